"""`inspect` of several checkpoints: differences, estimate, costs, pairs, plots, gates."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file

import otfuse_cli
from conftest import make_report
from otfuse_cli.errors import IncompatibleModels, UsageError
from otfuse_cli.graph.sizes import solve_widths
from otfuse_cli.matching.estimate import estimate_merge
from otfuse_cli.report.files import report_from_dict
from otfuse_cli.report.records import Pair
from otfuse_cli.requests.recipe import Recipe
from otfuse_cli.session import memory_limit
from test_report_schema import REPORT

pytestmark = pytest.mark.usefixtures("kept_graphs")


def net(widths, seed=0, dtype=torch.float32):
    """A chain of linear layers, random weights, as a state dict."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for at, (before, after) in enumerate(pairwise(widths)):
        weight = torch.randn(after, before, generator=draw) / before**0.5
        tensors[f"layers.{2 * at}.weight"] = weight.to(dtype)
        tensors[f"layers.{2 * at}.bias"] = (0.1 * torch.randn(after, generator=draw)).to(dtype)
    return tensors


def permuted(tensors, seed):
    """A twin with the units of the first hidden layer in another order; the order too."""
    units = len(tensors["layers.0.bias"])
    order = torch.randperm(units, generator=torch.Generator().manual_seed(seed))
    return reordered(tensors, order), order


def reordered(tensors, order):
    twin = dict(tensors)
    for name in ("layers.0.weight", "layers.0.bias"):
        twin[name] = tensors[name][order]
    twin["layers.2.weight"] = tensors["layers.2.weight"][:, order]
    return twin


def saved(folder, **models):
    for name, tensors in models.items():
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / f"{name}.safetensors")
    return [folder / f"{name}.safetensors" for name in models]


# -- differences


def test_every_difference_is_listed(cli, tmp_path):
    anchor = net([6, 8, 7, 3])
    other = {k: v for k, v in net([5, 8, 7, 3], seed=1, dtype=torch.float16).items()}
    del other["layers.2.bias"]
    other["head.scale"] = torch.ones(3)
    other["layers.4.weight"] = other["layers.4.weight"].flatten()
    a, b = saved(tmp_path, a=other, b=anchor)
    run = cli("inspect", a, b, "--json")
    assert run.code == 4
    envelope = json.loads(run.out)
    REPORT.validate(envelope["report"])
    found = [(d["kind"], d["name"]) for d in envelope["report"]["differences"]]
    assert [f for f in found if f[0] != "dtype"] == [
        ("missing", "layers.2.bias"),
        ("extra", "head.scale"),
        ("axes", "layers.4.weight"),
        ("size", "layers.0.weight"),
    ]
    assert sum(kind == "dtype" for kind, _ in found) == 5
    assert envelope["report"]["differences"][3]["shape"] == [8, 5]
    assert envelope["error"]["where"] == f"layers.2.bias in {a} and 3 more"
    text = cli("inspect", a, b)
    assert text.code == 4
    assert "axis 1: the axis has 5 positions, `in` makes 6" in text.out
    assert "5 tensors" in text.out
    assert text.err.startswith("error: the checkpoints don't fit together")


def test_widths_and_dtypes_are_no_obstacle(cli, tmp_path):
    paths = saved(tmp_path, a=net([6, 5, 7, 3], dtype=torch.float16), b=net([6, 8, 7, 3], seed=1))
    run = cli("inspect", *paths, "--json")
    assert run.code == 0
    differences = json.loads(run.out)["report"]["differences"]
    width = [d for d in differences if d["kind"] == "width"]
    assert [(d["name"], d["shape"], d["anchor_shape"]) for d in width] == [("layers.0", [5], [8])]
    assert {d["kind"] for d in differences} == {"width", "dtype"}


def test_library_gets_the_differences_with_the_error():
    with pytest.raises(IncompatibleModels) as refused:
        otfuse_cli.inspect(net([6, 8, 3]), net([6, 8, 4]))
    assert [d.name for d in refused.value.report.differences] == [
        "layers.2.weight",
        "layers.2.bias",
    ]


