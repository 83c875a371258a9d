"""Rebalancing between widths: the function stays, incoming weights get the anchor's length."""

from __future__ import annotations

import pytest
import torch

import otfuse_cli
from nets import Mlp, ResNet, StateDict, Vgg, distance, randomise, run, state
from otfuse_cli.checkpoint.open import open_checkpoint
from otfuse_cli.graph.spec.from_shapes import layer_graph
from otfuse_cli.matching.alignment import Alignment
from otfuse_cli.matching.models import Model
from otfuse_cli.matching.rescale_units import balance
from otfuse_cli.transport.maps import Coupling, Permutation
from otfuse_cli.transport.plan import Plan

WIDE, NARROW = (11, 16, 14, 5), (11, 9, 8, 5)


def mlp(widths: tuple[int, ...], seed: int) -> StateDict:
    return state(randomise(Mlp(widths), seed))


def test_the_function_stays():
    source, anchor = mlp(WIDE, 1), mlp(NARROW, 2)
    net = Mlp(NARROW)
    balanced, _ = otfuse_cli.merge(source, anchor, weights=(1, 0), scale="balanced")
    as_mapped, _ = otfuse_cli.merge(source, anchor, weights=(1, 0))
    assert not torch.equal(balanced["fc1.weight"], as_mapped["fc1.weight"])
    assert distance(run(net, balanced, (50, 11)), run(net, as_mapped, (50, 11))) < 1e-5


def test_incoming_weights_are_as_long_as_the_anchors():
    source, anchor = mlp(WIDE, 1), mlp(NARROW, 2)
    balanced, _ = otfuse_cli.merge(source, anchor, weights=(1, 0), scale="balanced")
    for at in (1, 2):
        ours, theirs = (
            torch.cat([m[f"fc{at}.weight"], m[f"fc{at}.bias"][:, None]], 1).norm(dim=1)
            for m in (balanced, anchor)
        )
        torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
def test_flattened_channels_and_residual_streams_keep_the_function():
    for make, shape in (
        (lambda w: Vgg(w, norm=False), (6, 8, 7)),
        (lambda w: ResNet(w, norm=False, bias=True), (6, 9, 12)),
    ):
        narrow = make(shape)
        wide = make(tuple(n + 3 for n in shape))
        source, anchor = state(randomise(wide, 1)), state(randomise(narrow, 2))
        balanced, _ = otfuse_cli.merge(
            source, anchor, weights=(1, 0), matcher="sweep", scale="balanced"
        )
        plain, _ = otfuse_cli.merge(source, anchor, weights=(1, 0), matcher="sweep")
        assert any(not torch.equal(balanced[n], t) for n, t in plain.items())
        image = (2, 3, 16, 16)
        assert distance(run(narrow, balanced, image), run(narrow, plain, image)) < 1e-4


@pytest.mark.slow
def test_nothing_is_balanced_between_equal_widths():
    source, anchor = mlp(NARROW, 1), mlp(NARROW, 2)
    one, _ = otfuse_cli.merge(source, anchor, weights=(1, 0), scale="balanced")
    two, _ = otfuse_cli.merge(source, anchor, weights=(1, 0))
    assert all(torch.equal(one[n], t) for n, t in two.items())


def test_channels_with_a_norm_are_left_alone():
    source, anchor = state(randomise(Vgg((9, 8, 10)), 1)), state(randomise(Vgg(), 2))
    options = {"weights": (1, 0), "matcher": "sweep"}
    one, _ = otfuse_cli.merge(source, anchor, scale="balanced", **options)
    two, _ = otfuse_cli.merge(source, anchor, **options)
    graph = layer_graph("auto", {n: tuple(t.shape) for n, t in anchor.items()})
    normed = [n for n in anchor if n.startswith("features")]
    assert {n for n in graph.tensors if n.startswith("features")} == set(normed)
    assert all(torch.equal(one[n], two[n]) for n in normed)


def test_a_dead_unit_is_not_scaled():
    source, anchor = mlp(WIDE, 1), mlp(NARROW, 2)
    anchor["fc1.weight"][3], anchor["fc1.bias"][3] = 0, 0
    balanced, _ = otfuse_cli.merge(source, anchor, weights=(1, 0), scale="balanced")
    assert all(torch.isfinite(t).all() for t in balanced.values())
    assert (balanced["fc1.weight"][3] != 0).any()


def model(index: int, widths: tuple[int, ...]) -> Model:
    tensors = mlp(widths, index)
    graph = layer_graph("auto", {n: tuple(t.shape) for n, t in tensors.items()})
    return Model(index, open_checkpoint(tensors, label=str(index)), graph)


def first_units(source: int, anchor: int, *, empty: int = 0) -> Coupling:
    """Source units in turn onto anchor units; no mass for the last `empty` of those."""
    plan = torch.zeros(source, anchor, dtype=torch.float64)
    live = anchor - empty
    for unit in range(source):
        plan[unit, unit % live] = 1 / source
    return Coupling(Plan.from_dense(plan))


def aligned(source: Model, anchor: Model, *, empty: int = 0) -> Alignment:
    sizes = {s.id: (source.graph.spaces[s.id].size, s.size) for s in anchor.graph.free()}
    return Alignment({space: first_units(*pair, empty=empty) for space, pair in sizes.items()})


def test_only_whole_maps_between_unlike_widths_are_scaled():
    source, anchor = model(1, WIDE), model(2, NARROW)
    plain = aligned(source, anchor)
    assert balance(source, anchor, plain).scales
    kept = aligned(source, anchor, empty=1)
    assert any(m.kept is not None for m in kept.maps.values())
    assert balance(source, anchor, kept) is kept
    apart = Alignment(plain.maps, overrides={("fc3.weight", 1): plain.maps})
    assert balance(source, anchor, apart) is apart


def test_one_unlike_width_is_enough_and_none_is_not():
    source, anchor = model(1, (11, 9, 14, 5)), model(2, NARROW)
    assert balance(source, anchor, aligned(source, anchor)).scales
    twin = model(3, NARROW)
    straight = Alignment({s.id: Permutation(torch.arange(s.size)) for s in anchor.graph.free()})
    assert balance(twin, anchor, straight) is straight
