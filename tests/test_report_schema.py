"""Reports and envelopes against the packaged JSON Schema."""

from __future__ import annotations

import json
from dataclasses import fields
from importlib import resources

import jsonschema
import pytest

from conftest import make_report
from otfuse_cli import errors
from otfuse_cli.cli.app import program
from otfuse_cli.cli.render import Outcome
from otfuse_cli.report import files, records, schema
from otfuse_cli.requests.requests import CHOICES, Recipe

SCHEMA = json.loads((resources.files("otfuse_cli.report") / "report.schema.json").read_text())
REPORT = jsonschema.Draft202012Validator(SCHEMA)


@pytest.fixture
def envelope_validator():
    from referencing import Registry, Resource

    registry = Registry().with_resource("urn:otfuse:report:1", Resource.from_contents(SCHEMA))
    return jsonschema.Draft202012Validator(
        {"$ref": "urn:otfuse:report:1#/$defs/envelope"}, registry=registry
    )


def test_schema_itself():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_shipped_schema_is_the_one_of_the_records():
    """`python -m otfuse_cli.report.schema` writes it anew."""
    assert schema.schema() == SCHEMA


def test_full_and_empty_reports():
    REPORT.validate(make_report().to_dict())
    REPORT.validate(records.Report("inspect", "0.1.0").to_dict())


@pytest.mark.parametrize(
    ("record", "definition"),
    [
        (records.FileRecord, "file"),
        (records.SpaceRecord, "space"),
        (records.LayerRecord, "layer"),
        (records.GraphRecord, "graph"),
        (records.Candidate, "candidate"),
        (records.Difference, "difference"),
        (records.Pair, "pair"),
        (records.Estimate, "estimate"),
        (records.Checks, "checks"),
        (records.Pruning, "pruning"),
        (records.Widened, "widened"),
        (records.PrunedSpace, "pruned_space"),
        (records.PrunedLayer, "pruned_layer"),
    ],
)
def test_records_and_schema_have_the_same_keys(record, definition):
    part = SCHEMA["$defs"][definition]
    assert list(part["properties"]) == part["required"] == list(record.__struct_fields__)
    assert part["additionalProperties"] is False


def test_report_and_schema_have_the_same_keys():
    names = ["schema", *records.Report.__struct_fields__]
    assert list(SCHEMA["properties"]) == SCHEMA["required"] == names


def test_recipe_and_schema_have_the_same_options():
    known = SCHEMA["$defs"]["recipe"]["properties"]
    assert {f.name for f in fields(Recipe)} <= set(known)
    for name, choices in CHOICES.items():
        assert known[name]["enum"] == list(choices)


def test_schema_has_every_command():
    known = SCHEMA["properties"]["command"]["enum"]
    assert set(known) == set(program().commands)


def whole_report():
    """A report with something in every field, those of other commands too."""
    axes = (records.AxisRecord("h1", ("h1",), ("out",)),)
    return make_report(
        recipe={
            "align": "wts",
            "epsilon": 0.05,
            "anchor": 1,
            "arch": ["mlp", "mlp"],
            "amount": 0.5,
            "layer": {"fc1": 0.5},
            "weights": [0.5, 0.5],
            "input_shape": [1, 8],
            "num_samples": 10,
            "weight_rules": [{"pattern": "fc*", "weights": [1, 0]}],
        },
        tensors=(records.TensorRecord("fc1.weight", (4, 2), "float32", axes),),
        yardsticks=(records.StepRecord("parent a", 0.5, 97.5, False),),
        steps=(records.StepRecord("average", 0.5, 97.5, True),),
        refits=(records.RefitRecord("fc1", 0.5, 0.25),),
        pruning=records.Pruning(
            "l1",
            10,
            5,
            0.5,
            (records.PrunedSpace("h1", 4, 2, 1),),
            (records.PrunedLayer("fc1", 8, 4, 0.5),),
            ("hidden_size: 2",),
        ),
        widened=records.Widened(10, 20, (records.WidenedSpace("h1", 4, 8, 6),), ("fc1: 6",)),
    )


