"""The document of layer graphs of real networks, from the results of `networks.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

Result = Mapping[str, Any]

MUCH_TOUCHED = 0.95
LIBRARIES = ("torchvision", "timm", "transformers")
HEAD = """\
# Layer graphs of real networks

Generated; don't edit. `python benchmarks/networks.py --results results.jsonl` measures,
`python benchmarks/networks.py --results results.jsonl --table` writes this page.

Networks of libraries are built with random weights, at the smallest inputs that they run on, and
traced ([architecture](architecture.md)). Those of transformers are default configs made small.
The *twin* is the network with all of its free units permuted at random, on weights and statistics
drawn anew; it has to compute the same outputs ([proof](methods/proof.md)). *Touched* is the share
of parameters in tensors with free units. *Error* is the largest change of an output relative to the
largest output, *allowed* what rounding may make of it; a network whose outputs aren't finite in
float64 is run in float32. CPU seconds and the peak of its
process's memory are of the trace; imports are in the memory (0.3 GiB), not in the time.
More than 8 GiB or 240 CPU seconds in all count as a failure. What could not be built, or not be run
on the inputs made up here, says nothing about the graph and is counted apart.
A run that was stopped has measured the small networks and one of each family first:
the table holds what there was.
"""


def document(results: Iterable[Result]) -> str:
    """The page: a summary, a row for every network, every failure with its reason."""
    ordered = sorted(results, key=lambda r: (LIBRARIES.index(_library(r)), r["name"]))
    parts = [HEAD, "## Summary\n", _summary(ordered), "## Networks\n", _networks(ordered)]
    parts += ["## Failures\n", _failures(ordered), "## Warnings\n"]
    parts += [_operators(ordered), "## Held in place\n", _held(ordered)]
    return "\n".join(parts).rstrip() + "\n"


def _library(result: Result) -> str:
    return str(result["name"].partition("/")[0])


def _summary(results: Sequence[Result]) -> str:
    rows = [
        "| library | networks | ran | traced | twin run | twin kept | median touched |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for library in LIBRARIES:
        rows.append(_summary_row(library, [r for r in results if _library(r) == library]))
    rows.append(_summary_row("all", results))
    aims = "Aims: 98 % of those that ran are traced, and 100 % of the twins that ran are kept."
    return "\n".join(rows) + f"\n\n{aims}\n"


def _summary_row(title: str, results: Sequence[Result]) -> str:
    ran = [r for r in results if r["status"] in ("traced", "not traced")]
    traced = [r for r in ran if r["status"] == "traced"]
    run = [r for r in traced if r["twin"] != "left out"]
    kept = [r for r in run if r["twin"] == "kept"]
    touched = f"{100 * median(r['touched'] for r in traced):.1f} %" if traced else ""
    cells = [
        title, str(len(results)), str(len(ran)), _of(traced, ran), str(len(run)), _of(kept, run),
        touched,
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _of(some: Sequence[Result], everything: Sequence[Result]) -> str:
    if not everything:
        return "0"
    return f"{len(some)} ({100 * len(some) / len(everything):.1f} %)"


def _networks(results: Sequence[Result]) -> str:
    rows = [
        "| network | M parameters | input | graph | spaces | touched | twin | error | allowed "
        "| CPU s | peak MiB |",
        "|---|--:|---|---|--:|--:|---|--:|--:|--:|--:|",
    ]
    rows += [_network_row(result) for result in results]
    return "\n".join(rows) + "\n"


def _network_row(result: Result) -> str:
    def shown(key: str, form: str, scale: float = 1) -> str:
        return format(result[key] * scale, form) if key in result else ""

    cells = [
        result["name"],
        shown("parameters", ".2f", 1e-6),
        result.get("input", ""),
        result["status"],
        shown("spaces", "d"),
        shown("touched", ".1%"),
        result.get("twin", ""),
        shown("error", ".1e"),
        shown("allowed", ".0e"),
        shown("cpu", ".1f"),
        shown("peak", ".0f", 2**-20),
    ]
    return f"| {' | '.join(cells)} |"


def _failures(results: Sequence[Result]) -> str:
    """Lists under a heading for each kind, one reason once with all of its networks."""
    titles = {
        "twin not kept": "The twin computes something else: a wrong graph",
        "not traced": "Not traced",
        "twin left out": "Traced, the twin not run",
        "not run": "Not run: the inputs made up here don't fit",
        "not built": "Not built",
    }
    parts = []
    for kind, title in titles.items():
        reasons: dict[str, list[str]] = {}
        for result in results:
            if _kind(result) == kind:
                reason = "; ".join(result.get("wrong", ())) or result.get("reason", "")
                reasons.setdefault(reason, []).append(result["name"])
        if reasons:
            parts.append(f"### {title}\n\n" + "\n".join(map(_group, reasons.items())) + "\n")
    return "\n".join(parts) or "None.\n"


def _operators(results: Sequence[Result]) -> str:
    """What the trace warned of: each warning once, with the networks that it was given for."""
    places: dict[str, list[str]] = {}
    for result in results:
        operators = {w.partition(";")[0] for w in result.get("warnings", ())}
        for operator in sorted(operators):
            places.setdefault(operator, []).append(result["name"])
    said = (
        "What an operator without a rule reads and writes stays in place; all around it is aligned "
        "all the same. What a network chooses by its data (the boxes that a detector keeps) is "
        "traced as if all of it were chosen; the twin is the network as it is."
    )
    return f"{said}\n\n" + "\n".join(map(_group, sorted(places.items()))) + "\n"


def _held(results: Sequence[Result]) -> str:
    """Networks of which much is pinned, by the reason that holds most of it."""
    names: dict[str, list[str]] = {}
    for result in results:
        held = result.get("held")
        if held and result["touched"] < MUCH_TOUCHED:
            reason = max(held, key=lambda one: (held[one], one))
            names.setdefault(reason, []).append(f"{result['name']} ({held[reason]:.0%})")
    rows = [f"- `{reason}`: {', '.join(of)}" for reason, of in sorted(names.items())]
    said = (
        f"Of these less than {MUCH_TOUCHED:.0%} is touched, here with the share under the most "
        "frequent reason. `unused` are layers that the pass doesn't run, `constant` tables of "
        "sines added to the units, `frequencies` Fourier transforms over them."
    )
    return f"{said}\n\n" + ("\n".join(rows) or "None.") + "\n"


def _kind(result: Result) -> str:
    return f"twin {result['twin']}" if result["status"] == "traced" else str(result["status"])


def _group(reason: tuple[str, list[str]]) -> str:
    text, names = reason
    quoted = f"``{text}``" if "`" in text else f"`{text}`"
    return f"- {', '.join(names)}: {quoted}"
