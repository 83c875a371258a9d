"""What of a pre-norm transformer of another depth stands for what of the anchor.

The streams are matched where blocks end, so that every such place of the anchor has one of the
source's. For a block of the anchor stand the source's blocks between two places: its heads and
units are those of all of them, and what they add to the stream is the sum of what these add
(docs/methods/depth.md). Names and sizes; the numbers are those of `similar`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest

import torch
from torch import Tensor

from ..graph.analysis.attentions import Attention
from ..graph.analysis.fit_targets import fits
from ..graph.trace.program import Axes
from ..running.execute import Walk
from .counterpart import PlacePair, Similar, Terms, released_with, summed
from .depth import covering
from .stages import unlike
from .stream_blocks import Section, Streamed, SubBlock


@dataclass(frozen=True)
class NormedSum:
    """What a norm without gain and shift makes of a sum of values of one stream."""

    terms: Terms
    centred: bool

    def value(self, walk: Walk) -> Tensor:
        """In a pass; what the norm adds to the variance is left out."""
        total = summed(self.terms, walk)
        if self.centred:
            total = total - total.mean(-1, keepdim=True)
        return total / total.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-12)


@dataclass(frozen=True)
class StreamCounterpart:
    """A pre-norm transformer of another depth, in the anchor's terms.

    Attributes:
        pairs: Places of the stream that stand for one another, in the anchor's order.
        values: What stands for a value that layers of the anchor are fitted to: sums of own values,
            whose units are others in each.
        axes: Of own values.
        released: By a value of the anchor, own ones that nobody asks for after it.
        reads: By what layers of the anchor read, what the own ones in their place read.
        normed: By what layers of the anchor read behind a norm, the same of the own stream there.
        tensors: By tensor of the anchor, own ones.
        attentions: For each attention layer of the anchor, the own ones.
        spaces: By space of the anchor's heads and units, the own ones.
        sizes: How many units these have together; of the stream its width.
    """

    pairs: tuple[PlacePair, ...]
    values: Mapping[str, tuple[Terms, ...]]
    axes: Mapping[str, Axes]
    released: Mapping[str, tuple[str, ...]]
    reads: Mapping[str, tuple[str, ...]]
    normed: Mapping[str, str | NormedSum]
    tensors: Mapping[str, tuple[str, ...]]
    attentions: tuple[tuple[Attention, ...], ...]
    spaces: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]

    def parts(self, name: str, walk: Walk) -> list[tuple[Tensor, Axes]]:
        """What stands for a value of the anchor in a pass, each with its axes; [] for nothing."""
        every = self.values.get(name, ())
        return [(summed(terms, walk), self.axes[terms[0][0]]) for terms in every]

    def own_values(self, names: Iterable[str]) -> tuple[str, ...]:
        """Own values that stand for some of the anchor's."""
        terms = chain.from_iterable(chain(*(self.values.get(name, ()) for name in names)))
        return tuple(own for own, _ in terms)

    def own_tensors(self, name: str) -> tuple[str, ...]:
        """Own tensors that do what one of the anchor does."""
        return self.tensors.get(name, ())


@dataclass
class _Drawn:
    """What stands for what, as it is drawn up."""

    anchor: Streamed
    source: Streamed
    values: dict[str, tuple[Terms, ...]] = field(default_factory=dict)
    reads: dict[str, tuple[str, ...]] = field(default_factory=dict)
    normed: dict[str, str | NormedSum] = field(default_factory=dict)
    tensors: dict[str, tuple[str, ...]] = field(default_factory=dict)
    spaces: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def section(self, one: Section, others: Sequence[Section]) -> None:
        """A section of the anchor, and those of the source that stand for it."""
        for at, fit in enumerate(one.fits):
            own = [other.fits[at] for other in others]
            self.values[fit.target] = tuple(((f.target, 1.0),) for f in own)
            self.reads[fit.layer.input] = tuple(f.layer.input for f in own)
        norms = {norm.shift for norm in self.anchor.stream.norms}
        for at, name in enumerate(one.tensors):
            named = tuple(other.tensors[at] for other in others)
            # A norm reads one stream; the shift that stays on it is that of the first.
            self.tensors[name] = named[:1] if name in norms else named
        for at, space in enumerate(one.spaces):
            self.spaces[space] = tuple(other.spaces[at] for other in others)

    def block(
        self, block: Sequence[SubBlock], group: Sequence[Sequence[SubBlock]], place: int
    ) -> None:
        """A block of the anchor, and the source's in a group; without any, from where it is."""
        stands = dict[str, float]()
        stands[self.source.places[place].seen] = 1.0
        for at, part in enumerate(block):
            own = [other[at] for other in group]
            self.section(part, own)
            if not group or at == 0:
                self.behind_norm(part, self.source.normed(place))
            elif len(group) == 1:
                self.behind_norm(part, self.source.normed_before(own[0]))
            else:
                self.behind_norm(part, NormedSum(_terms(stands), self.source.stream.centred))
            for other in own:  # what it adds: the stream behind it less the stream before
                for value, sign in ((other.after, 1.0), (other.before, -1.0)):
                    stands[value] = stands.get(value, 0.0) + sign
            self.values[part.after] = (_terms(stands),)

    def behind_norm(self, one: Section, normed: str | NormedSum) -> None:
        """What of the source's stream stands for what layers of a section read behind a norm."""
        readers = {face.weight for face in self.anchor.stream.readers}
        for fit in one.fits:
            if fit.layer.weight in readers:
                self.normed[fit.layer.input] = normed


