"""The spec format, binding to shapes, recognition, execution order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nets import TWO_BRANCHES_SPEC, Mlp, ResNet, TwoBranches, Vgg, zoo
from otfuse_cli.errors import IncompatibleModels, UnreadableInput
from otfuse_cli.graph.axes import Cat, Fixed, Prod, Unit, axis_size, axis_units
from otfuse_cli.graph.model import LayerGraph, OpKind, Role
from otfuse_cli.graph.sizes import resize
from otfuse_cli.graph.spec.bind import bind
from otfuse_cli.graph.spec.expressions import parse_expression
from otfuse_cli.graph.spec.from_shapes import families, layer_graph
from otfuse_cli.graph.spec.grammar import parse_specs
from otfuse_cli.graph.spec.order import base_order, execution_order, natural_key
from otfuse_cli.graph.spec.patterns import Pattern
from otfuse_cli.graph.trace.from_module import trace


def shapes_of(net) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in net.state_dict().items()}


def bound(text: str, shapes: dict[str, tuple[int, ...]]) -> LayerGraph:
    (spec,) = parse_specs(text, where="net.yaml", name="net")
    return bind(spec, shapes, where="spec net.yaml")


# Expressions


def test_an_expression_is_products_of_sums_outer_first():
    parsed = parse_expression("h * (4 + q@h) + 3", {})
    assert parsed.axis == Cat((Prod((Unit("h"), Cat((Fixed(4), Unit("q"))))), Fixed(3)))
    assert parsed.families == {"q": "h"}
    assert axis_size(parsed.axis, {"h": 2, "q": 5}) == 21


@pytest.mark.parametrize("text", ["a *", "a b", "(a", "-3", "0", "a @", "", "a + + b", "a)"])
def test_what_is_not_an_expression_is_refused(text):
    with pytest.raises(ValueError, match=r"."):
        parse_expression(text, {})


axes = st.recursive(
    st.one_of(st.sampled_from("abc").map(Unit), st.integers(1, 9).map(Fixed)),
    lambda inner: (
        st.lists(inner, min_size=2, max_size=3).map(lambda f: Prod(tuple(f)))
        | st.lists(inner, min_size=2, max_size=3).map(lambda p: Cat(tuple(p)))
    ),
    max_leaves=6,
)


@pytest.mark.slow
@given(axes)
def test_the_text_of_an_axis_parses_back_to_its_size_and_units(axis):
    sizes = {"a": 2, "b": 3, "c": 5}
    parsed = parse_expression(_bracketed(axis), {}).axis
    assert axis_size(parsed, sizes) == axis_size(axis, sizes)
    assert list(axis_units(parsed)) == list(axis_units(axis))


def _bracketed(axis) -> str:
    match axis:
        case Prod(children):
            return "(" + " * ".join(map(_bracketed, children)) + ")"
        case Cat(children):
            return "(" + " + ".join(map(_bracketed, children)) + ")"
    return str(axis)


@pytest.mark.parametrize(
    ("pattern", "name", "numbers"),
    [
        ("layer{i}.{b}.conv1", "layer3.10.conv1", {"i": 3, "b": 10}),
        ("features.*", "features.12", {}),
        ("x{i}.y{i}", "x2.y2", {"i": 2}),
    ],
)
def test_a_pattern_captures_numbers(pattern, name, numbers):
    assert dict(Pattern(pattern).match(name).numbers) == numbers


@pytest.mark.parametrize(
    ("pattern", "name"),
    [("features.*", "features.1.conv"), ("x{i}.y{i}", "x2.y3"), ("a.b", "axb"), ("fc", "fc1")],
)
def test_a_pattern_matches_whole_names_only(pattern, name):
    assert Pattern(pattern).match(name) is None


@pytest.mark.parametrize(
    ("pattern", "name", "numbers"),
    [
        ("(model.)?x.{i}", "model.x.3", {"i": 3}),
        ("(model.)?x.{i}", "x.3", {"i": 3}),
        ("(a|b.{i}).w", "a.w", {}),
        ("(a|b.{i}).w", "b.2.w", {"i": 2}),
        ("norm(.)?{n}", "norm.1", {"n": 1}),
    ],
)
def test_a_pattern_has_optional_parts_and_alternatives(pattern, name, numbers):
    assert dict(Pattern(pattern).match(name).numbers) == numbers


@pytest.mark.parametrize(
    ("pattern", "name"), [("(a|b).w", "c.w"), ("(m.)?x", "mx"), ("a|b", "a"), ("(m.)?x", "m.m.x")]
)
def test_a_group_matches_nothing_else(pattern, name):
    assert Pattern(pattern).match(name) is None


# Ranges


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        ("s + d{1..j-1}", "s + d1 + d2"),
        ("s + d{j..2}", "s"),
        ("s + d{1..} + e", "s + d1 + d2 + d10 + e"),
        ("x{j}.{1..2}", "x3.1 + x3.2"),
        ("(s + d{1..2}) * 4", "(s + d1 + d2) * 4"),
        ("s + d{2..2} * 3", "s + d2 * 3"),
    ],
)
def test_a_range_is_written_out(text, axis):
    made = {"d2", "d10", "d1", "dx", "xd1"}
    assert str(parse_expression(text, {"j": 3}, made=made).axis) == axis


@pytest.mark.parametrize("text", ["d{1..0}", "s + d{1..k}", "s + d{..2}", "s + d{1..2}.{1..2}"])
def test_what_is_not_a_range_is_refused(text):
    with pytest.raises(ValueError, match=r"."):
        parse_expression(text, {"j": 3})


# Lists


def test_a_list_says_the_roles_of_its_axes_and_nothing_of_what_is_done():
    text = "layers:\n  a: c <- in\n  g.weight: [produce c, consume c, 1]\n"
    text += "  s: [scale c]\n  o: out <- c"
    shapes = {"a.weight": (4, 3), "g.weight": (4, 4, 1), "s": (4,), "o.weight": (2, 4)}
    graph = bound(text, shapes)
    roles = [axis.roles for axis in graph.tensors["g.weight"].axes]
    assert roles == [{Role.PRODUCE}, {Role.CONSUME}, {Role.FIXED}]
    assert graph.tensors["s"].axes[0].roles == {Role.SCALE}
    assert {op.name: op.kind for op in graph.ops} == {
        "a": OpKind.LINEAR, "g": OpKind.OTHER, "s": OpKind.OTHER, "o": OpKind.LINEAR,
    }  # fmt: skip


# What the file doesn't say


def test_a_pin_holds_unless_a_module_says_otherwise():
    text = "layers:\n  a: c <- in\n  b: c <- c\n  head: out <- c\npinned: {c: output unless head}"
    shapes = {"a.weight": (4, 3), "b.weight": (4, 4)}
    assert bound(text, shapes).spaces["c"].pinned == "output"
    assert bound(text, {**shapes, "head.weight": (2, 4)}).spaces["c"].pinned is None


def test_a_tied_tensor_plays_both_parts():
    text = "layers:\n  t: in -> e\n  u: f <- e\n  d: e <- f\n  head: out <- e\n"
    text += "tied: [t.weight = head.weight unless other]"
    shapes = {"t.weight": (9, 4), "u.weight": (5, 4), "d.weight": (4, 5)}
    both = bound(text, shapes).tensors["t.weight"].axes[1].roles
    assert both == {Role.PRODUCE, Role.CONSUME}
    (spec,) = parse_specs(text.replace("unless other", "unless u"), where="", name="")
    assert bind(spec, shapes, where="").tensors["t.weight"].axes[1].roles == {Role.PRODUCE}


def test_spaces_are_one_where_their_sizes_agree():
    text = "layers:\n  a.{i}: s{i} <- s{i-1}\n  first: s0 <- in\n  head: out <- s{max i}\n"
    text += "same: ['s{i-1} = s{i} if sizes agree']"
    shapes = {"first.weight": (4, 3), "a.1.weight": (4, 4), "a.2.weight": (6, 4)}
    graph = bound(text, {**shapes, "head.weight": (2, 6)})
    assert {s.id: s.size for s in graph.free()} == {"s0": 4, "s2": 6}


# Binding


def test_a_hand_written_spec_finds_the_shared_space_of_two_branches():
    graph = bound(TWO_BRANCHES_SPEC, shapes_of(TwoBranches()))
    assert {s.id: s.size for s in graph.free()} == {"s": 6, "b": 8, "r": 7}
    assert graph.tensors["head.weight"].axes[1].expr == Prod((Unit("b"), Fixed(4)))
    assert graph.tensors["norm.running_var"].axes[0].roles == {Role.VARIANCE}
    assert graph.tensors["norm.weight"].axes[0].roles == {Role.SCALE}
    assert set(graph.producers("b")) == {"left.weight", "right_out.weight"}
    assert graph.consumers("b") == ("head.weight",)
    adds = [op for op in graph.ops if op.kind is OpKind.ADD]
    assert len(adds) == 1
    assert adds[0].writes == Unit("b")


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("b * 4", "b * 5", ["head.weight", "axis 1", "32"]),
        ("left: b <- s", "left: s <- s", ["left.weight", "axis 0"]),
        ("norm: b", "norm: r", ["norm", "axis 0"]),
        ("  norm: b\n", "", ["norm.weight", "not covered"]),
        ("stem: s <- in", "stem: s", ["stem.weight", "OUT <- IN"]),
        ("stem: s <- in", "stem: [s, in]", ["stem.weight", "2 axes"]),
        ("right_in: r <- s", "right_in: r{i} <- s", ["right_in", "{i}"]),
    ],
)
def test_a_wrong_line_is_refused_with_tensor_and_axis(old, new, named):
    assert old in TWO_BRANCHES_SPEC
    with pytest.raises(IncompatibleModels) as caught:
        bound(TWO_BRANCHES_SPEC.replace(old, new), shapes_of(TwoBranches()))
    for text in named:
        assert text in str(caught.value)


def test_a_space_that_nothing_reads_is_pinned_and_named():
    graph = bound(TWO_BRANCHES_SPEC.replace("out <- b * 4", "h <- b * 4"), shapes_of(TwoBranches()))
    assert "no layer reads it" in graph.spaces["h"].pinned
    assert any("h" in w for w in graph.warnings)


def test_a_size_that_shapes_do_not_determine_must_be_given():
    text = "layers:\n  a: h * q@h <- in\n  b: out <- h * q"
    shapes = {"a.weight": (12, 5), "b.weight": (2, 12)}
    with pytest.raises(IncompatibleModels, match="do not determine"):
        bound(text, shapes)
    graph = bound(text + "\nsizes: {h: 3}", shapes)
    assert graph.spaces["q"].size == 4
    assert graph.spaces["q"].per == "h"


def test_inputs_of_two_sizes_are_two_pinned_spaces():
    text = "layers:\n  tok: in -> e\n  pos: in -> e\n  head: out <- e"
    graph = bound(text, {"tok.weight": (30, 8), "pos.weight": (9, 8), "head.weight": (2, 8)})
    assert {s.id for s in graph.spaces.values() if s.pinned == "input"} == {"in:30", "in:9"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("layers: [a]", "map names"),
        ("chain: x", "list of names"),
        ("foo: 1\nlayers: {a: b}", "unknown key"),
        ("act: gelu\nlayers: {a: b}", "act"),
        ("sizes: {h: 0}\nlayers: {a: b}", "positive"),
        ("layers: {a: 'b <- c *'}", "ends too early"),
        ("same: [a]\nlayers: {a: b}", "can't read"),
        ("tied: [a]\nlayers: {a: b}", "can't read"),
        ("pinned: [a]\nlayers: {a: b}", "spaces to reasons"),
        ("norms: group\nlayers: {a: b}", "norms"),
        ("sizes: {h: [1]}\nlayers: {a: b}", "config.json"),
        ("sizes: {h: true}\nlayers: {a: b}", "positive"),
        ("layers: {(a|b: c}", "is not a name"),
        ("layers: {a: [scale, produce b *]}", "ends too early"),
        ("", "empty"),
    ],
)
def test_a_malformed_spec_says_what_is_wrong(text, why):
    with pytest.raises(IncompatibleModels, match="not a valid spec") as caught:
        parse_specs(text, where="net.yaml", name="net")
    assert why in str(caught.value)


def test_text_that_is_not_yaml_is_unreadable():
    with pytest.raises(UnreadableInput):
        parse_specs("layers: {a: [", where="net.yaml", name="net")


# Families


def test_the_zoo_is_recognised_by_names_and_shapes():
    found = {name: layer_graph("auto", shapes_of(net)) for name, (net, _) in zoo().items()}
    assert {name: graph.source for name, graph in found.items()} == {
        "mlp": "family mlp",
        "mlp-nobias": "family mlp",
        "vgg": "family vgg",
        "vgg-bn": "family vgg",
        "resnet-basic": "family resnet-basic",
        "resnet-basic-bn": "family resnet-basic",
        "resnet-bottleneck": "family resnet-bottleneck",
        "resnet-bottleneck-bn": "family resnet-bottleneck",
    }


def test_a_stage_without_projection_shares_its_stream():
    graph = layer_graph("auto", shapes_of(ResNet((6, 6, 6, 9))))
    assert graph.spaces["s0"].size == 6
    assert {s.id for s in graph.free() if s.id.startswith("s")} == {"s0", "s3"}
    assert len(graph.producers("s0")) == 5


def test_order_does_not_depend_on_how_the_file_lists_its_names():
    net = ResNet()
    shapes = shapes_of(net)
    by_name = layer_graph("auto", dict(sorted(shapes.items())))
    as_defined = layer_graph("auto", shapes)
    assert [o.name for o in by_name.ops] == [o.name for o in as_defined.ops]
    assert by_name.spaces == as_defined.spaces


def test_an_act_follows_the_add_and_not_half_of_the_sum():
    graph = layer_graph("auto", shapes_of(ResNet((6, 9), middle=5)))
    names = [op.name for op in graph.ops if op.writes == Unit("s1")]
    assert names == [
        "layer1.0.conv2",
        "layer1.0.bn2",
        "layer1.0.downsample.0",
        "layer1.0.downsample.1",
        "layer1.0.downsample.1.add",
        "layer1.0.downsample.1.act",
        "layer1.1.conv2",
        "layer1.1.bn2",
        "layer1.1.bn2.add",
        "layer1.1.bn2.act",
    ]


def test_a_norm_before_its_layer_is_not_taken_for_one_behind_it():
    """Pre-activation nets have the same names; the stem without a norm gives them away."""
    shapes = shapes_of(ResNet((6, 6, 6)))
    shapes = {n: s for n, s in shapes.items() if not n.startswith("bn1")}
    with pytest.raises(IncompatibleModels, match="unknown architecture") as caught:
        layer_graph("auto", shapes)
    assert "norm" in str(caught.value)


def test_equal_widths_without_gaps_could_hide_a_skip():
    shapes = shapes_of(Mlp((12, 8, 8, 5)))
    with pytest.raises(IncompatibleModels) as caught:
        layer_graph("auto", shapes)
    assert "--arch mlp" in str(caught.value)
    assert len(list(layer_graph("mlp", shapes).free())) == 2
    sequential = {f"net.{2 * int(n[2]) - 2}.{n[4:]}": s for n, s in shapes.items()}
    assert len(list(layer_graph("auto", sequential).free())) == 2


def test_an_even_kernel_may_be_transposed_and_is_refused():
    shapes = {"features.0.weight": (4, 4, 4, 4), "classifier.weight": (5, 4)}
    with pytest.raises(IncompatibleModels):
        layer_graph("auto", shapes)


def test_unknown_names_are_refused_with_the_ways_to_go_on():
    with pytest.raises(IncompatibleModels, match="unknown architecture") as caught:
        layer_graph("auto", shapes_of(TwoBranches()))
    for text in ("--arch mlp", "resnet-basic", "spec.yaml"):
        assert text in str(caught.value)


@pytest.mark.parametrize("arch", ["nonsense", "resnet"])
def test_an_unknown_arch_lists_the_families(arch):
    with pytest.raises(IncompatibleModels, match="unknown architecture"):
        layer_graph(arch, {"a.weight": (2, 2)})


def test_every_family_says_what_must_be_there():
    for name, specs in families().items():
        assert all(s.require for s in specs), name


# What is assumed


def test_every_family_says_in_a_sentence_what_it_assumes():
    sentences = [spec.assumes for specs in families().values() for spec in specs]
    assert all(len(sentence.split()) > 9 for sentence in sentences)
    assert not any(sentence.endswith(".") for sentence in sentences)


def test_graphs_from_names_say_what_they_assume(tmp_path):
    path = tmp_path / "net.yaml"
    path.write_text("chain: [fc1, fc2, fc3, fc4]")
    mlp = shapes_of(Mlp())
    chain = "a chain of linear layers, activations unit by unit, no skips"
    assert layer_graph("auto", mlp).assumes == layer_graph("mlp", mlp).assumes == chain
    assert layer_graph(str(path), mlp).assumes == f"what the lines of {path} say"
    path.write_text("chain: [fc1, fc2, fc3, fc4]\nassumes: ReLU between all layers")
    assert layer_graph(str(path), mlp).assumes == "ReLU between all layers"
    path.write_text("family: vgg")
    vgg = shapes_of(Vgg())
    assert layer_graph(str(path), vgg).assumes == families()["vgg"][0].assumes
    smaller = resize(layer_graph("auto", vgg), vgg, label="a.pt", anchor="b.pt")
    assert smaller.assumes == families()["vgg"][0].assumes


def test_a_traced_graph_assumes_nothing():
    assert trace(Mlp(), (torch.zeros(2, 12),)).assumes is None


# Other widths


def test_a_graph_takes_the_sizes_of_another_model():
    graph = layer_graph("auto", shapes_of(Vgg((6, 8, 7))))
    other = resize(graph, shapes_of(Vgg((9, 8, 14))), label="a.pt", anchor="b.pt")
    assert [s.size for s in other.free()] == [9, 8, 14, 11]
    assert other.ops == graph.ops


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"fc4.weight": (12, 7), "fc4.bias": (12,)}, ["fc4.weight axis 0", "output", "12", "5"]),
        ({"fc2.weight": (8, 10)}, ["fc2.weight axis 1"]),
        ({"fc1.bias": None}, ["fc1.bias", "not in a.pt"]),
        ({"extra.weight": (3,)}, ["extra.weight"]),
        ({"fc1.weight": (9, 12, 1)}, ["fc1.weight", "number of axes"]),
    ],
)
def test_what_differs_in_more_than_width_is_named(change, named):
    graph = layer_graph("auto", shapes_of(Mlp()))
    shapes = {k: v for k, v in {**shapes_of(Mlp()), **change}.items() if v is not None}
    with pytest.raises(IncompatibleModels) as caught:
        resize(graph, shapes, label="a.pt", anchor="b.pt")
    for text in named:
        assert text in str(caught.value)


# Order


def test_natural_order_reads_numbers():
    assert sorted(["f.10.w", "f.9.w", "f.1.b"], key=natural_key) == ["f.1.b", "f.9.w", "f.10.w"]
    assert base_order(["b", "a"]) == ["b", "a"]
    assert base_order(["f.10", "f.9"]) == ["f.9", "f.10"]


@given(st.permutations(["head", "a1", "a2", "b1", "b2", "stem"]))
def test_a_layer_runs_after_all_that_it_reads(nodes):
    """Two residual blocks on one stream: the head comes last, the stem first, whatever the list."""
    reads = {"stem": set(), "a1": {"s"}, "a2": {"x"}, "b1": {"s"}, "b2": {"y"}, "head": {"s"}}
    writes = {"stem": {"s"}, "a1": {"x"}, "a2": {"s"}, "b1": {"y"}, "b2": {"s"}, "head": set()}
    order = execution_order(nodes, reads, writes)
    assert sorted(order) == sorted(nodes)
    assert order[-1] == "head"
    assert order.index("a1") < order.index("a2")
    assert order.index("b1") < order.index("b2")
