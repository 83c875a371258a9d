"""What a checkpoint holds, before anybody asks which part of it is the state dict."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .choices import Kinds
from .disk import Disk, Extent
from .formats.rebuild import TensorRef, Unsupported
from .formats.symbols import Foreign
from .names import shown


class LazyTensor(ABC):
    """A tensor that is no block of one file: its format puts it together when it is read.

    Attributes:
        dtype: Of the tensor.
        shape: Of the tensor.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    @abstractmethod
    def read(self) -> torch.Tensor:
        """The tensor: on the CPU, contiguous, in memory of its own.

        Raises:
            UnreadableInput: It can't be put together.
        """


Entry = Extent | LazyTensor | torch.Tensor


@dataclass(frozen=True)
class Contents:
    """A value of nested mappings whose leaves describe tensors, and where those lie.

    Attributes:
        root: The value.
        form: The name of its format (`safetensors`, `pt`, `pt-legacy`, `dcp`; of a folder of such
            files with `-folder` behind it), or `memory`.
        disk: What its blocks are read from; None in memory.
        place: From the name of a tensor and what a pickle says of it to where it lies; None where
            the format has no pickles.
    """

    root: Any
    form: str
    disk: Disk | None = None
    place: Callable[[str, TensorRef], Extent] | None = field(default=None, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process its tensors can be read, once they were located, and no more."""
        return Contents, (None, self.form, self.disk)

    def locate(self, name: str, leaf: Any) -> Any:
        """A leaf with its place in the file; anything else as it is.

        Raises:
            UnreadableInput: It lies outside its storage, or the storage is not in the file.
        """
        if isinstance(leaf, TensorRef):
            assert self.place is not None, "references come from torch files"
            return self.place(name, leaf)
        return leaf

    def read(self, entry: Entry) -> torch.Tensor:
        """The tensor of a located leaf: on the CPU, contiguous, in memory of its own."""
        if isinstance(entry, torch.Tensor):
            fresh = entry.detach().resolve_conj().resolve_neg().to("cpu")
            return fresh.clone(memory_format=torch.contiguous_format)
        if isinstance(entry, LazyTensor):
            return entry.read()
        assert self.disk is not None, "blocks come from files"
        return self.disk.read_block(entry)


def is_leaf(value: Any) -> bool:
    """Whether a value describes a tensor."""
    return isinstance(value, TensorRef | Unsupported | Extent | LazyTensor | torch.Tensor)


def module_class(value: Any) -> str | None:
    """The class of a whole module with tensors in it, live or as a record; else None.

    A loss or an activation has none.
    """
    if isinstance(value, torch.nn.Module):
        if not any(isinstance(t, torch.Tensor) for t in value.state_dict().values()):
            return None
        return shown(f"{type(value).__module__}.{type(value).__qualname__}")
    if not isinstance(value, Foreign) or not value.is_module:
        return None
    seen: set[int] = set()
    pending = [value]
    while pending:
        record = pending.pop()
        if id(record) in seen or not record.is_module:
            continue
        seen.add(id(record))
        for table in (record.state.get(name) for name in ("_parameters", "_buffers", "_modules")):
            for item in table.values() if isinstance(table, Mapping) else ():
                if is_leaf(item):
                    return str(value.cls)
                if isinstance(item, Foreign):
                    pending.append(item)
    return None


KINDS = Kinds(is_leaf, module_class)


def plain_leaf(tensor: torch.Tensor) -> torch.Tensor | Unsupported:
    """A tensor in memory as a leaf: what can't be fused says why."""
    if tensor.is_quantized:
        return Unsupported("quantised: codes and scales can't be averaged")
    if tensor.layout != torch.strided or tensor.is_nested:
        return Unsupported("a sparse or nested tensor")
    if tensor.is_meta:
        return Unsupported("on the meta device: no values")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return Unsupported(f"a tensor subclass, {shown(type(tensor).__name__)}")
    return tensor.detach()
