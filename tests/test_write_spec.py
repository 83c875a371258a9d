"""A graph written as a spec and bound again is the same graph."""

from __future__ import annotations

import pytest
import torch

import zoo
from family_nets import HF
from graph_difference import graph_difference
from nets import TWO_BRANCHES_SPEC, TwoBranches
from otfuse_cli.graph.model import LayerGraph, OpKind
from otfuse_cli.graph.spec.bind import bind
from otfuse_cli.graph.spec.from_shapes import layer_graph
from otfuse_cli.graph.spec.grammar import parse_specs
from otfuse_cli.graph.spec.write_spec import write_spec
from otfuse_cli.graph.trace.from_module import trace
from otfuse_cli.running.acid import acid_test
from test_families import aliases_of, recognised, shapes_of, traced

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

QUICK = ("mlp", "grouped", "gru-state", "fused-vit")
FAMILIES = ("mlp", "vgg-bn", "densenet", "mobilenet-v2", "convnext", "vit", "bert-sequence")


def bound(text: str, graph: LayerGraph) -> LayerGraph:
    (spec,) = parse_specs(text, where="written", name="written")
    return bind(spec, shapes_of(graph), aliases=aliases_of(graph), where="written")


def returned(graph: LayerGraph) -> LayerGraph:
    again = bound(write_spec(graph), graph)
    assert graph_difference(again, graph) is None
    assert again.warnings == ()
    assert write_spec(again) == write_spec(bound(write_spec(again), again))
    return again


# Networks with units that are summed over: a spec knows of readers only that are layers.
UNREAD = {"slots", "graph"}


# All others of the zoo come back in test_trace_zoo.py, which has their graphs.
@pytest.mark.quick_cases("mlp", "grouped")
@pytest.mark.parametrize("name", QUICK)
def test_a_traced_graph_comes_back(name: str) -> None:
    if zoo.ZOO[name].hf:
        pytest.importorskip("transformers")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module, args, kwargs = zoo.make(name)
        graph = trace(module, args, kwargs)
        again = returned(graph)
        assert acid_test(module, args, kwargs, again, seed=0, draws=1).passed


@pytest.mark.quick_cases("slots")
@pytest.mark.parametrize("name", sorted(UNREAD))
def test_units_that_no_layer_reads_stay_in_a_spec_which_says_so(name: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module, args, kwargs = zoo.make(name)
        graph = trace(module, args, kwargs)
        again = bound(write_spec(graph), graph)
        assert len(list(again.free())) < len(list(graph.free()))
        assert any("no layer reads it" in warning for warning in again.warnings)
        assert acid_test(module, args, kwargs, again, seed=0, draws=1).passed


# All others come back in test_families.py, which has their graphs.
@pytest.mark.quick_cases("mlp", "vgg-bn")
@pytest.mark.parametrize("name", FAMILIES)
def test_the_graph_of_a_family_comes_back(name: str) -> None:
    require_family_returned(name)


def require_family_returned(name: str) -> None:
    """What a family says of a network, written and read again, with and without a config."""
    aliases = aliases_of(traced(name))
    returned(recognised(name, aliases=aliases))
    if name in HF:
        held = recognised(name, aliases=aliases, config=None)
        again = bound(write_spec(held), held)
        assert graph_difference(again, held) is None
        assert {s.pinned for s in again.spaces.values()} >= {
            s.pinned for s in held.spaces.values() if s.pinned and "known" in s.pinned
        }


def test_the_text_is_for_people() -> None:
    (spec,) = parse_specs(TWO_BRANCHES_SPEC, where="net.yaml", name="net")
    shapes = {name: tuple(t.shape) for name, t in TwoBranches().state_dict().items()}
    assert write_spec(bind(spec, shapes, where="spec net.yaml")) == (
        "# The graph of spec net.yaml.\n"
        "act: relu\n"
        "layers:\n"
        "  stem: s <- in\n"
        "  left: b <- s\n"
        "  right_in: r <- s\n"
        "  right_out: b <- r\n"
        "  norm: b\n"
        "  head: out <- b * 4\n"
    )


@pytest.mark.slow
def test_sizes_and_families_are_written_once() -> None:
    text = write_spec(recognised("gpt2", aliases=aliases_of(traced("gpt2"))))
    assert "  transformer.h.0.attn.c_attn: e -> h0 * q0@h0 + h0 * q0 + h0 * v0@h0\n" in text
    assert "  transformer.h.0.attn.c_proj: h0 * v0 -> e\n" in text
    assert "sizes:\n  h0: 4\n  h1: 4\n" in text
    tied = "transformer.wte.weight, lm_head.weight: [consume produce in, consume produce e]"
    assert f"  {tied}\n" in text


@pytest.mark.slow
def test_a_gate_is_not_written_as_a_sum() -> None:
    module, args, kwargs = zoo.make("mobilenet-se")
    graph = trace(module, args, kwargs)
    text = write_spec(graph)
    assert "3.body.6.up.weight" in text
    again = bound(text, graph)
    adds = [[op for op in g.ops if op.kind is OpKind.ADD] for g in (graph, again)]
    assert len(adds[0]) == len(adds[1]) == 1


@pytest.mark.slow
def test_relu_is_promised_where_every_layer_but_the_last_has_it() -> None:
    for name, act in (("resnet-basic-bn", "relu"), ("vgg-bn", "relu"), ("densenet", "other")):
        assert f"\nact: {act}\n" in write_spec(traced(name)), name
        again = bound(write_spec(traced(name)), traced(name))
        kinds = (OpKind.ACT, OpKind.LINEAR, OpKind.CONV, OpKind.ADD)
        runs = [[op.kind for op in g.ops if op.kind in kinds] for g in (traced(name), again)]
        assert act == "other" or runs[0] == runs[1]


def test_names_that_yaml_or_the_format_reads_otherwise_are_safe() -> None:
    shapes = {"1.10.weight": (4, 3), "1.10.bias": (4,), "no.weight": (4, 4), "2.weight": (2, 4)}
    text = 'layers: {"1.10": "scale <- in", "no": "x <- scale", "2": "out <- x"}'
    (spec,) = parse_specs(text, where="w", name="w")
    graph = bind(spec, shapes, where="w")
    assert graph_difference(bound(write_spec(graph), graph), graph) is None


@pytest.mark.slow
def test_a_pin_keeps_its_reason() -> None:
    graph = recognised("llama")
    reasons = {s.pinned for s in bound(write_spec(graph), graph).spaces.values() if s.pinned}
    assert "rotary position" in reasons
    backbone = layer_graph("vit", shapes_of(traced("vit-backbone")), config={})
    assert graph_difference(bound(write_spec(backbone), backbone), backbone) is None
