"""Tensors that are one, whether a file stores them once, twice, or under another name.

An output layer that shares its weight with the embedding is stored once by some writers and twice
by others. What the network, a file's own ties, or equal values say is one is fused once, and
written under all names that the anchor has it under.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..checkpoint.config import read_config
from ..checkpoint.open import Checkpoint
from ..checkpoint.tied import Tied, copies, known_names, same_values
from ..errors import OtfuseError
from ..graph.axes import axis_units
from ..graph.model import GraphTensor, LayerGraph
from ..graph.spec.from_shapes import layer_graph
from ..running.arch_value import Arch
from ..running.architecture import module_ties
from .find_architecture import library_arch_of, shapes_of

# Where names alone must tell that a tensor of one file is another one there: embeddings and output
# layers of language models, as libraries call them.
_EMBEDDING = re.compile(
    r"(.*\.)?(wte|shared|embed_tokens|embed_in|tok_embeddings|word_embeddings?)\.weight"
)
_HEAD = re.compile(r"(.*\.)?(lm_head|embed_out|predictions\.decoder|lm_head\.decoder)\.weight")
_CONFIG = "tie_word_embeddings"

Classes = list[tuple[str, ...]]


@dataclass(frozen=True)
class OneTensor:
    """Checkpoints with one tensor for each class of names.

    Attributes:
        checkpoints: In order, as they were or seen so.
        copies: Name to the other names under which the anchor's file stores the tensor again.
        warnings: Where a config.json says one thing and the values another.
    """

    checkpoints: tuple[Checkpoint, ...]
    copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def tie(checkpoints: Sequence[Checkpoint], anchor_index: int, arch: Arch) -> OneTensor:
    """See what is one tensor as one, in every file that stores it so.

    Where any file has different values under two of the names they are left apart.
    """
    anchor = checkpoints[anchor_index]
    warnings = tuple(w for c in checkpoints for w in _contradictions(c))
    apart = OneTensor(tuple(checkpoints), warnings=warnings)
    equal = [copies(c) for c in checkpoints]
    if not any(equal) and len({frozenset(c.infos) for c in checkpoints}) == 1:
        return apart
    said = _said_by_network(anchor, arch)
    if said is None:
        said = _said_by_names(checkpoints, anchor_index, arch, equal)
    order = {n: at for at, n in enumerate(known_names((anchor, *checkpoints)))}
    classes = [
        tuple(sorted(names, key=lambda n: (n not in anchor.infos, order[n])))
        for names in _joined(said, order)
    ]
    classes = [c for c in classes if _is_one(checkpoints, c) and _is_news(checkpoints, c)]
    if not classes:
        return apart
    again = {}
    for first, *others in classes:
        if stored_again := tuple(name for name in others if name in anchor.infos):
            again[first] = stored_again
    return OneTensor(tuple(Tied(c, classes) for c in checkpoints), again, warnings)


def _said_by_network(anchor: Checkpoint, arch: Arch) -> list[tuple[str, ...]] | None:
    """What is one tensor in the network, one of a library included; None without a network."""
    meant = library_arch_of(anchor, arch)
    try:
        return module_ties(meant, shapes_of(anchor), anchor.aliases)
    except OtfuseError:
        if meant == arch:
            raise
        return None  # the library fails, which is told when the graph is asked for


def _said_by_names(
    checkpoints: Sequence[Checkpoint], anchor_index: int, arch: Arch, equal: Sequence[Classes]
) -> Classes:
    """What is one tensor where there is no network to ask.

    Files' own ties, what the anchor's family says, and equal values: of an embedding and an output
    layer by their names, of others where all their axes mean the same.
    """
    anchor = checkpoints[anchor_index]
    said = [(name, *others) for c in checkpoints for name, others in c.aliases.items()]
    graph = _graph(anchor, arch)
    if graph is not None:
        said += [(t.name, *t.aliases, *t.stands_for) for t in graph.tensors.values()]
    for checkpoint, groups in zip(checkpoints, equal, strict=True):
        if _says(checkpoint) is False:
            continue
        for names in groups:
            said.append(tuple(filter(_by_name, names)))
        if checkpoint is anchor and graph is not None:
            for names in groups:
                said.extend(_alike(names, graph))
    modules: set[str] = set()
    for names in said:
        if len(names) > 1:
            modules.update(name.rpartition(".")[0] for name in names)
    # The bias of a tied output layer is kept one module further up as well.
    biases = [(f"{m.rpartition('.')[0]}.bias", f"{m}.bias") for m in sorted(modules) if "." in m]
    return [*said, *biases]


def _graph(anchor: Checkpoint, arch: Arch) -> LayerGraph | None:
    if not isinstance(arch, str):
        return None
    try:
        return layer_graph(
            arch, shapes_of(anchor), aliases=anchor.aliases, config=read_config(anchor.path)
        )
    except OtfuseError:  # told when the graph is asked for
        return None


def _by_name(name: str) -> bool:
    return bool(_EMBEDDING.fullmatch(name) or _HEAD.fullmatch(name))


def _alike(names: Sequence[str], graph: LayerGraph) -> Iterator[tuple[str, str]]:
    """Pairs of tensors whose units are the same ones, or stay in place: tying them is harmless.

    Two equal layers of a deep network are none: each has units of its own.
    """
    first = graph.tensors[names[0]]
    for other in names[1:]:
        if _same_axes(first, graph.tensors[other], graph):
            yield first.name, other


def _same_axes(one: GraphTensor, other: GraphTensor, graph: LayerGraph) -> bool:
    fixed = 0
    for one_axis, other_axis in zip(one.axes, other.axes, strict=True):
        units = {*axis_units(one_axis.expr), *axis_units(other_axis.expr)}
        pinned = all(graph.spaces[u].pinned is not None for u in units)
        fixed += pinned
        if one_axis.expr != other_axis.expr and not pinned:
            return False
    return 0 < fixed < len(one.axes)


def _joined(said: Classes, order: Mapping[str, int]) -> Classes:
    """Classes that share a name are one; names that no file has are left out."""
    classes: list[set[str]] = []
    for names in said:
        members = {n for n in names if n in order}
        if len(members) > 1:
            touched = [c for c in classes if c & members]
            classes = [c for c in classes if not c & members] + [members.union(*touched)]
    return [tuple(names) for names in classes]


def _is_one(checkpoints: Sequence[Checkpoint], names: Sequence[str]) -> bool:
    """Whether no file stores different values under two of the names."""
    for checkpoint in checkpoints:
        first, *rest = [n for n in names if n in checkpoint.infos] or [""]
        if not all(same_values(checkpoint, first, n) for n in rest):
            return False
    return True


def _is_news(checkpoints: Sequence[Checkpoint], names: Sequence[str]) -> bool:
    """Whether some file stores the tensor twice, or not under its first name."""
    for checkpoint in checkpoints:
        stored = [name for name in names if name in checkpoint.infos]
        if stored and stored != [names[0]]:
            return True
    return False


def _says(checkpoint: Checkpoint) -> bool | None:
    """Whether the config.json beside the weights says that they are tied."""
    said = (read_config(checkpoint.path) or {}).get(_CONFIG)
    return said if isinstance(said, bool) else None


def _contradictions(checkpoint: Checkpoint) -> Iterator[str]:
    """Where config.json says that two tensors are one, and their values differ.

    Some versions of a library load one of them, some both; fused apart, each is right.
    """
    if not _says(checkpoint):
        return
    heads = [n for n in checkpoint.infos if _HEAD.fullmatch(n)]
    embeddings = [n for n in checkpoint.infos if _EMBEDDING.fullmatch(n)]
    shapes = shapes_of(checkpoint)
    for head in heads:
        same = [n for n in embeddings if shapes[n] == shapes[head]]
        if same and not any(same_values(checkpoint, n, head) for n in same):
            yield (
                f"{checkpoint.label}: config.json says that {head} is {same[0]} ({_CONFIG}), but "
                f"their values differ: they are fused as two tensors; set {_CONFIG} to false in "
                "the output's config.json if the stored ones are meant"
            )
