"""What a traced graph says: roles, operations, kinds of map, taps, ties, reasons, refusals."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import zoo
from otfuse_cli.errors import ExitCode, IncompatibleModels
from otfuse_cli.graph.axes import Fixed, Prod, Unit
from otfuse_cli.graph.model import LayerGraph, OpKind, Role
from otfuse_cli.graph.trace import from_module
from otfuse_cli.graph.trace.from_module import export, graph_from_program, trace
from otfuse_cli.graph.trace.nodes import where
from otfuse_cli.running.acid import _drawn, acid_test, leave_one_out
from otfuse_cli.running.function_change import change_allowed, function_change
from otfuse_cli.running.precision import FLOAT32
from otfuse_cli.running.relabel import draw_maps, relabel_state
from otfuse_cli.running.runnable import with_tensors


def chain() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 9, 7),
        nn.GELU(), nn.Linear(7, 4),
    )  # fmt: skip


IMAGE = (torch.zeros(2, 3, 5, 5),)


@pytest.fixture(scope="module")
def graph() -> LayerGraph:
    return trace(chain(), IMAGE, source="traced chain")


def axes(graph: LayerGraph, name: str) -> list[str]:
    return [str(axis.expr) for axis in graph.tensors[name].axes]


def roles(graph: LayerGraph, name: str) -> list[str]:
    return ["+".join(sorted(axis.roles)) for axis in graph.tensors[name].axes]


def test_expressions_and_roles(graph: LayerGraph) -> None:
    assert graph.source == "traced chain"
    assert axes(graph, "0.weight") == ["0.weight:0", "0.weight:1", "3", "3"]
    assert roles(graph, "0.weight") == ["produce", "consume", "fixed", "fixed"]
    assert graph.tensors["4.weight"].axes[1].expr == Prod((Unit("0.weight:0"), Fixed(9)))
    assert roles(graph, "1.weight") == ["scale"]
    assert roles(graph, "1.bias") == roles(graph, "1.running_mean") == ["vector"]
    assert roles(graph, "1.running_var") == ["variance"]
    assert graph.tensors["1.num_batches_tracked"].axes == ()
    assert list(graph.tensors) == list(chain().state_dict())


class Scores(nn.Module):
    """Attention without a softmax: queries meet keys, both of which depend on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(5, 6, bias=False) for _ in range(3))
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.query(x) @ self.key(x).transpose(1, 2) @ self.value(x))


def test_a_rotation_cancels_between_two_values_and_a_scale_does_not() -> None:
    """x R R^T y is x y for an orthogonal R alone; between a value and a weight any R cancels."""
    graph = trace(Scores(), (torch.zeros(2, 4, 5),))
    assert graph.spaces["query.weight:0"].exact == {"perm", "orth"}
    assert graph.spaces["value.weight:0"].exact == {"perm", "scale", "orth", "gl"}


def test_spaces_in_processing_order_with_reasons(graph: LayerGraph) -> None:
    assert [(s.id, s.size, s.pinned) for s in graph.spaces.values()] == [
        ("0.weight:0", 8, None),
        ("0.weight:1", 3, "input"),
        ("4.weight:0", 7, None),
        ("6.weight:0", 4, "output"),
    ]
    assert [s.order for s in graph.spaces.values()] == [0, 1, 2, 3]
    assert graph.spaces["0.weight:0"].exact == {"perm", "scale"}
    assert graph.spaces["4.weight:0"].exact == {"perm"}


def test_operations_in_execution_order(graph: LayerGraph) -> None:
    assert [(op.kind, op.name, op.detail, op.inputs) for op in graph.ops] == [
        (OpKind.CONV, "0", "conv", ((),)),
        (OpKind.NORM, "1", "batch", ((0,),)),
        (OpKind.ACT, "2:relu", "relu", ((1,),)),
        (OpKind.LINEAR, "4", "linear", ((2,),)),
        (OpKind.ACT, "5:gelu", "gelu", ((3,),)),
        (OpKind.LINEAR, "6", "linear", ((4,),)),
    ]
    assert graph.ops[0].tensors == {"weight": "0.weight", "bias": "0.bias"}
    assert set(graph.ops[1].tensors) == {"weight", "bias", "running_mean", "running_var"}
    assert [str(a) for a in (*graph.ops[3].reads, graph.ops[3].writes)] == [
        "0.weight:0 * 9", "4.weight:0",
    ]  # fmt: skip


