"""Quantised weights, told by their structure: codes of few bits beside the scales they need.

Names of formats are many and change; what a module holds doesn't: a matrix of small numbers, and a
positive float for the whole, for each row or column, or for each block of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import ceil, prod
from typing import Any

import torch

from ..errors import UnreadableInput
from .names import TensorInfo, shown

# Name and number of rows: the first of them; a number alone comes as it is.
ReadRows = Callable[[str, int], torch.Tensor]

_FLOAT8 = frozenset(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
)
# Exponents alone: block scales of the MX formats. Older versions of torch have no such dtype.
_EXPONENTS = frozenset(d for d in (getattr(torch, "float8_e8m0fnu", None),) if d is not None)
# Indices are int64; nobody stores codes in that.
_INTEGERS = frozenset((torch.int8, torch.uint8, torch.int16, torch.int32))

# What has as many numbers as a weight has rows or columns and is no scale, whatever its sign.
_NO_SCALE = re.compile(r"bias|beta|shift|running_(mean|var)$|(^|_)b\d*$|_[uv]$")
_WEIGHT_NORM = re.compile(r"(?P<stem>.*?)(_g|_v|original0|original1)")

_PACKED = (2, 4, 8, 16)  # codes in one integer
_DISTINCT = 16  # masks, flags and ternary maps have no more values, codes do
_CHANNELS = 4  # pictures and tables of colours: no weights, if their mean and deviation lie by
_LARGE = 1 << 20  # packed codes fill all bits of an int32, indices don't
_LOOKED_AT = 64  # rows whose values are looked at
_SMALLEST_BLOCK = 16


def refuse_codes(infos: Mapping[str, TensorInfo], read_rows: ReadRows, label: str) -> None:
    """Refuse a checkpoint whose weights are codes.

    8-bit floats alone are weights that were cast. Values are read of suspects only.

    Raises:
        UnreadableInput: There are codes; names them and their scale, with both shapes.
    """
    coded: dict[str, list[TensorInfo]] = {}
    for info in infos.values():
        if may_be_codes(info):
            coded.setdefault(_module(info), []).append(info)
    if not coded:
        return
    modules: dict[str, list[TensorInfo]] = {}
    for info in infos.values():
        modules.setdefault(_module(info), []).append(info)
    for module, codes in coded.items():
        inside = [m for m in modules if any(_about(m, info.name) for info in codes)]
        beside = [i for m in (module, *inside) for i in modules[m]]
        for info in codes:
            scales = [s for s in beside if _scale_of(info, s) and _positive(s, read_rows)]
            scale = _belonging(info, _weights(codes), scales)
            if scale is not None and _has_values_of_codes(info, read_rows):
                raise quantised(
                    f"{label}, tensor {shown(info.name)} {_described(info)} "
                    f"beside {shown(scale.name)} {_described(scale)}"
                )


def may_be_codes(info: TensorInfo) -> bool:
    """Whether dtype and shape allow that a tensor holds codes: then its values are looked at."""
    # A cast vector may have axes of one; integers of one column are a packed matrix.
    axes = sum(n > 1 for n in info.shape) if info.dtype in _FLOAT8 else len(info.shape)
    return info.dtype in _FLOAT8 | _INTEGERS and axes > 1


def refuse_quantised_config(config: Mapping[str, Any] | None, label: str) -> None:
    """Refuse a folder whose config.json says that its weights are codes.

    Raises:
        UnreadableInput: It does.
    """
    scheme = (config or {}).get("quantization_config")
    if scheme:
        method = scheme.get("quant_method") if isinstance(scheme, dict) else None
        why = "quantization_config says that its weights are codes"
        why += f" ({shown(method, 40)})" if isinstance(method, str) else ""
        raise quantised(f"{label}/config.json", why)


def quantised(
    where: str, why: str = "its weights are codes that mean nothing without their scales"
) -> UnreadableInput:
    """The refusal."""
    return UnreadableInput(
        "a quantised checkpoint",
        where=where,
        why=why,
        fix="use the checkpoint it was quantised from, or dequantise it first",
    )


def _module(info: TensorInfo) -> str:
    return info.name.rpartition(".")[0]


def _last(info: TensorInfo) -> str:
    return info.name.rpartition(".")[2]


def _about(module: str, codes: str) -> bool:
    """Whether a module is about one tensor: `weight.quant_state`, `weight_quantizer`."""
    return module == codes or module.startswith((f"{codes}.", f"{codes}_"))


def _described(info: TensorInfo) -> str:
    return f"({str(info.dtype).removeprefix('torch.')} {list(info.shape)})"


def _weights(codes: Sequence[TensorInfo]) -> list[TensorInfo]:
    """`codes` without the zero points and scales of integers among them."""
    integers = [i for i in codes if i.dtype in _INTEGERS]
    return [
        one
        for one in codes
        if not any(other.numel > one.numel and _fits(one.shape, other) for other in integers)
    ]


def _scale_of(codes: TensorInfo, info: TensorInfo) -> bool:
    """Whether names, dtypes and shapes allow that `info` holds scales of `codes`."""
    wide = info.dtype.is_floating_point and info.dtype not in _FLOAT8
    # NVFP4 and MX pack pairs of codes into bytes, their scales are bytes or 8-bit floats.
    narrow = codes.dtype is torch.uint8 and (
        info.dtype in _FLOAT8 or (info.dtype is torch.uint8 and info.shape == codes.shape[:-1])
    )
    if not (wide or narrow) or _NO_SCALE.search(_last(info)):
        return False
    one, two = (_WEIGHT_NORM.fullmatch(_last(i)) for i in (codes, info))
    if one and two and one["stem"] == two["stem"]:
        return False  # a gain and a direction
    return _fits(info.shape, codes)


def _fits(shape: tuple[int, ...], codes: TensorInfo) -> bool:
    """Whether `shape` has one number for all `codes`, or for each part of their weight."""
    if _is_scales(shape, codes.shape):
        return True
    if codes.dtype not in _INTEGERS:
        return False
    axes = range(len(codes.shape))
    return any(
        _is_scales(shape, tuple(n * factor if d == axis else n for d, n in enumerate(codes.shape)))
        for axis in axes
        for factor in _PACKED
    )


def _is_scales(shape: tuple[int, ...], weight: tuple[int, ...]) -> bool:
    """One number; one for each row or column; one for each block, of axes or of the flat values."""
    if prod(shape) == 1:
        return True
    if shape == weight or not prod(shape):
        return False
    if len(shape) == 1:
        block, rest = divmod(prod(weight), shape[0])
        flat = not rest and block >= _SMALLEST_BLOCK and block & (block - 1) == 0
        return flat or shape[0] in weight
    return len(shape) <= len(weight) and all(map(_blocks, shape, weight))


def _blocks(number: int, size: int) -> bool:
    """Whether `size` positions fall into that many blocks of one size, the last one cut."""
    return 0 < number <= size and ceil(size / ceil(size / number)) == number


def _belonging(
    codes: TensorInfo, weights: Sequence[TensorInfo], scales: Sequence[TensorInfo]
) -> TensorInfo | None:
    """The scale of `codes`: one that shares its name, or any where there is one for each weight."""
    last = _last(codes)
    stem = last.rpartition("_")[0] or last
    for scale in scales:
        if stem in re.split(r"[._]", scale.name) or f"{stem}_" in scale.name:
            return scale
    picture = len(codes.shape) < 4 and min(codes.shape[0], codes.shape[-1]) <= _CHANNELS
    if codes.dtype in _INTEGERS and picture and codes.shape[-1] > 1:
        return None
    return scales[0] if scales and len(scales) >= len(weights) else None


def _positive(scale: TensorInfo, read_rows: ReadRows) -> bool:
    if not scale.dtype.is_floating_point or scale.dtype in _EXPONENTS:
        return True
    values = read_rows(scale.name, _LOOKED_AT).float()
    return bool((values >= 0).all() and (values > 0).any())


def _has_values_of_codes(info: TensorInfo, read_rows: ReadRows) -> bool:
    """Of integers: many values, and in 32 bits several of them packed in each."""
    if info.dtype in _FLOAT8:
        return True
    values = read_rows(info.name, _LOOKED_AT)
    if info.dtype is torch.int32:
        return bool((values.long().abs() >= _LARGE).double().mean() > 1 / 3)
    return int(values.long().flatten().sort().values.diff().count_nonzero()) >= _DISTINCT