def changed(path, value):
    """A whole report as plain values, with `value` at `path` (`spaces.0.sizes`)."""
    data = at = whole_report().to_dict()
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    for key in parents:
        at = at[key]
    at[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("extra", 1),
        ("schema", "otfuse.report/2"),
        ("command", "fuse"),
        ("inputs.0.sha256", "a" * 63),
        ("inputs.0.dtypes.float32", 0),
        ("inputs.0.parameters", -1),
        ("recipe.align", "maybe"),
        ("recipe.matcher", "best"),
        ("recipe.colour", "blue"),
        ("recipe.epsilon", 0),
        ("recipe.effort", None),
        ("recipe.beta", 1.5),
        ("recipe.steps", 1),
        ("recipe.anchor", -1),
        ("recipe.arch", ["mlp"]),
        ("recipe.amount", 1),
        ("recipe.layer.fc1", -1),
        ("recipe.weights.0", 1.5),
        ("recipe.input_shape.0", 0),
        ("recipe.num_samples", 0),
        ("recipe.weight_rules.0.note", "x"),
        ("recipe.weight_rules.0.weights", [2]),
        ("tensors.0.shape.0", -1),
        ("tensors.0.axes.0.note", "x"),
        ("tensors.0.axes.0.roles", None),
        ("graph.spaces.h1", -1),
        ("graph.pinned.0.note", "x"),
        ("spaces.0.sizes", [1]),
        ("spaces.0.sizes", [1, 1, 1]),
        ("spaces.0.note", "x"),
        ("spaces.0.ot_cost", -1),
        ("spaces.0.moved_fraction", 1.5),
        ("spaces.0.marginal_error", None),
        ("layers.0.diagonal_mass", 1.5),
        ("candidates.0.agreement", 1.5),
        ("candidates.0.flop", None),
        ("differences.0.kind", "colour"),
        ("differences.0.shape.0", -1),
        ("pairs.0.ot_cost", None),
        ("estimate.memory_bytes", 0.5),
        ("estimate.steps.sweep", -1),
        ("checks.function", "maybe"),
        ("checks.max_error", -1),
        ("steps.0.agreement", 1.5),
        ("steps.0.accuracy", 101),
        ("yardsticks.0.kept", 1),
        ("refits.0.before", -1),
        ("pruning.criterion", "l3"),
        ("pruning.sparsity", 1.5),
        ("pruning.spaces.0.units", 0),
        ("pruning.layers.0.kept", -1),
        ("widened.parameters", -1),
        ("widened.spaces.0.units", 0),
        ("evaluation.accuracy", {"a": "good"}),
        ("evaluation.accuracy", [1]),
        ("warnings", None),
        ("timings", {"read": -1}),
        ("peak_rss_bytes", 0.5),
    ],
)
def test_schema_is_strict(path, value):
    assert REPORT.is_valid(whole_report().to_dict())
    assert not REPORT.is_valid(changed(path, value))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("inputs.0.sha256", None),
        ("recipe.amount", None),
        ("recipe.input_shape", None),
        ("recipe.num_samples", None),
        ("recipe.arch", "mlp"),
        ("tensors.0.axes", None),
        ("graph", None),
        ("spaces.0.ot_cost", None),
        ("candidates.0.objective", -1),
        ("differences.0.shape", None),
        ("estimate", None),
        ("checks.function", None),
        ("checks.max_error", None),
        ("steps.0.accuracy", None),
        ("pruning", None),
        ("pruning.criterion", None),
        ("pruning.sparsity", -0.5),
        ("pruning.spaces.0.survivors", None),
        ("evaluation", None),
        ("evaluation.accuracy.fused", None),
    ],
)
def test_schema_takes_what_is_not_there(path, value):
    REPORT.validate(changed(path, value))


def test_missing_keys_are_refused():
    for name in SCHEMA["required"]:
        partial = make_report().to_dict()
        del partial[name]
        assert not REPORT.is_valid(partial), name


def test_envelopes(envelope_validator):
    failure = errors.GateFailed("too dear", where="h1")
    for outcome in (
        Outcome("merge", report=make_report()),
        Outcome(None, error=errors.UsageError("what?")),
        Outcome("inspect", report=make_report(), error=failure),
    ):
        envelope_validator.validate(outcome.envelope())
    envelope = outcome.envelope()
    for change in (
        {"extra": 1},
        {"schema": records.SCHEMA},
        {"exit_code": 9},
        {"report": {}},
        {"error": {**failure.to_dict(), "exit_code": 0}},
        {"error": {**failure.to_dict(), "note": "x"}},
    ):
        assert not envelope_validator.is_valid({**envelope, **change}), change


def test_report_survives_the_round_trip():
    text = make_report().to_json()
    assert files.report_from_dict(json.loads(text)) == files.report_from_dict(
        Outcome("merge", report=make_report()).envelope()
    )
    assert files.report_from_dict(json.loads(text)).to_json() == text


