"""Where results go: refused before any work, written whole, recorded."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.extras import Extras
from ..checkpoint.names import TensorInfo
from ..checkpoint.open import Checkpoint
from ..checkpoint.publication import Publication, is_inside, is_same
from ..checkpoint.write import check_output, open_writer, read_back
from ..errors import OutputRefused, UsageError
from ..output_names import DEFAULT_SHARD, PT_SUFFIXES, parse_size, suffix_of
from ..pruning.advice import Advice
from ..remote.location import is_remote, location
from ..report.records import FileRecord
from ..requests.requests import OutputOptions, Source

Put = Callable[[str, torch.Tensor], None]
PutRows = Callable[[str, int, torch.Tensor], None]


@dataclass
class Sink:
    """Where tensors go.

    Attributes:
        put: Takes a whole tensor.
        put_rows: Takes rows of one in order, from a first row on; None where whole ones are wanted.
        written: The output as it reads, once it is complete; empty where there is none.
    """

    put: Put
    put_rows: PutRows | None = None
    written: tuple[FileRecord, ...] = ()


def refuse_outputs(
    output: Path | None, report: Path | None, inputs: Sequence[Source], target: OutputOptions
) -> None:
    """Require that output and report can be written, and that no input is touched.

    Raises:
        OutputRefused: One exists already, is an input, or can't be written.
        UsageError: Output and report are the same, or an option that the output's format lacks.
    """
    folder = output is not None and suffix_of(output) == ""
    for path in (output, report):
        if path is None:
            continue
        for source in inputs:
            if isinstance(source, str | Path) and _touches(path, location(source)):
                raise OutputRefused(
                    "the output is one of the inputs",
                    where=str(path),
                    why="inputs are never touched",
                    fix="choose another name",
                )
        if output is not None and path != output and folder and is_inside(path, output):
            continue  # a report inside the folder comes and goes with it
        check_output(path, overwrite=target.overwrite, folder=folder and path == output)
    if output is None:
        return
    if report is not None and is_same(output, report):
        raise UsageError("output and report have the same name", where=str(output))
    _refuse_options(output, target, folder=folder)


def require_room(output: Path | None, infos: Iterable[TensorInfo]) -> None:
    """Require that the tensors fit on the disk, before hours are spent on them.

    Raises:
        OutputRefused: They don't.
    """
    if output is None:
        return
    folder = output.parent
    if is_remote(output):
        if output.suffix not in PT_SUFFIXES:
            return  # it is sent while it is written
        folder = Path(tempfile.gettempdir())
    wanted, free = sum(info.nbytes for info in infos), shutil.disk_usage(folder).free
    if wanted > free:
        raise OutputRefused(
            "the output does not fit on the disk",
            where=str(output) if folder == output.parent else f"{output}, on its way in {folder}",
            why=f"it has {wanted} bytes, {free} are free",
            fix="write to a folder with enough room",
        )


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
    target: OutputOptions,
    outputs: Publication,
    *,
    also: Put | None = None,
    extras: Extras | None = None,
    config: Mapping[str, Any] | None = None,
) -> Iterator[Sink]:
    """Where tensors go: the output file or folder, the caller (`also`: whole ones), or both.

    A folder gets the config.json of `like`, with what `config` says. The output is complete after
    the block, and is published with `outputs`.
    """
    if output is None:
        yield Sink(also or (lambda name, tensor: None))
        return
    with open_writer(
        output,
        infos,
        like=like,
        overwrite=target.overwrite,
        outputs=outputs,
        extras=extras,
        shard_size=parse_size(target.shard_size or DEFAULT_SHARD),
        dtype=None if target.dtype == "keep" else target.dtype,
        config=config,
    ) as writer:

        def put(name: str, tensor: torch.Tensor) -> None:
            writer.put(name, tensor)
            if also is not None:
                also(name, tensor)

        made = Sink(put, None if also is not None else writer.put_rows)
        yield made
    with read_back(writer, str(output)) as written:
        made.written = (written.record(),)


def folder_config(
    output: Path | None, copied: Mapping[str, Any] | None, changes: Advice
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """What the config.json of an output folder has to say, and what to say of it.

    Args:
        output: The output; None or a file has no config.json.
        copied: What the config.json that would be copied says; None: there is none.
        changes: What pruning has changed.
    """
    if output is None or suffix_of(output) or copied is None or not changes.sentences:
        return {}, ()
    if changes.config:
        sizes = ", ".join(f"{key} {_said(value)}" for key, value in changes.config.items())
        return changes.config, (f"config.json of the output says {sizes}",)
    return {}, ("config.json was copied as it is: it does not say what has changed",)


def _said(value: Any) -> str:
    """A value of a config.json; of a list of many entries their number."""
    long = isinstance(value, list) and not all(isinstance(entry, int) for entry in value)
    return f"({len(value)} entries)" if long else str(value)


def kept_extras(
    checkpoint: Checkpoint, target: OutputOptions
) -> tuple[Extras | None, tuple[str, ...]]:
    """What is written along with the tensors, if asked for, and a warning of what can't be."""
    if not target.keep_extras:
        return None, ()
    extras = checkpoint.extras()
    if not extras.left_out:
        return extras, ()
    return extras, (f"--keep-extras left out: {', '.join(extras.left_out)}",)


def _refuse_options(output: Path, target: OutputOptions, *, folder: bool) -> None:
    """Options that the format of the output has no place for."""
    if target.keep_extras and output.suffix not in PT_SUFFIXES:
        raise UsageError(
            "--keep-extras needs a .pt output",
            where=f"-o {output}",
            why="safetensors files hold tensors only",
            fix=f"end OUT in one of {', '.join(PT_SUFFIXES)}",
        )
    if target.shard_size is not None and not folder:
        raise UsageError(
            "--shard-size needs a folder as output",
            where=f"-o {output}",
            why=f"a {output.suffix} file is one file",
            fix="leave the suffix away",
        )


def _touches(output: Path, source: Path) -> bool:
    """Whether writing the output would replace an input: it, or a folder around it."""
    if is_remote(output) or is_remote(source):
        return output == source or output in source.parents
    try:
        return any(os.path.samefile(path, output) for path in (source, *source.resolve().parents))
    except OSError:
        return False
