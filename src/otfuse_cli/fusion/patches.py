"""What a layer reads and writes, as rows: inputs (g, n, D) and outputs (g, n, O).

A linear layer has one row per position of everything but its last axis; a convolution one row per
sample and output position, the unfolded patch under its kernel. Legend: g groups, n rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..graph.analysis.fit_targets import KernelWindow, Layer


@dataclass(frozen=True)
class Rows:
    """Which rows of a layer count.

    Attributes:
        layer: Whose rows.
        kernel: Sizes of its kernel; empty for a linear layer.
        places: Output positions that count, the same for every sample; None for all.
    """

    layer: Layer
    kernel: tuple[int, ...]
    places: Tensor | None = None

    @property
    def groups(self) -> int:
        """Independent parts of the layer."""
        return 1 if self.layer.window is None else self.layer.window.groups

    def inputs(self, value: Tensor) -> Tensor:
        """Rows of what the layer reads: (g, n, D)."""
        window = self.layer.window
        if window is None:
            return self._linear(value)
        patches = _patches(value, window, self.kernel)  # B, C, *out, *kernel
        space = len(self.kernel)
        chosen = self._chosen(patches.movedim(1, space + 1), space)  # n, C, *kernel
        return chosen.reshape(len(chosen), self.groups, -1).transpose(0, 1)

    def outputs(self, value: Tensor) -> Tensor:
        """Rows of what the layer, or what follows it at the same places, writes: (g, n, O)."""
        if self.layer.window is None:
            return self._linear(value)
        chosen = self._chosen(value.movedim(1, -1), value.dim() - 2)
        return chosen.reshape(len(chosen), self.groups, -1).transpose(0, 1)

    def _linear(self, value: Tensor) -> Tensor:
        if self.places is not None and value.dim() > 2:
            flat = value.flatten(1, -2).index_select(1, self.places.to(value.device))
            return flat.reshape(1, -1, value.shape[-1])
        return value.reshape(1, -1, value.shape[-1])

    def _chosen(self, value: Tensor, space: int) -> Tensor:
        """(B, *out, rest) to (n, rest), rows in order of samples."""
        if self.places is None:
            return value.flatten(0, space)
        index = torch.unravel_index(self.places.to(value.device), list(value.shape[1 : 1 + space]))
        picked = value[(slice(None), *index)]  # type: ignore[index]
        return picked.flatten(0, 1)

    def flat_weight(self, weight: Tensor) -> Tensor:
        """The weight as (g, O, D), in the order of the rows."""
        if self.layer.window is None:
            return (weight.t() if self.layer.turned else weight)[None]
        if self.layer.window.transposed:
            weight = _flipped(weight, self.groups)
        return weight.reshape(self.groups, weight.shape[0] // self.groups, -1)

    def full_weight(self, flat: Tensor, like: Tensor) -> Tensor:
        """Back to the shape in which it is stored."""
        if self.layer.window is None:
            return (flat[0].t() if self.layer.turned else flat[0]).contiguous()
        if self.layer.window.transposed:
            inner, outer = like.shape[0] // self.groups, like.shape[1]
            whole = flat.reshape(self.groups * outer, inner, *like.shape[2:])
            return _unflipped(whole, self.groups).contiguous()
        return flat.reshape(like.shape)


def rows_of(
    layer: Layer, weight: Tensor, shape: tuple[int, ...], *, most: int, generator: torch.Generator
) -> Rows:
    """Rows of a layer whose output for one sample has `shape` (without the sample axis).

    Where one sample has more than `most` positions, `most` of them are drawn, the same for every
    sample: the fit does not depend on how samples are batched or ordered.
    """
    kernel = tuple(weight.shape[2:]) if layer.window is not None else ()
    spatial = shape[1:] if layer.window is not None else shape[:-1]
    total = int(torch.Size(spatial).numel())
    places = None
    if total > most:
        places = torch.randperm(total, generator=generator)[:most].sort().values
    return Rows(layer, kernel, places)


def _patches(value: Tensor, window: KernelWindow, kernel: tuple[int, ...]) -> Tensor:
    """A view (B, C, *out, *kernel) of the patches under the kernel."""
    stride = window.stride
    if window.transposed:
        value, stride = _spread(value, window, kernel), (1,) * len(kernel)
    else:
        around: list[int] = []
        for pad in reversed(window.padding):  # as `F.pad` wants them: the last axis first
            around += [pad, pad]
        value = F.pad(value, around)
    for at, (size, step, wide) in enumerate(zip(kernel, stride, window.dilation, strict=True)):
        value = value.unfold(2 + at, (size - 1) * wide + 1, step)
    for at, wide in enumerate(window.dilation):
        dim = 2 + len(kernel) + at
        value = value[(slice(None),) * dim + (slice(None, None, wide),)]
    return value


def _spread(value: Tensor, window: KernelWindow, kernel: tuple[int, ...]) -> Tensor:
    """The input of the ordinary convolution that a transposed one is: zeros between and around."""
    space = len(kernel)
    sizes = [(n - 1) * s + 1 for n, s in zip(value.shape[2:], window.stride, strict=True)]
    spread = value.new_zeros(*value.shape[:2], *sizes)
    steps = tuple(slice(None, None, s) for s in window.stride)
    spread[(slice(None), slice(None), *steps)] = value
    around: list[int] = []
    for at in reversed(range(space)):
        # Padding of a transposed convolution takes away from its output.
        reach = window.dilation[at] * (kernel[at] - 1) - window.padding[at]
        around += [reach, reach + window.output_padding[at]]
    return F.pad(spread, around)


def _flipped(weight: Tensor, groups: int) -> Tensor:
    """(C, O/g, *k) of a transposed convolution as (O, C/g, *k) of the ordinary one."""
    kernel = list(range(2, weight.dim()))
    apart = torch.unflatten(weight, 0, (groups, -1)).transpose(1, 2)
    return apart.flatten(0, 1).flip(kernel)


def _unflipped(weight: Tensor, groups: int) -> Tensor:
    kernel = list(range(2, weight.dim()))
    apart = torch.unflatten(weight.flip(kernel), 0, (groups, -1)).transpose(1, 2)
    return apart.flatten(0, 1)


def along_outputs(values: Tensor, weight: Tensor, layer: Layer) -> Tensor:
    """One number per output of a layer, in a shape that multiplies its stored weight."""
    window = layer.window
    if window is not None and window.transposed:  # inputs, outputs of one group, kernel
        per_group = values.view(window.groups, 1, -1)
        inner = weight.shape[0] // window.groups
        spread = per_group.expand(-1, inner, -1).reshape(weight.shape[0], -1)
        return spread.view(*spread.shape, *(1,) * (weight.dim() - 2))
    shape = [1] * weight.dim()
    shape[1 if layer.turned else 0] = -1
    return values.view(shape)
