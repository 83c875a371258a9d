"""Tensor names: the prefixes that wrappers put before them, and what names give away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .disk import element_count

_PREFIXES = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_forward_module.")
# Modules that wrap another one anywhere in a network, under a name that nobody else uses.
_WRAPPED = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
# What torch.optim.swa_utils.AveragedModel counts, beside the `module.` that it averages.
_AVERAGED_COUNTER = "n_averaged"
_LIGHTNING = "model."
_QUANTISED = frozenset(
    ("weight_scale", "weight_scale_2", "weight_packed", "qweight", "qzeros", "SCB")
)


@dataclass(frozen=True)
class TensorInfo:
    """Name, shape and dtype of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return element_count(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes, stored compactly."""
        return self.numel * self.dtype.itemsize


def common_prefix(names: Sequence[str], *, lightning: bool = False) -> str:
    """What DDP, `torch.compile` and Lightning put before *every* name, in any order.

    With `lightning`, `model.` counts too, once.
    """
    prefix, allowed = "", [*_PREFIXES, *([_LIGHTNING] if lightning else [])]
    while names:
        for candidate in allowed:
            longer = prefix + candidate
            if all(name.startswith(longer) and name != longer for name in names):
                prefix = longer
                break
        else:
            break
        if candidate == _LIGHTNING:
            allowed.remove(_LIGHTNING)
    return prefix


@dataclass(frozen=True)
class CleanNames:
    """Names without what wrappers put into them.

    Attributes:
        prefix: What was before every name.
        clean: Clean name of each stored one.
        counter: A counter of the wrapper's own, which is no part of the model.
    """

    prefix: str
    clean: Mapping[str, str]
    counter: str | None = None


def clean_names(names: Sequence[str], *, lightning: bool = False) -> CleanNames:
    """Take off prefixes that every name has, and wrappers inside, where names stay distinct."""
    counter = None
    inner = [name for name in names if name != _AVERAGED_COUNTER]
    if len(inner) < len(names) and inner and all(n.startswith("module.") for n in inner):
        counter, names = _AVERAGED_COUNTER, inner
    prefix = common_prefix(names, lightning=lightning)
    clean = {name: name.removeprefix(prefix) for name in names}
    bare = {name: _unwrapped(short) for name, short in clean.items()}
    if len(set(bare.values())) == len(bare):
        clean = bare
    return CleanNames(prefix, clean, counter)


def _unwrapped(name: str) -> str:
    *modules, tensor = name.split(".")
    return ".".join([*(part for part in modules if part not in _WRAPPED), tensor])


def shown(text: str, limit: int = 200) -> str:
    """A text out of a file, fit for one line of a message on a terminal."""
    cut = text if len(text) <= limit else text[:limit] + "..."
    return "".join(c if c.isprintable() else "?" for c in cut)


def quantised_key(name: str) -> bool:
    """Whether a name belongs to a format that stores weights as codes and scales."""
    last = name.rsplit(".", 1)[-1]
    return (
        last in _QUANTISED
        or last.endswith(("_scale_inv", "_packed_params"))
        or ".quant_state." in name
    )
