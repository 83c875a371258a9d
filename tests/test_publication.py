"""Outputs appear together or not at all: a fault at every step of every command that writes."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from otfuse_cli.checkpoint import draft
from otfuse_cli.checkpoint.open import Checkpoint, open_checkpoint
from otfuse_cli.checkpoint.publication import Publication, write_whole
from otfuse_cli.errors import OtfuseError, OutputRefused, UsageError
from otfuse_cli.report.records import Report

FULL = OSError(errno.ENOSPC, "No space left on device")

# What a command does after the first byte: the system's calls, and our own steps between them.
STEPS: dict[str, tuple[Any, str]] = {
    "write": (os, "pwrite"),
    "flush": (os, "fsync"),
    "move": (os, "replace"),
    "link": (os, "link"),
    "open": (os, "open"),
    "duplicate": (os, "dup"),
    "folder": (os, "mkdir"),
    "save": (torch, "save"),
    "record": (Checkpoint, "record"),
    "report": (Report, "to_json"),
    "stage": (draft.Draft, "stage"),
}


class Fault(RuntimeError):
    """Raised where nobody expects it."""


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {
        str(p.relative_to(folder)): None if p.is_dir() else p.read_bytes()
        for p in sorted(folder.rglob("*"))
    }


@contextmanager
def fails_at(step: str, number: int | None, error: BaseException) -> Iterator[list[int]]:
    """The `number`th call (None: no call) of a step raises; yields the calls so far."""
    owner, name = STEPS[step]
    real, calls = getattr(owner, name), []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            raise error
        return real(*args, **options)

    # os.supports_dir_fd holds the function itself.
    counted_in = (os.supports_dir_fd | {counted}) if owner is os else os.supports_dir_fd
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, counted)
        patch.setattr(os, "supports_dir_fd", counted_in)
        yield calls


def nothing_is_left(
    cli: Callable[..., Any],
    folder: Path,
    line: list[object],
    errors: list[BaseException],
    steps: Iterable[str] = STEPS,
) -> int:
    """Fail a command line at every step; returns how many times it did fail."""
    before = snapshot(folder)
    failures = 0
    for step, error in itertools.product(steps, errors):
        for number in itertools.count(1):
            with fails_at(step, number, error) as calls:
                done = cli(*line)
            if len(calls) < number:
                assert done.code == 0, f"{step}: {done.err}"
                restore(folder, before)
                break
            if done.code:
                failures += 1
                assert snapshot(folder) == before, f"{step} {number}: {done.err}"
                if isinstance(error, OSError) and STEPS[step][0] is os:
                    assert done.code == 6, f"{step} {number}: {done.err}"
            else:  # a step with another way out
                assert not list(folder.rglob(".otfuse*")), f"{step} {number}"
                assert snapshot(folder) != before
                restore(folder, before)
    return failures


def restore(folder: Path, before: dict[str, bytes | None]) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name, data in before.items():
        path = folder / name
        if data is None:
            path.mkdir(parents=True)
        else:
            path.write_bytes(data)


def mlp(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"0.weight": (4, 3), "0.bias": (4,), "2.weight": (2, 4), "2.bias": (2,)}
    return {n: torch.randn(s, generator=generator) for n, s in shapes.items()}


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder; inputs lie beside it, old outputs in it."""
    work, given = tmp_path / "work", tmp_path / "given"
    work.mkdir()
    given.mkdir()
    for seed, name in enumerate("ab"):
        torch.save({"ema": {"module": mlp(seed)}, "step": 3}, given / f"{name}.pt")
        safetensors.torch.save_file(mlp(seed), given / f"{name}.safetensors")
        (given / name).mkdir()
        safetensors.torch.save_file(mlp(seed), given / name / "model.safetensors")
        (given / name / "config.json").write_text("{}")
        (given / name / "tokenizer.json").write_text("[]")
    x = np.random.default_rng(0).standard_normal((8, 3), dtype=np.float32)
    np.savez(given / "s.npz", x=x, y=np.arange(8) % 2)
    monkeypatch.chdir(work)
    return given


