"""Writing a safetensors file: the header first, then each tensor to its place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ...errors import UsageError
from ..announced import Announced, plain_values
from ..draft import Draft
from ..names import TensorInfo
from ..quantised import may_be_codes
from ..remote_draft import RemoteDraft
from .format import OutputFormat, Template
from .safetensors_file import CODES, make_header


class SafetensorsWriter:
    """Streams into a draft. Tied tensors are stored once; the metadata name their other names."""

    def __init__(
        self,
        draft: Draft | RemoteDraft,
        infos: Sequence[TensorInfo],
        like: Template,
        *,
        first: bool = True,
    ) -> None:
        stored_name = like.container.stored_name
        # What wrappers have beside the model is written once, also where there are several files.
        beside = like.container.beside if first else {}
        self.draft = draft
        self.wrapper: tuple[str, ...] = ()
        self._stored_name = stored_name
        self._announced = Announced(infos)
        names = {info.name for info in infos}
        ties = {
            stored_name(other): stored_name(name)
            for name, others in like.aliases.items()
            if name in names
            for other in others
            if other not in like.infos and other not in names
        }
        full = [TensorInfo(n, tuple(t.shape), t.dtype) for n, t in beside.items()]
        full += [TensorInfo(stored_name(i.name), i.shape, i.dtype) for i in infos]
        header, self._positions = make_header(full, ties)
        # What its reader looks at before it has its name can't be sent off yet.
        if not beside and not any(map(may_be_codes, infos)):
            draft.stream(len(header) + sum(info.nbytes for info in infos))
        draft.write_at(memoryview(header), 0)
        for name, tensor in beside.items():
            self._store(name, tensor)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Store a tensor."""
        self._announced.check(name, tensor)
        self._store(self._stored_name(name), tensor)
        self._announced.done(name)

    def put_rows(self, name: str, first: int, rows: torch.Tensor) -> None:
        """Store the next rows of a tensor."""
        self._announced.check_rows(name, first, rows)
        flat = plain_values(rows).contiguous().reshape(-1)
        if flat.numel():
            data = flat.view(torch.uint8).numpy().data
            position = self._positions[self._stored_name(name)]
            self.draft.write_at(data, position + first * (len(data) // len(rows)))
        self._announced.done_rows(name, first + len(rows))

    def finish(self) -> None:
        """Require that every tensor was put."""
        self._announced.require_complete()

    def _store(self, stored: str, tensor: torch.Tensor) -> None:
        flat = plain_values(tensor).contiguous().reshape(-1)
        if flat.numel():
            self.draft.write_at(flat.view(torch.uint8).numpy().data, self._positions[stored])


def require_dtypes(path: Path, infos: Sequence[TensorInfo]) -> None:
    """Refuse dtypes that the format lacks.

    Raises:
        UsageError: There is one; names the tensor.
    """
    for info in infos:
        if info.dtype not in CODES:
            raise UsageError(
                "a dtype that safetensors lacks",
                where=f"{path}, tensor {info.name}",
                why=f"its dtype is {info.dtype}",
                fix="write a .pt file, or set --dtype",
            )


SAFETENSORS_OUTPUT = OutputFormat(
    (".safetensors",),
    start=lambda outputs, order: SafetensorsWriter(
        outputs.file(order.path), order.infos, order.like
    ),
    check=require_dtypes,
)
