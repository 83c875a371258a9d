"""Make the index of known networks: what timm and torchvision build, by names and shapes.

    python benchmarks/network_index.py --facts facts.jsonl

Every network is built on the meta device, which takes ten to twenty minutes of a core; what was
found goes into the file of --facts line by line, and a second run goes on from there. Networks of
one signature are then run with the same weights: those that compute the same are one group.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import libraries  # noqa: E402
from otfuse_cli.running.known_networks import signature_of, tensor_hash  # noqa: E402
from otfuse_cli.running.user_code import find_callable  # noqa: E402

INDEX = ROOT / "src" / "otfuse_cli" / "running" / "known_networks.tsv"
OTHER_CLASSES = 7
MODULUS = 1 << 48
# Networks with more parameters are not run beside each other: how they print decides.
LARGEST = 150_000_000


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def build(name: str, device: str, **more: Any) -> nn.Module:
    """A network as `--arch NAME,option=value` builds it: random weights, nothing downloaded."""
    options = "".join(f",{key}={value!r}" for key, value in more.items())
    with torch.device(device):
        module: nn.Module = find_callable(f"{name}{options}")()
    return module.eval()


def built(name: str, **more: Any) -> nn.Module:
    """A network without weights, where its code runs without values."""
    try:
        return build(name, "meta", **more)
    except NotImplementedError:
        return build(name, "cpu", **more)


def names_of_all() -> list[str]:
    import timm
    import torchvision

    names = [f"torchvision:{name}" for name in torchvision.models.list_models()]
    names = [name for name in names if ":quantized_" not in name]  # plain until they are converted
    return names + [f"timm:{name}" for name in timm.list_models()]


def facts(name: str) -> dict[str, Any]:
    """The signature without the output layer, and which tensors that has."""
    module = built(name)
    shapes = shapes_of(module)
    head: list[str] = []
    if name.startswith("timm:"):
        layers = module.default_cfg.get("classifier") or ()
        for layer in (layers,) if isinstance(layers, str) else layers:
            head += [
                f"{layer}.{part}" for part in ("weight", "bias") if f"{layer}.{part}" in shapes
            ]
    else:
        try:
            other = shapes_of(built(name, num_classes=OTHER_CLASSES))
        except (TypeError, ValueError, RuntimeError):
            other = shapes
        if other.keys() == shapes.keys():
            head = [key for key in shapes if shapes[key] != other[key]]
    taken = sum(tensor_hash(key, shapes[key]) for key in head)
    return {
        "name": name,
        "signature": (signature_of(shapes) - taken) % MODULUS,
        "head": head,
        "classes": shapes[head[0]][0] if head else 0,
        "size": sum(tensor.numel() for tensor in module.state_dict().values()),
        "printed": repr(module),
    }


def side_of(name: str) -> int:
    """The height of the images that it was published for."""
    size = getattr(built(name), "default_cfg", {}).get("input_size", (3, 224, 224))
    return int(size[1])


def computed(name: str, side: int) -> torch.Tensor:
    """What it computes from weights that its tensors' names alone decide, and fixed images."""
    module = build(name, "cpu").double()
    with torch.no_grad():
        for key, tensor in module.state_dict().items():
            generator = torch.Generator().manual_seed(tensor_hash(key, tuple(tensor.shape)))
            if tensor.is_floating_point():
                made = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
                spread = 3.0 / max(1, tensor[0].numel()) ** 0.5 if tensor.dim() > 1 else 0.1
                centred = (made - 0.5) * 2 * spread
                tensor.copy_(made + 0.5 if key.endswith("running_var") else centred)
        generator = torch.Generator().manual_seed(0)
        outputs = module(torch.rand(2, 3, side, side, generator=generator, dtype=torch.float64))
    if not isinstance(outputs, torch.Tensor):
        raise TypeError(f"it returns a {type(outputs).__name__}")
    return outputs


def groups_of(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Names that compute the same, together; torchvision's first, which imports the least."""
    rows = sorted(rows, key=_preference)
    names = [row["name"] for row in rows]
    marks: dict[str, Any] = {row["name"]: row["printed"] for row in rows}
    if len(rows) > 1 and rows[0]["size"] <= LARGEST:
        for side in sorted(set(map(side_of, names))):
            try:
                marks = {name: computed(name, side) for name in names}
            except Exception as error:  # noqa: BLE001 - another size, or how they print, decides
                print(names, side, type(error).__name__, str(error)[:80], file=sys.stderr)
            else:
                break
    groups: list[list[str]] = []
    for name in names:
        alike = next((group for group in groups if same(marks[group[0]], marks[name])), None)
        if alike is None:
            groups.append([name])
        else:
            alike.append(name)
    return groups


def _preference(row: dict[str, Any]) -> tuple[bool, int, str]:
    name = row["name"]
    return not name.startswith("torchvision:"), len(name), name


def same(one: Any, other: Any) -> bool:
    """Whether two networks compute the same, up to rounding; or print the same."""
    if not isinstance(one, torch.Tensor):
        return bool(one == other)
    return one.shape == other.shape and bool((one - other).abs().max() <= 1e-9 * one.std())


def write(rows: list[dict[str, Any]]) -> None:
    import timm
    import torchvision

    lines = [
        f"library\ttimm\t{timm.__version__}",
        f"library\ttorchvision\t{torchvision.__version__.partition('+')[0]}",
    ]
    heads = sorted({(" ".join(row["head"]), row["classes"]) for row in rows})
    lines += [f"head\t{classes}\t{names}" for names, classes in heads]
    by_signature: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        at = heads.index((" ".join(row["head"]), row["classes"]))
        by_signature[row["signature"], at].append(row)
    for (number, at), alike in sorted(by_signature.items()):
        groups = "|".join(" ".join(names) for names in groups_of(alike))
        lines.append(f"{number:012x}\t{at}\t{groups}")
    INDEX.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--facts", type=Path, required=True)
    path = parser.parse_args().facts
    libraries.make_importable()
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {row["name"] for row in known}
    with path.open("a") as file:
        for name in names_of_all():
            if name not in done:
                try:
                    row = facts(name)
                except Exception as error:  # noqa: BLE001 - what can't be built isn't known
                    row = {"name": name, "error": f"{type(error).__name__}: {error}"}
                known.append(row)
                file.write(json.dumps(row) + "\n")
                file.flush()
    failed = [row for row in known if "error" in row]
    for row in failed:
        print("not built:", row["name"], row["error"][:100])
    wanted = set(names_of_all())
    write([row for row in known if "error" not in row and row["name"] in wanted])
    print(f"{len(known) - len(failed)} networks, {INDEX.stat().st_size} bytes")


if __name__ == "__main__":
    main()
