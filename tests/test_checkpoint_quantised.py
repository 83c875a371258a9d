"""Codes beside scales are refused whatever their names are; weights that were only cast are not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from libraries import timm
from nets import Mlp, Vgg, randomise, state
from otfuse_cli.checkpoint.open import Checkpoint, open_checkpoint
from otfuse_cli.errors import UnreadableInput

State = dict[str, torch.Tensor]
FP8 = torch.float8_e4m3fn
GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR)


def positive(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=GENERATOR) + 0.01


def fp8(*shape: int, dtype: torch.dtype = FP8) -> torch.Tensor:
    return normal(*shape).to(dtype)


def codes(*shape: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, shape, generator=GENERATOR, dtype=dtype)


def only_weight(*scales: tuple[str, torch.Tensor], weight: torch.Tensor | None = None) -> State:
    weight = fp8(32, 64) if weight is None else weight
    return {"fc.weight": weight, "fc.bias": normal(32), **dict(scales)}


QUANTISED: dict[str, State] = {
    "ComfyUI": {"scaled_fp8": torch.empty(0, dtype=FP8)}
    | only_weight(("fc.scale_weight", positive()), ("fc.scale_input", positive())),
    "ComfyUI, e5m2": only_weight(
        ("fc.scale_weight", positive(1)), weight=fp8(32, 64, dtype=torch.float8_e5m2)
    ),
    "one number": only_weight(("fc.scale", positive())),
    "rows": only_weight(("fc.s", positive(32))),
    "rows as a column": only_weight(("fc.amax", positive(32, 1))),
    "columns": only_weight(("fc.smooth", positive(64))),
    "blocks": only_weight(("fc.grid", positive(2, 4)), weight=fp8(256, 512)),
    "blocks, the last one cut": only_weight(("fc.grid", positive(2, 4)), weight=fp8(200, 500)),
    "MX exponents": only_weight(("fc.e", positive(32, 2).to(torch.float8_e8m0fnu))),
    "bfloat16 scale": only_weight(("fc.s", positive(32).bfloat16())),
    "a convolution": {"c.weight": fp8(16, 8, 3, 3), "c.k": positive(16, 1, 1, 1)},
    "experts": {"e.up": fp8(4, 64, 32), "e.up_k": positive(4), "e.down": fp8(4, 32, 64)}
    | {"e.down_k": positive(4)},
    "a flat state dict": {"w1": fp8(32, 64), "s1": positive(), "w2": fp8(8, 32), "s2": positive()},
    "a dead row": only_weight(("fc.s", positive(32).index_fill(0, torch.tensor([3]), 0.0))),
    "quanto": {"fc.weight._data": codes(32, 64), "fc.weight._scale": positive(32, 1)},
    "int8 of another name": {"fc.w": codes(32, 64), "fc.s": positive(32)},
    "int16": {"fc.w": codes(32, 64, dtype=torch.int16), "fc.s": positive()},
    "bitsandbytes": {"fc.q": codes(1024, 1, dtype=torch.uint8), "fc.q.absmax": positive(32)},
    "GPTQ of other names": {
        "fc.q": codes(16, 48, dtype=torch.int32),
        "fc.zeros": codes(1, 6, dtype=torch.int32),
        "fc.s": positive(1, 48).half(),
    },
    "AWQ of other names": {
        "fc.q": codes(128, 6, dtype=torch.int32),
        "fc.z": codes(2, 6, dtype=torch.int32),
        "fc.s": positive(2, 48).half(),
    },
    "MXFP4": {
        "e.up_blocks": codes(4, 64, 2, 16, dtype=torch.uint8),
        "e.up_scales": codes(4, 64, 2, dtype=torch.uint8),
        "e.up_bias": normal(4, 64),
    },
    "NVFP4": {"fc.w": codes(32, 32, dtype=torch.uint8), "fc.w_s": positive(32, 4).to(FP8)},
    "a quantiser of its own": {"fc.weight": fp8(32, 64), "fc.weight_quantizer.s": positive()},
}


def saved(value: State, folder: Path, kind: str) -> Path | State:
    if kind == "memory":
        return value
    path = folder / f"x.{kind}"
    if kind == "safetensors":
        safetensors.torch.save_file(value, path)
    else:
        torch.save(value, path)
    return path


@pytest.mark.parametrize("kind", ["safetensors", "pt", "memory"])
@pytest.mark.parametrize("name", QUANTISED)
def test_codes_are_refused_with_their_scale(tmp_path: Path, name: str, kind: str) -> None:
    source = saved(QUANTISED[name], tmp_path, kind)
    with pytest.raises(UnreadableInput) as caught, open_checkpoint(source):
        pass
    assert caught.value.what == "a quantised checkpoint"
    assert "beside" in str(caught.value.where)
    held = [
        t for t in QUANTISED[name].values() if t.element_size() == 1 or not t.is_floating_point()
    ]
    dtypes = {str(t.dtype).removeprefix("torch.") for t in held}
    assert dtypes & set(re.findall(r"\w+", str(caught.value.where)))


def cast(net: nn.Module, dtype: torch.dtype = FP8, *, all_of_it: bool = False) -> State:
    """Weights in 8 bits, as `model.to(dtype)` has them; vectors stay, unless all is cast."""
    return {
        n: t.to(dtype) if t.is_floating_point() and (all_of_it or t.dim() > 1) else t
        for n, t in net.state_dict().items()
    }


def swin() -> nn.Module:
    return timm().create_model(
        "swin_tiny_patch4_window7_224", img_size=28, window_size=7, embed_dim=12, depths=(1, 1)
    )


PLAIN = {
    "MLP": lambda: cast(randomise(Mlp((12, 9, 8, 5)), 0)),
    "MLP, all of it": lambda: cast(randomise(Mlp((12, 9, 8, 5)), 0), all_of_it=True),
    "MLP, e5m2": lambda: cast(randomise(Mlp((12, 9, 8, 5)), 0), torch.float8_e5m2),
    "biases that happen to be positive": lambda: {"a.weight": fp8(4, 8), "a.bias": positive(4)},
    "biases of another name, of either sign": lambda: {"w1": fp8(8, 4), "c1": normal(8)},
    "new biases, all zero": lambda: {"w1": fp8(8, 4), "c1": torch.zeros(8)},
    "VGG with BatchNorm": lambda: cast(Vgg(norm=True)),
    "transformer": lambda: cast(nn.TransformerEncoderLayer(16, 4, 32)),
    "LSTM": lambda: cast(nn.LSTM(8, 16, 2)),
    "Swin": lambda: cast(swin()),
    "Swin, float32": lambda: swin().state_dict(),
    "weight norm": lambda: cast(nn.utils.parametrizations.weight_norm(nn.Linear(8, 16)))
    | {"g.weight_g": positive(16, 1), "g.weight_v": fp8(16, 8)},
    "spectral norm": lambda: {
        "a.weight_orig": fp8(16, 8), "a.weight_u": positive(16), "a.weight_v": positive(8)
    },
    "CLIP's root": lambda: {
        "positional_embedding": fp8(77, 768),
        "text_projection": fp8(768, 768),
        "logit_scale": torch.tensor(4.6),
    },
    "RWKV": lambda: {f"time_mix_{k}": fp8(1, 1, 16) for k in "kvr"} | {"decay": positive(16)},
    "causal mask in bytes": lambda: {
        "attn.bias": torch.ones(16, 16, dtype=torch.uint8).tril()[None, None],
        "attn.temperature": positive(),
    },
    "bool mask": lambda: {"a.mask": torch.ones(8, 8).tril().bool(), "a.scale": positive(8)},
    "ternary map": lambda: {
        "a.signs": torch.randint(-1, 2, (16, 16), dtype=torch.int8), "a.scale": positive(16)
    },
    "position ids": lambda: {"e.position_ids": torch.arange(512)[None], "e.scale": positive()},
    "indices in 32 bits": lambda: {
        "a.index": torch.arange(49 * 49, dtype=torch.int32).view(49, 49), "a.scale": positive()
    },
    "palette": lambda: {"palette": codes(21, 3, dtype=torch.uint8), "std": positive(3)},
    "picture": lambda: {"image": codes(3, 32, 32, dtype=torch.uint8), "std": positive(3, 1, 1)},
}  # fmt: skip


@pytest.mark.slow_cases("Swin", "Swin, float32")
@pytest.mark.parametrize("name", PLAIN)
def test_what_was_only_cast_is_read(tmp_path: Path, name: str) -> None:
    value = {n: t.contiguous() for n, t in PLAIN[name]().items()}
    for kind in ("safetensors", "pt", "memory"):
        with open_checkpoint(saved(value, tmp_path, kind)) as checkpoint:
            assert set(checkpoint.infos) == set(value)


def test_suspects_alone_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening stays quick: without codes, or codes without scales, no tensor is read."""

    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError

    path = saved(state(Vgg(norm=True)) | cast(Mlp((64, 64, 5))), tmp_path, "safetensors")
    monkeypatch.setattr(Checkpoint, "read", refuse)
    monkeypatch.setattr(Checkpoint, "read_rows", refuse)
    with open_checkpoint(path) as checkpoint:
        assert len(checkpoint.infos) > 10
