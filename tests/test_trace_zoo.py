"""Every network of the zoo: the acid test, leave-one-out, and equal graphs at other widths."""

from __future__ import annotations

import pytest
import torch

import zoo
from otfuse_cli.graph.model import Role
from otfuse_cli.graph.trace.from_module import trace
from otfuse_cli.graph.trace.rules import RULES
from otfuse_cli.graph.trace.rules.table import Entry
from otfuse_cli.running.acid import acid_test, leave_one_out
from test_write_spec import UNREAD, returned

QUICK = ("mlp", "grouped", "gru-state", "fused-vit", "pixel-shuffle")
SEEDED = 0


def _names() -> list[object]:
    return [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in zoo.ZOO
    ]


def _skip_without_transformers(name: str) -> None:
    if zoo.ZOO[name].hf:
        pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    torch.manual_seed(SEEDED)


@pytest.mark.slow
@pytest.mark.parametrize("name", _names())
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_zoo(name: str) -> None:
    _skip_without_transformers(name)
    exhibit = zoo.ZOO[name]
    module, args, kwargs = zoo.make(name)
    graph = trace(module, args, kwargs)
    free = list(graph.free())
    assert (len(free), sum(s.per is not None for s in free)) == (exhibit.free, exhibit.families)
    assert graph.warnings == exhibit.warnings
    if name not in UNREAD:
        returned(graph)

    result = acid_test(module, args, kwargs, graph, seed=0)
    assert result.passed, result
    missing = leave_one_out(module, args, kwargs, graph, seed=1).undetected
    assert [m for m in missing if not any(part in m.tensor for part in exhibit.no_ops)] == []
    assert bool(missing) == bool(exhibit.no_ops)

    wide, args, kwargs = zoo.make(name, 2)
    other = trace(wide, args, kwargs)
    assert list(graph.spaces) == list(other.spaces)
    assert [s.per for s in graph.spaces.values()] == [s.per for s in other.spaces.values()]
    assert graph.ops == other.ops
    assert [s.size for s in graph.spaces.values() if s.pinned is not None] == [
        s.size for s in other.spaces.values() if s.pinned is not None
    ]
    assert {t.name: t.axes for t in graph.tensors.values()} == {
        t.name: t.axes for t in other.tensors.values()
    }


@pytest.mark.slow
def test_the_graph_does_not_depend_on_weights_or_device() -> None:
    module, args, kwargs = zoo.make("fused-vit")
    again, _, _ = zoo.make("fused-vit", seed=1)
    with torch.device("meta"):
        bare = zoo.FusedViT(1)
    graphs = [trace(m, args, kwargs) for m in (module, again, bare)]
    assert graphs[0] == graphs[1] == graphs[2]


@pytest.mark.slow
@pytest.mark.parametrize("side", [8, 16])
@pytest.mark.parametrize("batch", [1, 4])
def test_the_graph_does_not_depend_on_the_example(side: int, batch: int) -> None:
    # channels, batch and side coincide on purpose
    module, args, _ = zoo.make("unet-gn")
    assert trace(module, (zoo.image(side=side, batch=batch),)) == trace(module, args)


def test_leaving_an_axis_out_of_the_graph_fails_the_acid_test() -> None:
    from dataclasses import replace

    from otfuse_cli.graph.model import Fixed, TensorAxis

    module, args, kwargs = zoo.make("mlp")
    graph = trace(module, args, kwargs)
    bias = graph.tensors["1.bias"]
    broken = replace(bias, axes=(TensorAxis(Fixed(6), frozenset({Role.FIXED})),))
    wrong = replace(graph, tensors={**graph.tensors, "1.bias": broken})
    assert not acid_test(module, args, kwargs, wrong, seed=0).passed
    assert acid_test(module, args, kwargs, wrong, seed=0, spaces=["3.weight:0"]).passed


def test_a_swapped_rule_fails_the_acid_test(monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(call: object) -> object:
        x, weight = call.value("input"), call.value("weight")
        call.unify(x.labels[-1], weight.labels[0])
        call.role(weight.labels[0], Role.CONSUME)
        call.role(weight.labels[1], Role.PRODUCE)
        return [*x.labels[:-1], weight.labels[1]]

    square = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    args = (torch.randn(2, 4),)
    assert acid_test(square, args, None, trace(square, args), seed=0).passed
    monkeypatch.setitem(RULES, "linear", Entry(swapped))
    wrong = trace(square, args)
    assert list(wrong.free())
    assert not acid_test(square, args, None, wrong, seed=0).passed
