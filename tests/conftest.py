"""Fixtures that several test modules share."""

from __future__ import annotations

import gc
import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import settings

import libraries
from otfuse_cli.cli import app
from otfuse_cli.report.records import (
    Candidate,
    Checks,
    Difference,
    Estimate,
    FileRecord,
    GraphRecord,
    LayerRecord,
    Pair,
    Pinned,
    Report,
    SpaceRecord,
)

# Time limits mean nothing on a busy machine, and CI must not fail by the luck of a draw: people
# who run the tests by hand search on.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", parent=settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

gc.disable()  # while test modules are imported; see pytest_collection_finish

# The suite runs in a worker per core: threads inside them would only wait for one another.
torch.set_num_threads(1)
libraries.make_importable()

ROOT = Path(__file__).parents[1]
LONG_NAME = "backbone.features.stage3.block11.branch_b.conv2.weight_of_the_longest_name"


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`quick_cases` and `slow_cases` say by their ids which cases of a test are slow."""
    unseen: dict[tuple[str, str], set[str]] = {}
    for item in items:
        for mark in (*item.iter_markers("quick_cases"), *item.iter_markers("slow_cases")):
            case = item.callspec.id  # type: ignore[attr-defined]
            if (case in mark.args) == (mark.name == "slow_cases"):
                item.add_marker(pytest.mark.slow)
            test = item.nodeid.partition("[")[0]
            unseen.setdefault((test, mark.name), set(mark.args)).discard(case)
    whole = not any("::" in argument for argument in config.args)
    for (test, name), cases in unseen.items():
        if cases and whole:
            raise pytest.UsageError(f"{test}: {name} names what is no case of it: {cases}")


def pytest_collection_finish() -> None:
    """What was imported and collected is no garbage, and looking through it again takes long."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real checkpoints and data; tests that need it are skipped without it."""
    folder = Path(os.environ.get("OTFUSE_SHARED", ROOT.parent / "shared"))
    if not (folder / "checkpoints").is_dir():
        pytest.skip(f"no checkpoints in {folder}: set OTFUSE_SHARED")
    return folder


@pytest.fixture
def demo_pair(tmp_path: Path) -> tuple[Path, Path]:
    """The bundled pair of digit classifiers, copied to where a test may write."""
    folder = resources.files("otfuse_cli") / "demo_pair"
    paths = []
    for name in ("a.safetensors", "b.safetensors"):
        paths.append(tmp_path / name)
        paths[-1].write_bytes((folder / name).read_bytes())
    return paths[0], paths[1]


@pytest.fixture
def kept_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verbs export a network once for all tests that ask for this: not for tests of exporting."""
    import kept_traces
    from otfuse_cli.graph.trace import from_module
    from otfuse_cli.running import runnable

    trace = kept_traces.kept_graphs(from_module.trace)
    monkeypatch.setattr(from_module, "trace", trace)
    monkeypatch.setattr(runnable, "trace", trace)
    monkeypatch.setattr(runnable, "export", kept_traces.kept_programs(from_module.export))


@dataclass(frozen=True)
class Run:
    """What a command line left behind."""

    code: int
    out: str
    err: str


Cli = Callable[..., Run]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run a command line in this process: `cli("merge", a, b, stdin="...")`."""
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments: object, stdin: str | None = None) -> Run:
        with open(os.devnull) as nothing:
            monkeypatch.setattr(sys, "stdin", nothing if stdin is None else io.StringIO(stdin))
            capsys.readouterr()
            code = app.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Run(int(code), captured.out, captured.err)

    return run


def make_report(**changes: Any) -> Report:
    """A report with something in every field."""
    values: dict[str, Any] = {
        "command": "merge",
        "version": "0.1.0",
        "inputs": (
            FileRecord("a.pt", "a" * 64, "zip", 6, 5034, {"float32": 6}),
            FileRecord("b.pt", "b" * 64, "zip", 6, 5034, {"float32": 6}),
        ),
        "output": (FileRecord("out/fused.pt", "c" * 64, "zip", 6, 5034, {"float32": 6}),),
        "recipe": {"align": "wts", "epsilon": 0.05, "weights": [0.7, 0.3], "anchor": 1},
        "graph": GraphRecord("family mlp", {"h1": 48}, (Pinned("layers.0.weight:1", "input"),)),
        "spaces": (
            SpaceRecord("h1", 0, (48, 48), (LONG_NAME,), 0.25, 0.75, 0.9, "assignment", 1e-17),
            SpaceRecord(LONG_NAME, 0, (32, 16), ("layers.2.weight",), 0.5, None, None, "emd", 0.0),
        ),
        "layers": (LayerRecord("layers.0", 0, 0.25, 0.75), LayerRecord("head", 0, 0.1, 0.2, 0.4)),
        "candidates": (Candidate("sweep", 0, None, None, 1e6, True),),
        "differences": (
            Difference(0, "width", LONG_NAME, (32,), (16,)),
            Difference(0, "missing", "gain", None, (), "why not"),
        ),
        "pairs": (Pair(0, 1, 0.75, None, 1.5, 0.9, ()),),
        "estimate": Estimate(2**20, 2**19, 2**18, 2**18, 1e9, 2e13, {"sweep": 1e9}, ("descent",)),
        "checks": Checks("kept", 1e-7),
        "evaluation": {"samples": 450, "accuracy": {"parent a": 97.333, "fused": 94.9}},
        "warnings": ("mind the gap",),
        "timings": {"read": 0.1, "match": 1.25},
        "peak_rss_bytes": 2**28,
    }
    return Report(**{**values, **changes})


@pytest.fixture
def verbs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand-ins for the verbs: `requests` holds what they were asked, `answer` what they return."""
    asked: dict[str, Any] = {"requests": [], "answer": make_report()}
    for name in ("merge", "inspect", "prune_fuse", "prune", "check", "evaluate", "curve", "demo"):

        def verb(request: object, *, progress: Callable[[str, int, int], None]) -> Report:
            asked["requests"].append(request)
            progress("matching", 1, 2)
            if isinstance(asked["answer"], BaseException):
                raise asked["answer"]
            answer: Report = asked["answer"]
            return answer

        module = ModuleType(f"otfuse_cli.commands.{name}")
        setattr(module, f"run_{name}", verb)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return asked
