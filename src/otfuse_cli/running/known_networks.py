"""Networks of libraries, known by the names and shapes of their tensors. Imports no library.

`known_networks.tsv` holds the signatures of what timm and torchvision can build;
`benchmarks/network_index.py` makes it. A signature is a sum of hashes, one for every tensor, so
that the tensors of the class axis can be taken out of it: their size is the user's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from importlib import resources

from ..graph.model import Shapes

_BITS = 48
# Where the index has networks without an output layer: it is sorted by the names of tensors.
_HEADLESS = 0
# What a library makes the class axis where networks with different ones are meant: none of them 0.
_ANY_HEAD = -1
# Counters, which old files lack.
_IGNORED = "num_batches_tracked"
# What training scripts put before every name.
_WRAPPERS = re.compile(r"(module|model|backbone|net|network|encoder|_orig_mod)\.")


@dataclass(frozen=True)
class Known:
    """Networks that have the tensors of a checkpoint.

    Attributes:
        names: `library:NAME`; within a group they compute the same, between groups not.
        classes: Size of the class axis; 0 without one.
        usual: What the library makes it, unless told otherwise.
    """

    names: tuple[tuple[str, ...], ...]
    classes: int
    usual: int

    def arch(self, name: str) -> str:
        """What `--arch` says for one of the names."""
        return name if self.classes == self.usual else f"{name},num_classes={self.classes}"


@dataclass(frozen=True)
class Head:
    """An output layer: its tensors, and how many classes the library's default has."""

    tensors: tuple[str, ...]
    classes: int


@dataclass(frozen=True)
class Index:
    """Signatures to networks.

    Attributes:
        versions: What it was made with: library to version.
        heads: Output layers that occur.
        networks: (signature without the head, position of the head) to groups of names.
    """

    versions: Mapping[str, str]
    heads: tuple[Head, ...]
    networks: Mapping[tuple[int, int], tuple[tuple[str, ...], ...]]


def tensor_hash(name: str, shape: tuple[int, ...]) -> int:
    """What a tensor adds to a signature."""
    if name.endswith(_IGNORED):
        return 0
    text = f"{name} {','.join(map(str, shape))}"
    return int.from_bytes(blake2b(text.encode(), digest_size=_BITS // 8).digest(), "big")


def signature_of(shapes: Shapes) -> int:
    """Names and shapes as one number, whatever their order."""
    return sum(tensor_hash(name, tuple(shape)) for name, shape in shapes.items()) % (1 << _BITS)


def known_network(shapes: Shapes) -> Known | None:
    """The networks that have exactly these tensors, but for the number of classes; None: none."""
    index = read_index()
    for _ in range(3):
        entry = _look_up(index, shapes)
        if entry is not None:
            return entry
        match = _WRAPPERS.match(next(iter(shapes), ""))
        if match is None or not all(name.startswith(match[0]) for name in shapes):
            return None
        shapes = {name.removeprefix(match[0]): shape for name, shape in shapes.items()}
    return None


def _look_up(index: Index, shapes: Shapes) -> Known | None:
    whole = signature_of(shapes)
    for at, head in enumerate(index.heads):
        if not (head.tensors and all(name in shapes for name in head.tensors)):
            continue
        taken = sum(tensor_hash(name, tuple(shapes[name])) for name in head.tensors)
        rest = (whole - taken) % (1 << _BITS)
        classes = shapes[head.tensors[0]][0]
        if names := index.networks.get((rest, at)):
            return Known(names, classes, head.classes)
        # To what it builds without an output layer, timm adds one where classes are named.
        if names := index.networks.get((rest, _HEADLESS)):
            return Known(names, classes, 0)
    if names := index.networks.get((whole, _HEADLESS)):
        return Known(names, 0, 0)
    return _without_head(index, whole)


def _without_head(index: Index, whole: int) -> Known | None:
    """Networks that timm builds without their output layer for `num_classes=0`."""
    groups: list[tuple[str, ...]] = []
    for at in range(len(index.heads)):
        for group in index.networks.get((whole, at), ()):
            names = tuple(name for name in group if name.startswith("timm:"))
            if names:
                groups.append(names)
    return Known(tuple(groups), 0, _ANY_HEAD) if groups else None


@cache
def read_index() -> Index:
    """The index that is shipped."""
    text = resources.files(__package__).joinpath("known_networks.tsv").read_text("utf-8")
    versions: dict[str, str] = {}
    heads: list[Head] = []
    networks: dict[tuple[int, int], tuple[tuple[str, ...], ...]] = {}
    for line in text.splitlines():
        kind, *cells = line.split("\t")
        if kind == "library":
            versions[cells[0]] = cells[1]
        elif kind == "head":
            heads.append(Head(tuple(cells[1].split()), int(cells[0])))
        else:
            names = tuple(tuple(group.split()) for group in cells[1].split("|"))
            networks[int(kind, 16), int(cells[0])] = names
    return Index(versions, tuple(heads), networks)
