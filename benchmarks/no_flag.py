"""Published networks from the command line without `--arch`: recognised, traced, loaded back.

    python benchmarks/no_flag.py [--only REGEX]

Two networks of random weights each, of torchvision and timm as one file and of transformers as a
folder, are merged by `otfuse merge A B -o OUT`, once with their library and once where it is
missing. The library's own class has to load OUT with every tensor in its place. Seconds of CPU
time: *merge*, and in it *found* (recognising, building, exporting and reading the graph), beside
*library*, what building the network and exporting it take by themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import network_libraries
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from otfuse_cli.checkpoint.open import open_checkpoint
from otfuse_cli.cli.app import main as otfuse
from otfuse_cli.graph.trace.from_module import export
from otfuse_cli.session.find_architecture import find_architecture

NETWORKS = (
    *(f"torchvision/{n}" for n in ("resnet50", "efficientnet_b0", "swin_t", "regnet_y_400mf")),
    "timm/vit_tiny_patch16_224",
    "timm/convnextv2_atto",
    "timm/mobilenetv4_conv_small",
    "timm/eva02_tiny_patch14_224",
    "transformers/RobertaForSequenceClassification",
    "transformers/T5ForConditionalGeneration",
    "transformers/WhisperForConditionalGeneration",
    "transformers/Qwen3ForCausalLM",
    "transformers/MixtralForCausalLM",
)
LIBRARIES = ("torchvision", "timm", "transformers")
_SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": 99}
_SPEECH = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 99,
    "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "Roberta": {**_SIZES, "intermediate_size": 48},
    "T5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "vocab_size": 99},
    "Whisper": _SPEECH,
    "Qwen3": {**_SIZES, **_GROUPED, "intermediate_size": 48},
    "Mixtral": {**_SIZES, **_GROUPED, "intermediate_size": 48, "num_local_experts": 3},
}


def build(name: str, seed: int) -> nn.Module:
    """A network of random weights."""
    torch.manual_seed(seed)
    library, _, kind = name.partition("/")
    if library == "torchvision":
        return network_libraries.build_torchvision(kind)
    if library == "timm":
        return network_libraries.build_timm(kind)
    import transformers

    family = kind.partition("For")[0]
    config = getattr(transformers, f"{family}Config")(**CONFIGS[family])
    return getattr(transformers, kind)(config).eval()


def save(name: str, network: nn.Module, path: Path) -> Path:
    """As its users have it: a folder, or a file of tensors."""
    if name.startswith("transformers/"):
        network.save_pretrained(path)
        return path
    file = path.with_suffix(".safetensors")
    save_file({n: t.contiguous() for n, t in network.state_dict().items()}, file)
    return file


def loads(name: str, network: nn.Module, path: Path) -> bool:
    """Whether the library's class takes the result, each tensor in its place."""
    if name.startswith("transformers/"):
        _, said = type(network).from_pretrained(path, output_loading_info=True)
        return not any(said.values())
    network.load_state_dict(load_file(path), strict=True)
    return True


@contextlib.contextmanager
def missing(*libraries: str) -> Any:
    """Libraries that can't be imported."""
    gone = {n: m for n, m in sys.modules.items() if n.partition(".")[0] in libraries}
    for name in gone:
        del sys.modules[name]
    sys.modules.update(dict.fromkeys(libraries))  # None: an import of it fails
    try:
        yield
    finally:
        for name in libraries:
            del sys.modules[name]
        sys.modules.update(gone)


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """What a call gives, and its CPU seconds."""
    began = time.process_time()
    return function(), time.process_time() - began


def merge(paths: list[Path], out: Path) -> tuple[int, str]:
    """Exit code and everything that was printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = otfuse(["merge", *map(str, paths), "-o", str(out), "--matcher", "sweep"])
    return code, said.getvalue()


def one(name: str, folder: Path) -> str:
    """A row of the table."""
    network = build(name, 0)
    paths = [save(name, build(name, seed), folder / str(seed)) for seed in (0, 1)]
    out = folder / ("fused" if paths[0].is_dir() else "fused.safetensors")
    (code, said), merged = timed(lambda: merge(paths, out))
    loaded = "strict" if code == 0 and loads(name, network, out) else f"exit {code}: {said[-300:]}"
    with open_checkpoint(paths[0]) as checkpoint:
        architecture, found = timed(lambda: find_architecture(checkpoint, "auto"))
    library = _library(name, architecture)
    with missing(*LIBRARIES):
        code, said = merge(paths, folder / ("bare" if paths[0].is_dir() else "bare.safetensors"))
    told = re.search(r"this is [^\n]*(?:\n +[^\n]+)*", said)
    without = " ".join(told[0].split()) if told else " ".join(said.split())[:200]
    graph = architecture.graph
    return (
        f"| {name} | {graph.source} | {loaded} | {merged:.1f} | {found:.1f} | {library} "
        f"| exit {code}: {without} |"
    )


def _library(name: str, architecture: Any) -> str:
    """What the library's build and export take, where a network was built at all."""
    if architecture.network is None:
        return ""
    _, built = timed(lambda: build(name, 0))
    network = architecture.network
    _, exported = timed(lambda: export(network.module, network.args, network.kwargs))
    return f"{built + exported:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="regular expression of LIBRARY/NAME")
    given = parser.parse_args()
    network_libraries.make_importable()
    os.environ["TQDM_DISABLE"] = "1"
    print("| network | graph | loaded | merge | found | library | without the library |")
    print("|---|---|---|--:|--:|--:|---|", flush=True)
    for name in NETWORKS:
        if re.search(given.only, name):
            with tempfile.TemporaryDirectory() as folder:
                print(one(name, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