@pytest.mark.parametrize(
    ("changed", "where", "why"),
    [
        ("gone", "layers.2.bias in state dict 0", "it is in state dict 1 only"),
        ("more", "head.scale in state dict 0", "it is not in state dict 1"),
        ("narrow", "layers.2.weight in state dict 0", "[3, 8], [4, 8] in state dict 1"),
    ],
)
def test_a_refusal_says_what_the_first_difference_is(changed, where, why):
    other, anchor = net([6, 8, 3]), net([6, 8, 3 + (changed == "narrow")], seed=1)
    if changed == "gone":
        del other["layers.2.bias"]
    if changed in ("gone", "more"):  # without another name the two would only be named apart
        other["head.scale"] = torch.ones(3)
    with pytest.raises(IncompatibleModels) as refused:
        otfuse_cli.inspect(other, anchor)
    assert refused.value.where.startswith(where)
    assert refused.value.why.startswith(why)


def test_equal_models_differ_in_nothing():
    report = otfuse_cli.inspect(net([6, 8, 3]), net([6, 8, 3], seed=1))
    assert report.differences == ()


def test_sizes_go_on_after_a_misfit():
    from otfuse_cli.graph.spec.from_shapes import layer_graph

    shapes = {k: tuple(v.shape) for k, v in net([6, 8, 7, 3]).items()}
    graph = layer_graph("auto", shapes)
    wide = {k: tuple(v.shape) for k, v in net([5, 8, 9, 3]).items()}
    sizes, misfits = solve_widths(graph, wide)
    assert sizes["layers.2"] == 9
    assert [(m.name, m.dim) for m in misfits] == [("layers.0.weight", 1)]


# -- estimate


def test_estimate_counts_as_the_matchers_do(demo_pair, tmp_path):
    planned = otfuse_cli.inspect(*demo_pair).estimate
    _, report = otfuse_cli.merge(*demo_pair)
    spent = {c.name: c.flop for c in report.candidates}
    assert planned.steps["sweep"] == spent["sweep"]
    assert spent["sweep + descent"] - spent["sweep"] > 0
    assert planned.flop == sum(planned.steps.values())
    assert planned.skipped == ()
    assert planned.memory_bytes == (planned.tensor_bytes + planned.cost_bytes + planned.kept_bytes)
    # Largest space: 48 units of 64 numbers in either model, as read and at unit norm, in float32.
    assert planned.tensor_bytes == 2 * 48 * 64 * 2 * 4


def test_estimate_keeps_to_the_effort(demo_pair):
    little = otfuse_cli.inspect(*demo_pair, effort=5e6).estimate
    _, report = otfuse_cli.merge(*demo_pair, effort=5e6)
    assert "frank-wolfe" in little.skipped
    assert "frank-wolfe + descent (skipped)" in {c.name for c in report.candidates}
    assert little.flop <= 5e6 < sum(little.steps.values())


def test_estimate_of_several_sources_adds_up_work_not_memory():
    models = [net([6, 8, 7, 3], seed=s) for s in range(3)]
    two, three = otfuse_cli.inspect(*models[1:]).estimate, otfuse_cli.inspect(*models).estimate
    assert three.flop == 2 * two.flop
    assert three.memory_bytes == two.memory_bytes


def test_a_limit_is_reached_where_the_estimate_says(demo_pair):
    planned = otfuse_cli.inspect(*demo_pair).estimate.memory_bytes
    needed = (planned + memory_limit._PROGRAM) / 2**30
    otfuse_cli.merge(*demo_pair, max_memory=needed * (1 + 1e-9))
    with pytest.raises(UsageError, match="more memory"):
        otfuse_cli.merge(*demo_pair, max_memory=needed * (1 - 1e-9))


def test_nothing_to_estimate_alone():
    assert otfuse_cli.inspect(net([6, 8, 3])).estimate is None


