"""Rebalancing between widths: the function stays, incoming weights get the anchor's length."""

from __future__ import annotations

import torch

import otfuse_cli
from nets import Mlp, ResNet, StateDict, Vgg, distance, randomise, run, state
from otfuse_cli.graph.spec.from_shapes import layer_graph

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
