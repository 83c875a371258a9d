"""The tutorial: all blocks of docs/tutorial.md in order, typed in an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()


def shell(line):
    """Whatever is not ours, with this Python as `python`."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run(["sh", "-c", line], check=True, env=environment)


def told(printed, shown):
    """Require each line of a shown block: its words, numbers within 3 % or 3 points."""
    lines = [line.split() for line in printed.splitlines()]
    for line in shown.splitlines():
        words = [word for word in line.split() if set(word) - set("█░")]
        assert any(alike(words, found) for found in lines), f"not printed: {line}\n{printed}"


def alike(words, found):
    found = [word for word in found if set(word) - set("█░")]
    return len(words) == len(found) and all(map(near, words, found))


def near(word, found):
    try:
        one, other = float(word), float(found.strip(")"))
    except ValueError:
        return word == found or "e-" in word
    return abs(one - other) <= max(0.03 * abs(one), 3.0 if one > 50 else 0.02)


@pytest.mark.slow
def test_every_command_does_what_the_tutorial_shows(cli, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    printed = ""
    commands = 0
    for language, text in BLOCK.findall(TUTORIAL):
        if language == "python":
            Path(text.split("\n")[0].removeprefix("# ")).write_text(text)
        elif language == "sh":
            printed = ""
            for line in text.splitlines():
                program, *arguments = shlex.split(line)
                if program != "otfuse":
                    shell(line)
                    continue
                run = cli(*arguments)
                assert run.code == 0, (line, run.err)
                # What names alone say is declared, and nothing else is to be said.
                aside = [t for t in run.err.splitlines() if not t.startswith("assumed: ")]
                assert aside == [], (line, aside)
                printed += run.out
                commands += 1
        else:
            told(printed, text)
    assert commands == TUTORIAL.count("\notfuse ") > 5
    assert (tmp_path / "curve.svg").stat().st_size > 10_000


def test_pictures_and_links_are_there():
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", TUTORIAL):
        assert (ROOT / "docs" / target).exists(), target
