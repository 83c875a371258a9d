"""Recognition takes time in proportion to the tensors, and gives what a plain search does."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otfuse_cli.graph.spec.from_shapes import layer_graph
from otfuse_cli.graph.spec.grammar import parse_specs
from otfuse_cli.graph.spec.line_match import LineTable
from otfuse_cli.graph.spec.order import execution_order
from otfuse_cli.graph.spec.patterns import Pattern, Present

Shapes = dict[str, tuple[int, ...]]


# What the fast way finds is what the plain way finds


def plainly_ordered(nodes, reads, writes) -> list[str]:
    """The rule itself: the first node whose writers outside its cycle are all done."""
    writers = {s: {n for n in nodes if s in writes[n]} for n in nodes for s in reads[n]}
    before = {n: {w for s in reads[n] for w in writers[s]} - {n} for n in nodes}
    reached = {n: set(before[n]) for n in nodes}
    for middle in nodes:
        for n in nodes:
            if middle in reached[n]:
                reached[n] |= reached[middle]
    outside = {n: {p for p in before[n] if n not in reached[p]} for n in nodes}
    order: list[str] = []
    written: set[str] = set()
    while len(order) < len(nodes):
        ready = [n for n in nodes if n not in order and outside[n] <= set(order)]
        started = (n for n in ready if all(s in written or not writers[s] for s in reads[n]))
        order.append(next(started, ready[0]))
        written |= writes[order[-1]]
    return order


spaces = st.frozensets(st.sampled_from("pqrs"), max_size=2)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(spaces, spaces), min_size=1, max_size=8))
def test_the_order_is_that_of_the_rule(uses):
    nodes = [f"n{at}" for at in range(len(uses))]
    reads = {n: set(use[0]) for n, use in zip(nodes, uses, strict=True)}
    writes = {n: set(use[1]) for n, use in zip(nodes, uses, strict=True)}
    assert execution_order(nodes, reads, writes) == plainly_ordered(nodes, reads, writes)


NAMES = ["a", "a.b", "a.0", "a.0.b", "a.1.b", "c.b", "c.10.b.weight", "x.y.z"]
PATTERNS = ["a", "a.{i}", "a.*", "c.{i}.b", "(a|c).b", "a.b", "x.y", "*.b", "a.0.b", "(c.)?b"]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3), max_size=5))
def test_a_line_is_the_first_that_matches(lines):
    text = "layers:\n" + "".join(
        f'  "{", ".join(names)}": c{at}\n' for at, names in enumerate(lines)
    )
    parsed = parse_specs(text, where="", name="")[0].lines if len(set(map(tuple, lines))) else ()
    table = LineTable(parsed)
    for name in NAMES:
        plain = None
        for at, line in enumerate(parsed):
            for pattern in line.patterns:
                match = pattern.match(name) or pattern.match(name.rpartition(".")[0])
                if match is not None and plain is None:
                    plain = (at, match)
        assert table.find(name) == plain, name


@pytest.mark.parametrize("text", PATTERNS)
def test_a_name_is_present_where_a_pattern_matches_it(text):
    for name in NAMES:
        met = Pattern(text).match(name) or Pattern(text).match(name.rpartition(".")[0])
        assert (Pattern(text) in Present([name])) == (met is not None), name


# Time


def chain(count: int) -> Shapes:
    shapes: Shapes = {}
    for at in range(count // 2):
        shapes[f"net.{2 * at}.weight"] = (8, 8)
        shapes[f"net.{2 * at}.bias"] = (8,)
    return shapes


def named_at_random(count: int) -> Shapes:
    draw = random.Random(0)
    return {"".join(draw.choices("abcdefgh", k=12)) + ".weight": (8, 8) for _ in range(count)}


def residual(count: int) -> Shapes:
    """ResNet without norms, all stages in one stream: every block reads what all others wrote."""
    shapes: Shapes = {"conv1.weight": (8, 3, 3, 3)}
    for at in range(count // 2):
        shapes[f"layer{at + 1}.0.conv1.weight"] = (8, 8, 3, 3)
        shapes[f"layer{at + 1}.0.conv2.weight"] = (8, 8, 3, 3)
    return {**shapes, "fc.weight": (3, 8)}


def inverted(count: int) -> Shapes:
    shapes: Shapes = {
        "features.0.0.weight": (8, 3, 3, 3),
        "features.1.conv.0.0.weight": (8, 1, 3, 3),
        "features.1.conv.1.weight": (4, 8, 1, 1),
    }
    for at in range(2, count // 3 + 2):
        shapes[f"features.{at}.conv.0.0.weight"] = (24, 4, 1, 1)
        shapes[f"features.{at}.conv.1.0.weight"] = (24, 1, 3, 3)
        shapes[f"features.{at}.conv.2.weight"] = (4, 24, 1, 1)
    last = count // 3 + 2
    return {**shapes, f"features.{last}.0.weight": (16, 4, 1, 1), "classifier.1.weight": (3, 16)}


def llama(count: int) -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (50, 8)}
    for at in range(count // 9):
        block = f"model.layers.{at}."
        for name in "qkvo":
            shapes[f"{block}self_attn.{name}_proj.weight"] = (8, 8)
        for name, shape in {"gate": (6, 8), "up": (6, 8), "down": (8, 6)}.items():
            shapes[f"{block}mlp.{name}_proj.weight"] = shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{block}{name}.weight"] = (8,)
    return {**shapes, "model.norm.weight": (8,), "lm_head.weight": (50, 8)}


LARGE: dict[str, tuple[Callable[[int], Shapes], str]] = {
    "chain": (chain, "auto"),
    "named at random": (named_at_random, "mlp"),
    "resnet": (residual, "auto"),
    "mobilenet": (inverted, "auto"),
    "llama": (llama, "auto"),
}


# One of each way to a graph at every change, a given spec and one that is recognised.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        n if n in ("named at random", "resnet") else pytest.param(n, marks=pytest.mark.slow)
        for n in LARGE
    ],
)
def test_eight_times_the_tensors_take_about_eight_times_as_long(name):
    make, arch = LARGE[name]
    layer_graph(arch, make(90))  # reads the families
    seconds = []
    for count in (300, 2400):
        shapes = make(count)
        tries = []
        for _ in range(2):  # the best of them: a collection of garbage may fall into any
            start = time.process_time()
            graph = layer_graph(arch, shapes)
            tries.append(time.process_time() - start)
        seconds.append(min(tries))
        assert graph.tensors.keys() == shapes.keys()
    assert seconds[1] < 24 * seconds[0], seconds  # 64 times, if it were quadratic


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_twenty_thousand_tensors_take_seconds(name):
    make, arch = LARGE[name]
    shapes = make(20_000)
    start = time.process_time()
    layer_graph(arch, shapes)
    assert time.process_time() - start < 15


def test_a_spec_of_a_line_per_module_is_found_by_name():
    shapes = chain(4000)
    lines = "".join(f"  net.{2 * at}: c{at} <- c{at - 1}\n" for at in range(1, 1999))
    text = "layers:\n  net.0: c0 <- in\n" + lines + "  net.3998: out <- c1998\n"
    (spec,) = parse_specs(text, where="net.yaml", name="net")
    table = LineTable(spec.lines)
    start = time.process_time()
    assert [table.find(name)[0] for name in shapes] == [at // 2 for at in range(4000)]
    assert time.process_time() - start < 1  # seven seconds, were every line tried
