"""Several models in one file: a choice by structure; --key for all files, or for one of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import otfuse_cli
from otfuse_cli.checkpoint.open import open_checkpoint
from otfuse_cli.errors import UsageError
from test_publication import mlp

pytestmark = pytest.mark.usefixtures("kept_graphs")

A, B = mlp(0), mlp(1)
NET = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))


def prefixed(prefix: str, state: dict[str, torch.Tensor] = B) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in state.items()}


def moments() -> dict[str, Any]:
    optimizer = torch.optim.Adam(NET.parameters())
    NET(torch.rand(2, 3)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


# What lies beside `model`, and how messages call it.
CHOICES: dict[str, tuple[Any, str]] = {
    "ema": (B, "ema"),
    "model_avg": (B, "model_avg"),
    "averaged_model": (AveragedModel(NET).state_dict(), "averaged_model"),
    "shadow": (B, "shadow"),
    "avg_state_dict": (B, "avg_state_dict"),
    "model_ema": (prefixed("module."), "model_ema"),
    "ema_state_dict": (B, "ema_state_dict"),
    "swa_model": (prefixed("module."), "swa_model"),
    "swa": ({"state_dict": B}, "swa.state_dict"),
    "polyak": (B, "polyak"),
    # By structure alone.
    "best": (B, "best"),
    "previous": (B, "previous"),
    "teacher_net": (B, "teacher_net"),
    "extra_state": ({"step": 3, "copy": B}, "extra_state.copy"),
    "ema_pytorch": (prefixed("online_model.", A) | prefixed("ema_model."), "ema_pytorch"),
    "grads": (B, "grads"),
    # An average without names, as torch_ema and diffusers store it.
    "ema_params": ({"decay": 0.99, "shadow_params": list(B.values())}, "ema_params"),
    "shadow_params": (list(B.values()), "shadow_params"),
    "average": ({0: B["0.weight"], 1: B["0.bias"], 2: B["2.weight"]}, "average"),
}


@pytest.mark.parametrize("wrapper", ["model", "state_dict", "net"])
@pytest.mark.parametrize("name", CHOICES)
def test_another_copy_of_the_model_is_a_choice(tmp_path: Path, name: str, wrapper: str) -> None:
    other, shown = CHOICES[name]
    torch.save({wrapper: A, "epoch": 3, name: other, "optimizer": moments()}, tmp_path / "x.pt")
    with pytest.raises(UsageError, match="several state dicts") as caught:
        open_checkpoint(tmp_path / "x.pt")
    assert wrapper in str(caught.value.why)
    assert shown.partition(".")[0] in str(caught.value.why)
    assert "optimizer" not in str(caught.value.why)
    assert "--key" in str(caught.value.fix)
    with open_checkpoint(tmp_path / "x.pt", key=wrapper) as checkpoint:
        assert torch.equal(checkpoint.read("0.weight"), A["0.weight"])
    if isinstance(other, dict) and name not in ("ema_pytorch", "ema_params", "average"):
        with open_checkpoint(tmp_path / "x.pt", key=shown) as checkpoint:
            assert list(checkpoint.infos) == list(B)


COMPANY: dict[str, Any] = {
    "optimizer": moments(),
    "opt": moments(),
    "named_opt": {"exp_avg": B, "exp_avg_sq": B, "param_groups": [{"lr": 0.1}]},
    "optimizer_by_name": {"exp_avg": B, "exp_avg_sq": B},
    "lr_scheduler": {"base": torch.rand(3)},
    "ema": {"decay": torch.tensor(0.99), "updates": 3},
    "avg_loss": {"train": torch.rand(10)},
    "metrics": {"confusion": torch.rand(10, 10)},
    "rng": {"cpu": torch.get_rng_state()},
    "other_net": {"a.weight": torch.rand(7, 7), "a.bias": torch.rand(7)},
    "head": {"2.weight": torch.rand(9, 4)},
    "callbacks": {"ModelCheckpoint": {"best_model_score": torch.tensor(0.5)}},
    "losses": [torch.rand(3), torch.rand(3)],
    "history": [torch.rand(4, 3), 3],
}


@pytest.mark.parametrize("wrapper", ["model", "state_dict"])
@pytest.mark.parametrize("name", COMPANY)
def test_what_is_no_copy_is_no_choice(tmp_path: Path, name: str, wrapper: str) -> None:
    torch.save({wrapper: A, name: COMPANY[name]}, tmp_path / "x.pt")
    with open_checkpoint(tmp_path / "x.pt") as checkpoint:
        assert checkpoint.container.wrapper == (wrapper,)
        assert list(checkpoint.infos) == list(A)


@pytest.mark.parametrize(
    "beside",
    [
        {"stats": {"mean": torch.rand(3)}},
        {"extra": {"x": torch.tensor(1.0)}},
        {"opt": {"state": {0: {"exp_avg": torch.rand(3)}}}},
        {"note": "x", "cfg": {"lr": 0.1, "t": torch.rand(2)}},
        {"ema": {"decay": torch.tensor(0.9)}},
    ],
    ids=lambda v: "+".join(v),
)
def test_a_bare_state_dict_keeps_its_company(beside: dict[str, Any]) -> None:
    with open_checkpoint({**A, **beside}) as checkpoint:
        assert checkpoint.container.wrapper == ()
        assert list(checkpoint.infos) == list(A)


@pytest.mark.parametrize(
    "beside",
    [{"encoder": prefixed("x.")}, {"ema": B}, {"decoder": {"w": torch.rand(3, 3)}}],
    ids=lambda v: "+".join(v),
)
def test_weights_on_two_levels_are_a_choice(beside: dict[str, Any]) -> None:
    value = {**A, **beside}
    (name,) = beside
    with pytest.raises(UsageError) as caught:
        open_checkpoint(value)
    assert f": ., {name}" in str(caught.value.why)
    assert list(open_checkpoint(value, key=".").infos) == list(A)
    assert len(open_checkpoint(value, key=name).infos) == len(beside[name])


# -- --key


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("3=ema", "no such checkpoint"),
        ({7: "ema"}, "no such checkpoint"),
        (["1=a", "1=b"], "two values for one checkpoint"),
        (["a", "b"], "two values for all checkpoints"),
        ("1=", "a position without a value"),
        ({"x": "ema"}, "a position is a whole number"),
    ],
)
def test_keys_that_can_not_be_meant(key: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        otfuse_cli.inspect(A, B, A, key=key)
    assert "--key" in str(caught.value)


RAW = A
BOTH = {"model": A, "ema": B}
NESTED = {"ema": {"module": B}, "model": A}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "raw": RAW,
        "raw2": B,
        "both": BOTH,
        "nested": NESTED,
        "model": {"model": A, "epoch": 3},
        "timm": {"state_dict": A, "state_dict_ema": B, "arch": "x"},
    }.items():
        torch.save(value, f"{name}.pt")
    x = np.random.default_rng(0).standard_normal((20, 3), dtype=np.float32)
    np.savez("s.npz", x=x, y=np.arange(20) % 2)
    return tmp_path


MEAN = {n: (A[n] + B[n]) / 2 for n in A}
PLAIN = ("--align", "none", "--overwrite", "-o", "out.pt")


def unwrapped(path: str, *wrapper: str) -> dict[str, torch.Tensor]:
    value = torch.load(path, weights_only=True)
    for key in wrapper:
        assert list(value) == [key]
        value = value[key]
    return dict(value)


def close(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return got.keys() == wanted.keys() and all(torch.allclose(got[n], wanted[n]) for n in wanted)


@pytest.mark.quick_cases(
    "inputs2-keys2-wrapper2-wanted2",
    "inputs4-keys4-wrapper4-wanted4",
    "inputs3-keys3-wrapper3-wanted3",
)
@pytest.mark.parametrize(
    ("inputs", "keys", "wrapper", "wanted"),
    [
        (("raw", "both"), ["ema"], ("ema",), MEAN),
        (("raw", "both"), ["1=ema"], ("ema",), MEAN),
        (("raw", "both"), ["1=model"], ("model",), A),
        (("both", "raw"), ["ema"], (), MEAN),
        (("both", "both"), ["0=model", "1=ema"], ("ema",), MEAN),
        (("both", "both"), ["ema", "0=model"], ("ema",), MEAN),
        (("raw", "nested"), ["ema.module"], ("ema", "module"), MEAN),
        (("raw", "nested"), ["1=ema"], ("ema", "module"), MEAN),
        (("timm", "both", "raw"), ["0=state_dict_ema", "1=ema"], (), None),
        (("raw2", "timm"), ["state_dict"], ("state_dict",), MEAN),
    ],
)
def test_a_key_for_the_files_that_need_one(
    cli: Any,
    files: Path,
    inputs: tuple[str, ...],
    keys: list[str],
    wrapper: tuple[str, ...],
    wanted: dict[str, torch.Tensor] | None,
) -> None:
    options = [text for key in keys for text in ("--key", key)]
    done = cli("merge", *(f"{n}.pt" for n in inputs), *options, *PLAIN)
    assert done.code == 0, done.err
    third = {n: (2 * B[n] + A[n]) / 3 for n in A}
    assert close(unwrapped("out.pt", *wrapper), wanted or third)
    # It reads as what it is, without a key.
    assert cli("inspect", "out.pt").code == 0
    tensors, _ = otfuse_cli.merge(*(f"{n}.pt" for n in inputs), key=keys, align="none")
    assert close(tensors, wanted or third)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("inspect raw.pt both.pt --key ema", 0),
        ("inspect both.pt --key 0=ema", 0),
        ("inspect raw.pt both.pt --key 1=ema --ot-costs", 0),
        ("prune-fuse raw2.pt both.pt --key 1=ema -o p.pt", 0),
        ("prune-fuse both.pt raw.pt --key ema -o p.pt", 0),
        ("eval raw.pt both.pt --key 1=ema --samples s.npz --arch mlp --average", 0),
        ("eval raw.pt both.pt nested.pt --key 1=ema --key 2=ema --samples s.npz --arch mlp", 0),
        ("curve raw.pt both.pt --key ema --samples s.npz --arch mlp --steps 2", 0),
        ("curve raw.pt both.pt --key 1=ema --samples s.npz --arch mlp --steps 2", 0),
        ("prune both.pt --key ema --amount 0.5 -o p.pt", 0),
        ("prune both.pt --key 0=ema --amount 0.5 -o p.pt", 0),
        ("inspect raw.pt both.pt", 2),
        ("inspect raw.pt both.pt --key 2=ema", 2),
        ("inspect raw.pt both.pt --key 0=ema", 2),
        ("inspect raw.pt raw2.pt --key ema", 2),
        ("inspect raw.pt both.pt --key eam", 2),
        ("prune raw.pt --key ema --amount 0.5 -o p.pt", 2),
        ("curve raw.pt both.pt --key 1=eam --samples s.npz --arch mlp", 2),
        ("merge raw.pt both.pt --key ema --key model -o p.pt", 2),
    ],
)
def test_every_command_takes_keys(cli: Any, files: Path, line: str, code: int) -> None:
    done = cli(*line.split())
    assert done.code == code, done.err
    assert "Traceback" not in done.err


def test_another_wrapped_model_is_taken_with_a_warning(cli: Any, files: Path) -> None:
    done = cli("merge", "model.pt", "both.pt", "--key", "ema", *PLAIN, "--json")
    assert done.code == 0, done.err
    (warning,) = json.loads(done.out)["report"]["warnings"][:1]
    assert warning == "model.pt has no ema: its only model, model, was taken"


@pytest.mark.parametrize(
    "key", ["ema", {1: "ema"}, ["1=ema"], ("0=model", "1=ema"), {0: "model", 1: "ema"}]
)
def test_the_library_takes_keys_in_their_natural_types(files: Path, key: Any) -> None:
    first: Any = BOTH if key not in ("ema", {1: "ema"}, ["1=ema"]) else A
    tensors, report = otfuse_cli.merge(first, "both.pt", key=key, align="none")
    assert close(tensors, MEAN)
    assert report.inputs[1].container == "pt (ema)"
    assert otfuse_cli.inspect(first, "both.pt", key=key).inputs[1].container == "pt (ema)"


def test_the_message_for_one_file_of_several_names_the_way(cli: Any, files: Path) -> None:
    done = cli("merge", "raw.pt", "both.pt", *PLAIN)
    assert done.code == 2
    assert "--key INDEX=NAME" in done.err
