"""Writing what `torch.load` reads: everything at once, as `torch.save` wants it."""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...output_names import PT_SUFFIXES
from ..announced import Announced, plain_values
from ..draft import Draft, refused_by_system
from ..extras import Extras
from ..names import TensorInfo
from ..remote_draft import RemoteDraft
from .format import OutputFormat, Template

if TYPE_CHECKING:
    from typing_extensions import Buffer


class _Noting(io.FileIO):
    """Remembers why a write failed: torch's writer raises errors of its own, without the cause."""

    error: OSError | None = None

    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


class TorchWriter:
    """Collects tensors; at the end, the state dict in the wrappers of `like`, ties kept."""

    def __init__(
        self,
        draft: Draft | RemoteDraft,
        infos: Sequence[TensorInfo],
        like: Template,
        extras: Extras | None = None,
    ) -> None:
        self.draft = draft
        self.wrapper = like.container.wrapper
        self._like = like
        self._extras = extras
        self._announced = Announced(infos)
        self._names = tuple(info.name for info in infos)
        self._tensors: dict[str, torch.Tensor] = {}

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Take a copy: callers reuse buffers, and a view would drag its whole storage along."""
        self._announced.check(name, tensor)
        self._tensors[name] = plain_values(tensor).clone(memory_format=torch.contiguous_format)
        self._announced.done(name)

    def put_rows(self, name: str, first: int, rows: torch.Tensor) -> None:
        """Take a copy of the next rows of a tensor."""
        info = self._announced.check_rows(name, first, rows)
        if first == 0:
            self._tensors[name] = torch.empty(info.shape, dtype=info.dtype)
        self._tensors[name][first : first + len(rows)] = plain_values(rows)
        self._announced.done_rows(name, first + len(rows))

    def finish(self) -> None:
        """Save, once every tensor was put.

        Raises:
            OutputRefused: The disk is full.
        """
        self._announced.require_complete()
        value: Any = self._state_dict()
        if self._extras is None:
            for key in reversed(self.wrapper):
                value = {key: value}
        else:
            value = self._extras.around(value)
        try:
            raw = _Noting(os.dup(self.draft.fd), "wb")
        except OSError as error:
            raise refused_by_system(self.draft.path, error) from error
        try:
            # A file object: torch would put the name of a path into the archive.
            with io.BufferedWriter(raw) as file:
                torch.save(value, file)
        except (OSError, RuntimeError) as error:
            raise refused_by_system(self.draft.path, raw.error or error) from error

    def _state_dict(self) -> dict[str, torch.Tensor]:
        """Names in the order of `like`, then those that it doesn't have; tied names together."""
        container = self._like.container
        owner = {name: name for name in self._names}
        for name, others in self._like.aliases.items():
            if name in owner:
                # A name that was put itself is tied no longer.
                owner.update({other: name for other in others if other not in owner})
        order = [name for name in container.keys if name in owner]
        ordered = set(order)
        order += [name for name in self._names if name not in ordered]
        state: OrderedDict[str, torch.Tensor] = OrderedDict(container.beside)
        state.update((container.stored_name(n), self._tensors[owner[n]]) for n in order)
        if container.versions is None:
            return dict(state)
        versions = OrderedDict((name, dict(v)) for name, v in container.versions.items())
        state._metadata = versions  # type: ignore[attr-defined]
        return state


TORCH_OUTPUT = OutputFormat(
    PT_SUFFIXES,
    start=lambda outputs, order: TorchWriter(
        outputs.file(order.path), order.infos, order.like, order.extras
    ),
)