def line_of(given: Path, kind: str) -> list[object]:
    a, b = given / "a.safetensors", given / "b.safetensors"
    two: list[object] = [given / "a.pt", given / "b.pt"]
    plain: list[object] = ["--align", "none", "-q"]
    return {
        "merge .safetensors": ["merge", a, b, "-o", "out.safetensors", *plain],
        "merge .pt": ["merge", *two, "--key", "ema.module", "-o", "out.pt", *plain],
        "merge .ckpt with extras": [
            *("merge", *two, "--key", "ema.module", "--keep-extras", "-o", "out.ckpt", *plain),
        ],
        "merge folder": [
            *("merge", given / "a", given / "b", "-o", "out", "--shard-size", "0.05KB", *plain),
        ],
        "merge, report elsewhere": [
            *("merge", a, b, "-o", "out.safetensors", "--report", "r/x.json", *plain),
        ],
        "prune": ["prune", a, "-o", "out.safetensors", "--amount", "0.5", "--arch", "mlp", "-q"],
        "prune-fuse": ["prune-fuse", a, b, "-o", "out.pt", "-q"],
        "inspect": [
            *("inspect", a, b, "--ot-costs", "--report", "r.json", "--plot", "p.html"),
            *("--write-spec", "s.yaml", "-q"),
        ],
        "curve": [
            *("curve", a, b, "--arch", "mlp", "--samples", given / "s.npz", "--steps", "2"),
            *("--plot", "c.html", "-q"),
        ],
    }[kind]


KINDS = [
    *("merge .safetensors", "merge .pt", "merge .ckpt with extras", "merge folder"),
    *("merge, report elsewhere", "prune", "prune-fuse", "inspect", "curve"),
]
# With every error: the others differ in the command alone.
THOROUGH = {"merge .safetensors", "merge folder"}
# Between the outputs, where commands differ; what a publication does is tested by itself.
BETWEEN = ("move", "record", "report")


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True], ids=["new", "overwrite"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_any_step_leaves_nothing(
    cli: Any, inputs: Path, tmp_path: Path, kind: str, again: bool
) -> None:
    line = prepared(cli, inputs, tmp_path / "work", kind, again=again)
    errors: list[BaseException] = [FULL]
    if kind in THOROUGH and again:  # there is more to be put back where something was replaced
        errors += [Fault("no reason"), KeyboardInterrupt()]
    assert nothing_is_left(cli, tmp_path / "work", line, errors) >= 5


@pytest.mark.quick_cases("prune")
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_between_the_outputs_leaves_nothing(
    cli: Any, inputs: Path, tmp_path: Path, kind: str
) -> None:
    line = prepared(cli, inputs, tmp_path / "work", kind, again=kind in THOROUGH)
    assert nothing_is_left(cli, tmp_path / "work", line, [FULL], BETWEEN) >= 1


def prepared(
    cli: Callable[..., Any], inputs: Path, work: Path, kind: str, *, again: bool
) -> list[object]:
    """The command line; with `again`, one that replaces what is there already."""
    (work / "r").mkdir()
    line = line_of(inputs, kind)
    if again:
        first = cli(*line)
        assert first.code == 0, first.err
        # What is replaced must be told from what replaces it.
        for path in work.rglob("*"):
            if path.is_file():
                path.write_bytes(b"old " + path.name.encode())
        line = [*line, "--overwrite"]
    return line


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True], ids=["new", "overwrite"])
def test_a_fault_in_the_demo_leaves_nothing(cli: Any, inputs: Path, again: bool) -> None:
    line: list[object] = ["demo", "-o", "out.safetensors", "-q"]
    if again:
        assert cli(*line).code == 0
        line.append("--overwrite")
    assert nothing_is_left(cli, Path.cwd(), line, [FULL]) >= 8


def test_the_demo_is_measured_before_it_is_written(
    cli: Any, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> float:
        raise Fault("while measuring")

    monkeypatch.setattr("otfuse_cli.commands.demo._accuracy", fail)
    assert cli("demo", "-o", "out.safetensors").code == 1
    assert snapshot(Path.cwd()) == {}


@pytest.mark.parametrize(
    "key",
    ["ema", "ema.module", "model_ema.shadow.module", "a.b", "x.state_dict", "teacher.net.ema"],
)
def test_nested_keys_come_back(cli: Any, tmp_path: Path, key: str) -> None:
    """The output has the wrappers of its anchor, is recorded, and opens without a key."""
    for at, name in enumerate("ab"):
        value: Any = mlp(at)
        for part in reversed(key.split(".")):
            value = {part: value}
        torch.save({**value, "epoch": 1}, tmp_path / f"{name}.pt")
    line = ["merge", tmp_path / "a.pt", tmp_path / "b.pt", "--key", key, "--align", "none"]
    done = cli(*line, "-o", tmp_path / "out.pt", "--json")
    assert done.code == 0, done.err
    report = json.loads((tmp_path / "out.report.json").read_text())
    assert report["output"][0]["container"] == f"pt ({', '.join(key.split('.'))})"
    got = torch.load(tmp_path / "out.pt", weights_only=True)
    for part in key.split("."):
        assert list(got) == [part]
        got = got[part]
    want = {n: (t + mlp(1)[n]) / 2 for n, t in mlp(0).items()}
    assert all(torch.allclose(got[n], want[n]) for n in want)
    with open_checkpoint(tmp_path / "out.pt") as again:
        assert again.container.wrapper == tuple(key.split("."))


# -- the publication itself


def test_outputs_appear_together(tmp_path: Path) -> None:
    with Publication(overwrite=False) as outputs:
        outputs.write(tmp_path / "a", "one")
        outputs.folder(tmp_path / "f")
        outputs.write(tmp_path / "f" / "b", b"two")
        assert not (tmp_path / "a").exists()
    assert snapshot(tmp_path) == {"a": b"one", "f": None, "f/b": b"two"}


@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize("linked", [True, False])
def test_what_was_replaced_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, linked: bool
) -> None:
    """With and without hard links, which not every file system has."""
    (tmp_path / "a").write_text("old a")
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "b").write_text("old b")
    before = snapshot(tmp_path)
    if not linked:
        monkeypatch.delattr(os, "link")
        monkeypatch.setattr(os, "supports_dir_fd", frozenset())
        # `shutil.rmtree` asks for others in the same set.
        monkeypatch.setattr(shutil, "_use_fd_functions", False)

    def publish() -> None:
        with Publication(overwrite=True) as outputs:
            outputs.write(tmp_path / "a", "new a")
            outputs.folder(tmp_path / "f")
            outputs.write(tmp_path / "f" / "b", "new b")
            outputs.write(tmp_path / "c", "new c")

    with fails_at("move", number, FULL) as calls, pytest.raises(OutputRefused, match="No space"):
        publish()
    assert len(calls) >= number
    assert snapshot(tmp_path) == before
    publish()
    assert snapshot(tmp_path) == {"a": b"new a", "c": b"new c", "f": None, "f/b": b"new b"}


