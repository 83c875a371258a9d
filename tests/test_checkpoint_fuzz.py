"""Damaged files: an error of ours or a proper read, never a traceback."""

import argparse
import io
import json
import random
import signal
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import hypothesis.strategies as st
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import example, given, settings

from mutate import mutated, mutated_header, mutated_inside
from otfuse_cli.checkpoint.open import open_checkpoint
from otfuse_cli.errors import ExitCode, OtfuseError, UnreadableInput

STATE = {
    "a.weight": torch.arange(12.0).reshape(3, 4).t(),
    "a.half": torch.arange(5, dtype=torch.float16),
    "a.fp8": torch.ones(3).to(torch.float8_e4m3fn),
    "a.conj": torch.tensor([1 + 2j]).conj(),
    "a.flag": torch.tensor([True, False]),
}


def saved(kind: str) -> bytes:
    buffer = io.BytesIO()
    if kind == "safetensors":
        return safetensors.torch.save({n: t.resolve_conj().contiguous() for n, t in STATE.items()})
    value = {"state_dict": STATE, "args": {"lr": 0.1}}
    torch.save(value, buffer, _use_new_zipfile_serialization=kind == "zip")
    return buffer.getvalue()


ORIGINALS = {kind: saved(kind) for kind in ("safetensors", "zip", "legacy")}


def read_all(data: bytes) -> None:
    """Open the bytes and read every tensor; only our own errors may come out."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.pt"
        path.write_bytes(data)
        with suppress(OtfuseError), open_checkpoint(path) as checkpoint:
            for name, info in checkpoint.infos.items():
                tensor = checkpoint.read(name)
                assert (tuple(tensor.shape), tensor.dtype) == (info.shape, info.dtype)
                assert tensor.is_contiguous()


@pytest.mark.slow
@given(
    kind=st.sampled_from(sorted(ORIGINALS)),
    edits=st.lists(
        st.tuples(st.floats(0, 1), st.binary(max_size=4), st.integers(0, 8)), max_size=4
    ),
    cut=st.floats(0, 1),
    whole=st.booleans(),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_damaged_files(
    kind: str, edits: list[tuple[float, bytes, int]], cut: float, whole: bool
) -> None:
    data = ORIGINALS[kind]
    for place, patch, dropped in edits:
        at = int(place * len(data))
        data = data[:at] + patch + data[at + dropped :]
    read_all(data if whole else data[: int(cut * len(data))])


def pickled(edit: Callable[[bytes], bytes]) -> bytes:
    """The zip file with its pickle edited and everything else in order."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(ORIGINALS["zip"])) as old, zipfile.ZipFile(buffer, "w") as new:
        for record in old.infolist():
            data = old.read(record)
            name = record.filename
            new.writestr(name, edit(data) if name.endswith("data.pkl") else data)
    return buffer.getvalue()


@pytest.mark.slow
@given(place=st.floats(0, 1), patch=st.binary(min_size=1, max_size=3), dropped=st.integers(0, 3))
@example(place=0.0, patch=b"", dropped=2)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_damaged_pickles(place: float, patch: bytes, dropped: int) -> None:
    def edit(data: bytes) -> bytes:
        at = int(place * len(data))
        return data[:at] + patch + data[at + dropped :]

    read_all(pickled(edit))


@given(data=st.binary(max_size=64))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_arbitrary_bytes(data: bytes) -> None:
    read_all(data)
    read_all(len(data).to_bytes(8, "little") + b"{" + data)
    read_all(b"\x80\x02" + data)


# -- ten thousand files from our own seeded mutator

# What loading a hostile file would make Python do; reading tensors does none of it.
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class")
SECONDS = 20
seen: list[str] | None = None


def _watch(event: str, _: object) -> None:
    if seen is not None and event in FORBIDDEN:
        seen.append(event)