@pytest.mark.slow
def test_reports_of_real_runs(cli, demo_pair, tmp_path):
    a, b = demo_pair
    runs = [
        cli("demo", "--json"),
        cli("merge", a, b, "-o", tmp_path / "f.safetensors", "--json"),
        cli("prune-fuse", a, b, "--json"),
        cli("prune", a, "-o", tmp_path / "p.pt", "--amount", "0.5", "--json"),
        cli("inspect", a, "--json"),
        cli("inspect", a, b, "--ot-costs", "--json"),
    ]
    for run in runs:
        assert run.code == 0, run.out
        REPORT.validate(json.loads(run.out)["report"])
    REPORT.validate(json.loads((tmp_path / "f.report.json").read_text()))


def test_docs_name_every_key():
    from conftest import ROOT

    text = (ROOT / "docs" / "report.md").read_text()
    parts = [SCHEMA, *SCHEMA["$defs"].values()]
    names = {name for part in parts for name in part.get("properties", {})}
    names -= set(SCHEMA["$defs"]["recipe"]["properties"]) - {"weights", "anchor"}
    assert [
        name for name in sorted(names) if f"`{name}`" not in text and f"`{name}[]`" not in text
    ] == []


def test_reports_of_the_first_release_can_be_read():
    later = {"differences": (), "pairs": (), "estimate": None}
    later |= {"steps": (), "yardsticks": (), "refits": (), "pruning": None, "widened": None}
    data = make_report(**later).to_dict()
    for name in later:
        del data[name]
    for record in (*data["spaces"], *data["layers"]):
        record.pop("random_cost")
    for layer in data["layers"]:
        layer.pop("moved_fraction")
    assert files.report_from_dict(data) == make_report(**later)


@pytest.mark.parametrize("verdict", ["kept?", [], 1])
def test_a_verdict_from_outside_may_be_anything(verdict):
    data = changed("checks", {"function_preserved": verdict, "max_error": 0.5})
    with pytest.raises(ValueError, match=r"broken report: .*`\$.checks.function`"):
        files.report_from_dict(data)


def test_reports_of_newer_releases_can_be_read():
    newer = [("later", 1), ("command", "distil"), ("differences.0.kind", "layout")]
    for path, value in newer:
        assert files.report_from_dict(changed(path, value)).version == "0.1.0"


def test_a_report_that_is_read_is_written_as_it_was():
    """Whole numbers stay whole, where the first writer had no fraction."""
    data = changed("estimate.flop", 10**30)
    data["spaces"][0]["ot_cost"] = 0
    data["layers"][0]["ot_cost"] = -1e-17
    text = json.dumps(data, indent=2) + "\n"
    assert files.parse(text, where="here").to_json() == text


@pytest.mark.parametrize(
    ("path", "value", "place"),
    [
        ("spaces.1.sizes", [1], "$.spaces[1].sizes"),
        ("spaces.1.sizes.0", "wide", "$.spaces[1].sizes[0]"),
        ("tensors.0.axes.0.roles", "out", "$.tensors[0].axes[0].roles"),
        ("steps.0.agreement", "good", "$.steps[0].agreement"),
        ("refits.0.after", None, "$.refits[0].after"),
        ("pruning.layers.0.kept", 0.5, "$.pruning.layers[0].kept"),
        ("graph.pinned.0", {"axis": "fc1.weight:1"}, "$.graph.pinned[0]"),
        ("graph.spaces.h1", True, "$.graph.spaces[...]"),
        ("spaces.0.note", "x", "$.spaces[0]"),
        ("checks.function", "maybe", "$.checks.function"),
        ("evaluation.accuracy.fused", float("nan"), "$.evaluation.accuracy.fused"),
        ("recipe.weights.0", float("inf"), "$.recipe.weights[0]"),
    ],
)
def test_a_broken_report_says_where(path, value, place):
    with pytest.raises(errors.UnreadableInput) as caught:
        files.parse(json.dumps(changed(path, value)), where="here")
    assert caught.value.why.startswith("broken report: ")
    assert caught.value.why.endswith(f"- at `{place}`")


def test_what_every_report_has_is_required():
    first = set(SCHEMA["required"]) - {"schema", "steps", "refits", "pruning", "yardsticks"}
    for name in first - {"differences", "pairs", "estimate", "widened"}:
        data = make_report().to_dict()
        del data[name]
        with pytest.raises(ValueError, match=f"broken report: .*`{name}`"):
            files.report_from_dict(data)
