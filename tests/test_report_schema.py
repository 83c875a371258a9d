"""Reports and envelopes against the packaged JSON Schema."""

from __future__ import annotations

import json
from dataclasses import fields
from importlib import resources

import jsonschema
import pytest

from conftest import make_report
from otfuse_cli import errors
from otfuse_cli.cli.render import Outcome
from otfuse_cli.report import files, records
from otfuse_cli.requests.requests import CHOICES, Recipe

SCHEMA = json.loads((resources.files("otfuse_cli.report") / "report.schema.json").read_text())
REPORT = jsonschema.Draft202012Validator(SCHEMA)
ENVELOPE = REPORT.evolve(schema={"$ref": "urn:otfuse:report:1#/$defs/envelope"})


@pytest.fixture
def envelope_validator():
    from referencing import Registry, Resource

    registry = Registry().with_resource("urn:otfuse:report:1", Resource.from_contents(SCHEMA))
    return jsonschema.Draft202012Validator(
        {"$ref": "urn:otfuse:report:1#/$defs/envelope"}, registry=registry
    )


def test_schema_itself():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


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
        (records.PrunedSpace, "pruned_space"),
        (records.PrunedLayer, "pruned_layer"),
    ],
)
def test_records_and_schema_have_the_same_keys(record, definition):
    part = SCHEMA["$defs"][definition]
    assert list(part["properties"]) == part["required"] == [f.name for f in fields(record)]
    assert part["additionalProperties"] is False


def test_report_and_schema_have_the_same_keys():
    names = ["schema", *(f.name for f in fields(records.Report))]
    assert set(SCHEMA["properties"]) == set(SCHEMA["required"]) == set(names)


def test_recipe_and_schema_have_the_same_options():
    known = SCHEMA["$defs"]["recipe"]["properties"]
    assert {f.name for f in fields(Recipe)} <= set(known)
    for name, choices in CHOICES.items():
        assert known[name]["enum"] == list(choices)


@pytest.mark.parametrize(
    "change",
    [
        {"extra": 1},
        {"schema": "otfuse.report/2"},
        {"spaces": [{**make_report().to_dict()["spaces"][0], "sizes": [1]}]},
        {"spaces": [{**make_report().to_dict()["spaces"][0], "note": "x"}]},
        {"recipe": {"align": "maybe"}},
        {"recipe": {"colour": "blue"}},
        {"timings": {"read": -1}},
        {"peak_rss_bytes": 0.5},
    ],
)
def test_schema_is_strict(change):
    assert not REPORT.is_valid({**make_report().to_dict(), **change})


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
    assert not envelope_validator.is_valid({**outcome.envelope(), "extra": 1})


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
    later |= {"steps": (), "refits": (), "pruning": None}
    data = make_report(**later).to_dict()
    for name in later:
        del data[name]
    for record in (*data["spaces"], *data["layers"]):
        record.pop("random_cost")
    for layer in data["layers"]:
        layer.pop("moved_fraction")
    assert files.report_from_dict(data) == make_report(**later)
