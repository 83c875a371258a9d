"""The renderer: text for terminals and pipes, and what goes to which stream."""

from __future__ import annotations

import io
import re
import sys

import pytest

from conftest import LONG_NAME, make_report
from otfuse_cli.cli import render
from otfuse_cli.cli.render import Display, Outcome
from otfuse_cli.errors import UsageError
from otfuse_cli.report.records import RefitRecord, StepRecord
from otfuse_cli.requests.requests import Recipe


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Put terminals in place of the standard streams, once the test itself runs."""

    def install():
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setattr(sys, "stdout", Terminal())
        monkeypatch.setattr(sys, "stderr", Terminal())
        return sys.stdout, sys.stderr

    return install


def shown(capsys, view=None, **changes):
    render.show(Outcome("merge", report=make_report(**changes)), view or Display())
    return capsys.readouterr()


def test_results_on_stdout_warnings_on_stderr(capsys):
    text = shown(capsys)
    assert "output    out/fused.pt\n" in text.out
    assert f"sha256    {'c' * 64}\n" in text.out
    assert "report    out/fused.report.json\n" in text.out
    assert "function  kept (error 1e-07)\n" in text.out
    assert text.err == "warning: mind the gap\n"
    assert "mind" not in text.out


def test_pipe_cuts_and_wraps_nothing(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    text = shown(capsys, Display(verbose=True)).out
    assert LONG_NAME in text
    assert all(line == line.rstrip() for line in text.splitlines())
    assert "\x1b" not in text
    rows = [line.split() for line in text.splitlines()]
    assert next(r for r in rows if r[:2] == ["0", "a.pt"])[:4] == ["0", "a.pt", "0.7", "zip,"]
    assert next(r for r in rows if r[:2] == ["1", "b.pt"])[:4] == ["1", "b.pt", "0.3", "anchor"]


STEPS = (
    StepRecord("average", 0.9, 88.0, True),
    StepRecord("refit", 0.985, 96.25, True),
    StepRecord("calibrate bn", 0.97, 95.5, False),
)


def test_steps_say_what_they_gave(capsys):
    fitted = (RefitRecord(LONG_NAME, 0.25, 0.03125),)
    text = shown(capsys, steps=STEPS, refits=fitted).out
    lines = [line.split() for line in text.splitlines()]
    assert ["agreement", "accuracy"] in lines
    assert ["average", "0.9", "88.00"] in lines
    assert ["refit", "0.985", "96.25"] in lines
    assert ["calibrate", "bn", "(not", "kept)", "0.97", "95.50"] in lines
    assert "missed before" not in text
    lines = [
        line.split()
        for line in shown(capsys, Display(verbose=True), refits=fitted).out.splitlines()
    ]
    assert [LONG_NAME, "0.25", "0.03125"] in lines
    unlabelled = shown(capsys, steps=tuple(s.replace(accuracy=None) for s in STEPS)).out
    assert ["average", "0.9"] in [line.split() for line in unlabelled.splitlines()]
    assert "accuracy\n" not in unlabelled.partition("Steps")[2].partition("\n\n")[0]
    assert "Steps" not in shown(capsys).out


def test_costs_with_identity_cost_and_bars(capsys):
    lines = shown(capsys).out.splitlines()
    equal = next(line for line in lines if line.startswith("h1"))
    assert equal.split() == ["h1", "48", "0.25", "0.75", "90", "%", "█" * 8 + "░" * 16]
    unequal = next(line for line in lines if line.startswith(LONG_NAME))
    assert unequal.split() == [LONG_NAME, "32", "->", "16", "0.5", "█" * 16]
    assert next(line for line in lines if line.startswith("total")).split() == ["total", "0.75"]


def test_recipe_says_what_differs_from_the_defaults(capsys):
    merge = {**Recipe().to_dict(), "device": "cpu", "skip": [], "refit": False, "blend": "average"}
    assert "recipe" not in shown(capsys, recipe=merge).out
    changed = shown(capsys, recipe={**merge, "metric": "cosine", "skip": ["head.*"]}).out
    assert re.search(r"^recipe +metric=cosine skip=head", changed, re.MULTILINE)
    assert "align=wts" not in changed
    assert "align=wts" in shown(capsys, Display(verbose=True), recipe=merge).out


@pytest.mark.parametrize(
    ("command", "usual", "changed"),
    [
        ("inspect", {"matcher": "sweep"}, {"matcher": "auto"}),
        ("prune", {"criterion": "l1", "layer": {}}, {"criterion": "ot"}),
        ("prune-fuse", {"scale": "preserve", "keep_shape": False}, {"scale": "auto"}),
    ],
)
def test_every_command_has_defaults_of_its_own(capsys, command, usual, changed):
    assert "recipe" not in shown(capsys, command=command, recipe=usual).out
    ((name, value),) = changed.items()
    out = shown(capsys, command=command, recipe=usual | changed).out
    assert re.search(rf"^recipe +{name}={value}$", out, re.MULTILINE)


def test_ascii_streams_get_ascii_bars(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    report = make_report(output=(), graph=None, warnings=())
    render.show(Outcome("merge", report=report), Display())
    stream.seek(0)
    assert "########................" in stream.read()


def test_layers_only_where_asked(capsys):
    assert "on diagonal" not in shown(capsys).out
    for view in (Display(costs=True), Display(verbose=True)):
        text = shown(capsys, view).out
        assert "on diagonal" in text
        assert "40 %" in text


def test_graph_names_what_stays_in_place(capsys):
    assert "1 axis kept in place: input (-v names them)" in shown(capsys).out
    text = shown(capsys, Display(graph=True)).out
    assert "layers.0.weight:1  input" in text


def test_evaluation(capsys):
    text = shown(capsys).out
    assert "samples  450" in text
    assert "97.33  " + "█" * 24 in text


def test_sources_are_told_apart(capsys):
    one, two = make_report().spaces
    text = shown(capsys, spaces=(one, two.replace(source=2))).out
    assert "source" in text


def test_quiet_prints_errors_only(capsys):
    text = shown(capsys, Display(quiet=True))
    assert (text.out, text.err) == ("", "")
    render.show(Outcome("merge", error=UsageError("no")), Display(quiet=True, verbose=True))
    assert capsys.readouterr().err == "error: no\n"


def test_names_from_files_cannot_steer_the_terminal(capsys):
    one, two = make_report().spaces
    evil = "x\x1b[2J\n[red]y[/red]:smile:"
    text = shown(capsys, spaces=(one.replace(id=evil), two), warnings=(evil,))
    assert r"x\x1b[2J\n[red]y[/red]:smile:" in text.out
    assert "\x1b" not in text.out + text.err


def test_unencodable_names_are_escaped(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stderr", stream)
    render.show(Outcome("merge", error=UsageError("no é\udcff")), Display())
    stream.seek(0)
    assert stream.read() == "error: no \\xe9\\udcff\n"


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_narrow_terminals_lose_no_number_and_no_letter(terminal, monkeypatch, width):
    out, _ = terminal()
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    render.show(Outcome("merge", report=make_report(evaluation=None)), Display())
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    table = text[text.index("Spaces") :].splitlines()[1:]
    assert max(map(len, table)) <= width
    assert "…" not in text
    assert all(number in " ".join(table) for number in ("0.25", "0.75", "90 %", "32 -> 16"))
    assert ("█" in text) == (width >= 72)
    names = [line.split(" ")[0] for line in table]
    assert LONG_NAME in "".join(names)


def test_colours_only_where_welcome(terminal, monkeypatch):
    outcome = Outcome("merge", error=UsageError("no"))
    _, err = terminal()
    render.show(outcome, Display())
    assert "\x1b[1;31m" in err.getvalue()
    _, err = terminal()
    monkeypatch.setenv("NO_COLOR", "1")
    render.show(outcome, Display())
    assert "31m" not in err.getvalue()


def test_progress_on_a_terminal(terminal):
    out, err = terminal()
    with render.progress(Display()) as advance:
        advance("matching", 1, 2)
    assert "matching" in err.getvalue()
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("view", "is_terminal", "steps"),
    [(Display(quiet=True), True, 1), (Display(), False, 1), (Display(), True, 0)],
    ids=["quiet", "pipe", "nothing to report"],
)
def test_no_progress(terminal, monkeypatch, view, is_terminal, steps):
    _, err = terminal()
    monkeypatch.setattr(err, "isatty", lambda: is_terminal)
    with render.progress(view) as advance:
        for _ in range(steps):
            advance("matching", 1, 2)
    assert err.getvalue() == ""


def test_closed_streams_are_no_error(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    render.show(Outcome("merge", report=make_report(), error=UsageError("no")), Display(debug=True))
    render.show(Outcome("merge", report=make_report()), Display(json=True))
