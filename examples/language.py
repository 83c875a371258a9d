"""Two small language models of each kind, fused: plainly, turned, refitted, jointly.

    python examples/language.py [--kinds gpt2,llama] [--steps 800] [--num-samples 400]

Models of bytes, trained here on the help texts that ship with Python (pydoc_data.topics), from two
seeds; three layers of 96 channels, contexts of 64 bytes, untied embeddings, Llama with rotary
positions and grouped queries. Trained models are kept in a cache. Perplexity per byte on the last
tenth of the text; inputs for refit and joint fusion are drawn from the rest. Needs transformers.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers

import otfuse_cli

CONTEXT, BATCH, RATE, LAYERS = 64, 32, 2e-3, 3
SIZES: dict[str, Any] = {"vocab_size": 128, "tie_word_embeddings": False, "dtype": "float32"}
ENDS = {"bos_token_id": None, "eos_token_id": None}


def network(kind: str, layers: int = LAYERS) -> transformers.PreTrainedModel:
    """Untrained."""
    if kind == "gpt2":
        sizes = {"n_embd": 96, "n_layer": layers, "n_head": 4, "n_positions": CONTEXT}
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(**SIZES, **sizes, **off, **ENDS)
        return transformers.GPT2LMHeadModel(config)
    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24}
    config = transformers.LlamaConfig(
        **SIZES, **sizes, **heads, **ENDS, max_position_embeddings=CONTEXT
    )
    return transformers.LlamaForCausalLM(config)


def text() -> torch.Tensor:
    """All bytes, in the order of the topics' names."""
    whole = "\n".join(topics[name] for name in sorted(topics))
    return torch.tensor(list(whole.encode("ascii", "ignore")))


def windows(tokens: torch.Tensor) -> torch.Tensor:
    """Contexts one after another, (n, CONTEXT)."""
    return tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)


def trained(
    kind: str, seed: int, tokens: torch.Tensor, steps: int, cache: Path, *, layers: int = LAYERS
) -> Path:
    """A folder as transformers saves it, from the cache if it is there."""
    depth = "" if layers == LAYERS else f"-{layers}-layers"
    folder = cache / f"language-{kind}{depth}-{steps}-{seed}"
    if (folder / "config.json").exists():
        return folder
    began = time.process_time()
    torch.manual_seed(seed)
    net = network(kind, layers).train()
    adam = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(adam, RATE, total_steps=steps)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - CONTEXT, (BATCH, 1))
        batch = tokens[starts + torch.arange(CONTEXT)]
        loss = net(input_ids=batch, labels=batch).loss
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        adam.step()
        schedule.step()
    net.save_pretrained(folder)
    print(f"trained {kind} {seed} in {time.process_time() - began:.0f} s", flush=True)
    return folder


def ways(number: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is compared: a name, and options of `merge`."""
    inputs = {"num_samples": number}
    yield "plain average", {"align": "none"}
    yield "permuted", {}
    yield "turned", {"residual": "orthogonal"}
    yield "turned, refit", {"residual": "orthogonal", **inputs}
    # Nothing has to be aligned for the union: the cheapest matching will do.
    yield "joint", {"blend": "joint", "matcher": "sweep", **inputs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kinds", default="gpt2,llama", help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=500, help="of training (%(default)s)")
    parser.add_argument("--num-samples", type=int, default=400, help="contexts (%(default)s)")
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser.add_argument("--cache", type=Path, default=home / "otfuse-examples", help="of models")
    given = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order, so that the bytes repeat
    tokens = text()
    cut = len(tokens) * 9 // 10
    train, held = tokens[:cut], windows(tokens[cut:])
    print("| kind | fused | perplexity | seconds |\n|---|---|---|---|", flush=True)
    for kind in given.kinds.split(","):
        pair = [trained(kind, seed, train, given.steps, given.cache) for seed in (0, 1)]
        arch = f"hf:{pair[1]}"

        def perplexity(*nets: Any, arch: str = arch, **options: Any) -> dict[str, float]:
            report = otfuse_cli.evaluate(*nets, arch=arch, samples={"input_ids": held}, **options)
            assert report.evaluation is not None
            return dict(report.evaluation["perplexity"])

        for name, score in perplexity(*pair, ensemble=True).items():
            print(f"| {kind} | {Path(name).name} | {score:.2f} | |", flush=True)
        for name, options in ways(given.num_samples):
            if "num_samples" in options:
                options["samples"] = {"input_ids": windows(train)}
            began = time.perf_counter()
            fused, _ = otfuse_cli.merge(*pair, arch=arch, **options)
            seconds = time.perf_counter() - began
            (score,) = perplexity(fused).values()
            print(f"| {kind} | {name} | {score:.2f} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