class WrittenOut(nn.Module):
    """A residual block behind an RMS norm in elementary operations."""

    def __init__(self, *, shown: bool = False) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Linear(3, 6), nn.Linear(6, 5), nn.Linear(5, 6)
        self.gain, self.out, self.shown = nn.Parameter(torch.ones(6)), nn.Linear(6, 2), shown

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        unit = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        x = x + self.down(torch.relu(self.up(self.gain * unit)))
        return (self.out(x), unit.relu()) if self.shown else self.out(x)


def test_a_written_out_norm_is_one_operation() -> None:
    graph = trace(WrittenOut(), (torch.zeros(2, 3),))
    assert [(op.kind, op.detail, op.inputs) for op in graph.ops] == [
        (OpKind.LINEAR, "linear", ((),)),
        (OpKind.NORM, "rms", ((0,),)),
        (OpKind.LINEAR, "linear", ((1,),)),
        (OpKind.ACT, "relu", ((2,),)),
        (OpKind.LINEAR, "linear", ((3,),)),
        (OpKind.ADD, "add", ((0,), (4,))),
        (OpKind.LINEAR, "linear", ((5,),)),
    ]
    assert graph.ops[1].tensors == {"weight": "gain"}
    # read elsewhere as well, its parts stay
    shown = trace(WrittenOut(shown=True), (torch.zeros(2, 3),))
    assert [op.detail for op in shown.ops if op.kind is OpKind.NORM] == ["rms"]
    assert "gate" in [op.detail for op in shown.ops]


@pytest.mark.slow
def test_residual_adds_tied_embeddings_and_written_out_norms() -> None:
    pytest.importorskip("transformers")
    module, args, kwargs = zoo.make("hf-llama")
    graph = trace(module, args, kwargs)
    stream = "model.embed_tokens.weight:1"
    adds = [op for op in graph.ops if op.kind is OpKind.ADD and op.writes == Unit(stream)]
    assert [len(op.reads) for op in adds] == [2, 2, 2, 2]
    norms = [op for op in graph.ops if op.kind is OpKind.NORM]
    assert [op.detail for op in norms] == ["rms"] * 5
    assert norms[0].tensors == {"weight": "model.layers.0.input_layernorm.weight"}
    assert graph.spaces["model.layers.0.self_attn.v_proj.weight:0.1"].exact == {
        "perm", "scale", "orth", "gl",
    }  # fmt: skip


@pytest.mark.slow
def test_tied_tensors_are_one_with_aliases() -> None:
    graph = trace(*zoo.make("transformer")[:2])
    assert graph.tensors["embed.weight"].aliases == ("out.weight",)
    assert "out.weight" not in graph.tensors
    assert graph.tensors["embed.weight"].axes[1].roles == {Role.PRODUCE, Role.CONSUME}
    assert graph.spaces["embed.weight:0"].pinned == "indexed"
    last = graph.ops[-1]
    assert (last.name, last.tensors) == ("out", {"weight": "embed.weight"})


def test_bias_added_after_a_matrix_product_belongs_to_it() -> None:
    class ByHand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b = nn.Parameter(torch.zeros(3, 5)), nn.Parameter(torch.zeros(5))
            self.out = nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.tanh(x @ self.w + self.b))

    graph = trace(ByHand(), (torch.zeros(4, 3),))
    assert graph.ops[0].tensors == {"weight": "w", "bias": "b"}
    assert roles(graph, "w") == ["consume", "produce"]


def test_low_rank_adapters_produce_and_consume_their_rank() -> None:
    graph = trace(*zoo.make("adapted")[:2])
    assert roles(graph, "a") == ["produce", "consume"]
    assert roles(graph, "b") == ["produce", "consume"]
    assert axes(graph, "b") == ["b:0", "a:0"]


