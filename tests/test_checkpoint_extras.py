"""What lies beside the weights: carried over on request, whole or named as left out."""

from __future__ import annotations

import argparse
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from otfuse_cli.checkpoint.open import open_checkpoint
from otfuse_cli.checkpoint.write import open_writer
from test_checkpoint_folders import saved
from test_selection import mlp

MOMENT = torch.rand(3, 2)
PLAIN: dict[Any, Any] = {
    "epoch": 3,
    "loss": 0.25,
    "name": "run",
    "none": None,
    "flag": True,
    "raw": b"\x00\xff\xe4",
    "classes": ["cat", "dog"],
    "pair": (1, ("a", 2.5)),
    "seen": {1, 2},
    "dtype": torch.bfloat16,
    "size": torch.Size([2, 3]),
    "ordered": OrderedDict(a=1),
    "nested": {"deep": {"w": torch.arange(4.0), 7: "number"}},
    "optimizer": {
        "state": {0: {"step": torch.tensor(5.0), "exp_avg": MOMENT}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0]}],
    },
    "same": MOMENT,
}
FOREIGN: dict[Any, Any] = {
    "args": argparse.Namespace(lr=0.1),
    "path": Path("x"),
    "acc": np.float64(0.9),
    "counts": defaultdict(list, a=[1]),
    "history": {"acc": [np.float64(0.5)]},
    "frozen": frozenset([1]),
}


def equal(one: Any, other: Any) -> bool:
    if isinstance(other, torch.Tensor):
        return (
            isinstance(one, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
        )
    if isinstance(other, dict):
        return list(one) == list(other) and all(equal(one[k], other[k]) for k in other)
    if isinstance(other, list | tuple) and not isinstance(other, torch.Size):
        return (
            type(one) is type(other)
            and len(one) == len(other)
            and all(equal(a, b) for a, b in zip(one, other, strict=True))
        )
    return type(one) is type(other) and bool(one == other)


def carried(source: Any, folder: Path) -> tuple[Any, tuple[str, ...]]:
    out = folder / "out.pt"
    with open_checkpoint(source) as like:
        extras = like.extras()
        with open_writer(out, like.infos.values(), like=like, extras=extras) as writer:
            for name in like.infos:
                writer.put(name, like.read(name))
    return torch.load(out, weights_only=True), extras.left_out


@pytest.mark.parametrize("kind", ["zip", "legacy", "memory"])
def test_plain_entries_come_out_as_they_went_in(tmp_path: Path, kind: str) -> None:
    value = {"before": 1, "model": {"w": torch.rand(2), "note": "x"}, **PLAIN}
    source: Any = value
    if kind != "memory":
        source = tmp_path / "in.pt"
        torch.save(value, source, _use_new_zipfile_serialization=kind == "zip")
    back, left_out = carried(source, tmp_path)
    assert left_out == ()
    assert list(back) == list(value)
    assert equal(back, {**value, "ordered": {"a": 1}})
    moment = back["optimizer"]["state"][0]["exp_avg"]
    assert moment.data_ptr() == back["same"].data_ptr()


@pytest.mark.parametrize("new", [True, False])
def test_foreign_entries_are_left_out_whole_and_named(tmp_path: Path, new: bool) -> None:
    path = tmp_path / "in.pt"
    value = {"model": {"w": torch.rand(2), "cfg": argparse.Namespace()}, **FOREIGN, "epoch": 3}
    torch.save(value, path, _use_new_zipfile_serialization=new)
    back, left_out = carried(path, tmp_path)
    assert equal(back, {"model": {"w": value["model"]["w"]}, "epoch": 3})
    named = {text.partition(" (")[0] for text in left_out}
    assert named == {*FOREIGN, "model.cfg"}
    assert "args (a argparse.Namespace)" in left_out


def test_wrappers_in_wrappers(tmp_path: Path) -> None:
    path = tmp_path / "in.pt"
    value = {"a": 1, "model": {"b": 2, "state_dict": {"w": torch.rand(2)}, "c": 3}, "d": 4}
    torch.save(value, path)
    assert equal(carried(path, tmp_path)[0], value)


def test_an_entry_inside_itself_is_left_out(tmp_path: Path) -> None:
    loop: dict[str, Any] = {}
    loop["loop"] = loop
    torch.save({"model": {"w": torch.rand(2)}, "loop": loop}, tmp_path / "in.pt")
    back, left_out = carried(tmp_path / "in.pt", tmp_path)
    assert list(back) == ["model"]
    assert "inside itself" in left_out[0]


def test_extras_of_a_distributed_checkpoint(tmp_path: Path) -> None:
    value = {"model": {"w": torch.rand(2, 2)}, "ema": {"w": torch.rand(2, 2)}, "epoch": 3}
    folder = saved(tmp_path / "dcp", value)
    with open_checkpoint(folder, key="model") as like:
        extras = like.extras()
    ((key, entries),) = extras.levels
    assert key == "model"
    assert torch.equal(entries["ema"]["w"], value["ema"]["w"])


def test_merge_keeps_extras_only_when_asked(cli: Any, tmp_path: Path) -> None:
    a, b, out = (tmp_path / f"{n}.pt" for n in ("a", "b", "out"))
    torch.save({"model": mlp(0), "epoch": 1}, a)
    torch.save({"model": mlp(1), "epoch": 2, "args": argparse.Namespace(x=1)}, b)
    line = ["merge", a, b, "--align", "none", "--overwrite"]
    assert cli(*line, "-o", out).code == 0
    assert set(torch.load(out, weights_only=True)) == {"model"}
    done = cli(*line, "-o", out, "--keep-extras")
    assert done.code == 0
    assert "args (a argparse.Namespace)" in done.out + done.err
    back = torch.load(out, weights_only=True)
    assert back["epoch"] == 2
    assert set(back) == {"model", "epoch"}
    for other in ("out.safetensors", "folder"):
        done = cli(*line, "-o", tmp_path / other, "--keep-extras")
        assert done.code == 2
        assert "--keep-extras needs a .pt output" in done.err


def test_extras_of_an_ambiguous_anchor(cli: Any, tmp_path: Path) -> None:
    a, out = tmp_path / "a.pt", tmp_path / "out.pt"
    torch.save({"model": mlp(0), "ema": mlp(1)}, a)
    done = cli("merge", a, a, "-o", out, "--align", "none", "--key", "ema", "--keep-extras")
    assert done.code == 0, done.err
    back = torch.load(out, weights_only=True)
    assert equal(back, {"model": mlp(0), "ema": mlp(1)})
