"""Time and memory of layer graphs, each in a process of its own.

    python benchmarks/graph.py

Traces large networks on the meta device (needs transformers), and recognises files of 2,000 and of
20,000 tensors by their names and shapes. Prints CPU seconds (imports apart), and the peak resident
memory of the whole process.
"""

from __future__ import annotations

import subprocess
import sys
import time

LLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "tie_word_embeddings": False,
}


def llama():
    """A Llama of 1.5 billion parameters, and token ids."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    net = LlamaForCausalLM(LlamaConfig(**LLAMA))
    return net, {"input_ids": torch.zeros(2, 7, dtype=torch.long), "use_cache": False}


def resnet():
    """ResNet18 at full width, and images."""
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=64,
        hidden_sizes=[64, 128, 256, 512],
        depths=[2, 2, 2, 2],
        layer_type="basic",
    )
    return ResNetForImageClassification(config), {"pixel_values": torch.zeros(2, 3, 224, 224)}


def chain(count: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a Sequential of linear layers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for at in range(count // 2):
        shapes[f"net.{2 * at}.weight"] = (64, 64)
        shapes[f"net.{2 * at}.bias"] = (64,)
    return shapes


def blocks(count: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a Llama: a residual stream that all blocks read and write."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (999, 64)}
    for at in range(count // 9):
        block = f"model.layers.{at}."
        for name in "qkvo":
            shapes[f"{block}self_attn.{name}_proj.weight"] = (64, 64)
        for name, shape in {"gate": (96, 64), "up": (96, 64), "down": (64, 96)}.items():
            shapes[f"{block}mlp.{name}_proj.weight"] = shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{block}{name}.weight"] = (64,)
    return {**shapes, "model.norm.weight": (64,), "lm_head.weight": (999, 64)}


def recognise(name: str, count: int) -> None:
    """Recognise one file by its names and shapes and print what it took."""
    from otfuse_cli.graph.spec.from_shapes import families, layer_graph
    from otfuse_cli.runtime import peak_rss_bytes

    shapes = {"chain": chain, "blocks": blocks}[name](count)
    families()  # read once, whatever the file
    cpu = time.process_time()
    graph = layer_graph("auto", shapes)
    cpu = time.process_time() - cpu
    print(
        f"{name:7} {len(shapes):8} tensors        {len(list(graph.free())):5} spaces  "
        f"{cpu:5.1f} s CPU  {peak_rss_bytes() / 2**20:5.0f} MiB peak"
    )


def measure(name: str) -> None:
    """Trace one network and print what it took."""
    import torch

    from otfuse_cli.graph.trace.from_module import trace
    from otfuse_cli.runtime import peak_rss_bytes

    with torch.device("meta"):
        module, inputs = {"llama": llama, "resnet": resnet}[name]()
    start, cpu = time.perf_counter(), time.process_time()
    graph = trace(module, (), inputs)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    parameters = sum(p.numel() for p in module.parameters())
    print(
        f"{name:7} {parameters / 1e6:8.0f} M parameters  {len(list(graph.free())):4} spaces  "
        f"{cpu:5.1f} s CPU  {seconds:5.1f} s wall  {peak_rss_bytes() / 2**20:5.0f} MiB peak"
    )


if __name__ == "__main__":
    match sys.argv[1:]:
        case [network]:
            measure(network)
        case [names, tensors]:
            recognise(names, int(tensors))
        case _:
            runs = [("resnet",), ("llama",)]
            runs += [(names, size) for names in ("chain", "blocks") for size in ("2000", "20000")]
            for arguments in runs:
                subprocess.run([sys.executable, __file__, *arguments], check=True)
