"""What a checkpoint holds, before anybody asks which part of it is the state dict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .choices import Kinds
from .disk import Disk, Extent
from .formats.rebuild import TensorRef, Unsupported
from .formats.recognise import FileFormat, recognise
from .formats.safetensors_file import read_header
from .formats.sharded_tensor import Mosaic
from .formats.symbols import Foreign
from .formats.torch_file import TorchFile, read_legacy, read_zip
from .names import shown

Entry = Extent | Mosaic | torch.Tensor


@dataclass(frozen=True)
class Contents:
    """A value of nested mappings whose leaves describe tensors, and where those lie.

    Attributes:
        root: The value.
        form: `safetensors`, `pt`, `pt-legacy`, `safetensors-folder`, `pt-folder`, `dcp`, `memory`.
        disk: What its blocks are read from; None in memory.
        files: The torch file that its `TensorRef`s belong to.
    """

    root: Any
    form: str
    disk: Disk | None = None
    file: TorchFile | None = field(default=None, repr=False)

    def locate(self, name: str, leaf: Any) -> Any:
        """A leaf with its place in the file; anything else as it is.

        Raises:
            UnreadableInput: It lies outside its storage, or the storage is not in the file.
        """
        if isinstance(leaf, TensorRef):
            assert self.file is not None, "references come from torch files"
            return self.file.block(name, leaf)
        return leaf

    def read(self, entry: Entry) -> torch.Tensor:
        """The tensor of a located leaf: on the CPU, contiguous, in memory of its own."""
        if isinstance(entry, torch.Tensor):
            fresh = entry.detach().resolve_conj().resolve_neg().to("cpu")
            return fresh.clone(memory_format=torch.contiguous_format)
        if isinstance(entry, Mosaic):
            return entry.read()
        assert self.disk is not None, "blocks come from files"
        return self.disk.read_block(entry)


def is_leaf(value: Any) -> bool:
    """Whether a value describes a tensor."""
    return isinstance(value, TensorRef | Unsupported | Extent | Mosaic | torch.Tensor)


def module_class(value: Any) -> str | None:
    """The class of a whole module with tensors in it, live or as a record; else None.

    A loss or an activation has none.
    """
    if isinstance(value, torch.nn.Module):
        held = any(isinstance(t, torch.Tensor) for t in value.state_dict().values())
        return shown(f"{type(value).__module__}.{type(value).__qualname__}") if held else None
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


def file_contents(disk: Disk) -> Contents:
    """What a single file holds.

    Raises:
        UnreadableInput: Broken, unsafe, or in no known format.
    """
    kind = recognise(disk)
    if kind is FileFormat.SAFETENSORS:
        return Contents(read_header(disk), "safetensors", disk)
    file = read_zip(disk) if kind is FileFormat.ZIP else read_legacy(disk)
    return Contents(file.root, "pt-legacy" if file.legacy else "pt", disk, file)


def disk_contents(disk: Disk) -> Contents:
    """`file_contents`; the disk is closed where there are none.

    Raises:
        UnreadableInput: See there.
    """
    try:
        return file_contents(disk)
    except BaseException:
        disk.close()
        raise


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
