"""Opening a checkpoint: recognise the format, find the state dict, read tensors one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import torch

from ..errors import UnreadableInput
from ..report import FileRecord
from .containers import Container, find_state_dict, versions_of
from .disk import Block, Disk
from .names import TensorInfo, common_prefix, quantised_key, shown
from .rebuild import TensorRef, Unsupported
from .recognise import FileFormat, recognise
from .safetensors_file import read_header
from .torch_file import TorchFile, read_legacy, read_zip
from .unpickle import Table

_FINITE_CHUNK = 1 << 22


class Checkpoint:
    """An open checkpoint. Tensors stay in the file until `read`; reads may run in parallel.

    Attributes:
        path: The file, or `None` for a state dict in memory.
        label: What messages call it.
        container: What lies around its state dict.
        infos: Clean name -> info in file order; of tied names the first one only.
        aliases: Name -> the other names that share its tensor.
    """

    def __init__(
        self,
        *,
        disk: Disk | None,
        label: str,
        container: Container,
        entries: Mapping[str, Block | torch.Tensor],
        aliases: Mapping[str, tuple[str, ...]],
    ) -> None:
        self.path = None if disk is None else disk.path
        self.label = label
        self.container = container
        self.infos: Mapping[str, TensorInfo] = MappingProxyType(
            {name: TensorInfo(name, tuple(e.shape), e.dtype) for name, e in entries.items()}
        )
        self.aliases: Mapping[str, tuple[str, ...]] = MappingProxyType(dict(aliases))
        self._entries = entries
        self._disk = disk

    def read(self, name: str) -> torch.Tensor:
        """The tensor: on the CPU, in its stored dtype, contiguous, in memory of its own.

        Raises:
            UnreadableInput: The file changed or can't be read.
            KeyError: No such name in `infos`.
        """
        entry = self._entries[name]
        if isinstance(entry, torch.Tensor):
            return _copy(entry)
        assert self._disk is not None, "blocks come from files"
        return self._disk.read_block(entry)

    def sha256(self) -> str | None:
        """SHA-256 of the file, computed on first use; `None` in memory."""
        return None if self._disk is None else self._disk.sha256()

    def record(self, *, digest: bool = True) -> FileRecord:
        """The checkpoint as it stands in a report; without `digest` the file is not read for it."""
        infos = self.infos.values()
        dtypes = Counter(str(info.dtype).removeprefix("torch.") for info in infos)
        return FileRecord(
            path=self.label,
            sha256=self.sha256() if digest else None,
            container=str(self.container),
            tensors=len(infos),
            parameters=sum(info.numel for info in infos),
            dtypes=dict(sorted(dtypes.items())),
        )

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        if self._disk is not None:
            self._disk.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_checkpoint(
    source: str | Path | Mapping[str, Any], *, key: str | None = None, label: str | None = None
) -> Checkpoint:
    """Open a checkpoint file, or wrap a state dict in memory.

    Args:
        source: A file, recognised by its content, or a mapping of names to tensors.
        key: The (dotted) entry that holds the state dict, where there are several.
        label: What messages call it; by default the path as given.

    Raises:
        UnreadableInput: Missing, broken, unsafe, quantised, or without tensors.
        UsageError: Several state dicts and no `key`, or a `key` that leads nowhere.
    """
    if isinstance(source, Mapping):
        return _from_memory(source, key, label or "state dict")
    disk = Disk(Path(source), label or str(source))
    try:
        return _from_disk(disk, key)
    except BaseException:
        disk.close()
        raise


def require_finite(checkpoint: Checkpoint, name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor with NaN or infinity.

    Raises:
        UnreadableInput: It has some; names the file, the tensor and how many.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    bad = 0
    # In pieces: isfinite makes temporaries, and 8-bit floats have to be widened first.
    for start in range(0, flat.numel(), _FINITE_CHUNK):
        piece = flat[start : start + _FINITE_CHUNK]
        wide = piece.float() if piece.dtype.itemsize == 1 else piece
        low, high = torch.aminmax(wide)
        if not (torch.isfinite(low) and torch.isfinite(high)):
            bad += int(wide.numel() - torch.isfinite(wide).sum())
    if bad:
        raise UnreadableInput(
            "a tensor holds NaN or infinity",
            where=f"{checkpoint.label}, tensor {name}",
            why=f"{bad} of its {flat.numel()} values are not finite",
            fix="use a checkpoint from before training diverged",
        )


def _from_disk(disk: Disk, key: str | None) -> Checkpoint:
    kind = recognise(disk)
    if kind is FileFormat.SAFETENSORS:
        blocks = read_header(disk)
        path, table = find_state_dict(blocks, key=key, label=disk.label, is_leaf=_is_leaf)
        return _assemble(disk, disk.label, "safetensors", path, table, None)
    file = read_zip(disk) if kind is FileFormat.ZIP else read_legacy(disk)
    path, table = find_state_dict(file.root, key=key, label=disk.label, is_leaf=_is_leaf)
    state = table.state if isinstance(table, Table) else None
    metadata = state.get("_metadata") if isinstance(state, Mapping) else None
    located = {
        name: _locate(file, name, value) if isinstance(value, TensorRef) else value
        for name, value in table.items()
    }
    form = "pt-legacy" if file.legacy else "pt"
    return _assemble(disk, disk.label, form, path, located, metadata)


def _from_memory(source: Mapping[str, Any], key: str | None, label: str) -> Checkpoint:
    path, table = find_state_dict(source, key=key, label=label, is_leaf=_is_leaf)
    plain = {
        name: _plain(value) if isinstance(value, torch.Tensor) else value
        for name, value in table.items()
    }
    return _assemble(None, label, "memory", path, plain, getattr(table, "_metadata", None))


def _assemble(
    disk: Disk | None,
    label: str,
    form: str,
    path: tuple[str, ...],
    table: Mapping[Any, Any],
    metadata: Any,
) -> Checkpoint:
    """Check the names and entries of a state dict, find ties, strip the prefix."""
    names = [name for name in table if isinstance(name, str)]
    for name in names:
        _check_entry(label, name, table[name])
    found = {name: table[name] for name in names if isinstance(table[name], Block | torch.Tensor)}
    prefix = common_prefix(list(found), lightning="state_dict" in path)
    entries: dict[str, Block | torch.Tensor] = {}
    first: dict[Any, str] = {}
    aliases: dict[str, list[str]] = {}
    for full, entry in found.items():
        name = full.removeprefix(prefix)
        owner = first.setdefault(_identity(name, entry), name)
        if owner == name:
            entries[name] = entry
        else:
            aliases.setdefault(owner, []).append(name)
    container = Container(
        format=form,
        wrapper=path,
        prefix=prefix,
        keys=tuple(name.removeprefix(prefix) for name in found),
        versions=versions_of(metadata),
    )
    ties = {name: tuple(others) for name, others in aliases.items()}
    return Checkpoint(disk=disk, label=label, container=container, entries=entries, aliases=ties)


def _check_entry(label: str, name: str, entry: Any) -> None:
    where = f"{label}, tensor {shown(name)}"
    if not name.isprintable():
        raise UnreadableInput(
            "a tensor name that is no printable text",
            where=where,
            why="it holds control characters or half a character",
            fix="rename it and save the file again",
        )
    if quantised_key(name):
        raise UnreadableInput(
            "a quantised checkpoint",
            where=where,
            why="its weights are codes that mean nothing without their scales",
            fix="use the checkpoint it was quantised from, or dequantise it first",
        )
    if isinstance(entry, Unsupported):
        raise UnreadableInput(
            "a tensor that can't be fused",
            where=where,
            why=entry.reason,
            fix="save it as an ordinary dense tensor",
        )


def _identity(name: str, entry: Block | torch.Tensor) -> Any:
    """Equal for tied tensors only; an empty tensor shares nothing."""
    if isinstance(entry, Block):
        return entry if entry.numel else name
    if not entry.numel():
        return name
    return (
        *(entry.device, entry.data_ptr(), entry.dtype, tuple(entry.shape), entry.stride()),
        *(entry.is_conj(), entry.is_neg()),
    )


def _locate(file: TorchFile, name: Any, tensor: TensorRef) -> Block:
    return file.block(str(name), tensor)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, TensorRef | Unsupported | Block | torch.Tensor)


def _plain(tensor: torch.Tensor) -> torch.Tensor | Unsupported:
    if tensor.is_quantized:
        return Unsupported("quantised: codes and scales can't be averaged")
    if tensor.layout != torch.strided or tensor.is_nested:
        return Unsupported("a sparse or nested tensor")
    if tensor.is_meta:
        return Unsupported("on the meta device: no values")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return Unsupported(f"a tensor subclass, {type(tensor).__name__}")
    return tensor.detach()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    fresh = tensor.resolve_conj().resolve_neg().to("cpu")
    return fresh.clone(memory_format=torch.contiguous_format)
