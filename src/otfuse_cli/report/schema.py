"""The JSON Schema of reports and envelopes (2020-12), made from the records.

The package ships it as `report.schema.json`; `python -m otfuse_cli.report.schema` writes that file
anew. A command never imports this module.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec

from ..errors import ExitCode
from ..requests.recipe import CHOICES
from .records import ENVELOPE, SCHEMA, Record, Report
from .value_types import Amount, Number, Positive, Share, promise

SCHEMA_FILE = Path(__file__).with_name("report.schema.json")
_DEFINITIONS = "#/$defs/"
_FIRST = ("description", "type")  # what a reader of the file looks for


def _chosen(option: str) -> msgspec.Meta:
    return promise(enum=list(CHOICES[option]))


class WeightRule(TypedDict):
    """Weights of the tensors whose names match a pattern."""

    pattern: str
    weights: list[Share]


class RecipeRecord(TypedDict, total=False):
    """Every effective option. A command's recipe has those that it takes."""

    align: Annotated[str, _chosen("align")]
    matcher: Annotated[str, _chosen("matcher")]
    passes: Positive
    iterate: Annotated[int, promise(minimum=0)]
    effort: Annotated[Number, promise(exclusiveMinimum=0)]
    repair: Annotated[str, _chosen("repair")]
    metric: Annotated[str, _chosen("metric")]
    unit_norm: bool
    mass: Annotated[str, _chosen("mass")]
    post_activations: bool
    solver: Annotated[str, _chosen("solver")]
    epsilon: Annotated[Number, promise(exclusiveMinimum=0)]
    epsilon_unit: Annotated[str, _chosen("epsilon_unit")]
    residual: Annotated[str, _chosen("residual")]
    beta: Share
    scale: Annotated[str, _chosen("scale")]
    seed: int
    weights: Annotated[list[Share], promise("Effective weights, in the order of inputs.")]
    samples: Annotated[str | None, promise("Where the samples come from; `memory` for arrays.")]
    synthetic: bool
    synthetic_kind: str
    synthetic_steps: Positive | None
    input_shape: list[Positive] | None
    refit: bool
    blend: Annotated[str, _chosen("blend")]
    require_gain: bool
    ridge: Amount
    calibrate: Annotated[str, _chosen("calibrate")]
    num_samples: Positive | None
    batch: Positive
    over: Annotated[str, _chosen("over")]
    widths: list[Annotated[Number, promise(exclusiveMinimum=0)]] | None
    inputs: Annotated[str | None, promise("As samples: what a curve over widths fuses on.")]
    num_inputs: Positive | None
    steps: Annotated[int, promise("Points of a curve, both ends included.", minimum=2)]
    anchor: Annotated[int, promise("Position of the anchor among the inputs.", minimum=0)]
    arch: Annotated[
        str | Annotated[list[str], promise(minItems=2)],
        promise("One for all checkpoints, or one for each."),
    ]
    spec: str | None
    paper: bool
    strict: bool
    untie: bool
    vocab: Annotated[str, _chosen("vocab")]
    weight_rules: Annotated[
        list[WeightRule],
        promise("Weights by tensor: the first pattern that matches a name counts."),
    ]
    skip: list[str]
    only: list[str]
    keep_extras: bool
    shard_size: str | None
    dtype: Annotated[str, _chosen("dtype")]
    device: str
    criterion: Annotated[str, _chosen("criterion")]
    amount: Annotated[
        Number | None,
        promise(
            "Share of units removed from every space; null: from named ones only.",
            exclusiveMinimum=0,
            exclusiveMaximum=1,
        ),
    ]
    depth: Positive | None
    layer: Annotated[
        dict[str, Annotated[Number, promise(minimum=0)]],
        promise("By space, module or tensor: shares to remove, or of a merge how wide."),
    ]
    width: Annotated[
        Number | None,
        promise("How wide the result is, relative to the anchor.", exclusiveMinimum=0),
    ]
    width_multiple: Positive | None
    keep_shape: bool


class ErrorRecord(Record, frozen=True):
    """A failure: what, where, why, and what to do."""

    type: str
    exit_code: Annotated[int, promise(enum=[int(code) for code in ExitCode if code])]
    what: str
    where: str | None
    why: str | None
    fix: str | None


class Envelope(Record, frozen=True, tag_field="schema", tag=ENVELOPE):
    """What --json prints."""

    command: str | None
    exit_code: Annotated[int, promise(enum=[int(code) for code in ExitCode])]
    report: Report | None
    error: ErrorRecord | None


def schema() -> dict[str, Any]:
    """The schema: a report at the top, its parts and the envelope among the definitions.

    It is stricter than the reader of stored reports: every key is there, and no other.
    """
    _, parts = msgspec.json.schema_components(
        [Report, RecipeRecord, Envelope], ref_template=_DEFINITIONS + "{name}"
    )
    definitions = {_short(name): _whole(_tidy(part)) for name, part in parts.items()}
    definitions["recipe"]["required"] = []
    report = definitions.pop("report")
    report["properties"]["recipe"] = {"$ref": f"{_DEFINITIONS}recipe"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:otfuse:report:1",
        **report,
        "title": SCHEMA,
        "$defs": definitions,
    }


def schema_text() -> str:
    """The schema as `report.schema.json` holds it."""
    return json.dumps(schema(), indent=2) + "\n"


def _short(name: str) -> str:
    """`PrunedSpace` -> `pruned_space`, `FileRecord` -> `file`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name.removesuffix("Record")).lower()


def _whole(part: dict[str, Any]) -> dict[str, Any]:
    """An object that has all of its keys, and no others: so is everything that we write."""
    return {**part, "required": list(part["properties"]), "additionalProperties": False}


def _tidy(node: Any) -> Any:
    """A part of the schema without titles and defaults, with our names and one list of types."""
    if isinstance(node, list):
        return [_tidy(item) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        name = _short(node["$ref"].removeprefix(_DEFINITIONS))
        return {"$ref": "#" if name == "report" else _DEFINITIONS + name}
    tidy: dict[str, Any] = {}
    for keyword, value in node.items():
        if keyword == "properties":  # keys of ours, not keywords: one of them may be a `title`
            tidy[keyword] = {name: _tidy(part) for name, part in value.items()}
        elif keyword == "description":
            tidy[keyword] = " ".join(value.split())
        elif keyword not in ("title", "default"):
            tidy[keyword] = _tidy(value)
    tidy = _one_type(tidy)
    return {word: tidy[word] for word in _FIRST if word in tidy} | tidy


def _one_type(node: dict[str, Any]) -> dict[str, Any]:
    """`anyOf` of plain types as a list of types: `minimum` and the like say nothing of null."""
    options = node.get("anyOf", [])
    if not all("type" in option and "enum" not in option for option in options):
        return node
    types: list[str] = []
    merged = {keyword: value for keyword, value in node.items() if keyword != "anyOf"}
    for option in options:
        kind = option["type"]
        types += [kind] if isinstance(kind, str) else kind
        merged |= {keyword: value for keyword, value in option.items() if keyword != "type"}
    if "number" in types:  # of which whole numbers are some
        types = [kind for kind in types if kind != "integer"]
    if types:
        merged["type"] = types[0] if len(types) == 1 else types
    return merged


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