@pytest.mark.slow
def test_estimate_of_memory_is_near(tmp_path):
    """Peak memory of a merge over that of a tiny one, in processes of their own.

    A spec without an activation: no network is built and exported, which would hide the growth.
    """
    spec = tmp_path / "net.yaml"
    spec.write_text("chain: [layers.*]\n")
    peaks = {}
    for name, widths in {"tiny": [16, 32, 10], "wide": [512, 2048, 2048, 10]}.items():
        paths = saved(tmp_path, **{f"{name}-{s}": net(widths, seed=s) for s in range(2)})
        line = [sys.executable, "-m", "otfuse_cli.cli.app", "merge", *map(str, paths), "--json"]
        line += ["-o", str(tmp_path / f"{name}.safetensors"), "--matcher", "sweep"]
        line += ["--arch", str(spec)]
        run = subprocess.run(line, capture_output=True, text=True, check=True)
        peaks[name] = json.loads(run.stdout)["report"]["peak_rss_bytes"]
    planned = otfuse_cli.inspect(*paths).estimate.memory_bytes
    assert 0.5 < (peaks["wide"] - peaks["tiny"]) / planned < 1.5


# -- costs


def test_random_cost_is_the_mean_over_random_maps():
    a, b = net([6, 5, 3], seed=1), net([6, 5, 3], seed=2)
    report = otfuse_cli.inspect(a, b, ot_costs=True)
    rows = [torch.cat([m["layers.0.weight"], m["layers.0.bias"][:, None]], 1) for m in (a, b)]
    source, anchor = (r / r.norm(dim=1, keepdim=True) for r in rows)
    (space,) = report.spaces
    mean = torch.cdist(source.double(), anchor.double()).mean()
    assert space.random_cost == pytest.approx(float(mean), rel=1e-6)
    layer = report.layers[0]
    assert (layer.random_cost, layer.moved_fraction) == (space.random_cost, space.moved_fraction)
    assert report.layers[1].moved_fraction is not None


@pytest.mark.parametrize(
    "options", [{}, {"matcher": "auto"}, {"mass": "norm"}, {"solver": "sinkhorn"}]
)
def test_costs_are_ordered(options):
    report = otfuse_cli.inspect(
        net([6, 9, 8, 3]), net([6, 9, 8, 3], seed=1), ot_costs=True, **options
    )
    for space in report.spaces:
        assert space.ot_cost < space.random_cost


def test_merge_does_not_pay_for_random_costs(demo_pair):
    _, report = otfuse_cli.merge(*demo_pair)
    assert {s.random_cost for s in report.spaces} == {None}


@pytest.mark.slow
def test_residual_average_has_random_costs_too(shared):
    pair = [shared / "checkpoints" / f"cifar10-resnet18w16-{i}.safetensors" for i in (0, 1)]
    report = otfuse_cli.inspect(*pair, ot_costs=True, paper=True)
    assert all(s.ot_cost < s.random_cost for s in report.spaces)


# -- pairs


def test_all_pairs_find_the_twins(cli, tmp_path):
    first, other = net([6, 8, 7, 3]), net([6, 8, 7, 3], seed=1)
    paths = saved(tmp_path, a=first, b=other, c=permuted(first, 3)[0])
    run = cli("inspect", *paths, "--ot-costs", "--json")
    report = json.loads(run.out)["report"]
    REPORT.validate(report)
    pairs = {(p["source"], p["anchor"]): p for p in report["pairs"]}
    assert list(pairs) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert pairs[0, 2]["ot_cost"] == pytest.approx(0, abs=1e-6)
    assert pairs[0, 2]["identity_cost"] > 0.5
    assert pairs[1, 2]["ot_cost"] > 0.5
    for (source, anchor), pair in pairs.items():
        assert pair["ot_cost"] == pytest.approx(pairs[anchor, source]["ot_cost"])
        assert {s["source"] for s in pair["spaces"]} == {source}
        direct = otfuse_cli.inspect(paths[source], paths[anchor], ot_costs=True)
        assert pair["ot_cost"] == pytest.approx(sum(s.ot_cost for s in direct.spaces), rel=1e-6)
    text = cli("inspect", *paths, "--ot-costs").out
    assert "All pairs" in text
    assert report_from_dict(report).to_dict() == report


