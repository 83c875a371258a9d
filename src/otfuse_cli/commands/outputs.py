"""Where results go: refused early, written whole, recorded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from ..checkpoint.names import TensorInfo
from ..checkpoint.open import Checkpoint, open_checkpoint
from ..checkpoint.write import check_output, open_writer, suffix_of
from ..errors import OutputRefused, UsageError
from ..report import FileRecord
from .requests import Source

Put = Callable[[str, torch.Tensor], None]


def refuse_outputs(
    inputs: Sequence[Source], output: Path | None, report: Path | None, *, overwrite: bool
) -> None:
    """Say no before any work: an output that exists, or that is one of the inputs.

    Raises:
        OutputRefused: It exists, is an input, or can't be written.
        UsageError: A suffix that says no format, or one name for output and report.
    """
    if output is not None:
        suffix_of(output)
    for path in (output, report):
        if path is None:
            continue
        for source in inputs:
            if isinstance(source, str | Path) and _same_file(Path(source), path):
                raise OutputRefused(
                    "the output is one of the inputs",
                    where=str(path),
                    why="inputs are never touched",
                    fix="choose another name",
                )
        check_output(path, overwrite=overwrite)
    if output is not None and output == report:
        raise UsageError("output and report have the same name", where=str(output))


def target_info(info: TensorInfo, dtype: str) -> TensorInfo:
    """What is written for a tensor: floating ones as `--dtype` says."""
    if dtype == "keep" or not info.dtype.is_floating_point:
        return info
    return replace(info, dtype=getattr(torch, dtype))


@contextmanager
def sink(
    output: Path | None,
    like: Checkpoint,
    infos: Sequence[TensorInfo],
    *,
    overwrite: bool,
    also: Put | None = None,
) -> Iterator[Put]:
    """Where tensors go: the output file, the caller, or both."""
    if output is None:
        yield also or (lambda name, tensor: None)
        return
    with open_writer(output, infos, like=like, overwrite=overwrite) as writer:

        def put(name: str, tensor: torch.Tensor) -> None:
            writer.put(name, tensor)
            if also is not None:
                also(name, tensor)

        yield put


def output_record(output: Path | None) -> tuple[FileRecord, ...]:
    """What was written, as the report holds it."""
    if output is None:
        return ()
    with open_checkpoint(output) as written:
        return (written.record(),)


def _same_file(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
