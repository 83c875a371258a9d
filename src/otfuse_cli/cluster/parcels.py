"""Values on their way to another process: pickles, with tensors beside them as they lie in memory.

Strides are kept, since they decide which kernels compute and so the last bits. Operators of torch,
which no pickle takes, go by their names. Both ends are ours: nothing here reads a user's file.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True)
class Parcel:
    """A value, ready to be sent.

    Attributes:
        head: Its pickle.
        tensors: The memory of its tensors, bytes.
    """

    head: bytes
    tensors: Sequence[np.ndarray[Any, np.dtype[np.uint8]]]

    @property
    def nbytes(self) -> int:
        """What is sent."""
        return len(self.head) + sum(memory.nbytes for memory in self.tensors)


def pack(value: Any) -> Parcel:
    """A value as a parcel, whose tensors are those of the value until it is sent.

    Raises:
        TypeError: It can't be sent: an open file, a function inside a function.
    """
    stream, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    pickler = _Pickler(stream, protocol=5, buffer_callback=buffers.append)
    try:
        pickler.dump(value)
    except (pickle.PicklingError, AttributeError, RuntimeError, NotImplementedError) as error:
        raise TypeError(str(error)) from error
    import numpy as np

    tensors = [np.frombuffer(buffer.raw(), dtype=np.uint8) for buffer in buffers]
    return Parcel(stream.getvalue(), tensors)


def unpack(parcel: Parcel) -> Any:
    """The value, in memory of its own: what came may lie where nobody may write."""
    return pickle.loads(parcel.head, buffers=parcel.tensors)


class _Pickler(pickle.Pickler):
    """Knows tensors, operators of torch and read-only mappings."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        import torch

        self._torch = torch
        self._memories: dict[int, _Memory] = {}

    def reducer_override(self, value: Any) -> Any:
        """How a value of one of these kinds is made again; NotImplemented for any other."""
        kind = type(value)
        if kind is self._torch.Tensor or kind is self._torch.nn.Parameter:
            return self._tensor(value.detach())
        if kind is MappingProxyType:
            return _read_only, (dict(value),)
        if kind is self._torch._ops.OpOverload:
            return _operator, (value.namespace, value._opname, value._overloadname)
        return NotImplemented

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.layout != self._torch.strided or tensor.device.type != "cpu":
            return NotImplemented
        tensor = tensor.resolve_conj().resolve_neg()
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        span = 1 + sum((size - 1) * step for size, step in steps) if tensor.numel() else 0
        if tensor.untyped_storage().nbytes() > span * tensor.dtype.itemsize:
            # Of something larger the part between its first and its last number goes alone.
            part = tensor.as_strided((span,), (1,)).clone()
            tensor = part.as_strided(tensor.shape, tensor.stride(), 0)
        memory = self._memory(tensor.untyped_storage())
        place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        return _tensor_of, (memory, tensor.dtype, *place)

    def _memory(self, storage: torch.UntypedStorage) -> _Memory:
        """That of a storage; tensors that share one still do."""
        memory = self._memories.get(storage.data_ptr())
        if memory is None or memory.bytes.numel() != storage.nbytes():
            whole = self._torch.empty(0, dtype=self._torch.uint8).set_(storage)
            memory = _Memory(whole)
            if storage.nbytes():
                self._memories[storage.data_ptr()] = memory
        return memory


@dataclass(frozen=True, eq=False)
class _Memory:
    """The bytes of a storage."""

    bytes: torch.Tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return _memory_of, (pickle.PickleBuffer(self.bytes.numpy().data),)


def _memory_of(buffer: Any) -> _Memory:
    import numpy as np
    import torch

    return _Memory(torch.from_numpy(np.array(np.frombuffer(buffer, dtype=np.uint8))))


def _tensor_of(
    memory: _Memory,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> torch.Tensor:
    import torch

    tensor = torch.empty(0, dtype=dtype)
    return tensor.set_(memory.bytes.untyped_storage(), offset, shape, stride)


def _read_only(value: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(value)


def _operator(namespace: str, name: str, overload: str) -> Any:
    import torch

    return attrgetter(f"{namespace}.{name}.{overload}")(torch.ops)
