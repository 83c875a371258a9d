"""Rounds of realigning all models to their mean, and passes whose target is a mean."""

from __future__ import annotations

import itertools

import pytest
import torch

import otfuse_cli
from nets import Mlp, randomise, state
from otfuse_cli.errors import UsageError
from otfuse_cli.graph.model import LayerGraph, Space
from otfuse_cli.matching.alignment import Alignment
from otfuse_cli.matching.barycenter import _in_order_of
from otfuse_cli.requests.recipe import Recipe
from otfuse_cli.transport.maps import Permutation
from test_passes import mlp
from test_twins import permuted

pytestmark = pytest.mark.usefixtures("kept_graphs")

MANY = [mlp(seed) for seed in range(1, 8)]


def square(model):
    """Of all tensors with units that can be matched: all but the outputs' bias."""
    return sum(float(t.double().square().sum()) for n, t in model.items() if n != "fc3.bias")


def test_a_later_pass_of_sweeps_is_what_sweeps_onto_the_means_are():
    # Without biases: what is compared are rows of weights alone, as they lie in the file.
    a, b, anchor = (state(randomise(Mlp((9, 14, 12, 5), bias=False), seed)) for seed in (1, 2, 3))

    def onto(source, target):
        return otfuse_cli.merge(source, target, weights=(1, 0), matcher="sweep")[0]

    def mean(*models):
        return {name: sum(m[name] for m in models) / len(models) for name in anchor}

    b_once = onto(b, anchor)
    a_twice = onto(a, mean(anchor, b_once))
    b_twice = onto(b, mean(anchor, a_twice))
    fused, report = otfuse_cli.merge(a, b, anchor, matcher="sweep", passes=2, repair="none")
    assert any(not torch.equal(onto(a, anchor)[name], a_twice[name]) for name in anchor)
    for name, tensor in mean(a_twice, b_twice, anchor).items():
        torch.testing.assert_close(fused[name], tensor)
    assert any(c.name == "pass 2" and c.chosen for c in report.candidates)


def test_a_pass_by_activations_sees_what_the_mean_does():
    anchor = MANY[0]
    twins = [permuted(anchor, seed) for seed in (2, 3)]
    inputs = {"x": torch.randn(40, 9, generator=torch.Generator().manual_seed(0))}
    how = {"align": "acts", "matcher": "sweep", "passes": 2, "refit": False}
    fused, _ = otfuse_cli.merge(*twins, anchor, arch="mlp", samples=inputs, **how)
    assert all(torch.equal(fused[name], tensor) for name, tensor in anchor.items())
    _, report = otfuse_cli.merge(*MANY[:3], arch="mlp", samples=inputs, **how)
    assert any(c.name == "pass 2" and c.chosen for c in report.candidates)


def test_rounds_bring_models_nearer_to_their_mean_until_nothing_moves():
    _, report = otfuse_cli.merge(*MANY, matcher="descent", iterate=30)
    spreads = [entry.spread for entry in report.rounds]
    assert len(spreads) < 31
    assert report.rounds[0].moved is None
    assert report.rounds[-1].moved == 0
    assert all(b <= a * (1 + 1e-9) for a, b in itertools.pairwise(spreads))
    # The spread is that of the result: its square is what the models' squares leave.
    fused, _ = otfuse_cli.merge(*MANY, matcher="descent", iterate=30, repair="none")
    power = sum(square(model) for model in MANY) / len(MANY)
    assert spreads[-1] == pytest.approx(power - square(fused), rel=1e-5)
    assert spreads[-1] < spreads[0]


@pytest.mark.parametrize("matcher", ["sweep", "descent"])
def test_the_result_keeps_the_order_of_the_anchor(matcher):
    anchor = MANY[0]
    fused, _ = otfuse_cli.merge(
        *MANY[1:], anchor, matcher=matcher, iterate=2, weights=(*[0] * 6, 1)
    )
    assert all(torch.equal(fused[name], tensor) for name, tensor in anchor.items())
    twins = [permuted(anchor, seed) for seed in (2, 3)]
    fused, report = otfuse_cli.merge(*twins, anchor, matcher=matcher, iterate=3)
    assert all(torch.equal(fused[name], tensor) for name, tensor in anchor.items())
    assert [entry.moved for entry in report.rounds] == [None, 0]
    assert report.rounds[0].spread < 1e-9


def test_maps_onto_the_mean_become_maps_onto_the_anchor():
    """Moved to the mean and from there to the anchor, by hand, with heads and their insides."""
    generator = torch.Generator().manual_seed(0)

    def drawn(size: int) -> Permutation:
        return Permutation(torch.randperm(size, generator=generator))

    spaces = {"u": Space("u", 7), "h": Space("h", 3), "v": Space("v", 4, per="h")}
    graph = LayerGraph({}, spaces, ())
    alignments = [
        Alignment({"u": drawn(7), "h": drawn(3)}, {"v": tuple(drawn(4) for _ in range(3))})
        for _ in range(2)
    ]
    anchors, own = alignments
    found = _in_order_of(anchors, own, graph, Recipe())
    units = torch.randn(7, generator=generator)
    onto_mean = own.maps["u"].produce(units, 0)
    back = torch.empty(7)
    back[anchors.maps["u"].index_M] = onto_mean
    assert torch.equal(found.maps["u"].produce(units, 0), back)
    heads = torch.randn(3, 4, generator=generator)
    placed = torch.empty(3, 4)
    for m, head in enumerate(own.maps["h"].index_M.tolist()):
        at_mean = own.families["v"][m].produce(heads[head], 0)
        anchors_head = int(anchors.maps["h"].index_M[m])
        placed[anchors_head, anchors.families["v"][m].index_M] = at_mean
    moved = [
        found.families["v"][h].produce(heads[int(found.maps["h"].index_M[h])], 0) for h in range(3)
    ]
    assert torch.equal(torch.stack(moved), placed)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"solver": "sinkhorn"}, "--solver sinkhorn"),
        ({"mass": "norm"}, "--mass norm"),
    ],
)
def test_what_would_blur_the_anchor_is_refused(options, said):
    with pytest.raises(UsageError, match=f"--iterate can't be combined with {said}"):
        otfuse_cli.merge(*MANY[:3], iterate=2, **options)
    with pytest.raises(UsageError, match="--iterate -1"):
        otfuse_cli.merge(*MANY[:2], iterate=-1)
