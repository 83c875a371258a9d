"""Time and memory of tracing large networks on the meta device, each in a process of its own.

    python benchmarks/graph.py

Needs transformers. Prints CPU seconds of tracing (imports apart), and the peak resident memory of
the whole process.
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


def measure(name: str) -> None:
    """Trace one network and print what it took."""
    import torch

    from otfuse_cli.graph.trace import trace
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
    if len(sys.argv) > 1:
        measure(sys.argv[1])
    else:
        for network in ("resnet", "llama"):
            subprocess.run([sys.executable, __file__, network], check=True)
