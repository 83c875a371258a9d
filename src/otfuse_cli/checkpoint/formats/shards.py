"""Writing a folder: safetensors shards with their index, and what else belongs to the model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import OutputRefused
from ...output_names import DEFAULT_SHARD, SUFFIXES, parse_size
from ..draft import FolderDraft
from ..names import TensorInfo
from ..publication import Publication
from ..remote_draft import RemoteFolderDraft
from ..sidecars import contents_of, is_sidecar, sidecars
from .folder import INDEX, weights_stem
from .format import Order, OutputFormat, Template
from .safetensors_writer import SafetensorsWriter, require_dtypes


def plan_shards(infos: Sequence[TensorInfo], limit: int) -> list[list[TensorInfo]]:
    """Tensors in order, dealt out to shards of at most `limit` bytes (or one tensor)."""
    shards: list[list[TensorInfo]] = [[]]
    size = 0
    for info in infos:
        if shards[-1] and size + info.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(info)
        size += info.nbytes
    return shards


class FolderWriter:
    """Streams into the shards of a folder, and adds index and sidecars at the end."""

    def __init__(
        self,
        draft: FolderDraft | RemoteFolderDraft,
        infos: Sequence[TensorInfo],
        like: Template,
        *,
        limit: int,
        dtype: str | None,
        config: Mapping[str, Any],
    ) -> None:
        self.draft = draft
        self.wrapper: tuple[str, ...] = ()
        self._like = like
        self._stem = weights_stem(like.path)
        self._dtype = dtype
        self._config = config
        self._infos = tuple(infos)
        self._file: dict[str, str] = {}
        self._writers: dict[str, SafetensorsWriter] = {}
        shards = plan_shards(infos, limit)
        for number, members in enumerate(shards, start=1):
            name = f"{self._stem}.safetensors"
            if len(shards) > 1:
                name = f"{self._stem}-{number:05d}-of-{len(shards):05d}.safetensors"
            self._writers[name] = SafetensorsWriter(
                draft.add(name), members, like, first=number == 1
            )
            self._file.update({info.name: name for info in members})

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Store a tensor in its shard."""
        if name not in self._file:
            raise ValueError(f"tensor {name} was not announced")
        self._writers[self._file[name]].put(name, tensor)

    def put_rows(self, name: str, first: int, rows: torch.Tensor) -> None:
        """Store the next rows of a tensor in its shard."""
        if name not in self._file:
            raise ValueError(f"tensor {name} was not announced")
        self._writers[self._file[name]].put_rows(name, first, rows)

    def finish(self) -> None:
        """Write the index and the sidecars, once every tensor was put."""
        for writer in self._writers.values():
            writer.finish()
        if len(self._writers) > 1:
            container = self._like.container
            beside = sum(tensor.nbytes for tensor in container.beside.values())
            files = {container.stored_name(n): file for n, file in self._file.items()}
            index = {
                "metadata": {"total_size": beside + sum(info.nbytes for info in self._infos)},
                "weight_map": dict.fromkeys(container.beside, next(iter(self._writers))) | files,
            }
            text = json.dumps(index, indent=2, ensure_ascii=False) + "\n"
            self._add(f"{self._stem}.safetensors{INDEX}", [text.encode("utf-8")])
        for path in sidecars(self._like.path):
            self._add(path.name, contents_of(path, self._dtype, self._config))

    def _add(self, name: str, chunks: Iterable[bytes]) -> None:
        draft, position = self.draft.add(name), 0
        for chunk in chunks:
            draft.write_at(memoryview(chunk), position)
            position += len(chunk)


def refuse_foreign_files(folder: Path) -> None:
    """Before a folder is replaced: it must be a model's, and nothing else may be in it.

    Raises:
        OutputRefused: It holds something that no model folder of ours has.
    """
    for entry in sorted(folder.iterdir()):
        name = entry.name
        ours = (
            entry.suffix in SUFFIXES or name.endswith((INDEX, ".report.json")) or is_sidecar(name)
        )
        if entry.is_dir() or not ours:
            raise OutputRefused(
                "the output is refused",
                where=str(folder),
                why=f"it is a folder that holds {name}, which is no part of a model",
                fix="name another folder; --overwrite replaces model folders only",
            )


def _start(outputs: Publication, order: Order) -> FolderWriter:
    return FolderWriter(
        outputs.folder(order.path),
        order.infos,
        order.like,
        limit=order.shard_size or parse_size(DEFAULT_SHARD),
        dtype=order.dtype,
        config=order.config,
    )


FOLDER_OUTPUT = OutputFormat(("",), start=_start, check=require_dtypes)
