"""Writing a fused model: tensor by tensor, or by blocks of rows, and what else belongs to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..checkpoint.names import TensorInfo
from ..checkpoint.publication import Publication
from ..fusion.fused import Fused
from ..remote.location import is_remote
from ..report.records import FileRecord
from ..runtime import Runtime, ahead
from .merge_plan import MergePlan
from .outputs import Put, kept_extras, sink, target_info
from .parents import Parents
from .pieces import averaged_elsewhere


def output_infos(plan: MergePlan, parents: Parents) -> list[TensorInfo]:
    """The tensors of the output, in the order of the file that it is like."""
    like = parents.stored_like or parents.whole.checkpoint
    return [target_info(info, plan.target.dtype) for info in like.infos.values()]


def write_fused(
    plan: MergePlan,
    parents: Parents,
    fused: Fused,
    runtime: Runtime,
    also: Put | None,
    outputs: Publication,
) -> tuple[tuple[str, ...], tuple[FileRecord, ...]]:
    """Write every tensor; returns what could not be written along with them, and what was."""
    like = parents.stored_like or parents.whole.checkpoint
    infos = {info.name: info for info in output_infos(plan, parents)}
    extras, lost = kept_extras(like, plan.target)
    with sink(
        plan.output,
        like,
        list(infos.values()),
        plan.target,
        outputs,
        also=also,
        extras=extras,
        config=parents.config,
    ) as out:
        # Rows go out as they come only where a tensor is stored as it is.
        put_rows = out.put_rows if parents.store is None else None
        names = list(parents.whole.checkpoint.infos.values())
        if is_remote(plan.output):
            # As safetensors lays them out: what comes early would wait for what lies before it.
            names.sort(key=lambda info: -target_info(info, plan.target.dtype).dtype.itemsize)
        pieces = _pieces(plan, fused, names, runtime, by_rows=put_rows is not None)
        # The next piece is averaged while this one is hashed and written.
        for name, first, piece in ahead(pieces):
            if put_rows is not None and first is not None:
                for stored_name in parents.names(name):
                    put_rows(stored_name, first, piece)
                continue
            for stored_name, stored in parents.stored(name, piece).items():
                out.put(stored_name, stored.to(infos[stored_name].dtype))
    runtime.progress("write", len(names), len(names))
    return lost, out.written


def _pieces(
    plan: MergePlan, fused: Fused, infos: Sequence[TensorInfo], runtime: Runtime, *, by_rows: bool
) -> Iterator[tuple[str, int | None, torch.Tensor]]:
    """Name, first row and values of every piece; without a first row it is the whole tensor."""
    if runtime.workers.away:
        wanted = [target_info(info, plan.target.dtype) for info in infos]
        made = averaged_elsewhere(fused, wanted, runtime)
        for done, (info, tensor) in enumerate(zip(infos, made, strict=True)):
            runtime.progress("write", done, len(infos))
            yield info.name, None, tensor
        return
    for done, info in enumerate(infos):
        runtime.progress("write", done, len(infos))
        dtype = target_info(info, plan.target.dtype).dtype
        blocks = fused.blocks(info.name, dtype=dtype) if by_rows else None
        if blocks is None:
            yield info.name, None, fused.tensor(info.name, dtype=dtype)
            continue
        for first, rows in blocks:
            yield info.name, first, rows