class Queries(nn.Module):
    """Learned queries that meet one another before they meet data."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(3, 6))
        self.q, self.k, self.v = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(6, 6)
        self.data, self.out = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        near = (self.q(self.queries) @ self.k(self.queries).T).softmax(-1)
        queries = self.queries + near @ self.v(self.queries)
        return self.out((queries[None] * self.data(x)[:, None]).tanh().mean(1))


@pytest.mark.slow
def test_biases_of_what_is_computed_from_weights_alone_are_used() -> None:
    torch.manual_seed(0)
    net, x = Queries().eval(), (torch.randn(2, 4),)
    graph = trace(net, x)
    free = {s.id for s in graph.free()}
    assert {"queries:0", "queries:1", "q.weight:0"} <= free
    assert axes(graph, "q.bias") == axes(graph, "k.bias") == ["q.weight:0"]
    assert axes(graph, "v.bias") == ["queries:1"]
    assert acid_test(net, x, None, graph, seed=0).passed
    undetected = leave_one_out(net, x, None, graph, seed=0).undetected
    # One number less for all scores of a query changes no softmax, and queries are averaged.
    assert {(m.tensor, m.axis) for m in undetected} <= {("k.bias", 0), ("queries", 0)}


def test_unused_tensors_are_pinned() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.on, self.off = nn.Linear(3, 4), nn.Linear(3, 4)
            self.table = nn.Parameter(torch.zeros(9, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.on(x) + self.table[:2]

    graph = trace(Unused(), (torch.zeros(2, 3),))
    assert list(graph.free()) == []
    assert graph.spaces["off.weight:0"].pinned == "unused"
    assert graph.tensors["off.bias"].axes[0].roles == {Role.FIXED}


def test_constants_and_lost_buffers_pin_what_they_touch() -> None:
    class Frozen(nn.Module):
        def __init__(self, *, kept: bool) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 2)
            self.register_buffer("shift", torch.arange(4.0), persistent=kept)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x) + self.shift)

    x = (torch.zeros(2, 3),)
    assert trace(Frozen(kept=False), x).spaces["one.weight:0"].pinned == "constant"
    moving = trace(Frozen(kept=True), x)
    assert axes(moving, "shift") == axes(moving, "one.bias") == ["shift:0"]
    assert acid_test(Frozen(kept=True), (torch.randn(2, 3),), None, moving, seed=0).passed


def test_logits_alone_are_pinned() -> None:
    class Headed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = self.body(x)
            return {"hidden": h, "logits": self.head(h)}

    graph = trace(Headed(), (torch.zeros(2, 3),))
    assert [s.id for s in graph.free()] == ["body.weight:0"]
    assert graph.outputs == ()


def test_free_outputs_move_with_their_space() -> None:
    module, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5)), (torch.randn(2, 3),)
    graph = trace(module, x, free_outputs=True)
    assert [s.id for s in graph.free()] == ["0.weight:0", "2.weight:0"]
    assert graph.outputs == ((0, 1, Unit("2.weight:0")),)
    assert acid_test(module, x, None, graph, seed=0).passed
    assert not acid_test(module, x, None, replace(graph, outputs=()), seed=0).passed


def test_the_function_check_on_a_real_state() -> None:
    module, x = chain().eval(), (torch.randn(2, 3, 5, 5),)
    graph, state = trace(module, x), module.state_dict()
    maps = draw_maps(graph, torch.Generator().manual_seed(0))
    moved = relabel_state(state, graph, maps)
    assert function_change(module, x, None, state, moved) < 1e-5
    assert function_change(module, x, None, state, moved | {"4.bias": state["4.bias"]}) > 1e-3


def test_names_follow_the_checkpoint() -> None:
    names = {name: f"model.{name}" for name in chain().state_dict()}
    graph = trace(chain(), IMAGE, name_map=names)
    assert list(graph.tensors) == list(names.values())
    assert axes(graph, "model.1.bias") == ["model.0.weight:0"]
    assert graph.ops[0].tensors["weight"] == "model.0.weight"


def test_a_saved_program_gives_the_same_graph(tmp_path: Any, graph: LayerGraph) -> None:
    program = export(chain(), IMAGE)
    torch.export.save(program, tmp_path / "chain.pt2")
    loaded = graph_from_program(torch.export.load(tmp_path / "chain.pt2"))
    assert loaded == replace(graph, source="")


@pytest.mark.slow
def test_a_program_with_a_free_batch_size_gives_the_same_graph(graph: LayerGraph) -> None:
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(
        chain().eval(), (torch.zeros(4, 3, 5, 5),), dynamic_shapes=({0: batch},)
    )
    assert graph_from_program(program) == replace(graph, source="")


@pytest.mark.slow
def test_a_shape_that_depends_on_the_data_is_refused() -> None:
    class Chosen(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            y = super().forward(input)
            return y[y > 0].sum()

    with pytest.raises(IncompatibleModels, match="depends on the data") as caught:
        graph_from_program(export(Chosen(3, 3), (torch.zeros(2, 3),), lines=True))
    assert "test_trace_graph.py:" in (caught.value.where or "")


def test_training_mode_comes_back() -> None:
    module = chain().train()
    module[1].eval()
    trace(module, IMAGE)
    assert module.training
    assert not module[1].training


def test_what_the_module_prints_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    class Loud(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            print("hello")  # noqa: T201
            return super().forward(input)

    trace(Loud(3, 2), (torch.zeros(2, 3),))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "hello" in captured.err


class Branch(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        if y.sum() > 0:
            y = y * 2
        return y


class Loop(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        for _ in range(int(y.max().item())):
            y = y + 1
        return y


class Numpy(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        return y + torch.from_numpy(numpy.frompyfunc(abs, 1, 1)(y.detach().numpy()).astype("f4"))


class Strange:
    pass


class Cache(nn.Linear):
    def forward(self, input: Tensor) -> Any:
        super().forward(input)
        return Strange()


@torch.library.custom_op("otfuse_tests::no_fake", mutates_args=())
def no_fake(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.custom_op("otfuse_tests::with_fake", mutates_args=())
def with_fake(x: Tensor) -> Tensor:
    return x.clone()


@with_fake.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Custom(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return no_fake(super().forward(input))


@pytest.mark.slow_cases(
    "Branch-if y.sum() > 0:-depends on the data",
    "Loop-for _ in range(int(y.max().item())):-depends on the data",
)
@pytest.mark.parametrize(
    ("module", "line", "why"),
    [
        (Branch, "if y.sum() > 0:", "depends on the data"),
        (Loop, "for _ in range(int(y.max().item())):", "depends on the data"),
        (Numpy, '(numpy.frompyfunc(abs, 1, 1)(y.detach().numpy()).astype("f4"))', "leaves torch"),
        (Custom, "return no_fake(super().forward(input))", "custom operator"),
        (Cache, None, "no tensor, tuple, list or dict"),
    ],
)
def test_what_cannot_be_traced_says_where_and_what_to_do(
    module: type[nn.Linear], line: str | None, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(IncompatibleModels) as caught:
        trace(module(3, 3), (torch.zeros(2, 3),))
    error = caught.value
    assert error.exit_code is ExitCode.INCOMPATIBLE
    assert error.what == f"{module.__name__} can't be traced"
    assert (error.where or "").endswith(line or "")
    assert (line is None) == (error.where is None)
    assert why in (error.why or "")
    assert "spec" in (error.fix or "")
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_are_refused_by_name() -> None:
    module = nn.Sequential(nn.ReLU(), torch.jit.script(nn.Linear(3, 3)))
    with pytest.raises(IncompatibleModels, match="TorchScript") as caught:
        trace(module, (torch.zeros(2, 3),))
    assert caught.value.where == "1"


@pytest.mark.slow
def test_a_custom_operator_is_pinned_and_what_surrounds_it_is_not() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.three(self.two(with_fake(self.one(x))))

    graph = trace(Around(), (torch.zeros(2, 3),))
    assert [s.id for s in graph.free()] == ["two.weight:0"]
    assert graph.spaces["one.weight:0"].pinned == "no rule: otfuse_tests::with_fake"
    (warning,) = graph.warnings
    assert "test_trace_graph.py:" in warning


def test_weights_are_drawn_of_order_one_over_the_root_of_the_inputs():
    net = nn.Sequential(nn.Linear(400, 9), nn.ReLU(), nn.Linear(9, 4))
    graph = trace(net, (torch.zeros(2, 400),), source="here")
    generator = torch.Generator().manual_seed(0)
    weight = _drawn(graph.tensors["0.weight"], torch.Size((9, 400)), generator)
    assert 0.9 < float(weight.std()) * 400**0.5 < 1.1


class OnlyInFloat32(nn.Sequential):
    """Masks by the largest number of a type: that of float64 is infinite where it is cast."""

    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = super().forward(input)
        largest = torch.full((), torch.finfo(y.dtype).max, dtype=torch.float64)
        return y + 0 * largest.float()


def test_what_is_a_number_in_float32_only_is_proven_in_float32() -> None:
    torch.manual_seed(0)
    net, x = OnlyInFloat32(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), (torch.randn(2, 4),)
    assert bool(torch.isnan(net.double()(x[0].double())).all())
    net = net.float()
    graph = trace(net, x)
    result = acid_test(net, x, None, graph, seed=0)
    assert result.passed
    assert result.threshold == FLOAT32
    state = net.state_dict()
    maps = draw_maps(graph, torch.Generator().manual_seed(0))
    moved = relabel_state(state, graph, maps)
    assert change_allowed(net, x, None, state, moved).error < FLOAT32
    wrong = moved | {"2.weight": state["2.weight"]}
    assert 1e-3 < change_allowed(net, x, None, state, wrong).error < inf


def test_what_is_no_number_in_any_type_is_not_kept() -> None:
    net, x = nn.Linear(3, 2), (torch.randn(2, 3),)
    state = net.state_dict()
    assert change_allowed(net, x, None, state, state).error == 0
    broken = state | {"bias": torch.full((2,), nan)}
    assert change_allowed(net, x, None, state, broken).error == inf
    assert change_allowed(net, x, None, broken, broken).error == inf


def test_code_that_torch_has_generated_is_nobodys_line() -> None:
    node = torch.fx.Graph().placeholder("x")
    frames = ['File "net.py", line 7, in forward', 'File "<eval_with_key>.1", line 3, in forward']
    node.meta["stack_trace"] = "\n    y = x\n".join(f"  {frame}" for frame in frames)
    assert where(node) == " (net.py:7)"
    node.meta["stack_trace"] = f"  {frames[1]}"
    assert where(node) == ""


def test_a_network_with_other_tensors_learns_nothing() -> None:
    """It is run to be measured: memory for gradients would be lost."""
    state = {"weight": torch.randn(5, 2), "bias": torch.zeros(5)}
    other = with_tensors(nn.Linear(3, 4), state)
    assert other(torch.randn(1, 2)).shape == (1, 5)
    assert not any(parameter.requires_grad for parameter in other.parameters())


class Crossed(nn.Module):
    """An operation without a rule between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        return self.two(torch.linalg.cross(y, y + 1))


LINE = Crossed.forward.__code__.co_firstlineno + 2


@pytest.mark.parametrize(
    ("module", "times"), [(Crossed(), 2), (nn.Linear(4, 2), 1)], ids=["cross", "linear"]
)
def test_lines_are_looked_for_where_one_is_told(
    monkeypatch: pytest.MonkeyPatch, module: nn.Module, times: int
) -> None:
    """What operations remember of the code is half the time of an export."""
    asked = []

    def watched(*arguments: Any, lines: bool = False, **options: Any) -> Any:
        asked.append(lines)
        return export(*arguments, lines=lines, **options)

    monkeypatch.setattr(from_module, "export", watched)
    warnings = trace(module, (torch.zeros(2, 4),)).warnings
    assert asked == [False, True][:times]
    assert sum(w.endswith(f"({__file__}:{LINE})") for w in warnings) == times - 1
    assert not torch.fx.config.do_not_emit_stack_traces
