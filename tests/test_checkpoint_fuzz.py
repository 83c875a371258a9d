"""Damaged files: an error of ours or a proper read, never a traceback."""

import io
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import hypothesis.strategies as st
import safetensors.torch
import torch
from hypothesis import example, given, settings

from otfuse_cli.checkpoint.open import open_checkpoint
from otfuse_cli.errors import OtfuseError

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
