"""Matchers against oracles: noisy twins, brute force, finite differences, dense evaluation."""

from __future__ import annotations

from itertools import pairwise, permutations, product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import otfuse_cli
from nets import Mlp, ResNet, StateDict, Vgg, randomise, state
from otfuse_cli.checkpoint.open import open_checkpoint
from otfuse_cli.errors import UsageError
from otfuse_cli.graph.sizes import resize
from otfuse_cli.graph.spec.from_shapes import layer_graph
from otfuse_cli.matching.alignment import Alignment
from otfuse_cli.matching.apply import transport
from otfuse_cli.matching.match import match
from otfuse_cli.matching.matchers.descent import descend, movable
from otfuse_cli.matching.matchers.frank_wolfe import Relaxed, RelaxedPath, line_search, relax
from otfuse_cli.matching.matchers.searches import SEARCHES
from otfuse_cli.matching.matchers.sweep import sweep
from otfuse_cli.matching.models import Model
from otfuse_cli.matching.similarity import Similarity
from otfuse_cli.requests.recipe import MATCHERS, Recipe
from otfuse_cli.runtime import Runtime
from otfuse_cli.transport.maps import Permutation
from test_twins import permuted

EVERY = ["sweep", "descent", "frank-wolfe", "auto"]
NETS = {
    "mlp": lambda: Mlp((18, 24, 20, 16, 5)),
    "vgg-bn": lambda: Vgg((12, 16, 12)),
    "resnet": lambda: ResNet((12, 12, 16, 20), norm=False, bias=True),
    "resnet-bn": lambda: ResNet((12, 12, 16, 20)),
}
RNN = """\
act: other
layers:
  embed: h <- in
  recur: h <- h
  head: out <- h
"""
ATTENTION = """\
sizes: {h: 3}
layers:
  emb: e <- in
  q: h * 4 <- e
  k: h * 4 <- e
  v: h * v@h <- e
  o: e <- h * v
  head: out <- e
"""

THREE_AXES = """\
layers:
  one: a <- in
  two: b <- in
  three: c <- in
  core.weight: [a, b, c]
  out_a: out <- a
  out_b: out <- b
  out_c: out <- c
"""


def shapes(tensors: StateDict) -> dict[str, tuple[int, ...]]:
    return {n: tuple(t.shape) for n, t in tensors.items()}


def models(source: StateDict, anchor: StateDict, arch: str = "auto") -> tuple[Model, Model]:
    graph = layer_graph(arch, shapes(anchor))
    own = resize(graph, shapes(source), label="source", anchor="anchor")
    return (
        Model(0, open_checkpoint(source, label="source"), own),
        Model(1, open_checkpoint(anchor, label="anchor"), graph),
    )


def random_mlp(widths: tuple[int, ...], seed: int) -> StateDict:
    return state(randomise(Mlp(widths), seed))


def random_like(like: StateDict, seed: int, noise: float = 1.0) -> StateDict:
    """Noise of a share of each weight's norm, added to `like`."""
    generator = torch.Generator().manual_seed(seed)
    noisy = {}
    for name, tensor in like.items():
        noisy[name] = tensor.clone()
        if tensor.is_floating_point() and "running" not in name:
            drawn = torch.randn(tensor.shape, generator=generator)
            noisy[name] += noise * tensor.norm() / tensor.numel() ** 0.5 * drawn
    return noisy


