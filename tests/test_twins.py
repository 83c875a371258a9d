"""The oracles: permuted twins, widened twins, fuse(x, x) = x, relabelled sources, endpoints."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import otfuse_cli
from nets import Mlp, StateDict, distance, randomise, run, state, zoo
from otfuse_cli.graph.model import LayerGraph
from otfuse_cli.graph.spec.from_shapes import layer_graph
from otfuse_cli.matching.alignment import Alignment
from otfuse_cli.matching.apply import transport
from otfuse_cli.transport.maps import Permutation

NETS = zoo()


def graph_of(tensors: StateDict, arch: str = "auto") -> LayerGraph:
    return layer_graph(arch, {name: tuple(t.shape) for name, t in tensors.items()})


def permuted(tensors: StateDict, seed: int, arch: str = "auto") -> StateDict:
    """The same function with every free space in another order."""
    graph = graph_of(tensors, arch)
    generator = torch.Generator().manual_seed(seed)
    maps = {s.id: Permutation(torch.randperm(s.size, generator=generator)) for s in graph.free()}
    return {
        name: transport(t, name, graph, Alignment(maps)).contiguous() for name, t in tensors.items()
    }


def widened(tensors: StateDict) -> StateDict:
    """Every hidden unit twice, its outgoing weights halved: the same function."""
    graph = graph_of(tensors)
    wide = {}
    for name, tensor in tensors.items():
        for dim, axis in enumerate(graph.tensors[name].axes):
            free = [s for s in graph.free() if s.id in str(axis.expr).split(" * ")]
            if free:
                consume = "consume" in {str(r) for r in axis.roles}
                blocks = tensor.unflatten(dim, (free[0].size, -1))
                tensor = blocks.repeat_interleave(2, dim).flatten(dim, dim + 1)
                tensor = tensor / 2 if consume else tensor
        wide[name] = tensor
    return wide


@pytest.mark.parametrize("name", NETS)
def test_a_permuted_twin_computes_the_same(name):
    net, shape = NETS[name]
    twin = permuted(state(net), seed=3)
    assert any(not torch.equal(twin[n], t) for n, t in state(net).items())
    assert distance(run(net, twin, shape), run(net, state(net), shape)) < 1e-5


@pytest.mark.slow_cases(
    "resnet-basic-bn-weights1",
    "resnet-basic-bn-weights2",
    "resnet-bottleneck-bn-weights0",
    "resnet-bottleneck-bn-weights1",
    "resnet-bottleneck-bn-weights2",
    "resnet-bottleneck-weights0",
    "resnet-bottleneck-weights1",
    "resnet-bottleneck-weights2",
    "resnet-basic-weights1",
    "resnet-basic-weights2",
    "resnet-bottleneck-bn-weights3",
)
@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.3, 0.7), (1.0, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("name", NETS)
def test_a_permuted_twin_is_recovered_exactly(name, weights):
    net, _ = NETS[name]
    original = state(net)
    fused, report = otfuse_cli.merge(permuted(original, seed=5), original, weights=weights)
    for tensor, value in original.items():
        assert torch.equal(fused[tensor], value), tensor
    if weights[0]:
        assert all(s.ot_cost < 1e-6 for s in report.spaces)


@pytest.mark.slow_cases(
    "resnet-basic-bn-options0", "resnet-basic-bn-options1", "resnet-basic-bn-options2"
)
@pytest.mark.parametrize(
    "options", [{"solver": "exact"}, {"metric": "cosine"}, {"unit_norm": False}]
)
@pytest.mark.parametrize("name", ["mlp", "resnet-basic-bn"])
def test_other_costs_recover_the_twin_too(name, options):
    original = state(NETS[name][0])
    fused, _ = otfuse_cli.merge(permuted(original, seed=6), original, **options)
    for tensor, value in original.items():
        assert torch.equal(fused[tensor], value), tensor


@pytest.mark.quick_cases("mlp", "vgg-bn", "resnet-basic")
@pytest.mark.parametrize("name", NETS)
def test_fusing_a_model_with_itself_changes_nothing(name):
    original = state(NETS[name][0])
    fused, report = otfuse_cli.merge(original, original, original, weights=(0.2, 0.3, 0.5))
    for tensor, value in original.items():
        assert torch.equal(fused[tensor], value), tensor
    assert all(s.moved_fraction == 0 for s in report.spaces)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "vgg-bn", "resnet-basic-bn", "resnet-bottleneck"])
def test_relabelling_the_source_changes_nothing(name):
    """The units of a source have no names: any order of them fuses to the same bytes."""
    net, _ = NETS[name]
    anchor = state(net)
    other = {n: t.clone() for n, t in state(randomise(net, 50)).items()}
    one, _ = otfuse_cli.merge(other, anchor)
    two, _ = otfuse_cli.merge(permuted(other, seed=8), anchor)
    for tensor in anchor:
        torch.testing.assert_close(one[tensor], two[tensor], rtol=1e-6, atol=1e-6)
    randomise(net, list(NETS).index(name))


@pytest.mark.quick_cases("0.5-mlp-nobias", "0.5-vgg-bn")
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize(
    "share", [0.5, *(pytest.param(w, marks=pytest.mark.slow) for w in (0.25, 1.0))]
)
def test_a_widened_twin_fuses_exactly_both_ways(name, share):
    net, shape = NETS[name]
    narrow = state(net)
    wide = widened(narrow)
    expected = run(net, narrow, shape)
    fused, _ = otfuse_cli.merge(wide, narrow, weights=(share, 1 - share))
    assert distance(run(net, fused, shape), expected) < 1e-5
    back, _ = otfuse_cli.merge(narrow, wide, weights=(share, 1 - share))
    for tensor, value in wide.items():
        torch.testing.assert_close(back[tensor], value, rtol=1e-5, atol=1e-6)


def test_the_papers_scale_loses_the_function_of_a_widened_twin():
    """Why `--scale preserve` is the default: M/N at every layer, visible as soon as biases are."""
    net, shape = NETS["mlp"]
    narrow = state(net)
    fused, _ = otfuse_cli.merge(widened(narrow), narrow, weights=(1, 0), scale="paper")
    assert distance(run(net, fused, shape), run(net, narrow, shape)) > 0.1


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    widths=st.lists(st.integers(1, 9), min_size=3, max_size=5),
    seed=st.integers(0, 10_000),
    share=st.floats(0, 1),
)
def test_any_mlp_is_recovered_from_its_twin(widths, seed, share):
    net = randomise(Mlp(tuple(widths)), seed)
    original = state(net)
    twin = permuted(original, seed, arch="mlp")
    fused, _ = otfuse_cli.merge(twin, original, weights=(share, 1 - share), arch="mlp")
    for tensor, value in original.items():
        assert torch.equal(fused[tensor], value), tensor


@pytest.mark.quick_cases("mlp", "vgg-bn")
@pytest.mark.parametrize("name", ["mlp", "vgg-bn", "resnet-basic-bn"])
def test_weight_one_returns_the_aligned_source_by_index(name):
    net, shape = NETS[name]
    anchor = state(net)
    other = {n: t.clone() for n, t in state(randomise(net, 60)).items()}
    randomise(net, list(NETS).index(name))
    fused, report = otfuse_cli.merge(other, anchor, weights=(1, 0))
    assert any(s.moved_fraction for s in report.spaces)
    for tensor, value in other.items():
        assert torch.equal(fused[tensor].flatten().sort()[0], value.flatten().sort()[0]), tensor
    assert distance(run(net, fused, shape), run(net, other, shape)) < 1e-5


def test_residual_average_is_the_papers_rule_and_loses_the_function():
    net, shape = NETS["resnet-basic"]
    anchor = state(net)
    other = {n: t.clone() for n, t in state(randomise(net, 61)).items()}
    randomise(net, list(NETS).index("resnet-basic"))
    fused, report = otfuse_cli.merge(other, anchor, weights=(1, 0), residual="average")
    assert distance(run(net, fused, shape), run(net, other, shape)) > 1e-2
    assert any("residual average" in w for w in report.warnings)
    one_sided, _ = otfuse_cli.merge(other, anchor, weights=(1, 0), residual="average", beta=1.0)
    assert not torch.equal(one_sided["fc.weight"], fused["fc.weight"])


def test_residual_identity_leaves_the_streams_in_place():
    net, shape = NETS["resnet-basic"]
    anchor = state(net)
    other = {n: t.clone() for n, t in state(randomise(net, 62)).items()}
    randomise(net, list(NETS).index("resnet-basic"))
    fused, report = otfuse_cli.merge(other, anchor, weights=(1, 0), residual="identity")
    assert torch.equal(fused["fc.weight"], other["fc.weight"])
    assert torch.equal(fused["conv1.weight"], other["conv1.weight"])
    assert distance(run(net, fused, shape), run(net, other, shape)) < 1e-5
    stay = {s.id for s in report.spaces if s.solver == "identity"}
    assert stay == {"s0", "s2", "s3"}


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["sinkhorn"])
def test_soft_solvers_work_wherever_the_exact_one_does(solver):
    net, shape = NETS["vgg-bn"]
    anchor = state(net)
    other = {n: t.clone() for n, t in state(randomise(net, 63)).items()}
    randomise(net, list(NETS).index("vgg-bn"))
    fused, report = otfuse_cli.merge(other, anchor, solver=solver)
    assert {s.solver for s in report.spaces} == {solver}
    assert all(torch.isfinite(t).all() for t in fused.values())
    assert not torch.equal(fused["features.0.weight"], anchor["features.0.weight"])
    assert torch.isfinite(run(net, fused, shape)).all()


def test_an_anchor_unit_without_a_source_keeps_its_weights():
    """Unbalanced transport may send nothing to a unit far from all others."""
    from otfuse_cli.transport.maps import Coupling
    from otfuse_cli.transport.plan import Plan

    tensors = state(NETS["mlp"][0])
    graph = graph_of(tensors)
    plan = torch.zeros(9, 9, dtype=torch.float64)
    plan[:8, :8] = torch.eye(8) / 8
    moved = transport(
        tensors["fc2.weight"] + 1,
        "fc2.weight",
        graph,
        Alignment({"fc1": Coupling(Plan.from_dense(plan))}),
        anchor=tensors["fc2.weight"],
    )
    torch.testing.assert_close(moved[:, :8], tensors["fc2.weight"][:, :8] + 1)
    assert torch.equal(moved[:, 8], tensors["fc2.weight"][:, 8])
