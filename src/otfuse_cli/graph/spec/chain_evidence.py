"""What speaks against a plain chain where only names suggest one.

A chain has no lines to contradict: layers fit one another by their sizes, which they may do by
chance. Whoever names the family, or writes a spec, has said that it is a chain.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt

from ..model import Shapes
from .chain import chain_modules, weights_of
from .grammar import Spec
from .patterns import Pattern


@dataclass(frozen=True)
class _Layer:
    module: str
    weight: str
    shape: tuple[int, ...]

    @property
    def kernel(self) -> tuple[int, ...]:
        return self.shape[2:]

    def __str__(self) -> str:
        return f"{self.weight} {list(self.shape)}"


def against_chain(spec: Spec, shapes: Shapes) -> Iterator[str]:
    """Signs that a net of chain-like names is not a plain chain, or is one read backwards."""
    modules = chain_modules(spec.chain, shapes)
    weights = weights_of(modules, shapes)
    layers = [_Layer(module, weight, shapes[weight]) for module, weight in weights.items()]
    yield from _kinds(layers)
    for pattern in spec.chain:
        yield from _names([layer for layer in layers if pattern.match(layer.module)], pattern)
    yield from _flattened(layers, spec)
    yield from _equal_widths(layers)


def _kinds(layers: Sequence[_Layer]) -> Iterator[str]:
    last = layers[-1]
    if last.kernel:
        yield f"{last} comes last and is a convolution; the family ends in a linear layer"
    for layer in layers:
        # A convolution that keeps the size has an odd kernel; one of 2 or 4 mostly goes up.
        if any(size % 2 == 0 for size in layer.kernel):
            yield f"{layer}: an even kernel may be a transposed convolution"
    for before, layer in pairwise(layers):
        if layer.kernel and not before.kernel:
            yield f"{layer} is a convolution behind the linear layer {before}"
        elif layer.kernel and len(layer.kernel) != len(before.kernel):
            yield f"{before} and {layer} are convolutions of different kinds"


def _names(layers: Sequence[_Layer], pattern: Pattern) -> Iterator[str]:
    """Attributes of a class run by their numbers, 1, 2, 3; a suffix says that they don't.

    Children of a Sequential (`features.7`) are numbered with what lies between them.
    """
    names = [layer.module.rpartition(".")[2] for layer in layers]
    if all(map(str.isdigit, names)) or (len(layers) == 1 and not re.search(r"\d", names[0])):
        return
    parts = [re.fullmatch(r"([A-Za-z_]*?)(\d+)", name) for name in names]
    for layer, part in zip(layers, parts, strict=True):
        if part is None:
            yield f"{layer}: {layer.module} has no number that says when it runs"
    for (before, one), (layer, other) in pairwise(zip(layers, parts, strict=True)):
        if one is None or other is None:
            continue
        if one[1] != other[1] or int(other[2]) != int(one[2]) + 1:
            yield f"{before} and {layer}: {layer.module} is not the number after {before.module}"


def _flattened(layers: Sequence[_Layer], spec: Spec) -> Iterator[str]:
    """A flattened feature map is taken for a square; any other number may be branches."""
    for before, layer in pairwise(layers):
        factor, rest = divmod(layer.shape[1], before.shape[0])
        if rest or factor < 2 or layer.kernel:
            continue
        square = isqrt(factor) ** 2 == factor
        cube = round(factor ** (1 / 3)) ** 3 == factor  # of three-dimensional feature maps
        if {2: square, 3: square or cube}.get(len(before.kernel), False):
            continue
        what = "a flattened feature map" if len(before.kernel) < 2 else "a map of another shape"
        name = (
            f", say --arch {spec.name}" if spec.name != "mlp" else ", write a spec (docs/spec.md)"
        )
        yield (
            f"axis 1 of {layer} is {factor} times the {before.shape[0]} that {before.module} "
            f"makes, not H x W of a square: branches that are put together look like that; if it "
            f"is {what}{name}"
        )


def _equal_widths(layers: Sequence[_Layer]) -> Iterator[str]:
    """Numbered without gaps, layers may be attributes of a class whose forward adds a skip."""
    numbers: list[int] = []
    for layer in layers:
        number = re.search(r"\d+$", layer.module)
        if number is not None:
            numbers.append(int(number[0]))
    # Children of a Sequential leave numbers to what has no tensors: then nothing else runs there.
    if any(after - before > 1 for before, after in pairwise(numbers)):
        return
    widths = [layers[0].shape[1], *(layer.shape[0] for layer in layers[:-1])]
    twice = next((n for at, n in enumerate(widths) if n in widths[:at]), None)
    if twice is not None:
        one, other = [layer for layer in layers if twice in layer.shape[:2]][:2]
        yield (
            f"two of its layers are {twice} wide ({one}, {other}), so a skip connection between "
            "them, or two layers that read the same units, can't be ruled out from names and "
            "shapes; if it is a plain chain of linear layers, say --arch mlp"
        )