@pytest.fixture
def spec(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "net.yaml"
        path.write_text(text)
        return str(path)

    return write


def rnn(seed: int, hidden: int = 6) -> StateDict:
    g = torch.Generator().manual_seed(seed)
    made = {"embed": (hidden, 5), "recur": (hidden, hidden), "head": (4, hidden)}
    return {f"{n}.weight": torch.randn(s, generator=g) for n, s in made.items()}


def attention(seed: int) -> StateDict:
    g = torch.Generator().manual_seed(seed)
    made = {"emb": (8, 10), "q": (12, 8), "k": (12, 8), "v": (15, 8), "o": (8, 15), "head": (5, 8)}
    return {f"{n}.weight": torch.randn(s, generator=g) for n, s in made.items()}


def three_axes(seed: int) -> StateDict:
    g = torch.Generator().manual_seed(seed)
    sizes = {"one": (5, 9), "two": (6, 9), "three": (4, 9), "core": (5, 6, 4)}
    sizes |= {"out_a": (3, 5), "out_b": (3, 6), "out_c": (3, 4)}
    return {f"{n}.weight": torch.randn(s, generator=g) for n, s in sizes.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("matcher", "noise"),
    [("sweep", 0.1), *((m, n) for m in EVERY[1:] for n in (0.1, 0.5))],
)
@pytest.mark.parametrize("name", NETS)
def test_a_noisy_twin_is_recovered(name, matcher, noise):
    anchor = state(randomise(NETS[name](), 1))
    noisy = random_like(anchor, 2, noise)
    fused, _ = otfuse_cli.merge(permuted(noisy, 3), anchor, weights=(1, 0), matcher=matcher)
    wrong = [n for n, t in noisy.items() if not torch.equal(fused[n], t)]
    assert not wrong


@pytest.mark.parametrize("matcher", EVERY)
def test_heads_and_what_is_inside_them_are_recovered(spec, matcher):
    g = torch.Generator().manual_seed(1)
    anchor = attention(0)
    arch = spec(ATTENTION)
    graph = layer_graph(arch, shapes(anchor))
    maps = {s: Permutation(torch.randperm(graph.sizes[s], generator=g)) for s in ("e", "h")}
    inner = {"v": tuple(Permutation(torch.randperm(5, generator=g)) for _ in range(3))}
    assert not maps["h"].identity
    noisy = random_like(anchor, 4, 0.2)
    twin = {n: transport(t, n, graph, Alignment(maps, inner)) for n, t in noisy.items()}
    fused, _ = otfuse_cli.merge(twin, anchor, weights=(1, 0), arch=arch, matcher=matcher)
    for name, tensor in noisy.items():
        assert torch.equal(fused[name], tensor), name


@pytest.mark.parametrize("matcher", ["descent", "frank-wolfe", "auto"])
def test_a_recurrent_weight_has_its_space_on_two_axes(spec, matcher):
    arch, anchor = spec(RNN), rnn(0, 12)
    noisy = random_like(anchor, 1, 0.3)
    twin = permuted(noisy, 2, arch)
    fused, _ = otfuse_cli.merge(twin, anchor, weights=(1, 0), arch=arch, matcher=matcher)
    assert torch.equal(fused["recur.weight"], noisy["recur.weight"])


@settings(max_examples=8, deadline=None)
@given(
    hidden=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=3),
    seed=st.integers(0, 10_000),
    equal=st.booleans(),
    mass=st.sampled_from(["uniform", "norm"]),
)
def test_descent_never_lowers_the_objective(hidden, seed, equal, mass):
    wide = (4, *(n for n, _ in hidden), 3)
    own = wide if equal else (4, *(m for _, m in hidden), 3)
    source, anchor = models(random_mlp(wide, seed), random_mlp(own, seed + 1), "mlp")
    recipe = Recipe(mass=mass)
    start = sweep(source, anchor, recipe, Runtime()).alignment
    work = Similarity(source, anchor)
    value = work.objective(start)
    for passes in (1, 2, 50):
        found = descend(work, start, recipe, Runtime().generator(seed), most_passes=passes)
        assert found.objective >= value - 1e-5 * abs(value)
        value = found.objective


@pytest.mark.slow
def test_descent_never_lowers_the_objective_of_a_recurrent_net(spec):
    arch = spec(RNN)
    for seed in range(8):
        source, anchor = models(rnn(seed), rnn(seed + 50), arch)
        start = sweep(source, anchor, Recipe(), Runtime()).alignment
        work = Similarity(source, anchor)
        value = work.objective(start)
        for passes in range(1, 5):
            found = descend(work, start, Recipe(), Runtime().generator(), most_passes=passes)
            assert found.objective >= value - 1e-5 * abs(value)
            value = found.objective


def test_a_stop_of_descent_is_a_maximum_in_each_space():
    source, anchor = models(random_mlp((6, 5, 5, 3), 1), random_mlp((6, 5, 5, 3), 2), "mlp")
    work = Similarity(source, anchor)
    start = sweep(source, anchor, Recipe(), Runtime()).alignment
    found = descend(work, start, Recipe(), Runtime().generator())
    for space, order in product(("fc1", "fc2"), permutations(range(5))):
        other = {**found.alignment.maps, space: Permutation(torch.tensor(order))}
        assert work.objective(Alignment(other)) <= found.objective + 1e-4


@pytest.mark.slow
def test_the_portfolio_finds_the_optimum_of_tiny_nets():
    """Six times six alignments, all tried: the best of the portfolio is nearly always the best."""
    hits = 0
    for seed in range(10):
        a, b = random_mlp((4, 3, 3, 2), seed), random_mlp((4, 3, 3, 2), seed + 100)
        work = Similarity(*models(a, b, "mlp"))
        orders = [Permutation(torch.tensor(o)) for o in permutations(range(3))]
        best = max(
            work.objective(Alignment({"fc1": p, "fc2": q})) for p, q in product(orders, orders)
        )
        _, report = otfuse_cli.merge(a, b, arch="mlp")
        found = next(c.objective for c in report.candidates if c.chosen)
        assert found <= best + 1e-4
        hits += found >= best - 1e-4
    assert hits >= 9


