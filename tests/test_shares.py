"""Different widths: a source counts by how many of its units stand for one."""

from __future__ import annotations

import pytest
import torch

import otfuse_cli
from nets import Mlp, StateDict, Vgg, randomise, state
from otfuse_cli.graph.axes import Cat, Fixed, Prod, Unit
from otfuse_cli.graph.model import GraphTensor, LayerGraph, Role, Space, TensorAxis
from otfuse_cli.matching.alignment import Alignment
from otfuse_cli.matching.width_weights import effective

WIDE, NARROW = (11, 16, 14, 5), (11, 8, 7, 5)


def mlp(widths: tuple[int, ...], seed: int) -> StateDict:
    return state(randomise(Mlp(widths), seed))


@pytest.mark.parametrize(("one", "other"), [(WIDE, NARROW), (NARROW, WIDE)])
def test_the_weight_of_a_source_is_multiplied_on_each_axis_that_changes(one, other):
    source, anchor = mlp(one, 1), mlp(other, 2)
    aligned, _ = otfuse_cli.merge(source, anchor, weights=(1, 0))
    fused, _ = otfuse_cli.merge(source, anchor, weights=(0.6, 0.4), repair="none")
    ratio = other[1] / one[1]
    changed = {"fc1.weight": 1, "fc1.bias": 1, "fc2.weight": 2, "fc2.bias": 1, "fc3.weight": 1}
    for name, tensor in fused.items():
        share = 0.6 * ratio ** changed.get(name, 0)
        wanted = (share * aligned[name] + 0.4 * anchor[name]) / (share + 0.4)
        torch.testing.assert_close(tensor, wanted)


def test_several_sources_share_what_the_anchor_leaves():
    first, second, anchor = mlp(WIDE, 1), mlp(NARROW, 3), mlp(NARROW, 2)
    options = {"repair": "none", "matcher": "sweep"}
    aligned = [otfuse_cli.merge(s, anchor, weights=(1, 0), **options)[0] for s in (first, second)]
    fused, _ = otfuse_cli.merge(first, second, anchor, **options)
    wanted = aligned[0]["fc2.weight"] / 4 + aligned[1]["fc2.weight"] + anchor["fc2.weight"]
    torch.testing.assert_close(fused["fc2.weight"], wanted / 2.25)


@pytest.mark.parametrize(
    ("axis", "share"),
    [
        (Unit("h"), 0.5),
        (Prod((Unit("h"), Fixed(49))), 0.5),
        (Prod((Unit("h"), Unit("q"))), 0.1),
        (Cat((Unit("h"), Unit("h"), Unit("h"))), 0.5),  # q, k and v of the same heads
        (Cat((Unit("h"), Unit("q"))), 1.0),
    ],
    ids=str,
)
def test_an_axis_has_one_share_and_none_where_spaces_lie_side_by_side(axis, share):
    tensor = GraphTensor("w", (2,), (TensorAxis(axis, frozenset({Role.PRODUCE})),))
    graph = LayerGraph({"w": tensor}, {name: Space(name, 2) for name in "hq"})
    source = Alignment({}, shares={"h": 0.5, "q": 0.2})
    (weight,) = effective("w", graph, [(source, 0.5)])
    assert weight == pytest.approx(share / (1 + share))


def test_equal_widths_have_equal_say():
    source, anchor = mlp(NARROW, 1), mlp(NARROW, 2)
    auto, _ = otfuse_cli.merge(source, anchor)
    preserve, _ = otfuse_cli.merge(source, anchor, scale="preserve")
    assert all(torch.equal(auto[n], t) for n, t in preserve.items())


@pytest.mark.slow
def test_prune_fuse_counts_the_dense_network_in_full():
    dense, pruned = mlp(WIDE, 1), mlp(NARROW, 2)
    plain, report = otfuse_cli.prune_fuse(dense, pruned)
    assert report.recipe["scale"] == "preserve"
    _, report = otfuse_cli.prune_fuse(dense, pruned, paper=True)
    assert report.recipe["scale"] == "paper"
    auto, report = otfuse_cli.prune_fuse(dense, pruned, scale="auto")
    assert report.recipe["scale"] == "auto"
    assert not torch.equal(auto["fc1.weight"], plain["fc1.weight"])


def test_a_running_mean_is_averaged_as_the_weight_that_feeds_it():
    source, anchor = state(randomise(Vgg((6, 8, 12)), 1)), state(randomise(Vgg((3, 4, 6)), 2))
    aligned, _ = otfuse_cli.merge(source, anchor, weights=(1, 0), matcher="sweep")
    fused, _ = otfuse_cli.merge(source, anchor, matcher="sweep")
    means = [n for n in fused if n.endswith("running_mean")]
    for at, name in enumerate(means):
        share = 0.5 if at == 0 else 0.25  # of images, of channels that changed too
        wanted = (share * aligned[name] + anchor[name]) / (share + 1)
        torch.testing.assert_close(fused[name], wanted)
    assert len(means) > 1
