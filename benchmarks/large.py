"""Two checkpoints larger than the memory they may take: `merge` against `cp`, and against torch.

    python benchmarks/large.py [--gib 2] [--hidden 4096] [--folder DIR]

Writes two synthetic transformers by Llama's names (bfloat16, no layer wider than 4096) to a
temporary folder, which it removes. In one run, by turns: `cp` of both and `sync`; load, average,
save and `sync` by safetensors' own functions; `merge`, without matching and, in the first round
only, with the sweep. Each is a process of its own; times are wall seconds, since most of it is
reading and writing (CPU seconds tell how much is not). Medians over the rounds; ratios are to the
`cp` of the same round.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import processes

AVERAGE = """
import sys, torch
from safetensors.torch import load_file, save_file
a, b = map(load_file, sys.argv[1:3])
save_file({n: ((a[n].float() + b[n].float()) / 2).to(b[n].dtype) for n in b}, sys.argv[3])
"""

SLOW = "merge --matcher sweep"
OTFUSE = "import sys; from otfuse_cli.cli.app import main; sys.exit(main(sys.argv[1:]))"


def shapes(gib: float, hidden: int) -> dict[str, tuple[int, ...]]:
    """As many layers as fit; heads of 128, feed-forward layers of 4096, 8192 tokens."""
    found = {"model.embed_tokens.weight": (8192, hidden), "lm_head.weight": (8192, hidden)}
    found["model.norm.weight"] = (hidden,)
    used, layer = 2 * 2 * 8192 * hidden, 0
    while used < gib * 2**30:
        path = f"model.layers.{layer}"
        for name in "qkvo":
            found[f"{path}.self_attn.{name}_proj.weight"] = (hidden, hidden)
        for name in ("gate", "up"):
            found[f"{path}.mlp.{name}_proj.weight"] = (4096, hidden)
        found[f"{path}.mlp.down_proj.weight"] = (hidden, 4096)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{path}.{name}.weight"] = (hidden,)
        used += 2 * (4 * hidden + 3 * 4096) * hidden
        layer += 1
    return found


def write(path: Path, layout: dict[str, tuple[int, ...]], seed: int) -> None:
    """Random weights, tensor by tensor: they needn't fit in memory either."""
    import torch

    header, position = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in layout.items():
        size = 2 * torch.Size(shape).numel()
        offsets = [position, position + size]
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": offsets}
        position += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = torch.Generator().manual_seed(seed)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in layout.values():
            tensor = torch.randn(shape, generator=generator, dtype=torch.float32) * 0.02
            file.write(tensor.to(torch.bfloat16).view(torch.uint8).numpy().data)
    # What merge reads the number of heads from.
    config = {"model_type": "llama", "hidden_size": layout["model.norm.weight"][0]}
    config |= {"num_attention_heads": config["hidden_size"] // 128}
    config["num_key_value_heads"] = config["num_attention_heads"]
    (path.parent / "config.json").write_text(json.dumps(config))


def run(command: list[str]) -> tuple[float, float, float]:
    """Wall seconds with `sync`, CPU seconds and the peak memory (MiB) of the process."""
    subprocess.run(["sync"], check=True)
    began = time.perf_counter()
    taken = processes.run(command)
    subprocess.run(["sync"], check=True)
    return time.perf_counter() - began, taken.cpu, taken.peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=float, default=2, help="size of each (default 2)")
    parser.add_argument("--hidden", type=int, default=4096, help="width (default 4096)")
    parser.add_argument("--folder", type=Path, help="where the temporary folder goes")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--without", nargs="*", default=[], help="rows to leave out")
    parser.add_argument("--write", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.write is not None:
        write(given.folder, shapes(given.gib, given.hidden), given.write)
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as temporary:
        folder = Path(temporary)
        layout = shapes(given.gib, given.hidden)
        pair = [str(folder / f"{at}.safetensors") for at in (0, 1)]
        for seed, path in enumerate(pair):
            # In a process of its own: the memory of this one is part of its children's peaks.
            options = ["--gib", str(given.gib), "--hidden", str(given.hidden), "--write", str(seed)]
            subprocess.run([sys.executable, __file__, *options, "--folder", path], check=True)
        out = str(folder / "out.safetensors")
        merge = [sys.executable, "-c", OTFUSE, "merge", *pair, "-o", out, "--overwrite"]
        commands = {
            "cp": ["cp", *pair, str(folder / "copy")],
            "load, average, save": [sys.executable, "-c", AVERAGE, *pair, out],
            "merge --align none": [*merge, "--align", "none", "-q"],
            SLOW: [*merge, "--matcher", "sweep", "-q"],
        }
        (folder / "copy").mkdir()
        size = sum(Path(path).stat().st_size for path in pair) / 2**30
        print(f"{size:.2f} GiB in two files, width {given.hidden}, {len(layout)} tensors each\n")
        print("| command | CPU, s | wall, s | against cp", end="")
        print(" | peak, MiB | matching, s | the rest against cp |\n|" + "---|" * 7, flush=True)
        rows: dict[str, list[Row]] = {}
        for at in range(given.rounds):
            reference = 0.0
            for name, command in commands.items():
                if name in given.without or (at and name == SLOW):
                    continue
                seconds, cpu, peak = run(command)
                reference = reference or seconds
                matching = None
                if name.startswith("merge"):
                    report = json.loads((folder / "out.report.json").read_text())
                    matching = report["timings"]["match"]
                rows.setdefault(name, []).append(Row(seconds, cpu, peak, matching, reference))
                for made in (folder / "copy").iterdir():
                    made.unlink()
        for name, found in rows.items():
            print(line(name, found), flush=True)


@dataclass(frozen=True)
class Row:
    """One run of a command, and what `cp` took in the same round."""

    seconds: float
    cpu: float
    peak: float
    matching: float | None
    reference: float


def line(name: str, rows: list[Row]) -> str:
    """Medians of a command's runs, as a line of the table."""
    seconds = median(r.seconds for r in rows)
    ratio = median(r.seconds / r.reference for r in rows)
    peak = max(r.peak for r in rows)
    cpu = median(r.cpu for r in rows)
    cells = [name, f"{cpu:.1f}", f"{seconds:.1f}", f"{ratio:.1f}", f"{peak:.0f}", "", ""]
    if rows[0].matching is not None:
        rest = median(
            (r.seconds - r.matching) / r.reference for r in rows if r.matching is not None
        )
        cells[5:] = [f"{median(r.matching or 0.0 for r in rows):.1f}", f"**{rest:.2f}**"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
