"""What torch's rebuild calls describe: storages and the tensors that view them.

The functions take the arguments found in a pickle and check every one; nothing of torch is called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..disk import plausible
from .symbols import Foreign, Symbol, dtype_of, storage_dtype

# Calls what it is given.
REBUILD_FROM_TYPE = Symbol("torch._tensor", "_rebuild_from_type_v2")


@dataclass(frozen=True)
class StorageRef:
    """A storage by its key in the file; `first` is where a legacy view of it begins.

    `numel` and `first` count elements of `dtype`.
    """

    key: str
    dtype: torch.dtype
    numel: int
    first: int = 0


@dataclass(frozen=True, eq=False)
class TensorRef:
    """A view of a storage, as the pickle describes it; offset and strides in elements."""

    storage: StorageRef
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    conjugate: bool = False
    negative: bool = False


@dataclass(frozen=True, eq=False)
class Unsupported:
    """A tensor that can't be fused, and why."""

    reason: str


def storage_from_id(pid: Any) -> Any:
    """The storage (or, in old files, the module class) that a persistent id names.

    Raises:
        ValueError: It names neither.
    """
    if not isinstance(pid, tuple) or not pid:
        raise ValueError("a persistent id that torch does not write")
    if pid[0] == "module" and len(pid) > 1:
        return pid[1]
    if pid[0] != "storage" or len(pid) not in (5, 6):
        raise ValueError("a persistent id that torch does not write")
    _, kind, key, _, numel, *view = pid
    dtype = storage_dtype(kind)
    if dtype is None:
        raise ValueError(f"an unknown kind of storage, {_shown(kind)}")
    if not isinstance(key, str):
        raise ValueError("a storage key that is no text")
    first = 0
    if view and view[0] is not None:
        _, first, size = view[0]
        if _size(first) + _size(size) > _size(numel):
            raise ValueError("a storage view outside its storage")
    return StorageRef(key, dtype, _size(numel), first)


def rebuild(symbol: Symbol, args: tuple[Any, ...]) -> Any:
    """The tensor that a call of torch's rebuild functions describes, otherwise a `Foreign`.

    Raises:
        ValueError: The arguments aren't those that torch writes.
    """
    function = _REBUILD.get((symbol.module, symbol.name))
    return Foreign(symbol, args) if function is None else function(*args)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any) -> TensorRef:
    if not isinstance(storage, StorageRef):
        raise ValueError("a tensor without a storage")
    return _view(storage, storage.dtype, offset, shape, stride, None)


def _tensor_v2(
    storage: Any,
    offset: Any,
    shape: Any,
    stride: Any,
    requires_grad: Any = False,
    hooks: Any = None,
    metadata: Any = None,
) -> TensorRef:
    if not isinstance(storage, StorageRef):
        raise ValueError("a tensor without a storage")
    return _view(storage, storage.dtype, offset, shape, stride, metadata)


def _tensor_v3(
    storage: Any,
    offset: Any,
    shape: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
    kind: Any,
    metadata: Any = None,
) -> TensorRef | Unsupported:
    if not isinstance(storage, StorageRef):
        raise ValueError("a tensor without a storage")
    dtype = dtype_of(kind)
    if dtype is None:
        return Unsupported(f"its dtype, {_shown(kind)}, is none that can be averaged")
    return _view(storage, dtype, offset, shape, stride, metadata)


def _view(
    storage: StorageRef, dtype: torch.dtype, offset: Any, shape: Any, stride: Any, metadata: Any
) -> TensorRef:
    if not isinstance(shape, tuple | list) or not isinstance(stride, tuple | list):
        raise ValueError("a tensor whose shape is no tuple")
    if len(shape) != len(stride):
        raise ValueError("a tensor with more strides than axes")
    sizes = tuple(_size(n) for n in shape)
    if not plausible(sizes):
        raise ValueError("a tensor of an impossible shape")
    flags = metadata if isinstance(metadata, dict) else {}
    return TensorRef(
        storage,
        dtype,
        _size(offset),
        sizes,
        tuple(_size(n) for n in stride),
        conjugate=flags.get("conj") is True,
        negative=flags.get("neg") is True,
    )


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _from_type(function: Any, cls: Any, args: Any, state: Any = None) -> Any:
    """A tensor with Python attributes, or of a subclass (only torch's own are plain tensors)."""
    plain = (Symbol("torch", "Tensor"), Symbol("torch.nn.parameter", "Parameter"))
    if cls not in plain:
        return Unsupported(f"a tensor subclass, {_shown(cls)}")
    if not isinstance(function, Symbol) or not isinstance(args, tuple):
        raise ValueError("a tensor rebuilt by no function")
    if function == REBUILD_FROM_TYPE:
        raise ValueError("a tensor rebuilt by its own rebuilding")
    return rebuild(function, args)


def _unsupported(reason: str) -> Callable[..., Unsupported]:
    return lambda *_: Unsupported(reason)


def _shown(value: Any) -> str:
    # Never the repr of what a file holds: it can be endless.
    return str(value) if isinstance(value, Symbol) else f"a {type(value).__name__}"


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError("a size that is no whole number")
    return value


_UTILS = "torch._utils"
_REBUILD: dict[tuple[str, str], Callable[..., Any]] = {
    (_UTILS, "_rebuild_tensor"): _tensor,
    (_UTILS, "_rebuild_tensor_v2"): _tensor_v2,
    (_UTILS, "_rebuild_tensor_v3"): _tensor_v3,
    (_UTILS, "_rebuild_parameter"): _parameter,
    (_UTILS, "_rebuild_parameter_with_state"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    (_UTILS, "_rebuild_qtensor"): _unsupported("quantised: codes and scales can't be averaged"),
    (_UTILS, "_rebuild_sparse_tensor"): _unsupported("a sparse tensor"),
    (_UTILS, "_rebuild_sparse_csr_tensor"): _unsupported("a sparse tensor"),
    (_UTILS, "_rebuild_nested_tensor"): _unsupported("a nested tensor"),
    (_UTILS, "_rebuild_meta_tensor_no_storage"): _unsupported("on the meta device: no values"),
    (_UTILS, "_rebuild_wrapper_subclass"): _unsupported("a tensor subclass"),
    (_UTILS, "_rebuild_xla_tensor"): _unsupported("an XLA tensor"),
    (_UTILS, "_rebuild_device_tensor_from_numpy"): _unsupported("an XLA tensor"),
    (_UTILS, "_rebuild_device_tensor_from_cpu_tensor"): _unsupported("a device's own tensor"),
}
