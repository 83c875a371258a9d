"""Tensors that the network's graph doesn't reach: what they follow from, or whose they stay.

A copy that lags behind a weight, the sums of a codebook, a weight with its norm folded in: nothing
in a forward pass says how their units stand. Values say it, where every parent agrees; what nobody
can tell stays the anchor's, and is named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from ..errors import few
from ..fusion.relations import follows, relation
from ..graph.axes import axis_units
from ..graph.derived_tensors import UNUSED, linked, related
from ..graph.model import Derived, LayerGraph
from ..matching.models import Model
from .parents import Parents

# What a layer has anyway: not worth a look where there is no network to say what is used.
_USUAL = re.compile(
    r"(.*_)?(weight|bias|running_mean|running_var|num_batches_tracked|gamma|beta|weight_[gv]"
    r"|original\d?|weight_orig|[wb]\d*)(_.*l\d+.*)?"
)
_MOST = 40  # tensors of a module and below that are tried as what another one follows from


def settle(parents: Parents, *, keep: bool) -> Parents:
    """The parents with such tensors related to others, or with `keep` left to the anchor.

    Integers are the anchor's in any case, and what all parents hold alike needs no care.
    """
    graph = parents.anchor.graph
    models = [_Reader(m) for m in parents.models]
    unused = [n for n in _floating(parents) if _is_unused(graph, n)]
    traced = bool(unused) or graph.source.startswith(("traced", "program"))
    odd = unused if traced else [n for n in _floating(parents) if not _USUAL.fullmatch(_last(n))]
    odd = [n for n in odd if _differs(n, models)]
    if not odd:
        return parents
    relations = _relations(odd, graph, models)
    shared = _shared(relations)
    left = [n for n in odd if n not in shared] if traced else []
    copies = _copies(left, graph, models)
    left = [n for n in left if n not in copies] if keep else []
    parents = _with_graphs(parents, relations, copies)
    if not left:
        return parents
    warning = (
        f"{few(left)}: the network does not use {'it' if len(left) == 1 else 'them'}, and nothing "
        f"tells how their units stand: kept from {parents.anchor.checkpoint.label}"
    )
    return replace(parents, kept=parents.kept | set(left), warnings=(*parents.warnings, warning))


class _Reader:
    """Tensors of one model, the last few of them held."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._held: dict[str, torch.Tensor] = {}

    def __call__(self, name: str) -> torch.Tensor:
        if name not in self._held:
            if len(self._held) > _MOST:
                self._held.clear()
            integer = not self.model.checkpoint.infos[name].dtype.is_floating_point
            read = self.model.stored if integer else self.model.read
            self._held[name] = read(name).cpu()
        return self._held[name]


def _floating(parents: Parents) -> Iterator[str]:
    infos = [m.checkpoint.infos for m in parents.models]
    for name in parents.anchor.graph.tensors:
        if name not in parents.kept and all(i[name].dtype.is_floating_point for i in infos):
            yield name


def _is_unused(graph: LayerGraph, name: str) -> bool:
    units = [u for axis in graph.tensors[name].axes for u in axis_units(axis.expr)]
    return bool(units) and all(graph.spaces[u].pinned == UNUSED for u in units)


def _differs(name: str, models: Sequence[_Reader]) -> bool:
    first, *rest = (read(name) for read in models)
    return any(other.shape != first.shape or not torch.equal(other, first) for other in rest)


def _relations(
    odd: Sequence[str], graph: LayerGraph, models: Sequence[_Reader]
) -> tuple[Derived, ...]:
    """What follows from what: first unused tensors from used ones, then used from unused ones."""
    shapes = {n: t.shape for n, t in graph.tensors.items()}
    strange, relations = set(odd), list[Derived]()
    for name in odd:
        beside = _beside(name, shapes)
        derived = relation(name, beside, shapes, models, without=strange)
        if derived is not None:
            relations.append(derived)
    shared = _shared(relations)
    for name in odd:
        for other in _beside(name, shapes) if name not in shared else ():
            if other in strange or _module(other) != _module(name) or name in shared:
                continue
            derived = relation(other, _beside(other, shapes), shapes, models)
            if derived is not None and name in derived.sources:
                relations.append(derived)
                shared = _shared(relations)
    return tuple(relations)


