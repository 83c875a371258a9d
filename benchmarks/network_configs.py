"""Small networks of transformers: default configs whose sizes are shrunk field by field.

No list of architectures: a config says what it has, and a table says how small each field may be.
What one type needs besides is a row of `EXCEPTIONS`. Nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

IDS, WAVE = 9, 1600  # tokens, samples

# Fields of one number, by their value in the small network.
NUMBERS = {
    32: "hidden_size d_model n_embd dim emb_dim embed_dim n_embed embedding_size hidden_dim "
    "word_embed_proj_dim decoder_hidden_size attention_hidden_size bottleneck_size "
    "output_hidden_size text_embed_dim lru_width neck_hidden_size fusion_hidden_size "
    "text_hidden_size out_hidden_size image_size img_size",
    40: "intermediate_size d_ff n_inner ffn_dim encoder_ffn_dim decoder_ffn_dim d_inner ffn_hidden "
    "ffn_hidden_size shared_expert_intermediate_size mlp_hidden_size ff_dim inner_dim "
    "intermediate_size_mlp",
    24: "moe_intermediate_size projection_dim classifier_proj_size pooler_output_size "
    "proj_codevector_dim codevector_dim expert_ffn_hidden_size shared_intermediate_size",
    2: "num_hidden_layers n_layer n_layers encoder_layers decoder_layers num_layers "
    "num_decoder_layers num_encoder_layers num_key_value_heads num_kv_heads num_experts_per_tok "
    "moe_topk experts_per_token top_k "
    "num_sparse_encoder_layers num_sparse_decoder_layers",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
    "decoder_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts "
    "num_routed_experts n_experts attn_heads",
    8: "head_dim d_kv qk_nope_head_dim v_head_dim patch_size state_size qk_rope_head_dim "
    "attention_head_size",
    16: "q_lora_rank kv_lora_rank num_conv_pos_embeddings num_mel_bins time_step_rank "
    "num_codevectors_per_group",
    1: "n_group topk_group first_k_dense_replace num_nextn_predict_layers",
    64: "max_position_embeddings n_positions max_target_positions n_ctx max_seq_len "
    "max_sequence_length",
    50: "max_source_positions",
    99: "vocab_size src_vocab_size tgt_vocab_size decoder_vocab_size text_vocab_size",
}
SMALL = {name: size for size, names in NUMBERS.items() for name in names.split()}

# Fields of one number for each stage or layer: the first, and whether the next ones double.
LISTS = {
    "hidden_sizes": (16, True), "embed_dims": (16, True), "hidden_channels": (16, True),
    "depths": (1, False), "num_attention_heads": (2, False), "num_heads": (2, False),
    "conv_dim": (16, False), "layers": (1, False), "encoder_hidden_sizes": (16, True),
    "decoder_hidden_sizes": (16, False), "neck_hidden_sizes": (16, False),
    "num_conv_layers": (1, False),
}  # fmt: skip

EXCEPTIONS: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 16},
    "audio-spectrogram-transformer": {"max_length": 64, "num_mel_bins": 32},
    "bloom": {"n_head": 4},
    "canine": {"downsampling_rate": 4},
    "convnext": {"num_stages": 4},
    "deberta-v2": {"pos_att_type": ["p2c", "c2p"], "relative_attention": True},
    "deformable_detr": {"backbone_config": {"model_type": "resnet", "embedding_size": 8,
                                            "hidden_sizes": [16, 16, 16, 16], "depths": [1] * 4,
                                            "out_features": ["stage2", "stage3", "stage4"]}},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 320},
    "electra": {"embedding_size": 16},
    "funnel": {"block_sizes": [1, 1], "d_head": 8},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
              "expert_layer_offset": 1, "use_mamba_kernels": False},
    "levit": {"hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 3, 4], "key_dim": [8] * 3,
              "image_size": 64, "patch_size": 16},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
    "mobilebert": {"embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    "mobilevit": {"image_size": 64, "patch_size": 2, "hidden_sizes": [16, 24, 32]},
    "mobilevitv2": {"image_size": 64, "patch_size": 2},
    "regnet": {"groups_width": 4, "embedding_size": 8},
    "reformer": {"attn_layers": ["local", "local"], "axial_pos_embds": False,
                 "local_attn_chunk_length": 3, "is_decoder": True},
    "rwkv": {"attention_hidden_size": 32},
    "segformer": {"hidden_sizes": [16, 16, 32, 32], "num_attention_heads": [1, 2, 2, 4],
                  "decoder_hidden_size": 16},
    "swin": {"embed_dim": 16, "depths": [2, 1], "num_heads": [2, 2], "patch_size": 4,
             "window_size": 4},
    "swinv2": {"embed_dim": 16, "depths": [2, 1], "num_heads": [2, 2], "patch_size": 4,
               "window_size": 4},
    "timesformer": {"num_frames": 2},
    "videomae": {"num_frames": 4},
    "vivit": {"num_frames": 4, "tubelet_size": [2, 8, 8]},
    "whisper": {"num_mel_bins": 16},
    "wav2vec2": {"num_conv_pos_embedding_groups": 4},
}  # fmt: skip

# Inputs that a type's config does not tell.
FURTHER_INPUTS: dict[str, Any] = {
    "layoutlm": lambda c: {"bbox": torch.zeros(2, IDS, 4, dtype=torch.long)},
    "lilt": lambda c: {"bbox": torch.zeros(2, IDS, 4, dtype=torch.long)},
    "bros": lambda c: {"bbox": torch.rand(2, IDS, 4)},
    "time_series_transformer": lambda c: _series(c),
    "reformer": lambda c: {"input_ids": _ids(c, 12)},
    "canine": lambda c: {"input_ids": _ids(c, 16)},
}

# Heads by what they are for, in the order in which one is taken.
HEADS = (
    "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM", "MASKED_LM", "CTC",
    "IMAGE_CLASSIFICATION", "ZERO_SHOT_IMAGE_CLASSIFICATION", "SEQUENCE_CLASSIFICATION",
    "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION", "SEMANTIC_SEGMENTATION", "DEPTH_ESTIMATION",
    "OBJECT_DETECTION", "IMAGE_TO_IMAGE", "TIME_SERIES_PREDICTION", "PRETRAINING",
)  # fmt: skip

# Taken in any case; the others by the draw.
ALWAYS = (
    "bert", "roberta", "albert", "electra", "deberta-v2", "distilbert", "xlm-roberta",
    "mobilebert", "modernbert", "mpnet", "gpt2", "gpt_neo", "gptj", "gpt_neox", "opt", "bloom",
    "falcon", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi",
    "phi3", "olmo2", "cohere", "granite", "stablelm", "mixtral", "qwen3_moe", "qwen2_moe",
    "olmoe", "gpt_oss", "deepseek_v3", "mamba", "mamba2", "jamba", "rwkv", "t5", "bart",
    "mbart", "pegasus", "whisper", "speech_to_text", "wav2vec2", "hubert", "wavlm",
    "audio-spectrogram-transformer", "clip", "siglip", "vit", "deit", "beit", "swin",
    "convnext", "resnet", "segformer", "dinov2", "levit", "mobilevit", "regnet", "poolformer",
    "videomae", "vivit", "timesformer", "xlnet", "funnel", "layoutlm", "canine",
)  # fmt: skip


def heads() -> dict[str, str]:
    """The class with a head of every model type that has one."""
    from transformers.models.auto import modeling_auto

    chosen: dict[str, str] = {}
    for purpose in HEADS:
        mapping = getattr(modeling_auto, f"MODEL_FOR_{purpose}_MAPPING_NAMES")
        for kind, name in mapping.items():
            chosen.setdefault(kind, name if isinstance(name, str) else name[0])
    return chosen


def chosen_types(count: int, seed: int, available: Mapping[str, str]) -> list[str]:
    """`ALWAYS`, and as many types more as make `count`, drawn from those with a head."""
    first = [kind for kind in ALWAYS if kind in available]
    rest = sorted(set(available) - set(first))
    random.Random(seed).shuffle(rest)
    return [*first, *rest[: max(0, count - len(first))]]


def small_config(config_class: type, kind: str = "") -> Any:
    """The default config with every field that is known to be a size made small."""
    default = config_class()
    fields = _fields(config_class)
    changes: dict[str, Any] = {}
    for name in fields:
        value = getattr(default, name, None)
        small = _shrunk(name, value)
        if small is not None:
            changes[name] = small
    for name, part in getattr(config_class, "sub_configs", {}).items():
        value = getattr(default, name, None)
        part = type(value) if part.__name__ == "AutoConfig" else part
        if value is not None and part is not type(None):
            shrunk = small_config(part, getattr(part, "model_type", ""))
            changes[name] = shrunk.to_dict()
    if "qk_nope_head_dim" in fields:  # latent attention: keys are made for every head
        changes["num_key_value_heads"] = SMALL["num_attention_heads"]
    changes |= EXCEPTIONS.get(kind, {})
    return config_class(**changes)


def _fields(config_class: type) -> list[str]:
    if dataclasses.is_dataclass(config_class):
        return [field.name for field in dataclasses.fields(config_class)]
    return list(inspect.signature(config_class.__init__).parameters)[1:]


def _shrunk(name: str, value: Any) -> Any:
    """A small value of the field, or None to leave it as it is."""
    if isinstance(value, bool):
        return None
    if name.endswith("token_id") and isinstance(value, int):
        return value if value < 3 else 3
    if isinstance(value, int) and name in SMALL:
        return min(value, SMALL[name])
    if isinstance(value, list | tuple) and name in LISTS and value:
        first, doubles = LISTS[name]
        return [first * 2 ** min(at, 3) if doubles else first for at in range(len(value))]
    return None


def build(kind: str) -> nn.Module:
    """A small network of the type, with a head and random weights."""
    import transformers

    network_class: Any = getattr(transformers, heads()[kind])
    network: nn.Module = network_class(small_config(network_class.config_class, kind))
    return network.eval()


def inputs(kind: str, network: nn.Module) -> dict[str, torch.Tensor]:
    """What to call the network with: the required ones of its inputs, by their names."""
    config: Any = network.config
    wanted = inspect.signature(network.forward).parameters
    made: dict[str, torch.Tensor] = {}
    if "input_ids" in wanted and "input_features" not in wanted:
        made["input_ids"] = _ids(config)
    if "pixel_values" in wanted:
        made["pixel_values"] = _pixels(kind, config)
    elif "pixel_values_videos" in wanted:
        made["pixel_values_videos"] = _pixels(kind, config)
    if "input_features" in wanted:
        length = 2 * getattr(config, "max_source_positions", 20)
        bins = getattr(config, "num_mel_bins", None) or getattr(
            config, "input_feat_per_channel", 16
        )
        shape = (2, bins, length) if "whisper" in kind else (2, length, bins)
        made["input_features"] = torch.randn(shape)
    if "input_values" in wanted:
        if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
            made["input_values"] = torch.randn(2, config.max_length, config.num_mel_bins)
        else:
            made["input_values"] = torch.randn(2, WAVE)
    if config.is_encoder_decoder and "decoder_input_ids" in wanted:
        made["decoder_input_ids"] = _ids(config, 5)
    return made | FURTHER_INPUTS.get(kind, lambda c: {})(config)


def _ids(config: Any, length: int = IDS) -> torch.Tensor:
    """Tokens of neither end nor padding."""
    text = config.get_text_config()
    vocabulary = getattr(text, "vocab_size", None) or 99
    return torch.randint(4, max(5, min(vocabulary, 99) - 4), (2, length))


def _pixels(kind: str, config: Any) -> torch.Tensor:
    vision = getattr(config, "vision_config", getattr(config, "image_config", config))
    side = getattr(vision, "image_size", None) or 64
    height, width = side if isinstance(side, list | tuple) else (side, side)
    channels = getattr(vision, "num_channels", 3)
    frames = getattr(vision, "num_frames", None) or getattr(vision, "frames_per_clip", None)
    shape = (2, frames, channels) if frames else (2, channels)
    return torch.randn(*shape, height, width)


def _series(config: Any) -> dict[str, torch.Tensor]:
    past = config.context_length + max(config.lags_sequence)
    values = torch.randn(2, past)
    features = config.num_time_features
    return {
        "past_values": values,
        "past_time_features": torch.randn(2, past, features),
        "past_observed_mask": torch.ones(2, past),
        "future_values": torch.randn(2, config.prediction_length),
        "future_time_features": torch.randn(2, config.prediction_length, features),
    }