def test_a_folder_that_may_not_be_changed_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk of the second output fails for good; the first one is taken back."""
    (tmp_path / "bad").mkdir()
    (tmp_path / "a").write_text("old")
    real = os.replace

    def replace(source: Any, target: Any) -> None:
        if Path(target).parent.name == "bad":
            raise OSError(errno.EROFS, "Read-only file system")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)

    def publish() -> None:
        with Publication(overwrite=True) as outputs:
            outputs.write(tmp_path / "a", "new")
            outputs.write(tmp_path / "bad" / "b", "new")

    with pytest.raises(OutputRefused, match="Read-only") as caught:
        publish()
    assert str(caught.value.where) == str(tmp_path / "bad" / "b")
    assert snapshot(tmp_path) == {"a": b"old", "bad": None}


def test_what_can_not_be_put_back_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("old")
    real, calls = os.replace, []

    def replace(source: Any, target: Any) -> None:
        calls.append(1)
        if len(calls) > 1:
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    def publish() -> None:
        with Publication(overwrite=True) as outputs:
            outputs.write(tmp_path / "a", "new")
            outputs.write(tmp_path / "b", "new")

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OutputRefused, match="can't be put back") as caught:
        publish()
    (backup,) = tmp_path.glob(".otfuse*")
    assert str(backup) in str(caught.value.why)
    assert backup.read_text() == "old"


@pytest.mark.parametrize("spelled", ["x", "./x", "sub/../x", "link"])
def test_two_outputs_of_one_name(tmp_path: Path, spelled: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "link").symlink_to("x")
    with Publication(overwrite=True) as outputs:
        outputs.write(tmp_path / "x", "one")
        with pytest.raises(UsageError, match="the same name"):
            outputs.write(tmp_path / spelled, "two")
    assert (tmp_path / "x").read_text() == "one"


def test_two_files_of_one_name_in_a_folder(tmp_path: Path) -> None:
    with Publication(overwrite=True) as outputs:
        outputs.folder(tmp_path / "f").add("config.json")
        with pytest.raises(UsageError, match="the same name"):
            outputs.write(tmp_path / "f" / "config.json", "{}")


def test_a_report_named_by_another_way_lies_in_the_new_folder(cli: Any, inputs: Path) -> None:
    Path("out").mkdir()
    Path("way").symlink_to("out")
    line = [*line_of(inputs, "merge folder"), "--overwrite", "--report", "way/mine.report.json"]
    for _ in range(2):
        assert cli(*line).code == 0
        assert Path("out/mine.report.json").is_file()
        assert not list(Path.cwd().glob(".otfuse*"))


def test_an_interrupt_is_no_refusal(tmp_path: Path) -> None:
    with fails_at("move", 1, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "x", "text", overwrite=False)
    assert os.listdir(tmp_path) == []


def test_an_error_of_ours_keeps_its_own_words(tmp_path: Path) -> None:
    with fails_at("stage", 1, OtfuseError("mine")), pytest.raises(OtfuseError, match="mine"):
        write_whole(tmp_path / "x", "text", overwrite=False)
    assert os.listdir(tmp_path) == []