def test_pairs_of_different_widths_go_both_ways():
    models = [net([6, width, 3], seed=width) for width in (4, 8, 8)]
    pairs = otfuse_cli.inspect(*models, ot_costs=True).pairs
    sizes = {(p.source, p.anchor): p.spaces[0].sizes for p in pairs}
    assert sizes[0, 1] == (4, 8)
    assert sizes[1, 0] == (8, 4)
    assert {p.identity_cost is None for p in pairs if 0 in (p.source, p.anchor)} == {True}


def test_two_models_are_no_matrix(demo_pair):
    assert otfuse_cli.inspect(*demo_pair, ot_costs=True).pairs == ()


# -- fine-tunes of one start

ONE_START = "these look like fine-tunes of one start"


def test_fine_tunes_are_recognised():
    start = net([16, 40, 30, 4])
    draw = torch.Generator().manual_seed(9)
    tuned = {k: v + 0.05 * v.std() * torch.randn(v.shape, generator=draw) for k, v in start.items()}
    (warning,) = otfuse_cli.inspect(tuned, start, ot_costs=True).warnings
    assert ONE_START in warning


def test_a_few_units_may_move():
    start = net([16, 40, 30, 4])
    tuned = reordered(start, torch.tensor([1, 0, *range(2, 40)]))
    report = otfuse_cli.inspect(tuned, start, ot_costs=True)
    assert [ONE_START in w for w in report.warnings] == [True]
    assert any(s.moved_fraction for s in report.spaces)


def test_strangers_and_permuted_twins_are_no_fine_tunes():
    start = net([16, 40, 30, 4])
    for other in (net([16, 40, 30, 4], seed=1), permuted(start, 5)[0]):
        assert otfuse_cli.inspect(other, start, ot_costs=True).warnings == ()


# -- plots


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["png", "svg", "html"])
def test_plot(cli, demo_pair, tmp_path, suffix):
    path = tmp_path / f"costs.{suffix}"
    assert cli("inspect", *demo_pair, "--plot", path).code == 0
    first = path.read_bytes()
    assert cli("inspect", *demo_pair, "--plot", path, "-q").code == 6
    assert cli("inspect", *demo_pair, "--plot", path, "--overwrite", "-q").code == 0
    assert path.read_bytes() == first


def drawn(path):
    text = re.search(r'id="data">(.*?)</script>', path.read_text()).group(1)
    return json.loads(text)


def test_plot_shows_the_costs_of_the_report(cli, demo_pair, tmp_path):
    run = cli("inspect", *demo_pair, "--plot", tmp_path / "p.html", "--json")
    report, data = json.loads(run.out)["report"], drawn(tmp_path / "p.html")
    (chart,) = data["lines"]
    assert chart["categories"] == ["layers.0", "layers.2", "layers.4 (output)"]
    values = {line["name"]: line["y"] for line in chart["series"]}
    for name, key in (
        ("OT", "ot_cost"),
        ("identity", "identity_cost"),
        ("random map, mean", "random_cost"),
    ):
        assert values[name] == [layer[key] for layer in report["layers"]]
    assert chart["ylabel"] == "mean cost per unit (euclidean, rows at unit norm)"


def test_heat_map_of_a_permutation(cli, tmp_path):
    start = net([16, 40, 5, 4])
    twin, order = permuted(start, 5)
    paths = saved(tmp_path, a=twin, b=start)
    assert cli("inspect", *paths, "--plot", tmp_path / "p.html", "-q").code == 0
    first = drawn(tmp_path / "p.html")["maps"][0]
    assert first["title"].startswith("layers.0")
    cells = torch.tensor(first["values"])
    assert torch.equal(cells.argmax(1), order)
    assert cells.count_nonzero() == 40


