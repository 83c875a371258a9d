"""The tensors an output was promised: each is put once, as announced, and none is missing."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .names import TensorInfo


class Announced:
    """What has not been put yet.

    Raises:
        ValueError: A name is announced twice.
    """

    def __init__(self, infos: Iterable[TensorInfo]) -> None:
        infos = tuple(infos)
        self._missing = {info.name: info for info in infos}
        self._rows: dict[str, int] = {}
        if len(self._missing) != len(infos):
            raise ValueError("a tensor name is announced twice")

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Require that the tensor is awaited, in this shape and dtype.

        Raises:
            ValueError: It isn't.
        """
        info = self._missing.get(name)
        if info is None:
            raise ValueError(f"tensor {name} was not announced, or put before")
        if tuple(tensor.shape) != info.shape or tensor.dtype != info.dtype:
            raise ValueError(
                f"tensor {name} was announced as {info.dtype} {list(info.shape)}, "
                f"not {tensor.dtype} {list(tensor.shape)}"
            )

    def check_rows(self, name: str, first: int, rows: torch.Tensor) -> TensorInfo:
        """Require that these rows come next, in the announced dtype; a tensor starts at row 0.

        Raises:
            ValueError: They don't.
        """
        info = self._missing.get(name)
        if info is None:
            raise ValueError(f"tensor {name} was not announced, or put before")
        last = first + len(rows)
        if first != self._rows.get(name, 0) or not info.shape or last > info.shape[0]:
            raise ValueError(f"rows {first} to {last} of tensor {name} come out of order")
        if tuple(rows.shape[1:]) != info.shape[1:] or rows.dtype != info.dtype:
            raise ValueError(
                f"tensor {name} was announced as {info.dtype} {list(info.shape)}, "
                f"not {rows.dtype} {list(rows.shape)}"
            )
        return info

    def done_rows(self, name: str, last: int) -> bool:
        """The rows before `last` have been stored; whether that is all of the tensor."""
        self._rows[name] = last
        whole = last == self._missing[name].shape[0]
        if whole:
            self.done(name)
        return whole

    def done(self, name: str) -> None:
        """The tensor has been stored."""
        del self._missing[name]

    def require_complete(self) -> None:
        """Require that every tensor was put.

        Raises:
            ValueError: One was not.
        """
        if self._missing:
            first = next(iter(self._missing))
            raise ValueError(f"{len(self._missing)} tensors were not put, first {first}")


def plain_values(tensor: torch.Tensor) -> torch.Tensor:
    """The values on the CPU, without lazy conjugation or negation."""
    return tensor.detach().resolve_conj().resolve_neg().to("cpu")