@pytest.mark.parametrize("name", ["mlp", "vgg-bn", "resnet-bn", "rnn"])
def test_benefits_are_the_derivative_of_the_objective(spec, name):
    if name == "rnn":
        pair, arch = (rnn(1), rnn(2)), spec(RNN)
    else:
        pair, arch = tuple(state(randomise(NETS[name](), s)) for s in (1, 2)), "auto"
    double = [{n: t.double() if t.is_floating_point() else t for n, t in p.items()} for p in pair]
    work = Similarity(*models(*double, arch))
    spaces = movable(work, Recipe())
    sizes = work.anchor.graph.sizes
    g = torch.Generator().manual_seed(0)
    here = {s: torch.rand(sizes[s], sizes[s], generator=g).double() for s in spaces}
    there = {s: torch.rand(sizes[s], sizes[s], generator=g).double() for s in spaces}

    def value(t: float) -> float:
        return work.objective(
            Alignment({s: Relaxed(here[s] + t * (there[s] - here[s])) for s in spaces})
        )

    at = Alignment({s: Relaxed(here[s]) for s in spaces})
    slope = sum(float((work.benefit(s, at) * (there[s] - here[s])).sum()) for s in spaces)
    assert slope == pytest.approx((value(1e-4) - value(-1e-4)) / 2e-4, rel=1e-5)
    # On a line the objective is a polynomial of the stated degree: so many differences vanish.
    degree = work.degree(spaces)
    assert degree == 2
    values = np.array([value(t) for t in np.linspace(0, 1, degree + 2)])
    assert abs(np.diff(values, degree + 1)[0]) < 1e-9 * abs(values).max()


def in_double(tensors: StateDict) -> StateDict:
    return {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}


@pytest.mark.quick_cases("rnn", "attention")
@pytest.mark.parametrize("name", ["mlp", "vgg-bn", "resnet-bn", "rnn", "attention", "three"])
def test_kept_benefits_follow_every_change_of_a_map(spec, name):
    specs = {"rnn": (rnn, RNN), "attention": (attention, ATTENTION)}
    specs["three"] = three_axes, THREE_AXES
    make, text = specs.get(name, (lambda s: state(randomise(NETS[name](), s)), None))
    pair = models(*(in_double(make(s)) for s in (1, 2)), spec(text) if text else "auto")
    work = Similarity(*pair)
    start = sweep(*pair, Recipe(), Runtime()).alignment
    spaces, g = movable(work, Recipe()), torch.Generator().manual_seed(0)
    maps = dict(start.maps)
    updated = 0
    for _ in range(40):
        for at in torch.randperm(len(spaces), generator=g)[:2].tolist():
            moved = spaces[at]
            if moved not in maps:
                continue
            index = maps[moved].plan.index_M.clone()
            i, j = torch.randperm(len(index), generator=g)[:2].tolist()
            index[i], index[j] = index[j].clone(), index[i].clone()
            maps[moved] = Permutation(index)
        at = Alignment(dict(maps), start.families)
        fresh = Similarity(*pair)
        for space in spaces:
            before = work.flop
            kept, whole = work.benefit(space, at), fresh.benefit(space, at)
            assert torch.allclose(kept, whole, rtol=1e-9, atol=1e-9 * float(whole.abs().max()))
            updated += 0 < work.flop - before < 0.9 * fresh.pass_flop([space])
    assert updated, "none was updated: this shows nothing"


@pytest.mark.parametrize("name", ["mlp", "resnet-bn"])
def test_gradients_on_the_way_to_vertices_are_means_of_those_at_its_ends(name):
    pair = models(*(in_double(state(randomise(NETS[name](), s))) for s in (1, 2)))
    work = Similarity(*pair)
    spaces, g = movable(work, Recipe()), torch.Generator().manual_seed(0)
    held = sweep(*pair, Recipe(), Runtime()).alignment
    sizes = work.anchor.graph.sizes
    weights = {s: torch.full((sizes[s],) * 2, 1 / sizes[s]).double() for s in spaces}
    vertices = {s: Permutation(torch.randperm(sizes[s], generator=g)) for s in spaces}
    line = RelaxedPath(work, spaces, held)
    gradients = line.gradients(weights)
    ends = {s: torch.eye(sizes[s])[:, vertices[s].index_M].double() for s in spaces}
    change = {s: ends[s] - weights[s] for s in spaces}
    slope = sum(float((gradients[s] * change[s]).sum()) for s in spaces)
    values = line.values(weights, vertices, work.objective(line.at(weights)), slope)
    assert line.knots == [1.0]
    assert values[0] == pytest.approx(work.objective(line.at(vertices)), rel=1e-9)
    between = {s: weights[s] + 0.3 * change[s] for s in spaces}
    for space, moved in line.moved(gradients, between, 0.3).items():
        assert torch.allclose(moved, Similarity(*pair).benefit(space, line.at(between)))