@pytest.mark.slow
def test_plot_of_many(cli, tmp_path):
    paths = saved(tmp_path, **{n: net([6, 80, 3], seed=s) for s, n in enumerate("abc")})
    for suffix in ("html", "png"):
        assert cli("inspect", *paths, "--plot", tmp_path / f"p.{suffix}", "-q").code == 0
    data = drawn(tmp_path / "p.html")
    matrix, *maps = data["maps"]
    assert matrix["values"][0][0] is None
    assert matrix["values"][0][1] == pytest.approx(matrix["values"][1][0])
    assert [len(m["values"]) for m in maps] == [64, 64]
    assert sum(map(sum, maps[0]["values"])) == pytest.approx(1)
    assert {line["name"] for line in data["lines"][0]["series"]} >= {
        "OT, checkpoint 0",
        "OT, checkpoint 1",
    }


def test_plot_of_a_stored_report(cli, demo_pair, tmp_path):
    merged = cli("merge", *demo_pair, "-o", tmp_path / "f.safetensors", "--report", "-")
    json.loads(merged.out)
    run = cli("inspect", "-", "--plot", tmp_path / "p.html", stdin=merged.out)
    assert run.code == 0
    assert len(drawn(tmp_path / "p.html")["lines"][0]["series"]) == 2


@pytest.mark.parametrize("junk", ["NaN", "1e999", "-Infinity"])
def test_a_report_from_outside_must_be_finite(cli, tmp_path, junk):
    text = re.sub(r'"ot_cost": [\d.]+', f'"ot_cost": {junk}', make_report().to_json())
    run = cli("inspect", "-", "--plot", tmp_path / "p.html", stdin=text)
    assert run.code == 3
    assert not (tmp_path / "p.html").exists()


def test_a_report_from_outside_may_name_any_checkpoint(cli, tmp_path):
    text = make_report(pairs=(Pair(10**9, 1, 0.75, None, 1.5, 0.9, ()),)).to_json()
    assert cli("inspect", "-", "--plot", tmp_path / "p.html", stdin=text).code == 0


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (("--plot", "x.pdf"), 2, "use one of: .png, .svg, .html"),
        (("--plot", "nowhere/x.png"), 6, "there is no folder"),
        (("--plot", "x.html", "--align", "none"), 2, "no OT costs to draw"),
        (("--plot", "x.html", "--report", "x.html"), 2, "same name"),
        (("--json", "--report", "-"), 2, "two results"),
        (("--max-moved", "1.5"), 2, "from 0 to 1"),
        (("--max-moved", "nan"), 2, "from 0 to 1"),
        (("--max-moved", "0.5"), 7, "move more than 0.5"),
        (("--max-moved", "0.5", "--align", "none"), 7, "no moved fractions"),
    ],
)
def test_wrong_input(cli, demo_pair, tmp_path, monkeypatch, options, code, text):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    run = cli("inspect", *demo_pair, *options)
    assert run.code == code
    assert text in run.out + run.err
    assert sorted(tmp_path.iterdir()) == before


# -- gates and reports


def test_gate_on_moved_units(cli, tmp_path):
    start = net([16, 40, 30, 4])
    paths = saved(tmp_path, a=start, b=start, c=net([16, 20, 30, 4], seed=2))
    assert cli("inspect", *paths[:2], "--max-moved", "0").code == 0
    wide = cli("inspect", paths[2], paths[0], "--max-moved", "1", "--max-cost", "2")
    assert wide.code == 7
    assert "units of different number" in wide.err


def test_report_is_filed_and_shown_though_the_gate_fails(cli, demo_pair, tmp_path):
    path = tmp_path / "r.json"
    run = cli("inspect", *demo_pair, "--max-cost", "0.1", "--report", path)
    assert run.code == 7
    REPORT.validate(json.loads(path.read_text()))
    piped = cli("inspect", *demo_pair, "--max-cost", "0.1", "--report", "-", "-q")
    assert piped.code == 7
    assert json.loads(piped.out)["spaces"] == json.loads(path.read_text())["spaces"]
    assert piped.err.startswith("error: 2 of 2 spaces cost more than 0.1")


