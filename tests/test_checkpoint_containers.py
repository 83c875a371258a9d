"""Wrappers, prefixes, --key: one set of weights in many coats."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from otfuse_cli.checkpoint.names import common_prefix, quantised_key
from otfuse_cli.checkpoint.open import open_checkpoint
from otfuse_cli.errors import UsageError

STATE = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.arange(2.0)}


def prefixed(prefix: str) -> dict[str, Any]:
    return {prefix + name: tensor for name, tensor in STATE.items()}


COATS: dict[str, tuple[Any, tuple[str, ...], str]] = {
    "raw": (STATE, (), ""),
    "ordered": (OrderedDict(STATE), (), ""),
    "state_dict": ({"state_dict": STATE, "epoch": 3}, ("state_dict",), ""),
    "model": ({"model": STATE, "optimizer": {"state": {0: STATE}}}, ("model",), ""),
    "model_state_dict": ({"model_state_dict": STATE, "loss": 0.5}, ("model_state_dict",), ""),
    "ddp": (prefixed("module."), (), "module."),
    "compile": (prefixed("_orig_mod."), (), "_orig_mod."),
    "compile ddp": (prefixed("_orig_mod.module."), (), "_orig_mod.module."),
    "ddp compile": (prefixed("module._orig_mod."), (), "module._orig_mod."),
    "lightning": ({"state_dict": prefixed("model.")}, ("state_dict",), "model."),
    "lightning compile": (
        {"state_dict": prefixed("model._orig_mod.")},
        ("state_dict",),
        "model._orig_mod.",
    ),
    "nested": (
        {"model": {"state_dict": prefixed("module.")}, "epoch": 1},
        ("model", "state_dict"),
        "module.",
    ),
    "nested the other way": (
        {"state_dict": {"model": prefixed("module.model.")}},
        ("state_dict", "model"),
        "module.model.",
    ),
    "another name": ({"net": STATE, "acc": 90.0, "epoch": 2}, ("net",), ""),
    "only ema": ({"ema": STATE, "decay": 0.99}, ("ema",), ""),
    "tensor beside": ({"model": STATE, "rng": torch.zeros(3)}, ("model",), ""),
    "deepspeed": ({"module": STATE, "lr_scheduler": {"x": torch.rand(1)}}, ("module",), ""),
    "strings inside": ({**STATE, "note": "x", "version": 1.5, "flag": None}, (), ""),
    "extra state inside": ({**STATE, "a._extra_state": {"scale": torch.rand(1)}}, (), ""),
}


@pytest.mark.parametrize("kind", ["memory", "zip", "legacy"])
@pytest.mark.parametrize("coat", COATS)
def test_every_coat_holds_the_same_weights(tmp_path: Path, coat: str, kind: str) -> None:
    value, wrapper, prefix = COATS[coat]
    source: Any = value
    if kind != "memory":
        source = tmp_path / "x.pt"
        torch.save(value, source, _use_new_zipfile_serialization=kind == "zip")
    with open_checkpoint(source) as checkpoint:
        assert list(checkpoint.infos) == list(STATE)
        assert all(torch.equal(checkpoint.read(name), STATE[name]) for name in STATE)
        assert checkpoint.container.wrapper == wrapper
        assert checkpoint.container.prefix == prefix


def test_prefix_in_safetensors(tmp_path: Path) -> None:
    safetensors.torch.save_file(prefixed("module."), tmp_path / "x.safetensors")
    with open_checkpoint(tmp_path / "x.safetensors") as checkpoint:
        assert sorted(checkpoint.infos) == sorted(STATE)
        assert str(checkpoint.container) == "safetensors (module.)"


@pytest.mark.parametrize(
    ("names", "lightning", "wanted"),
    [
        ([], False, ""),
        (["module.a", "module.b"], False, "module."),
        (["module.a", "b"], False, ""),
        (["module", "module.a"], False, ""),
        (["module."], False, ""),
        (["modules.a"], False, ""),
        (["model.a"], False, ""),
        (["model.a"], True, "model."),
        (["model.model.a", "model.head"], True, "model."),
        (["model.model.a"], True, "model."),
        (["module.module.a"], False, "module.module."),
        (["model.module.a"], True, "model.module."),
    ],
)
def test_common_prefix(names: list[str], lightning: bool, wanted: str) -> None:
    assert common_prefix(names, lightning=lightning) == wanted


def test_quantised_key() -> None:
    assert not any(map(quantised_key, ["a.weight", "logit_scale", "scale", "weight_scaler"]))
    assert quantised_key("weight_scale")
    assert quantised_key("a.weight.quant_state.bitsandbytes__nf4")


AMBIGUOUS = [
    {"model": STATE, "ema": STATE},
    {"model": STATE, "model_ema": STATE},
    {"state_dict": STATE, "state_dict_ema": STATE},
    {"model": STATE, "ema": {"shadow": STATE}},
    {"model": STATE, "state_dict": STATE},
    {"generator": STATE, "discriminator": STATE},
]


@pytest.mark.parametrize("value", AMBIGUOUS, ids=lambda v: "+".join(v))
def test_ambiguous_files_need_a_key(value: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        open_checkpoint(value)
    assert all(name in str(caught.value.why) for name in value)
    assert "--key" in str(caught.value.fix)
    for name in value:
        with open_checkpoint(value, key=name) as checkpoint:
            assert checkpoint.container.wrapper[0] == name
            assert list(checkpoint.infos) == list(STATE)


def test_an_ema_without_tensors_is_no_choice() -> None:
    with open_checkpoint({"model": STATE, "ema": {"decay": 0.9}}) as checkpoint:
        assert checkpoint.container.wrapper == ("model",)


def test_dotted_keys() -> None:
    value = {"a": {"b": {"model": STATE}, "c.d": STATE}, "x": STATE}
    assert open_checkpoint(value, key="a.b").container.wrapper == ("a", "b", "model")
    assert open_checkpoint(value, key="a.c.d").container.wrapper == ("a", "c.d")


@pytest.mark.parametrize("key", ["nope", "model.nope", "epoch", "model.a.weight", ""])
def test_a_key_that_leads_nowhere(key: str) -> None:
    with pytest.raises(UsageError, match="no such entry") as caught:
        open_checkpoint({"model": STATE, "epoch": 3}, key=key)
    assert "model" in str(caught.value.why)


def test_a_key_for_a_flat_file() -> None:
    with pytest.raises(UsageError, match="leave --key away"):
        open_checkpoint(STATE, key="ema")


def test_a_file_that_contains_itself() -> None:
    loop: dict[str, Any] = {"epoch": 1}
    loop["model"] = loop
    with pytest.raises(Exception, match="no tensors found"):
        open_checkpoint(loop)
