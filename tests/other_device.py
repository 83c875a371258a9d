"""A second device on a machine that has none: what CUDA would refuse is refused, on any CPU.

Tensors on it hold real numbers, computed by the CPU's kernels, so that results can be compared bit
for bit. What a GPU doesn't do fails here too: an operation on tensors of both places, NumPy on
memory that isn't the host's. What makes a GPU wait is counted, by the line of ours that does it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten = torch.ops.aten
NAME = "elsewhere"

# What may meet tensors of both places, and which operands may then be on the CPU.
_COPIES = {aten.copy_.default, aten._to_copy.default, aten._copy_from.default}
_INDEXED = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
}
# Numbers of the device that the host waits for: values themselves, and sizes that depend on them.
_WAITS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.bincount.default,
}


class Elsewhere(torch.Tensor):
    """A tensor of the other device, around the CPU's tensor that holds its numbers."""

    here: torch.Tensor

    @staticmethod
    def __new__(cls, here: torch.Tensor) -> Elsewhere:
        """Wrap `here`, sharing its memory."""
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            here.size(),
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=torch.device(NAME, 0),
        )
        made.here = here
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Any operation with such a tensor."""
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        """As on any device; of subclasses torch refuses it."""
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        """Where the numbers are: tied tensors are told by it."""
        return self.here.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Elsewhere:
        """With numbers of its own; a parameter stays one."""
        made = self.detach().clone().requires_grad_(self.requires_grad)
        made._is_param = getattr(self, "_is_param", False)
        memo[id(self)] = made
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        """The numbers, and where they are."""
        return f"Elsewhere({self.here!r})"


class Transfers(Counter[str]):
    """How often the host waited for the device: by `module.py:line operation`."""

    def at(self, module: str) -> int:
        """Those of one module of ours."""
        return sum(times for line, times in self.items() if line.startswith(f"{module}:"))


_watching: list[Transfers] = []


@contextmanager
def transfers() -> Iterator[Transfers]:
    """Count what makes the host wait for the device inside."""
    _watching.append(Transfers())
    try:
        yield _watching[-1]
    finally:
        _watching.pop()


class _Module:
    """What torch asks of `torch.elsewhere`: nobody else in the process is to find a device."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Nothing is drawn there."""


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return False

    def has_primary_context(self, dev_id: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


@cache
def other_device() -> str:
    """Make the device known to torch, once in a process; its name."""
    _setup_privateuseone_for_python_backend(NAME, _Module(), _Hooks())
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")
    _kept.append(library)
    return f"{NAME}:0"


_kept: list[Any] = []  # a library that is collected takes its kernels along


def _run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves: list[torch.Tensor] = []
    here_args = _mapped(_taken(leaves), args)
    here_kwargs = {name: _mapped(_taken(leaves), value) for name, value in kwargs.items()}
    away = [x for x in leaves if isinstance(x, Elsewhere)]
    _refuse_mixture(op, args, leaves, away)
    wanted = kwargs.get("device")
    goes_home = wanted is not None and torch.device(wanted).type != NAME
    if goes_home or op in _WAITS or (op in _COPIES and not isinstance(args[0], Elsewhere)):
        _count(op)
    if wanted is not None:
        here_kwargs["device"] = "cpu"
    made = op(*here_args, **here_kwargs)
    if goes_home or (not away and wanted is None):
        return made
    same = {id(x.here): x for x in away}
    return _mapped(lambda t: same[id(t)] if id(t) in same else Elsewhere(t), made)


def _mapped(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Tensors in nested lists and tuples, changed; pytree takes several times as long."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(_mapped(change, item) for item in value)
    return value


def _taken(leaves: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The CPU's tensor of any; each is noted."""

    def take(tensor: torch.Tensor) -> torch.Tensor:
        leaves.append(tensor)
        return tensor.here if isinstance(tensor, Elsewhere) else tensor

    return take


def _refuse_mixture(
    op: Any, args: tuple[Any, ...], leaves: list[torch.Tensor], away: list[torch.Tensor]
) -> None:
    """RuntimeError as CUDA raises it; numbers of the CPU may meet tensors of the device."""
    strangers = [x for x in leaves if not isinstance(x, Elsewhere) and x.dim()]
    if not away or not strangers or op in _COPIES:
        return
    if op in _INDEXED and isinstance(args[0], Elsewhere):
        values = args[2:3]  # indices may be on the CPU, values may not
        strangers = [x for x in strangers if any(x is value for value in values)]
    if strangers:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {op} got "
            f"{[tuple(x.shape) for x in strangers]} on the CPU"
        )


def _count(op: Any) -> None:
    if not _watching:
        return
    frame = sys._getframe(1)
    while frame is not None and "otfuse_cli" not in frame.f_code.co_filename:
        frame = frame.f_back  # type: ignore[assignment]
    where = (
        "?" if frame is None else f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
    )
    for counter in _watching:
        counter[f"{where} {op}"] += 1