def test_report_on_standard_output_makes_no_file(cli, demo_pair, tmp_path):
    run = cli("merge", *demo_pair, "-o", tmp_path / "f.safetensors", "--report", "-")
    assert run.code == 0
    REPORT.validate(json.loads(run.out))
    assert not (tmp_path / "f.report.json").exists()
    refused = cli("merge", *demo_pair, "-o", tmp_path / "f.safetensors", "--report", "-")
    assert (refused.code, refused.out) == (6, "")


@pytest.mark.slow
def test_two_runs_say_the_same(cli, demo_pair, tmp_path):
    """Whole JSON, apart from timings and memory: `inspect`, `merge`, and three models."""
    third = saved(tmp_path, third=load_file(demo_pair[0]))[0]
    lines = [
        ("inspect", *demo_pair, "--ot-costs", "--json"),
        ("inspect", *demo_pair, third, "--ot-costs", "--json", "--matcher", "auto"),
        ("merge", *demo_pair, "-o", tmp_path / "f.safetensors", "--overwrite", "--json"),
    ]
    for line in lines:
        first, second = (json.loads(cli(*line).out) for _ in range(2))
        for envelope in (first, second):
            assert envelope["report"].pop("timings")
            assert envelope["report"].pop("peak_rss_bytes")
        assert json.dumps(first) == json.dumps(second)


def test_estimate_needs_no_weights():
    """Shapes alone: the models are never read."""
    from otfuse_cli.session.parents import assemble, open_checkpoints

    with open_checkpoints([net([6, 8, 3]), net([6, 8, 3], seed=1)], None) as checkpoints:
        parents = assemble(checkpoints, 1, "auto", "cpu")
        for checkpoint in checkpoints:
            checkpoint.read = None
        assert estimate_merge(parents.sources, parents.anchor, Recipe()).flop > 0


def test_allowed_differences_are_listed_and_compared_all_the_same():
    anchor, other = net([6, 8, 3]), net([6, 8, 3], seed=1)
    other["scale"] = torch.ones(3)
    with pytest.raises(IncompatibleModels) as refused:
        otfuse_cli.inspect(other, anchor)
    assert "--no-strict" in refused.value.fix
    report = otfuse_cli.inspect(other, anchor, strict=False, ot_costs=True)
    assert [(d.kind, d.name) for d in report.differences] == [("extra", "scale")]
    assert report.spaces
    wide = net([6, 8, 4], seed=1)
    with pytest.raises(IncompatibleModels) as refused:
        otfuse_cli.inspect(wide, anchor)
    assert "--vocab common" in refused.value.fix
    report = otfuse_cli.inspect(wide, anchor, vocab="common", ot_costs=True)
    assert {d.kind for d in report.differences} == {"size"}
    assert any("--vocab common" in w for w in report.warnings)


def test_activations_are_compared_on_inputs():
    pair = net([6, 8, 3]), net([6, 8, 3], seed=1)
    inputs = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    options = {"arch": "mlp", "ot_costs": True}
    by_weights = otfuse_cli.inspect(*pair, **options)
    seen = otfuse_cli.inspect(*pair, **options, align="acts", samples=inputs)
    assert seen.spaces[0].ot_cost != by_weights.spaces[0].ot_cost
    assert seen.spaces[0].random_cost > seen.spaces[0].ot_cost
    # Inputs serve nothing else: costs need not be asked for.
    again = otfuse_cli.inspect(*pair, arch="mlp", align="acts", samples=inputs)
    assert again.spaces == seen.spaces
    with pytest.raises(UsageError, match="needs inputs"):
        otfuse_cli.inspect(*pair, **options, align="acts")
