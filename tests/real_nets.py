"""Networks of libraries, at small sizes, whose graphs were once refused or crashed a command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from libraries import torchvision_models

Made = tuple[nn.Module, Any]

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
}
AUDIO = {
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 4, 2),
    "conv_kernel": (10, 4, 3),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}


def transformers(kind: str, head: str, **options: Any) -> nn.Module:
    torchvision_models()  # transformers imports it
    import transformers as library

    module: nn.Module = getattr(library, kind + head)(getattr(library, f"{kind}Config")(**options))
    return module


def image(side: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, side, side)}


def wav2vec2() -> Made:
    net = transformers("Wav2Vec2", "ForCTC", vocab_size=12, **SMALL, **AUDIO)
    return net, {"input_values": torch.randn(2, 1600)}


def hubert() -> Made:
    net = transformers("Hubert", "ForCTC", vocab_size=12, **SMALL, **AUDIO)
    return net, {"input_values": torch.randn(2, 1600)}


def xlnet() -> Made:
    sizes = {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 40}
    net = transformers("XLNet", "ForSequenceClassification", vocab_size=40, **sizes)
    return net, {"input_ids": torch.randint(3, 40, (2, 9))}


def regnet() -> Made:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4}
    return transformers("RegNet", "ForImageClassification", **sizes), image(32)


def levit() -> Made:
    sizes: dict[str, Any] = {"hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 3, 4]}
    sizes |= {"depths": [1, 1, 1], "key_dim": [8, 8, 8], "image_size": 64, "num_labels": 3}
    ratios = {"mlp_ratio": [2, 2, 2], "attention_ratio": [2, 2, 2]}
    return transformers("Levit", "ForImageClassification", **sizes, **ratios), image(64)


def shufflenet() -> Made:
    models = torchvision_models()
    options = {"stages_repeats": [1, 2, 1], "stages_out_channels": [8, 16, 32, 64, 64]}
    return models.ShuffleNetV2(**options, num_classes=5), torch.randn(2, 3, 64, 64)


REAL: tuple[Callable[[], Made], ...] = (wav2vec2, hubert, xlnet, regnet, levit, shufflenet)
