"""Benchmarks that CI and others start: what they print, and say where nothing is measured."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """A module of benchmarks/, imported as when it is run."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    before = set(sys.modules)
    threads = torch.get_num_threads()
    yield importlib.import_module
    torch.set_num_threads(threads)
    for name in set(sys.modules) - before:
        if str(ROOT / "benchmarks") in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_one_error(script, capsys):
    with pytest.raises(SystemExit) as stopped:
        script("gpu").main([])
    assert stopped.value.code == 2
    said = capsys.readouterr()
    assert not said.out
    assert said.err.count("error:") == 1
    assert "torch sees no GPU" in said.err


def test_an_unknown_network_is_refused(script, capsys):
    with pytest.raises(SystemExit) as stopped:
        script("gpu").main(["--device", "cpu", "--only", "vgg12"])
    assert stopped.value.code == 2
    assert "'vgg12'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_smallest_network_is_measured_on_a_cpu(script, capsys):
    options = ["--device", "cpu", "--only", "vgg11", "--ways", "sweep,refit"]
    script("gpu").main([*options, "--repeat", "1", "--inputs", "40"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| vgg11")]
    assert [row.split(" | ")[1] for row in rows] == ["sweep", "refit"]


def test_without_checkpoints_the_line_says_so(script, capsys, monkeypatch):
    ratios = script("ratios")
    monkeypatch.setattr(ratios.peers, "PAIR", ["missing.safetensors"] * 2)
    monkeypatch.setattr(sys, "argv", ["ratios.py", "--line"])
    ratios.main()
    assert capsys.readouterr().out == "ratios: not measured, there are no checkpoints\n"


def test_ratios_are_those_of_each_round(script, monkeypatch):
    ratios = script("ratios")

    def seconds(rows, folder, repeat):
        return {name: [2.0 + at, 4.0 + at, 9.0 + at] for at, name in enumerate(rows)}

    monkeypatch.setattr(ratios.peers, "in_turns", seconds)
    both = {"import torch": [1.0, 2.0, 3.0], "merge --paper": [1.5, 2.25, 4.0]}
    monkeypatch.setattr(ratios.start, "seconds_of_both", lambda repeat: both)
    found = {name: ratio for name, (ratio, _) in ratios.measured(3).items()}
    assert found == {
        "VGG descent / Git Re-Basin (peer)": 1.5,
        "VGG auto / Git Re-Basin (peer)": 1.75,
        "VGG --paper / published algorithm (peer)": 1.6,
        "MNIST --paper less import torch, s": 0.5,
    }
