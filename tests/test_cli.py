"""The command line: options to requests, exit codes, the envelope, help and its documentation."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import shlex
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
import typer

from conftest import ROOT, make_report
from otfuse_cli import __version__, errors, runtime
from otfuse_cli.cli import app, render
from otfuse_cli.cli.options import RunOptions
from otfuse_cli.commands import prune_fuse
from otfuse_cli.report import files
from otfuse_cli.report.gate import gate
from otfuse_cli.report.records import Report
from otfuse_cli.requests import requests
from otfuse_cli.requests.option import option_of
from otfuse_cli.requests.python_values import READERS
from otfuse_cli.running import class_driven, norm_memory
from otfuse_cli.session import moved_kinds, open_inputs

PROGRAM = app.program()
COMMANDS = PROGRAM.commands
REQUESTS = {
    "merge": requests.MergeRequest,
    "inspect": requests.InspectRequest,
    "prune-fuse": requests.PruneFuseRequest,
    "prune": requests.PruneRequest,
    "check": requests.CheckRequest,
    "eval": requests.EvaluateRequest,
    "curve": requests.CurveRequest,
    "demo": requests.DemoRequest,
}
FAILURES = {
    errors.UsageError: 2,
    errors.UnreadableInput: 3,
    errors.IncompatibleModels: 4,
    errors.SolveFailed: 5,
    errors.OutputRefused: 6,
    errors.GateFailed: 7,
}


def flags_of(name):
    command = COMMANDS[name]
    context = typer.Context(command, **PROGRAM.context_settings)
    options = [p for p in command.get_params(context) if p.param_type_name == "option"]
    return {flag for p in options for flag in (*p.opts, *p.secondary_opts)}


# -- options -> request


def test_merge_request(cli, verbs):
    run = cli("merge", "a.pt", "b.pt", "-o", "f.pt", "--align", "wts")
    assert run.code == 0
    assert verbs["requests"] == [
        requests.MergeRequest(
            checkpoints=(Path("a.pt"), Path("b.pt")), output=Path("f.pt"), align="wts"
        )
    ]


def test_every_option_reaches_the_request(cli, verbs):
    line = (
        "merge a b c -o o.pt --weights 0.5,0.3,0.2 --anchor first --arch mlp --key model "
        "--device cpu --paper --align none --matcher sweep --metric cosine --raw --mass norm "
        "--solver sinkhorn --epsilon 0.1 --residual identity --beta 0.25 --scale paper --seed 7 "
        "--report r.json --overwrite --dtype float16 --skip a.* --skip b --only c --no-strict "
        "--vocab common --keep-extras --shard-size 2GiB"
    )
    assert cli(*line.split()).code == 0
    assert verbs["requests"] == [
        requests.MergeRequest(
            checkpoints=(Path("a"), Path("b"), Path("c")),
            weights=(0.5, 0.3, 0.2),
            anchor="first",
            output=Path("o.pt"),
            report=Path("r.json"),
            overwrite=True,
            dtype="float16",
            arch="mlp",
            key="model",
            device="cpu",
            paper=True,
            align="none",
            matcher="sweep",
            metric="cosine",
            unit_norm=False,
            mass="norm",
            solver="sinkhorn",
            epsilon=0.1,
            residual="identity",
            beta=0.25,
            scale="paper",
            seed=7,
            skip=("a.*", "b"),
            only=("c",),
            strict=False,
            vocab="common",
            keep_extras=True,
            shard_size="2GiB",
        )
    ]


@pytest.mark.slow
def test_arch_may_be_given_for_each_checkpoint(cli, verbs):
    line = ("merge", "a", "b", "-o", "o.pt")
    for said in (["0=n.py:f", "1=n.py:g"], ["0=n.py:f", "n.py:g"], ["1=n.py:g"], ["n.py:g"], []):
        assert cli(*line, *(part for arch in said for part in ("--arch", arch))).code == 0
    found = [request.arch for request in verbs["requests"]]
    assert found == [("0=n.py:f", "1=n.py:g"), ("0=n.py:f", "n.py:g"), "1=n.py:g", "n.py:g", "auto"]


def test_prune_fuse_request(cli, verbs):
    assert cli("prune-fuse", "dense.pt", "pruned.pt").code == 0
    assert cli("prune-fuse", "dense.pt", "pruned.pt", "--dense-weight", "0.3").code == 0
    dense, pruned = Path("dense.pt"), Path("pruned.pt")
    assert verbs["requests"] == [
        requests.PruneFuseRequest(dense=dense, pruned=pruned),
        requests.PruneFuseRequest(dense=dense, pruned=pruned, dense_weight=0.3),
    ]


def test_inspect_request(cli, verbs):
    assert cli("inspect", "a.pt").code == 0
    assert cli("inspect", "a.pt", "b.pt", "--ot-costs", "--graph", "--max-cost", "0.5").code == 0
    a, b = Path("a.pt"), Path("b.pt")
    assert verbs["requests"] == [
        requests.InspectRequest(checkpoints=(a,)),
        requests.InspectRequest(checkpoints=(a, b), ot_costs=True, graph=True, max_cost=0.5),
    ]


def test_demo_request(cli, verbs):
    assert cli("demo").code == 0
    assert verbs["requests"] == [requests.DemoRequest()]


@pytest.mark.parametrize("name", REQUESTS)
def test_every_request_field_has_an_option(name):
    taken = {parameter.name for parameter in COMMANDS[name].params}
    items = [item for kind in (REQUESTS[name], RunOptions) for item in fields(kind)]
    assert taken == {item.name for item in items}
    assert all(option_of(item) is not None for item in items)


@pytest.mark.parametrize("name", REQUESTS)
def test_options_are_typed_as_the_fields_that_they_fill(name):
    hints = get_type_hints(REQUESTS[name])
    plain = 0
    for item in fields(REQUESTS[name]):
        if READERS.get(hints[item.name]) is not None:
            kind = option_of(item).kind
            assert hints[item.name] in (kind, kind | None, tuple[kind, ...], tuple[int, ...] | None)
            plain += 1
    assert plain > 2


# -- usage errors


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("merge a b -o f --weights 1,x", "--weights 1,x"),
        ("merge a b -o f --weights ,", "--weights ,"),
        ("merge a b -o f --align up", "use one of: wts, acts, none"),
        ("merge a b -o f --metric manhattan", "--metric"),
        ("merge a b -o f --dtype int8", "--dtype"),
        ("merge a b -o f --epsilon 0", "--epsilon 0"),
        ("merge a b -o f --beta 2", "--beta 2"),
        ("merge a b -o f --beta x", "--beta"),
        ("merge a b", "--output"),
        ("merge -o f", "CKPT"),
        ("merge a b -o f --algin wts", "--algin"),
        ("prune-fuse a", "PRUNED"),
        ("prune-fuse a b --weights 1,1", "--weights"),
        ("merge a b -o f --seed -1", "--seed -1"),
        ("merge a b -o f --seed 4294967296", "--seed 4294967296"),
        ("merge a b -o f --max-memory nan", "--max-memory nan"),
        ("merge a b -o f --pass-memory -1", "--pass-memory -1"),
        ("prune a -o f --amount .5 --pass-memory nan", "--pass-memory nan"),
        ("merge a b -o f --num-samples 0", "--num-samples 0"),
        ("prune a -o f --amount 0.5 --seed -1", "--seed -1"),
        ("check a --arch n.py:f --seed -1", "--seed -1"),
        ("eval a --samples x.npz --seed -1", "--seed -1"),
        ("curve a b --samples x.npz --seed -1", "--seed -1"),
        ("inspect a b --max-cost nan", "--max-cost nan"),
        ("inspect a b --max-cost inf", "--max-cost inf"),
        ("inspect a b --max-cost -1", "--max-cost -1"),
        ("mrge a b", "Did you mean 'merge'?"),
        ("--verison", "--verison"),
    ],
)
def test_usage_errors(cli, verbs, line, text):
    run = cli(*line.split())
    assert run.code == 2
    assert run.out == ""
    assert text in run.err
    assert run.err.startswith("error: ")
    assert len(run.err.splitlines()) <= 4
    assert "Traceback" not in run.err
    assert verbs["requests"] == []

    machine = cli(*line.split(), "--json")
    assert machine.code == 2
    envelope = json.loads(machine.out)
    assert envelope["exit_code"] == envelope["error"]["exit_code"] == 2
    command = line.split()[0]
    assert envelope["command"] == (command if command in REQUESTS else None)
    assert machine.err == ""


def test_bare_program_shows_help_and_exits_2(cli):
    run = cli()
    assert run.code == 2
    assert "Commands:" in run.out


def test_version(cli):
    run = cli("--version")
    assert (run.code, run.out, run.err) == (0, f"otfuse {__version__}\n", "")


# -- failures


@pytest.mark.parametrize(("kind", "code"), FAILURES.items())
def test_exit_codes(cli, verbs, kind, code):
    verbs["answer"] = kind("it broke", where="a.pt: fc1", why="because", fix="do this")
    run = cli("merge", "a", "b", "-o", "f")
    assert run.code == code
    assert run.out == ""
    assert run.err == "error: it broke\nwhere: a.pt: fc1\nwhy: because\nfix: do this\n"


def test_unforeseen_failure_is_one_line_without_traceback(cli, verbs):
    verbs["answer"] = RuntimeError("deep trouble\nwith details")
    run = cli("merge", "a", "b", "-o", "f")
    assert run.code == 1
    assert run.err == (
        "error: RuntimeError: deep trouble\nfix: run with --debug for the traceback\n"
    )


@pytest.mark.parametrize(
    "error", [RuntimeError("deep trouble"), errors.SolveFailed("no plan")], ids=["bug", "ours"]
)
def test_debug_shows_the_traceback(cli, verbs, error):
    verbs["answer"] = error
    run = cli("merge", "a", "b", "-o", "f", "--debug")
    assert "Traceback" in run.err
    assert "in verb" in run.err
    machine = cli("merge", "a", "b", "-o", "f", "--debug", "--json")
    assert json.loads(machine.out)["error"]["what"].endswith(str(error))
    assert "Traceback" in machine.err


def test_threads_are_as_many_as_were_allowed(cli, verbs, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(runtime, "_threads", runtime._Threads())
    before = runtime.cores()
    assert cli("merge", "a", "b", "-o", "f").code == 0
    assert (asked, runtime.cores()) == ([], before)
    assert cli("merge", "a", "b", "-o", "f", "--threads", 1).code == 0
    assert (asked, runtime.cores()) == ([1], 1)
    assert len(verbs["requests"]) == 2
    refused = cli("merge", "a", "b", "-o", "f", "--threads", 0)
    assert refused.code == errors.ExitCode.USAGE
    assert "where: --threads 0" in refused.err
    assert len(verbs["requests"]) == 2


def test_interrupted(cli, verbs):
    verbs["answer"] = KeyboardInterrupt()
    run = cli("merge", "a", "b", "-o", "f")
    assert (run.code, run.out, run.err) == (130, "", "error: interrupted\n")
    envelope = json.loads(cli("merge", "a", "b", "-o", "f", "--json").out)
    assert envelope["exit_code"] == 130


def test_missing_files_of_the_verb_are_not_usage_errors(cli, verbs):
    verbs["answer"] = errors.UnreadableInput("no such file", where="a.pt")
    assert cli("inspect", "a.pt").code == 3


# -- the envelope


def test_envelope_contract(cli, verbs):
    run = cli("merge", "a", "b", "-o", "f", "--json")
    assert run.code == 0
    assert json.loads(run.out) == {
        "schema": "otfuse.envelope/1",
        "command": "merge",
        "exit_code": 0,
        "report": make_report().to_dict(),
        "error": None,
    }
    assert run.err == ""


def test_envelope_contract_on_failure(cli, verbs):
    verbs["answer"] = errors.OutputRefused("output exists", where="f", fix="--overwrite")
    run = cli("prune-fuse", "a", "b", "--json")
    assert json.loads(run.out) == {
        "schema": "otfuse.envelope/1",
        "command": "prune-fuse",
        "exit_code": 6,
        "report": None,
        "error": {
            "type": "OutputRefused",
            "exit_code": 6,
            "what": "output exists",
            "where": "f",
            "why": None,
            "fix": "--overwrite",
        },
    }
    assert run.err == ""


def test_report_that_json_cannot_hold_is_a_bug_in_one_envelope(cli, verbs):
    verbs["answer"] = make_report(timings={"read": float("nan")})
    run = cli("merge", "a", "b", "-o", "f", "--json")
    assert run.code == 1
    assert json.loads(run.out)["report"] is None


def test_failed_gate_shows_report_and_error(cli, verbs):
    verbs["answer"] = errors.GateFailed("too dear", report=make_report())
    run = cli("inspect", "a", "b", "--max-cost", "0.1")
    assert run.code == 7
    assert "h1" in run.out
    assert run.err.endswith("error: too dear\n")
    machine = json.loads(cli("inspect", "a", "b", "--max-cost", "0.1", "--json").out)
    assert machine["report"] == make_report().to_dict()
    assert machine["error"]["exit_code"] == machine["exit_code"] == 7


# -- inspect: stored reports


def test_inspect_reads_a_report_from_a_pipe(cli, verbs):
    run = cli("inspect", "--ot-costs", stdin=make_report().to_json())
    assert run.code == 0
    assert "h1" in run.out
    assert "head" in run.out  # costs per layer too
    assert verbs["requests"] == []


def test_inspect_reads_an_envelope_from_a_pipe(cli, verbs):
    envelope = cli("merge", "a", "b", "-o", "f", "--json").out
    run = cli("inspect", "--json", stdin=envelope)
    assert json.loads(run.out)["report"] == make_report().to_dict()
    assert json.loads(run.out)["command"] == "inspect"


@pytest.mark.parametrize("stdin", [None, "", " \n"], ids=["no pipe", "empty", "blank"])
def test_inspect_with_nothing_gives_two_examples(cli, stdin):
    run = cli("inspect", "--ot-costs", stdin=stdin)
    assert run.code == 2
    assert all(example in run.err for example in files.EXAMPLES)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("hello", "Expecting value"),
        ("[]", "JSON object"),
        ("{}", "not an otfuse.report/1"),
        ('{"schema": "otfuse.report/1"}', "broken report"),
        (
            make_report().to_json().replace("0.75", '"cheap"'),
            "got `str` - at `$.spaces[0].identity_cost`",
        ),
        (
            make_report().to_json().replace('"tensors": 6', '"tensors": true'),
            "got `bool` - at `$.inputs[0].tensors`",
        ),
    ],
)
def test_inspect_refuses_what_is_no_report(cli, text, why):
    run = cli("inspect", stdin=text)
    assert run.code == 3
    assert "standard input" in run.err
    assert why in run.err
    assert len(run.err.splitlines()) <= 4


def broken_reports():
    """A whole report with one value replaced, for every value and several replacements."""

    def places(value, path=()):
        yield path
        if isinstance(value, dict | list):
            for key in value if isinstance(value, dict) else range(min(len(value), 1)):
                yield from places(value[key], (*path, key))

    text = make_report().to_json()
    for path in places(json.loads(text)):
        for junk in (None, "x", True, {"x": []}):
            document = json.loads(text)
            if path:
                at = document
                for key in path[:-1]:
                    at = at[key]
                at[path[-1]] = junk
            yield path, junk, json.dumps(document if path else junk)


@pytest.mark.slow
def test_no_report_from_outside_is_a_bug_of_ours(monkeypatch):
    refused = 0
    for path, junk, text in broken_reports():
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        try:
            report = gate(files.parse(text, where="pipe"), 1e9)
            render.show(render.Outcome("inspect", report=report), render.Display(verbose=True))
        except errors.OtfuseError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{path} = {junk!r}") from error
    assert refused > 100


def test_inspect_names_the_failure_before_the_pipe(cli, verbs):
    verbs["answer"] = errors.OutputRefused("output exists", fix="use --overwrite")
    run = cli("inspect", stdin=cli("merge", "a", "b", "-o", "f", "--json").out)
    assert run.code == 3
    assert "why: output exists\nfix: use --overwrite\n" in run.err


def test_inspect_shows_the_costs_of_the_report_beside(cli, tmp_path, verbs):
    (tmp_path / "fused.report.json").write_text(make_report().to_json())
    run = cli("inspect", tmp_path / "fused.pt", "--ot-costs")
    assert run.code == 0
    assert "head" in run.out
    assert verbs["requests"] == []


def test_inspect_without_a_report_beside(cli, tmp_path):
    run = cli("inspect", tmp_path / "fused.pt", "--ot-costs")
    assert run.code == 3
    assert str(tmp_path / "fused.report.json") in run.err


def test_report_of_a_folder_lies_inside(tmp_path):
    (tmp_path / "fused").mkdir()
    assert files.report_beside(tmp_path / "fused") == tmp_path / "fused" / "fused.report.json"


@pytest.mark.parametrize(("limit", "code"), [("0.5", 0), ("0.49", 7)])
def test_gate_on_a_stored_report(cli, limit, code):
    run = cli("inspect", "--max-cost", limit, "--json", stdin=make_report().to_json())
    assert run.code == code
    assert json.loads(run.out)["report"] == make_report().to_dict()


def test_gate_needs_costs(cli):
    run = cli("inspect", "--max-cost", "9", stdin=make_report(spaces=()).to_json())
    assert run.code == 7
    assert "no OT costs" in run.err


# -- help, documentation, speed


@pytest.mark.quick_cases("check", "merge", "eval", "demo")
@pytest.mark.parametrize("name", REQUESTS)
def test_every_help_ends_with_examples_that_work(cli, verbs, name):
    run = cli(name, "--help")
    assert run.code == 0
    examples = re.split(r"\n\nExamples?:\n", run.out)[1].strip().splitlines()
    assert examples
    for example in examples:
        for part in example.split("|"):
            program, command, *arguments = shlex.split(part)
            assert program == "otfuse"
            piped = make_report().to_json()
            assert cli(command, *arguments, stdin=piped).code == 0, part
    assert command == name


@pytest.mark.parametrize("name", REQUESTS)
def test_help_shows_panels_choices_and_defaults(cli, name):
    text = cli(name, "--help-all").out
    panels = re.findall(r"^(\w+):$", text, re.M)
    wanted = ("Arguments", "Pruning", "Fusion", "Matching", "Inputs", "Output", "Run", "Examples")
    assert panels == [panel for panel in wanted if panel in panels]
    assert "-h, --help" in text.partition("\nRun:\n")[2]
    if name in ("check", "eval"):
        assert {"Inputs", "Output", "Run"} <= set(panels)
        return
    if name == "prune":
        assert {"Pruning", "Inputs", "Output", "Run"} <= set(panels)
        return
    assert {"Fusion", "Matching", "Output", "Run"} <= set(panels)
    assert "--solver exact|sinkhorn" in text
    assert "[default: exact]" in text
    assert "\\[" not in text  # escaped by some versions of Typer
    assert f"[default: {requests.Recipe.epsilon}]" in " ".join(text.split())


def flags_in(page):
    """Flags that begin a line of a help page."""
    return set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", page, re.M))


@pytest.mark.parametrize("name", REQUESTS)
def test_help_shows_what_most_people_need_and_help_all_the_rest(cli, name):
    command = COMMANDS[name]
    params = command.get_params(typer.Context(command, **PROGRAM.context_settings))
    options = [param for param in params if param.param_type_name == "option"]
    flags = {param.name: {f for f in param.opts if f.startswith("--")} for param in options}
    page, every = cli(name, "--help").out, cli(name, "--help-all").out
    assert flags_in(every) == set().union(*(flags[key] & flags_in(every) for key in flags))
    assert all(flags[key] & flags_in(every) for key in flags)
    line = f"otfuse {name} --help-all shows all {len(options)} options."
    assert line not in every
    if len(options) <= 20:
        assert page == every
        return
    shown = {key for key in flags if flags[key] & flags_in(page)}
    items = [item for kind in (REQUESTS[name], RunOptions) for item in fields(kind)]
    common = {item.name for item in items if option_of(item).common and option_of(item).flags}
    help_option = {key for key in flags if "--help" in flags[key]}  # Click's own name for it varies
    assert shown == help_option | common
    assert len(shown) <= 20
    assert page.partition("\n\nExample")[0].endswith(line)


def test_help_of_merge_has_what_a_first_fusion_takes(cli):
    wanted = {"weights", "anchor", "output", "arch", "key", "samples", "num-samples", "synthetic"}
    wanted |= {"align", "blend", "overwrite", "device", "json"}
    assert {f"--{name}" for name in wanted | {"verbose"}} <= flags_in(cli("merge", "--help").out)


# Numbers in words that a default depends on.
NUMBERS_IN_WORDS = {
    "num_samples": [
        *(open_inputs.REAL, open_inputs.SYNTHETIC),
        *(moved_kinds.NUMBERS["statistics"], moved_kinds.NUMBERS["class"]),
    ],
    "synthetic_steps": [norm_memory.STEPS, class_driven.STEPS],
    "dense_weight": [prune_fuse._TRUSTING, prune_fuse._CAREFUL],
    "shard_size": [5],
}


@pytest.mark.parametrize("name", REQUESTS)
def test_help_tells_the_defaults_that_requests_have(cli, name):
    recipe = {item.name: item.default for item in fields(requests.Recipe)}
    page = " ".join(cli(name, "--help-all").out.split())
    told = 0
    for item in fields(REQUESTS[name]):
        declared = option_of(item)
        default = recipe.get(item.name) if item.default is None else item.default
        if item.default is MISSING or declared.kind is bool:
            assert "default" not in declared.help or declared.said, item.name
        elif declared.said is None and default not in (None, ()):
            number = isinstance(default, float)
            said = f"[default: {default:g}]" if number else f"[default: {default}]"
            assert declared.help.endswith(said), item.name
            told += 1
        if declared.said is not None:
            numbers = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", declared.said)]
            assert numbers == NUMBERS_IN_WORDS.get(item.name, []), item.name
    declared = [option_of(item) for kind in (REQUESTS[name], RunOptions) for item in fields(kind)]
    assert page.count("[default:") == sum("[default:" in one.help for one in declared)
    assert told


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("merge a b -o o --beta 1.5", "use a number from 0 to 1"),
        ("merge a b -o o --beta nan", "use a number from 0 to 1"),
        ("merge a b -o o --epsilon 0", "use a number above 0"),
        ("merge a b -o o --ridge -1", "use a number from 0 on"),
        ("merge a b -o o --ridge inf", "use a number from 0 on"),
        ("merge a b -o o --passes 0", "use a whole number from 1 on"),
        ("merge a b -o o --seed -1", "use a whole number from 0 to 4294967295"),
        ("prune a -o o --amount .5 --seed 4294967296", "use a whole number from 0 to 4294967295"),
        ("inspect a b --max-moved 1.1", "use a number from 0 to 1"),
        ("check a --arch mlp --seed -1", "use a whole number from 0 to 4294967295"),
        ("eval a --samples x.npz --batch 0", "use a whole number from 1 on"),
        ("eval a --samples x.npz --num-samples 0", "use a whole number from 1 on"),
        ("curve a b --samples x.npz --steps 1", "use a whole number from 2 on"),
        ("demo --effort -1", "use a number from 0 on"),
        ("merge a b -o o --max-memory -0.5", "use a number from 0 on"),
    ],
)
def test_numbers_out_of_range_are_refused_with_the_range(cli, verbs, line, fix):
    run = cli(*line.split())
    assert run.code == 2
    assert run.err.splitlines()[0] == "error: out of range"
    assert run.err.splitlines()[-1] == f"fix: {fix}"
    assert verbs["requests"] == []


def documented():
    """Flag -> commands, from the table in docs/commands.md."""
    text = (ROOT / "docs" / "commands.md").read_text().partition("## Options")[2]
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for flag in re.findall(r"`(--?[\w-]+)`", cells[0]):
            names = cells[-1].split(", ")
            found[flag] = set(REQUESTS) if names == ["all"] else set(names)
    return found


@pytest.mark.parametrize("name", REQUESTS)
def test_every_flag_is_documented_and_nothing_else(name):
    text = (ROOT / "docs" / "commands.md").read_text()
    assert f"## `otfuse {name}" in text
    assert flags_of(name) == {flag for flag, names in documented().items() if name in names}


def test_documented_exit_codes():
    text = (ROOT / "docs" / "exit-codes.md").read_text()
    assert set(re.findall(r"^\| (\d+) \|", text, re.M)) == {str(int(c)) for c in errors.ExitCode}


def test_documented_defaults_and_choices():
    text = (ROOT / "docs" / "commands.md").read_text()
    for name, choices in requests.CHOICES.items():
        default = getattr(requests.Recipe, name, choices[0])
        values = ", ".join(f"`{choice}`" for choice in choices)
        flag = name.replace("_", "-")
        assert f"| `--{flag}` | {values} (`{default}`" in text


def test_completion_offers_choices(monkeypatch, capsys):
    monkeypatch.setenv("_OTFUSE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "otfuse merge --align ")
    monkeypatch.setenv("COMP_CWORD", "3")
    with pytest.raises(SystemExit) as ended:
        app.main([])
    assert ended.value.code == 0
    assert capsys.readouterr().out.split() == ["wts", "acts", "none"]


def fresh(
    *arguments, code="import sys; from otfuse_cli.cli.app import main; sys.exit(main())", **more
):
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **more)


def test_help_imports_nothing_heavy():
    run = fresh(
        code="import sys; from otfuse_cli.cli.app import main; main(['--help']);"
        "print({'torch', 'ot', 'numpy', 'scipy', 'rich', 'msgspec', 'fsspec'} & set(sys.modules))"
    )
    assert run.stdout.splitlines()[-1] == "set()"


@pytest.mark.slow
def test_help_takes_less_than_300_ms_of_cpu(tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = str(tmp_path)  # compiled already, as an installed package is

    def seconds(**code):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert fresh("--help", env=env, **code).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    # The first quiet moment counts; on a slow machine, what Typer alone takes there.
    assert any(seconds() < max(0.3, 1.8 * seconds(code="import typer")) for _ in range(8))


@pytest.mark.slow
def test_reader_that_leaves_is_no_error(tmp_path):
    (tmp_path / "big.json").write_text(make_report(warnings=("w" * 100,) * 10_000).to_json())
    reading, writing = os.pipe()
    os.close(reading)
    with (tmp_path / "big.json").open() as big:
        run = fresh_to(writing, big, "inspect", "--json")
    os.close(writing)
    assert (run.returncode, run.stderr) == (0, "")


def fresh_to(stdout, stdin, *arguments):
    code = "import sys; from otfuse_cli.cli.app import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device here")
def test_full_disk_behind_standard_output(tmp_path):
    (tmp_path / "r.json").write_text(make_report().to_json())
    with (tmp_path / "r.json").open() as source, open("/dev/full", "w") as full:
        run = fresh_to(full, source, "inspect", "--json")
    assert run.returncode == 6
    assert run.stderr.startswith("error: can't write to standard output\n")


# -- the real verbs


def test_demo_for_real(cli):
    run = cli("demo", "--json")
    assert run.code == 0
    accuracy = json.loads(run.out)["report"]["evaluation"]["accuracy"]
    assert accuracy["plain average"] < 70
    assert accuracy["fused"] > 90
    assert min(accuracy["parent a"], accuracy["parent b"]) > 97


@pytest.mark.slow
def test_lines_as_typed(cli, demo_pair, monkeypatch):
    a, b = demo_pair
    monkeypatch.chdir(a.parent)
    assert cli("merge", a.name, b.name, "-o", "fused.safetensors", "--align", "wts").code == 0
    assert cli("inspect", "fused.safetensors", "--ot-costs").code == 0
    run = cli("prune-fuse", a.name, b.name)
    assert run.code == 0
    assert "b.fused.safetensors" in run.out
    assert (a.parent / "b.fused.report.json").exists()
    envelope = cli("merge", a.name, b.name, "-o", "again.safetensors", "--json").out
    report = json.loads(envelope)["report"]
    run = cli("inspect", "--ot-costs", stdin=envelope)
    assert run.code == 0
    assert all(space["id"] in run.out for space in report["spaces"])
    assert isinstance(files.parse(envelope, where="here"), Report)