@cache
def install_watch() -> None:
    """An audit hook stays for good, so there is one; it looks only while `seen` is a list."""
    sys.addaudithook(_watch)


@contextmanager
def nothing_runs() -> Iterator[None]:
    """No execution and no hang inside this block."""
    global seen
    install_watch()

    def late(*_: object) -> None:
        raise AssertionError(f"reading took more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    seen = []
    try:
        yield
        assert seen == []
    finally:
        seen = None
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@cache
def folders() -> dict[str, dict[str, bytes]]:
    """Folders as they are on disk: name to the bytes of each file."""
    flat = {n: t.resolve_conj().contiguous() for n, t in STATE.items()}
    halves = (dict(list(flat.items())[:2]), dict(list(flat.items())[2:]))
    sharded: dict[str, bytes] = {"config.json": b'{"model_type": "x"}'}
    weight_map = {}
    for at, part in enumerate(halves, start=1):
        file = f"model-0000{at}-of-00002.safetensors"
        sharded[file] = safetensors.torch.save(part)
        weight_map.update(dict.fromkeys(part, file))
    sharded["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": flat, "epoch": 3}, checkpoint_id=folder, no_dist=True)
        distributed = {p.name: p.read_bytes() for p in Path(folder).iterdir()}
    return {"sharded": sharded, "distributed": distributed}


def foreign() -> bytes:
    buffer = io.BytesIO()
    torch.save({"model": STATE, "args": argparse.Namespace(a=1)}, buffer)
    return buffer.getvalue()


def damaged(number: int, root: Path) -> Path:
    """File or folder number `number`, damaged in a way that only the number decides."""
    dice = random.Random(number)
    kind = dice.choice(["file", "pickle", "header", "sharded", "distributed"])
    path = root / str(number)
    if kind == "file":
        original = dice.choice([*ORIGINALS.values(), foreign()])
        path.write_bytes(mutated(original, dice))
    elif kind == "pickle":
        path.write_bytes(mutated_inside(dice.choice([ORIGINALS["zip"], foreign()]), dice))
    elif kind == "header":
        path.write_bytes(mutated_header(ORIGINALS["safetensors"], dice))
    else:
        path.mkdir()
        files = dict(folders()[kind])
        # The small files say where everything is.
        small = [n for n in files if n.endswith((".json", ".metadata"))]
        victim = dice.choice(small if dice.random() < 0.7 else list(files))
        change = mutated_header if ".safetensors" in victim[-12:] else mutated
        files[victim] = change(files[victim], dice)
        for name, data in files.items():
            (path / name).write_bytes(data)
    return path


def outcome(path: Path) -> str:
    """`read`, or what was refused; anything but an exit code of 3 fails the test."""
    try:
        with open_checkpoint(path) as checkpoint:
            checkpoint.record()
            for name, info in checkpoint.infos.items():
                tensor = checkpoint.read(name)
                assert (tuple(tensor.shape), tensor.dtype) == (info.shape, info.dtype)
    except UnreadableInput as error:
        refused = error
    else:
        return "read"
    assert refused.exit_code is ExitCode.UNREADABLE
    assert refused.what
    assert refused.where
    texts = (refused.what, refused.where, refused.why, refused.fix)
    assert all("\n" not in str(text) for text in texts)
    return refused.what


def attack(numbers: range) -> set[str]:
    found = set()
    with tempfile.TemporaryDirectory() as folder:
        folders()
        for number in numbers:
            path = damaged(number, Path(folder))
            with nothing_runs():
                try:
                    found.add(outcome(path))
                except Exception as error:
                    raise AssertionError(f"file {number}: {error!r}") from error
    return found


@pytest.mark.slow
def test_hundreds_of_damaged_files() -> None:
    assert len(attack(range(200))) > 8  # refused for many reasons: damage gets everywhere


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_ten_thousand_damaged_files(part: int) -> None:
    attack(range(1000 * part, 1000 * (part + 1)))