def test_frank_wolfe_where_three_axes_of_a_tensor_move(spec):
    pair = models(three_axes(1), three_axes(2), spec(THREE_AXES))
    work = Similarity(*pair)
    assert work.degree(movable(work, Recipe())) == 3
    start = sweep(*pair, Recipe(), Runtime()).alignment
    path: list[float] = []
    rounded = relax(work, movable(work, Recipe()), start, watch=path.append)
    assert len(path) > 1
    assert all(after > before for before, after in pairwise(path))
    assert all(m.hard for m in rounded.maps.values())


@pytest.mark.parametrize("scale", ["preserve", "paper"])
@pytest.mark.parametrize("mass", ["uniform", "norm"])
def test_a_step_between_widths_gains_what_it_promised(scale, mass):
    source, anchor = models(random_mlp((6, 9, 8, 4), 1), random_mlp((6, 5, 7, 4), 2))
    recipe = Recipe(scale=scale, mass=mass)
    work = Similarity(source, anchor, paper_scale=scale == "paper")
    start = sweep(source, anchor, recipe, Runtime()).alignment
    found = descend(work, start, recipe, Runtime().generator())
    assert found.objective > work.objective(start)
    new = found.alignment.maps["fc1"]
    benefit = work.benefit("fc1", start)
    promised = 5 * (new.plan.cost(benefit) - start.maps["fc1"].plan.cost(benefit))
    after = Alignment({**start.maps, "fc1": new})
    assert work.objective(after) - work.objective(start) == pytest.approx(promised, rel=1e-4)


@settings(max_examples=40, deadline=None)
@given(
    coefficients=st.lists(st.floats(-5, 5), min_size=2, max_size=6),
    offset=st.floats(-100, 100),
)
@example(coefficients=[1.0, -1.8665396029538996, 0.0], offset=16.0)
@example(coefficients=[1.0, -2.0, 0.0, 0.0, 0.0, 0.0], offset=90.0)
def test_line_search_against_dense_evaluation(coefficients, offset):
    polynomial = np.polynomial.Polynomial([offset, *coefficients])
    degree = len(coefficients)
    knots = [(k + 1) / (degree - 1) for k in range(degree - 1)]
    step, best = line_search(offset, coefficients[0], knots, [float(polynomial(t)) for t in knots])
    grid = polynomial(np.linspace(0, 1, 2001))
    assert 0 <= step <= 1
    assert best == pytest.approx(float(polynomial(step)), abs=1e-6)
    assert best >= grid.max() - 1e-6


def test_frank_wolfe_climbs_and_ends_in_permutations():
    source, anchor = models(*(state(randomise(NETS["resnet"](), s)) for s in (1, 2)))
    work = Similarity(source, anchor)
    start = sweep(source, anchor, Recipe(), Runtime()).alignment
    path: list[float] = []
    rounded = relax(work, movable(work, Recipe()), start, watch=path.append)
    assert len(path) > 2
    assert all(after > before for before, after in pairwise(path))
    assert all(m.hard for m in rounded.maps.values())


@pytest.mark.slow
def test_the_seed_decides_everything():
    a, b = random_mlp((11, 16, 14, 12, 5), 1), random_mlp((11, 16, 14, 12, 5), 2)
    one, first = otfuse_cli.merge(a, b, seed=3)
    two, second = otfuse_cli.merge(a, b, seed=3)
    assert first.candidates == second.candidates
    assert all(torch.equal(one[n], t) for n, t in two.items())
    _, other = otfuse_cli.merge(a, b, seed=4)
    assert other.candidates != first.candidates


def test_the_best_candidate_is_chosen_and_all_are_listed():
    a, b = random_mlp((11, 16, 14, 12, 5), 1), random_mlp((11, 16, 14, 12, 5), 2)
    _, report = otfuse_cli.merge(a, b)
    names = [c.name for c in report.candidates]
    assert names[:4] == ["sweep", "identity", "sweep + descent", "frank-wolfe + descent"]
    chosen = [c for c in report.candidates if c.chosen]
    assert len(chosen) == 1
    assert chosen[0].objective == pytest.approx(max(c.objective for c in report.candidates))
    assert all(c.flop > 0 for c in report.candidates if c.name != "identity")
    assert {s.solver for s in report.spaces} == {"assignment"}
    assert all(s.ot_cost > 0 and s.moved_fraction > 0 for s in report.spaces)