def _terms(stands: Mapping[str, float]) -> Terms:
    return tuple((value, factor) for value, factor in stands.items() if factor)


def stream_counterpart(
    anchor: Streamed,
    source: Streamed,
    similar: Similar,
    within: Similar,
    *,
    labels: tuple[str, str],
) -> StreamCounterpart:
    """What of a source stands for what of the anchor.

    Args:
        anchor: Its blocks.
        source: Those of the other network.
        similar: How alike two places of the streams are.
        within: How alike two places of the source's stream are.
        labels: What messages call the source, and the anchor.

    Raises:
        IncompatibleModels: They are built of other blocks; names the first difference.
    """
    _require_same_blocks(anchor, source, labels)
    rows = [[similar(a.seen, s.seen) for s in source.places] for a in anchor.places]
    similarity_AS = torch.tensor(rows, dtype=torch.float64)
    chosen = covering(similarity_AS, begin=True, between_SS=_read_instead(source, within))
    drawn = _Drawn(anchor, source)
    drawn.section(anchor.prelude, [source.prelude])
    for at, block in enumerate(anchor.blocks):
        first, last = chosen[at : at + 2]
        drawn.block(block, source.blocks[first:last], first)
    drawn.section(anchor.coda, [source.coda])
    drawn.behind_norm(anchor.coda, source.normed_before(source.coda))
    own_terms = {name: tuple(chain(*parts)) for name, parts in drawn.values.items()}
    attentions = {a.heads: a for a in source.stream.attentions}
    heads = [a.heads for a in anchor.stream.attentions]
    sizes = source.graph.sizes
    return StreamCounterpart(
        tuple(
            PlacePair(place, source.places[s], rows[a][s])
            for a, (place, s) in enumerate(zip(anchor.places, chosen, strict=True))
        ),
        drawn.values,
        source.program.axes,
        released_with(fits(anchor.program)[0], own_terms),
        drawn.reads,
        drawn.normed,
        drawn.tensors,
        tuple(tuple(attentions[own] for own in drawn.spaces[space]) for space in heads),
        drawn.spaces,
        {
            anchor.stream.space: sizes[source.stream.space],
            **{space: sum(sizes[own] for own in named) for space, named in drawn.spaces.items()},
        },
    )


def _read_instead(source: Streamed, within: Similar) -> Tensor:
    """What it costs to put all blocks between two places into one.

    All of them are given what the first one reads: of every attention layer and every MLP behind
    it counts by how much that differs from what its own block reads (docs/methods/depth.md).
    """
    places, parts = source.places, len(source.blocks[0])
    cost_SS = torch.zeros(len(places), len(places), dtype=torch.float64)
    for first, begin in enumerate(places):
        cost = 0.0
        for last in range(first + 2, len(places)):
            cost += parts * (1.0 - within(begin.seen, places[last - 1].seen))
            cost_SS[first, last] = -cost
    return cost_SS


def _require_same_blocks(anchor: Streamed, source: Streamed, labels: tuple[str, str]) -> None:
    label, anchor_label = labels
    difference = None
    pairs = [(anchor.prelude, source.prelude, "what makes the stream")]
    for ours, theirs in zip_longest(anchor.blocks[0], source.blocks[0]):
        pairs.append((ours, theirs, "a block"))
    pairs.append((anchor.coda, source.coda, "what reads the stream at its end"))
    if anchor.stream.centred is not source.stream.centred:
        difference = "LayerNorm in one of them, RMSNorm in the other"
    elif anchor.places[0].positions != source.places[0].positions:
        sizes = [" x ".join(map(str, n.places[0].positions)) for n in (source, anchor)]
        difference = f"{sizes[0]} positions in {label}, {sizes[1]} in {anchor_label}"
    else:
        for ours, theirs, what in pairs:
            if ours is None or theirs is None or ours.signature != theirs.signature:
                names = _first_difference(theirs, ours)
                difference = (
                    f"{what} is built otherwise: {names[0]} in {label}, {names[1]} in "
                    f"{anchor_label}"
                )
                break
    if difference is not None:
        raise unlike(labels, difference, same="with the same inputs, kinds of blocks and outputs")


def _first_difference(*sections: Section | None) -> list[str]:
    """The first tensors in which two sections differ; their layers' other properties come last."""
    parts = [() if s is None else s.signature for s in sections]
    same = 0
    while same < min(map(len, parts)) and parts[0][same] == parts[1][same]:
        same += 1
    names = list[str]()
    for section in sections:
        tensors = () if section is None else section.tensors
        names.append(tensors[same] if same < len(tensors) else "its end")
    return names
