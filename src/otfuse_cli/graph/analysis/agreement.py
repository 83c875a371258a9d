"""Whether two networks, each with a graph of its own, are one structure at different widths."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import zip_longest

from ...errors import IncompatibleModels
from ..axes import Axis, Cat, Fixed, Prod, Unit, axis_units
from ..model import LayerGraph, Op


def agreed_sizes(
    source: LayerGraph,
    anchor: LayerGraph,
    *,
    names: Collection[str] | None = None,
    label: str,
    anchor_label: str,
) -> dict[str, int]:
    """Sizes of the anchor's spaces in the source's own graph.

    Spaces may go by other names; every tensor has to carry the same ones, and operations have to
    come in the same order. Sizes of pinned axes are left to `resize`.

    Args:
        source: Graph of the source's own network, in the checkpoint's names.
        anchor: The anchor's.
        names: Tensors that count, where the checkpoints differ in them; None for all.
        label: What messages call the source.
        anchor_label: What they call the anchor.

    Raises:
        IncompatibleModels: They are different structures; names the first difference.
    """
    pairing = _Pairing(source, anchor, label, anchor_label)
    shared = [n for n in anchor.tensors if n in source.tensors and (names is None or n in names)]
    difference: str | None = None
    for name in shared:
        difference = pairing.difference(name)
        if difference is not None:
            break
    # Where some tensors don't count, the operations on them are in one network only.
    whole = len(shared) == len(anchor.tensors) == len(source.tensors)
    if difference is None and whole:
        difference = pairing.other_operation()
    if difference is not None:
        raise IncompatibleModels(
            "the networks differ in more than widths",
            where=f"{label}: {source.source}; {anchor_label}: {anchor.source}",
            why=difference,
            fix="give factories that build one architecture, at different widths",
        )
    return {
        anchor_space: source.spaces[source_space].size
        for anchor_space, source_space in pairing.mine_of.items()
        if anchor.spaces[anchor_space].pinned is None
    }


@dataclass
class _Pairing:
    """Spaces of one graph against those of another, paired as their tensors are gone through."""

    source: LayerGraph
    anchor: LayerGraph
    label: str
    anchor_label: str
    theirs_of: dict[str, str] = field(default_factory=dict)
    mine_of: dict[str, str] = field(default_factory=dict)

    def difference(self, name: str) -> str | None:
        """What a tensor carries in one and not in the other, in words."""
        tensor, partner = self.source.tensors[name], self.anchor.tensors[name]
        if len(tensor.axes) != len(partner.axes):
            return self._both(f"{name} has {len(tensor.axes)} axes", str(len(partner.axes)))
        # Axis by axis, and unit by unit along each: the first difference is the one to be told.
        for dim, (a, b) in enumerate(zip(tensor.axes, partner.axes, strict=True)):
            where = f"{name} axis {dim}"
            if not self._paired(a.expr, b.expr):
                return self._both(f"{where} is `{a.expr}`", f"`{b.expr}`")
            units = zip(axis_units(a.expr), axis_units(b.expr), strict=True)
            for one, other in units:
                pinned = (self.source.spaces[one].pinned, self.anchor.spaces[other].pinned)
                if (pinned[0] is None) is not (pinned[1] is None):
                    here, there = ("may move" if p is None else f"stay ({p})" for p in pinned)
                    return self._both(f"units of {where} {here}", there)
        return None

    def other_operation(self) -> str | None:
        """The first operation that the other network does not have at its place."""
        for op, partner in zip_longest(self.source.ops, self.anchor.ops):
            if op is None:
                return f"{_named(partner)} in {self.anchor_label} only"
            if partner is None:
                return f"{_named(op)} in {self.label} only"
            if _meaning(op) != _meaning(partner):
                return self._both(_named(op), f"{_named(partner)} at its place")
        return None

    def _both(self, here: str, there: str) -> str:
        return f"{here} in {self.label}, {there} in {self.anchor_label}"

    def _paired(self, source_axis: Axis, anchor_axis: Axis) -> bool:
        match source_axis, anchor_axis:
            case Unit(a), Unit(b):
                # One to one: each name is paired the first time that it is met, and for good.
                pair = self.theirs_of.setdefault(a, b), self.mine_of.setdefault(b, a)
                return pair == (b, a)
            case Fixed(a), Fixed(b):
                return a == b
            case (Prod(a), Prod(b)) | (Cat(a), Cat(b)):
                return len(a) == len(b) and all(map(self._paired, a, b))
        return False


def _meaning(op: Op) -> tuple[object, ...]:
    return op.kind, op.detail, tuple(sorted(op.tensors.items()))


def _named(op: Op) -> str:
    kind = f"{op.kind} {op.detail}".strip()
    return f"{kind} of {', '.join(op.tensors.values())}" if op.tensors else f"{kind} ({op.name})"