@pytest.mark.parametrize(("lead", "decides"), [(9, True), (3, False)])
def test_agreement_decides_only_where_it_leads_by_more_than_chance(lead, decides):
    states = [random_mlp((11, 16, 14, 12, 5), seed) for seed in (1, 2)]
    source, anchor = models(*states)
    judged = []

    def judge(alignment: Alignment) -> torch.Tensor:
        judged.append(alignment)
        agreed = torch.zeros(100, dtype=torch.bool)
        agreed[: lead if len(judged) == 1 else 0] = True  # the sweep's average alone is right
        return agreed

    outcome = match(source, anchor, Recipe(), Runtime(), judge)
    assert outcome.candidates[0].name == "sweep"
    assert [c.agreement for c in outcome.candidates] == [lead / 100] + [0.0] * (len(judged) - 1)
    best = max(outcome.candidates, key=lambda c: c.objective)
    (chosen,) = [c for c in outcome.candidates if c.chosen]
    assert chosen == (outcome.candidates[0] if decides else best)
    assert best is not outcome.candidates[0]


def test_what_exceeds_the_effort_is_named_instead_of_run():
    a, b = random_mlp((11, 16, 14, 12, 5), 1), random_mlp((11, 16, 14, 12, 5), 2)
    _, report = otfuse_cli.merge(a, b, effort=0)
    skipped = [c for c in report.candidates if c.objective is None]
    assert [c.name for c in skipped] == [
        "frank-wolfe + descent (skipped)",
        "sweep + descent, order 1 (skipped)",
        "sweep + descent, order 2 (skipped)",
    ]
    assert all(c.flop > 0 and not c.chosen for c in skipped)
    assert sum("--effort" in w for w in report.warnings) == 3
    assert "sweep + descent" in [c.name for c in report.candidates]
    with pytest.raises(UsageError, match="--effort nan"):
        otfuse_cli.merge(a, b, effort=float("nan"))


def test_fine_tunes_of_one_start_need_no_matching():
    a = random_mlp((11, 16, 14, 12, 5), 1)
    fused, report = otfuse_cli.merge(
        random_like(a, 2, 0.05), random_like(a, 3, 0.05), repair="none"
    )
    assert any("a plain average" in w for w in report.warnings)
    plain, _ = otfuse_cli.merge(random_like(a, 2, 0.05), random_like(a, 3, 0.05), align="none")
    assert all(torch.equal(fused[n], t) for n, t in plain.items())


def test_different_widths_skip_what_needs_permutations():
    a, b = random_mlp((12, 16, 14, 5), 1), random_mlp((12, 10, 14, 5), 2)
    _, report = otfuse_cli.merge(a, b)
    assert any("frank-wolfe" in w and "16 units" in w for w in report.warnings)
    assert "identity" not in [c.name for c in report.candidates]
    assert {s.solver for s in report.spaces} == {"emd", "assignment"}
    assert max(s.marginal_error for s in report.spaces) < 1e-9
    _, alone = otfuse_cli.merge(a, b, matcher="frank-wolfe")
    assert [c.name for c in alone.candidates if c.chosen] == ["sweep + descent"]


@pytest.mark.quick_cases("descent")
@pytest.mark.parametrize("matcher", ["descent", "frank-wolfe"])
def test_no_search_where_a_space_has_several_maps(matcher):
    a, b = (state(randomise(NETS["resnet"](), s)) for s in (1, 2))
    with pytest.raises(UsageError, match="residual average"):
        otfuse_cli.merge(a, b, matcher=matcher, residual="average")
    _, report = otfuse_cli.merge(a, b, residual="average")
    assert [c.name for c in report.candidates] == ["sweep"]


@pytest.mark.slow
def test_streams_stay_under_residual_identity():
    a, b = (state(randomise(NETS["resnet"](), s)) for s in (1, 2))
    fused, report = otfuse_cli.merge(a, b, weights=(1, 0), residual="identity")
    assert torch.equal(fused["conv1.weight"], a["conv1.weight"])
    assert any(s.moved_fraction for s in report.spaces)


def test_every_search_has_a_name_that_the_command_line_knows():
    assert ["sweep", *SEARCHES] == list(MATCHERS)
    assert all(search.name == name for name, search in SEARCHES.items())