def _shared(relations: Sequence[Derived]) -> set[str]:
    return {n for d in relations for n in (*d.tensors, *d.sources)}


def _beside(name: str, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Tensors of the same module and of those below it."""
    module = _module(name)
    below = f"{module}." if module else ""
    below_it = [n for n in shapes if n.startswith(below) and n != name]
    near = [n for n in below_it if _module(n) == module]
    return below_it if len(below_it) <= _MOST else near[:_MOST]


def _copies(left: Sequence[str], graph: LayerGraph, models: Sequence[_Reader]) -> dict[str, str]:
    """Copies that lag behind (`ema_weight`, `encoder_k`), and the tensors they are copies of.

    One change of names makes all of them; it counts if every matrix of a parent follows its own.
    """
    changes: dict[tuple[str, ...], dict[str, str]] = {}
    for name in left:
        for other, change in _twins(name, graph):
            changes.setdefault(change, {})[name] = other
    twins: dict[str, str] = {}
    for pairs in sorted(changes.values(), key=len, reverse=True):
        pairs = {n: o for n, o in pairs.items() if n not in twins}
        # Vectors may be equal by chance (all zeros); where there are matrices, they decide.
        matrices = {n: o for n, o in pairs.items() if len(graph.tensors[n].shape) > 1}
        if pairs and _all_follow(matrices or pairs, models):
            twins |= pairs
    return twins


def _all_follow(pairs: Mapping[str, str], models: Sequence[_Reader]) -> bool:
    """Whether in every model each tensor follows its pair's other one."""
    for read in models:
        if not all(follows(name, other, read) for name, other in pairs.items()):
            return False
    return True


def _twins(name: str, graph: LayerGraph) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Used tensors of the same shape whose names differ in one part, or lack one."""
    shape, parts = graph.tensors[name].shape, name.split(".")
    for other, tensor in graph.tensors.items():
        if tensor.shape != shape or other == name or _is_unused(graph, other):
            continue
        other_parts = other.split(".")
        same = sum(a == b for a, b in zip(parts, other_parts, strict=False))
        if len(other_parts) == len(parts) and same == len(parts) - 1:
            at = next(i for i, (a, b) in enumerate(zip(parts, other_parts, strict=True)) if a != b)
            if not (parts[at].isdigit() and other_parts[at].isdigit()):
                yield other, (parts[at], other_parts[at])
        elif (
            len(other_parts) < len(parts) and parts[len(parts) - len(other_parts) :] == other_parts
        ):
            yield other, (*parts[: len(parts) - len(other_parts)], "")
        elif len(other_parts) <= len(parts) + 2 and parts[-1] == other_parts[-1]:
            rest = min(len(parts), len(other_parts)) - 1
            tail = next((n for n in range(rest, 0, -1) if parts[-n:] == other_parts[-n:]), 0)
            if tail >= 2:
                yield other, (*parts[:-tail], "=", *other_parts[:-tail])


def _with_graphs(
    parents: Parents, relations: Sequence[Derived], copies: Mapping[str, str]
) -> Parents:
    if not relations and not copies:
        return parents
    links = [
        *(link for d in relations for link in linked(d, parents.anchor.graph)),
        *_whole(copies, parents),
    ]
    models = tuple(replace(m, graph=related(m.graph, relations, links)) for m in parents.models)
    whole = parents.whole
    if whole.graph is parents.anchor.graph:
        graph = models[parents.anchor_index].graph
    else:
        graph = related(whole.graph, relations, links)
    return replace(parents, models=models, whole=replace(whole, graph=graph))


def _whole(copies: Mapping[str, str], parents: Parents) -> Iterator[tuple[str, int, str, int]]:
    for name, other in copies.items():
        for dim in range(len(parents.anchor.graph.tensors[name].shape)):
            yield name, dim, other, dim


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _last(name: str) -> str:
    return name.rpartition(".")[2]
