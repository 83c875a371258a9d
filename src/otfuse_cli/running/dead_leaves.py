"""Synthetic images: dead leaves (overlapping shapes of all sizes), and smooth 1/f noise.

Shape letters: S samples, C channels, H and W pixels, L leaves, P pixels of a leaf's own square.
Both have what networks learn from photographs: power at all scales that falls with frequency.
Leaves have edges and corners as well. Everything is float32, drawn from one numpy generator.
"""

from __future__ import annotations

from itertools import pairwise
from math import ceil, cos, log, log2, pi, sin, sqrt

import numpy as np
from numpy.typing import NDArray

Images = NDArray[np.float32]

SMALLEST = 2.0  # radius of the smallest leaf in pixels, and at least
FINEST = 1 / 32  # this share of the longer side
LARGEST = 0.5  # radius of the largest, as a share of the longer side
COVERS = 4.0  # how many leaves lie over a pixel, on average
STRETCH = 2.0  # the longest axis of a leaf over its shortest, at most
CORRELATION = 0.8  # between the colours of two channels
# Pixels that are worked on together: what fits into a processor's cache is much faster.
_PIXELS = 1 << 18


def dead_leaves(number: int, channels: int, height: int, width: int, seed: int) -> Images:
    """Images of leaves that fell on one another: discs, ellipses, triangles to hexagons.

    Radii follow the power law r^-3, the one that is the same at every scale; each leaf has one
    colour, correlated between channels.

    Returns:
        number x channels x height x width, zero mean and unit variance per channel.
    """
    rng = np.random.default_rng([seed, 1])
    images = np.empty((number, channels, height, width), np.float32)
    chunk = max(1, _PIXELS // (height * width))
    for start in range(0, number, chunk):
        part = images[start : start + chunk]
        leaf_SHW, leaves = _fall(len(part), height, width, rng)
        colour_SLC = _colours(rng, len(part), leaves, channels)
        at_S = np.arange(len(part))[:, None, None]
        part[:] = colour_SLC[at_S, leaf_SHW].transpose(0, 3, 1, 2)
    return _standardised(images)


def smooth_noise(number: int, channels: int, shape: tuple[int, ...], seed: int) -> Images:
    """Gaussian noise with amplitude 1/f over the axes of `shape` (one, two or three).

    Returns:
        number x channels x shape, zero mean and unit variance per channel.
    """
    rng = np.random.default_rng([seed, 2])
    axes = tuple(range(2, 2 + len(shape)))
    frequency = np.zeros((*shape[:-1], shape[-1] // 2 + 1))
    for axis, n in enumerate(shape):
        f = np.fft.rfftfreq(n) if axis == len(shape) - 1 else np.fft.fftfreq(n)
        along = [1] * len(shape)
        along[axis] = -1
        frequency += f.reshape(along) ** 2
    # No frequency is lower than one wave over the longest side; the constant gets that one's power.
    amplitude = 1 / np.sqrt(np.maximum(frequency, 1 / max(shape) ** 2))
    images = np.empty((number, channels, *shape), np.float32)
    chunk = max(1, _PIXELS // int(np.prod(shape)))
    for start in range(0, number, chunk):
        part = images[start : start + chunk]
        white = rng.standard_normal(part.shape, np.float32)
        common = rng.standard_normal((len(part), 1, *shape), np.float32)
        white = sqrt(CORRELATION) * common + sqrt(1 - CORRELATION) * white
        spectrum = np.fft.rfftn(white, axes=axes) * amplitude
        part[:] = np.fft.irfftn(spectrum, s=shape, axes=axes)
    return _standardised(images)


def _fall(
    samples: int, height: int, width: int, rng: np.random.Generator
) -> tuple[NDArray[np.int32], int]:
    """Which leaf lies on top of each pixel (0 is the ground), and how many leaves there are.

    The leaves that fall on all images at one time have the same number of corners and nearly the
    same size: a leaf costs as many pixels as it has, and not the image.
    """
    classes = _size_classes(max(height, width))
    # A density of r^-3 gives a class (a, b) the share a^-2 - b^-2, and the area pi r^2 a mean of
    # 2 pi log(b / a) over that share.
    share = np.array([a**-2 - b**-2 for a, b in classes])
    mean_area = 2 * pi * log(classes[-1][1] / classes[0][0]) / share.sum()
    leaves = ceil(COVERS * height * width / mean_area)
    sizes = rng.choice(len(classes), leaves, p=share / share.sum())
    corners = rng.choice([0, 0, 3, 4, 5, 6], leaves)  # none: discs and ellipses
    leaf = np.zeros((samples, height, width), np.int32)
    for number in range(leaves):
        _drop(leaf, number + 1, classes[sizes[number]], int(corners[number]), rng)
    return leaf, leaves + 1


def _size_classes(side: int) -> list[tuple[float, float]]:
    """Half octaves of radii, from the smallest to the largest."""
    smallest = max(SMALLEST, FINEST * side)
    steps = max(1, round(2 * log2(max(LARGEST * side / smallest, 1))))
    edges = [smallest * 2 ** (step / 2) for step in range(steps + 1)]
    return list(pairwise(edges))


def _drop(
    leaf_SHW: NDArray[np.int32],
    number: int,
    size: tuple[float, float],
    corners: int,
    rng: np.random.Generator,
) -> None:
    """One leaf on every image."""
    samples, height, width = leaf_SHW.shape
    low, high = size
    u = rng.random((5, samples), np.float32)
    # By inversion: the share of radii below r is (low^-2 - r^-2) / (low^-2 - high^-2).
    radius = (low**-2 - u[0] * np.float32(low**-2 - high**-2)) ** -0.5
    stretch = np.float32(STRETCH) ** (u[1] - np.float32(0.5))
    # Centres outside of the image as well, so that its edge is covered as often as its middle.
    y = u[2] * (height + 2 * radius) - radius
    x = u[3] * (width + 2 * radius) - radius
    turn = np.float32(2 * pi) * u[4]
    side = np.arange(-ceil(high * sqrt(STRETCH)), ceil(high * sqrt(STRETCH)) + 2)
    rows = np.floor(y).astype(np.int64)[:, None] + side
    columns = np.floor(x).astype(np.int64)[:, None] + side
    dy, dx = (rows - y[:, None]).astype(np.float32), (columns - x[:, None]).astype(np.float32)
    along = _rotated(dx, dy, turn, radius * stretch)
    across = _rotated(dx, dy, turn + np.float32(pi / 2), radius / stretch)
    inside = _polygon(along, across, corners) if corners else _disc(along, across)
    inside &= ((rows >= 0) & (rows < height))[:, :, None]
    inside &= ((columns >= 0) & (columns < width))[:, None, :]
    first = np.arange(samples)[:, None] * (height * width) + rows * width
    pixel = first[:, :, None] + columns[:, None, :]
    leaf_SHW.reshape(-1)[pixel[inside]] = number


def _rotated(dx: Images, dy: Images, turn: Images, unit: Images) -> tuple[Images, Images]:
    """A coordinate of the leaf's own axes, as parts that are summed over columns and rows."""
    cos_S, sin_S = (f(turn).astype(np.float32) / unit for f in (np.cos, np.sin))
    return cos_S[:, None] * dx, sin_S[:, None] * dy


def _disc(along: tuple[Images, Images], across: tuple[Images, Images]) -> NDArray[np.bool_]:
    square = np.square(along[0][:, None, :] + along[1][:, :, None])
    square += np.square(across[0][:, None, :] + across[1][:, :, None])
    inside: NDArray[np.bool_] = square <= 1
    return inside


def _polygon(
    along: tuple[Images, Images], across: tuple[Images, Images], corners: int
) -> NDArray[np.bool_]:
    """Inside all edges of the regular polygon with its corners on the unit circle."""
    edge = np.float32(cos(pi / corners))  # distance of the edges from the centre
    inside: NDArray[np.bool_] | None = None
    for corner in range(corners):
        c, s = (np.float32(f(2 * pi * corner / corners)) for f in (cos, sin))
        column, row = (c * a + s * b for a, b in zip(along, across, strict=True))
        within = column[:, None, :] + row[:, :, None] <= edge
        inside = within if inside is None else inside & within
    assert inside is not None
    return inside


def _colours(rng: np.random.Generator, samples: int, leaves: int, channels: int) -> Images:
    """A colour per leaf around one per image: leaves of one picture are lit alike."""
    picture = rng.standard_normal((2, samples, 1, 1), np.float32)
    leaf_colour = rng.standard_normal((samples, leaves, channels), np.float32)
    light = rng.standard_normal((samples, leaves, 1), np.float32)
    mixed = sqrt(CORRELATION) * light + sqrt(1 - CORRELATION) * leaf_colour
    # Pictures differ in contrast by some 30 %, in brightness by half of what leaves differ by.
    contrast = np.exp(np.float32(0.3) * picture[1])
    coloured: Images = np.float32(0.5) * picture[0] + contrast * mixed
    return coloured


def _standardised(images: Images) -> Images:
    axes = (0, *range(2, images.ndim))
    images -= images.mean(axes, keepdims=True, dtype=np.float64).astype(np.float32)
    spread = np.sqrt(np.square(images).mean(axes, keepdims=True, dtype=np.float64))
    images /= np.maximum(spread, 1e-6).astype(np.float32)
    return images
