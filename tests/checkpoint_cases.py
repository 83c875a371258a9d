"""Checkpoints as users have them: container, tensors, what is odd, and what `merge` makes of it.

Every case is a row of the table in docs/checkpoints.md and a test in test_checkpoint_table.py.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import resource
import shutil
import warnings
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from nets import Mlp, ResNet, Vgg, randomise, state
from otfuse_cli.session import pipeline
from test_twins import permuted, widened

State = dict[str, torch.Tensor]
Lines = list[object]


@dataclass(frozen=True)
class Case:
    """What goes in and what comes out.

    Attributes:
        container: Of the checkpoint that is odd.
        tensors: What it holds.
        odd: What is odd about it.
        happens: What the docs say that happens.
        build: Writes the inputs into a folder and returns the arguments of `merge` but for `-o`.
        out: Name of the output.
        code: Exit code.
        words: Words in the error message.
        check: Looks at the output and its folder.
        during: Changes the world before `merge` runs.
    """

    container: str
    tensors: str
    odd: str
    happens: str
    build: Callable[[Path], Lines]
    out: str = "out.pt"
    code: int = 0
    words: tuple[str, ...] = ()
    check: Callable[[Path], None] = lambda out: None
    during: Callable[[pytest.MonkeyPatch, Path], None] = lambda patch, folder: None

    @property
    def row(self) -> str:
        """The case as it stands in the docs."""
        return f"| {self.container} | {self.tensors} | {self.odd} | {self.happens} |"


def mlp(seed: int, widths: tuple[int, ...] = (12, 9, 8, 7, 5)) -> State:
    return dict(state(randomise(Mlp(widths), seed)))


A, B = mlp(0), mlp(1)
MEAN = {n: B[n] + 0.5 * (A[n] - B[n]) for n in B}
SCALE = torch.full((9,), 0.01)
PLAIN: Lines = ["--align", "none"]


def load(path: Path, *wrapper: str) -> Any:
    """An output as its own library reads it, wrappers opened."""
    if path.suffix == ".safetensors":
        return load_file(path)
    value = torch.load(path, weights_only=True)
    for key in wrapper:
        assert list(value) == [key], "only the wrapper of the anchor"
        value = value[key]
    return value


def holds(
    wanted: Mapping[str, torch.Tensor], *wrapper: str, prefix: str = "", tolerance: float = 1e-5
) -> Callable[[Path], None]:
    """The output holds these tensors, in these wrappers."""

    def check(out: Path) -> None:
        got = load(out, *wrapper)
        assert set(got) == {prefix + name for name in wanted}
        for name, tensor in wanted.items():
            mine = got[prefix + name]
            assert mine.dtype == tensor.dtype, name
            torch.testing.assert_close(mine, tensor, rtol=tolerance, atol=tolerance)

    return check


def wrapped(name: str) -> str:
    """`fc1.weight` as FSDP calls it where it wraps the layer too."""
    return name.replace(".", "._fsdp_wrapped_module.")


def pt(anchor: Any, source: Any = None, *options: object, **how: Any) -> Callable[[Path], Lines]:
    """Two torch files, the second one the anchor."""

    def build(folder: Path) -> Lines:
        torch.save(A if source is None else source, folder / "a.pt")
        torch.save(anchor, folder / "b.pt", **how)
        return [folder / "a.pt", folder / "b.pt", *(options or PLAIN)]

    return build


def st(anchor: State, source: State | None = None, *options: object) -> Callable[[Path], Lines]:
    """Two safetensors files, the second one the anchor."""

    def build(folder: Path) -> Lines:
        save_file(A if source is None else source, folder / "a.safetensors")
        save_file(anchor, folder / "b.safetensors")
        return [folder / "a.safetensors", folder / "b.safetensors", *(options or PLAIN)]

    return build


def raw(data: bytes, name: str = "b.pt") -> Callable[[Path], Lines]:
    """An anchor of these bytes."""

    def build(folder: Path) -> Lines:
        torch.save(A, folder / "a.pt")
        (folder / name).write_bytes(data)
        return [folder / "a.pt", folder / name]

    return build


def cut(build: Callable[[Path], Lines], share: float) -> Callable[[Path], Lines]:
    """The same, with the anchor cut short."""

    def shorter(folder: Path) -> Lines:
        lines = build(folder)
        path = Path(str(lines[1]))
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
        return lines

    return shorter


def keras(folder: Path) -> Lines:
    """An anchor as Keras saves it."""
    torch.save(A, folder / "a.pt")
    with zipfile.ZipFile(folder / "b.keras", "w") as archive:
        for name in ("metadata.json", "config.json", "model.weights.h5"):
            archive.writestr(name, b"{}")
    return [folder / "a.pt", folder / "b.keras"]


def prefixed(tensors: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def hf(
    change: Callable[[Path], object] = lambda folder: None, kind: str = ".safetensors"
) -> Callable[[Path], Lines]:
    """A sharded folder as anchor."""

    def build(folder: Path) -> Lines:
        save_file(A, folder / "a.safetensors")
        model = folder / "model"
        model.mkdir()
        stem = "model" if kind == ".safetensors" else "pytorch_model"
        names, weight_map = list(B), {}
        for at, part in enumerate((names[:3], names[3:]), start=1):
            file = f"{stem}-0000{at}-of-00002{kind}"
            tensors = {n: B[n] for n in part}
            if kind == ".safetensors":
                save_file(tensors, model / file)
            else:
                torch.save(tensors, model / file)
            weight_map.update(dict.fromkeys(part, file))
        (model / f"{stem}{kind}.index.json").write_text(json.dumps({"weight_map": weight_map}))
        (model / "config.json").write_text('{"model_type": "mine"}')
        (model / "tokenizer.json").write_text("{}")
        change(model)
        return [folder / "a.safetensors", model, *PLAIN]

    return build


def is_folder(out: Path) -> None:
    names = {p.name for p in out.iterdir()}
    assert {"config.json", "tokenizer.json", f"{out.name}.report.json"} <= names
    got: State = {}
    for path in out.glob("*.safetensors"):
        got |= load_file(path)
    assert set(got) == set(B)
    assert all(torch.allclose(got[n], MEAN[n]) for n in B)


def distributed(change: Callable[[Path], object] = lambda f: None) -> Callable[[Path], Lines]:
    def build(folder: Path) -> Lines:
        torch.save(A, folder / "a.pt")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"model": B, "epoch": 1}, checkpoint_id=folder / "dcp", no_dist=True)
        change(folder / "dcp")
        return [folder / "a.pt", folder / "dcp", *PLAIN]

    return build


class Touch:
    """A pickle with a side effect."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
        return os.system, (f"touch {self.path}",)


def hostile(folder: Path) -> Lines:
    return pt({"model": B, "hook": Touch(folder / "ran")})(folder)


def untouched(out: Path) -> None:
    assert not (out.parent / "ran").exists()


COMPANY = {
    "args": argparse.Namespace(lr=0.1),
    "acc": np.float64(0.9),
    "path": Path("x"),
    "when": datetime.datetime(2020, 1, 1),
    "log": defaultdict(list),
}


def tied(out: Path) -> None:
    got = load(out)
    assert got["fc1.bias"].data_ptr() == got["fc1.shift"].data_ptr()


def tied_state(tensors: State) -> State:
    return {**tensors, "fc1.shift": tensors["fc1.bias"]}


def views() -> State:
    """Weights as rows of one storage, some transposed."""
    whole = torch.cat([B["fc1.weight"].reshape(-1), B["fc2.weight"].reshape(-1)])
    first = B["fc1.weight"].numel()
    return {
        **B,
        "fc1.weight": whole[:first].view(9, 12),
        "fc2.weight": whole[first:].view(8, 9),
        "fc3.weight": B["fc3.weight"].t().contiguous().t(),
    }


def huge() -> State:
    storage = torch.zeros(1_000_000)
    storage[: B["fc4.bias"].numel()] = B["fc4.bias"]
    return {**B, "fc4.bias": storage[: B["fc4.bias"].numel()]}


def small(out: Path) -> None:
    assert out.stat().st_size < 20_000


def cast(tensors: State, dtype: torch.dtype) -> State:
    return {n: t.to(dtype) for n, t in tensors.items()}


def conv(seed: int) -> State:
    return dict(state(randomise(Vgg(), seed)))


def channels_last(tensors: State) -> State:
    return {
        n: t.to(memory_format=torch.channels_last) if t.dim() == 4 else t
        for n, t in tensors.items()
    }


def counted(seed: int, steps: int) -> State:
    tensors = conv(seed)
    for name, tensor in tensors.items():
        if name.endswith("num_batches_tracked"):
            tensor.fill_(steps)
    return tensors


def counters(out: Path) -> None:
    got = load(out)
    found = {t.item() for n, t in got.items() if n.endswith("num_batches_tracked")}
    assert found == {70001}
    assert got["features.1.num_batches_tracked"].dtype == torch.int64
    Vgg().load_state_dict(got, strict=True)


def with_nan(value: float) -> State:
    tensors = {n: t.clone() for n, t in A.items()}
    tensors["fc2.weight"][1, 2] = value
    return tensors


def dead_row() -> State:
    tensors = {n: t.clone() for n, t in A.items()}
    tensors["fc2.weight"][3] = 0
    tensors["fc2.bias"][3] = 0
    return tensors


def quantised() -> State:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        codes = torch.quantize_per_tensor(B["fc1.weight"], 0.1, 0, torch.qint8)
    return {**B, "fc1.weight": codes}


def resnet(seed: int) -> State:
    return dict(state(randomise(ResNet(norm=False, bias=True), seed)))


def noisy_twin(folder: Path) -> Lines:
    """The anchor permuted, with noise: only one map for the residual stream finds it again."""
    anchor = resnet(3)
    generator = torch.Generator().manual_seed(5)
    source = {
        n: t + 0.01 * torch.randn(t.shape, generator=generator)
        for n, t in permuted(anchor, seed=4).items()
    }
    return st(anchor, source, "--weights", "1,0", "--matcher", "sweep")(folder)


def near(wanted: State) -> Callable[[Path], None]:
    def check(out: Path) -> None:
        got = load(out)
        for name, tensor in wanted.items():
            assert float((got[name] - tensor).abs().max()) < 0.1, name

    return check


def rolled() -> State:
    return {n: t.roll(1, 0) if n.startswith("fc4") else t for n, t in A.items()}


def classes_in_place(out: Path) -> None:
    got = load(out)
    expected = B["fc4.bias"] + 0.5 * (A["fc4.bias"].roll(1, 0) - B["fc4.bias"])
    torch.testing.assert_close(got["fc4.bias"], expected)


def common_classes(out: Path) -> None:
    got = load(out)["fc4.bias"]
    assert got.shape == (5,)
    torch.testing.assert_close(got, B["fc4.bias"] + 0.5 * (MORE["fc4.bias"][:5] - B["fc4.bias"]))


def source_counts(out: Path) -> None:
    """No plan without mass: the source is in the average, which isn't half the anchor."""
    got = load(out)["fc2.weight"]
    assert float((got - 5 * B["fc2.weight"]).abs().max()) > 0.1


def rotary(seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    turn = torch.randn(2, 3, generator=generator, dtype=torch.complex64)
    return {"rot": turn, **mlp(seed)}


def rotary_pair(folder: Path) -> Lines:
    layers = "  rot: [2, 3]\n  fc1: x <- in\n  fc2: y <- x\n  fc3: z <- y\n  fc4: out <- z"
    (folder / "net.yaml").write_text(f"layers:\n{layers}\n")
    return pt(rotary(1), rotary(0), "--arch", folder / "net.yaml")(folder)


def complex_layer(tensors: State) -> State:
    return {**tensors, "fc2.weight": tensors["fc2.weight"] * (1 + 1j)}


def turned(out: Path) -> None:
    a, b = rotary(0)["rot"], rotary(1)["rot"]
    torch.testing.assert_close(load(out)["rot"], b + 0.5 * (a - b))


def scripted(folder: Path) -> Lines:
    torch.save(A, folder / "a.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(3, 2)), str(folder / "b.pt"))
    return [folder / "a.pt", folder / "b.pt"]


def quietly(build: Callable[[Path], Lines]) -> Callable[[Path], Lines]:
    """Without torch's advice."""

    def silenced(folder: Path) -> Lines:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return build(folder)

    return silenced


def is_fp8(out: Path) -> None:
    for name, tensor in load(out).items():
        assert tensor.dtype == torch.float8_e4m3fn
        a, b = (x[name].to(torch.float8_e4m3fn).float() for x in (A, B))
        expected = (b + 0.5 * (a - b)).to(torch.float8_e4m3fn)
        assert torch.equal(tensor.float(), expected.float()), name


def kept_buffers(out: Path) -> None:
    got = load(out)
    assert got["fc1.mask"].tolist() == [True] * 9
    assert got["fc1.ids"].tolist() == list(range(9))


def same_function(out: Path) -> None:
    wide = Mlp((12, 18, 16, 14, 5))
    wide.load_state_dict(load(out))
    narrow = Mlp()
    narrow.load_state_dict(B)
    inputs = torch.randn(7, 12, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(wide(inputs), narrow(inputs), rtol=1e-4, atol=1e-4)


def gone(out: Path) -> None:
    assert not out.exists()


def full_disk(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """A limit on file sizes: the system refuses the write in the middle."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))


def no_room(patch: pytest.MonkeyPatch, folder: Path) -> None:
    usage = shutil.disk_usage(folder)
    patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))


def read_only(patch: pytest.MonkeyPatch, folder: Path) -> None:
    real = os.access  # root may write anywhere
    patch.setattr(os, "access", lambda path, mode: mode == os.R_OK and real(path, mode))


def shrinking(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """The source loses its end after it was opened and read once."""
    real = pipeline.open_bench

    def open_bench(*args: Any) -> Any:
        os.truncate(folder / "a.pt", 1500)
        return real(*args)

    patch.setattr(pipeline, "open_bench", open_bench)


def exists(build: Callable[[Path], Lines], name: str) -> Callable[[Path], Lines]:
    def also(folder: Path) -> Lines:
        (folder / name).write_text("precious")
        return build(folder)

    return also


W73: Lines = ["--weights", "0.7,0.3", "--matcher", "sweep"]
MORE = mlp(0, (12, 9, 8, 7, 7))

CONTAINERS = [
    Case("`.pt`", "float32", "nothing", "fused", pt(B), check=holds(MEAN)),
    Case(
        *("`.pt`", "float32", "weights in `state_dict`", "fused, in `state_dict`"),
        build=pt({"state_dict": B, "epoch": 3}),
        check=holds(MEAN, "state_dict"),
    ),
    Case(
        *("`.pt`", "float32", "weights in `model_state_dict`, optimizer beside"),
        happens="fused, in `model_state_dict`; the optimizer is not copied",
        build=pt({"model_state_dict": B, "optimizer": {"state": {0: {"m": torch.rand(3)}}}}),
        check=holds(MEAN, "model_state_dict"),
    ),
    Case(
        *("`.pt`", "float32", "weights in `model` in `state_dict`", "fused, in both"),
        build=pt({"state_dict": {"model": B}}),
        check=holds(MEAN, "state_dict", "model"),
    ),
    Case(
        *("`.pt`", "float32", "DDP: every name begins with `module.`", "fused, `module.` kept"),
        build=pt(prefixed(B, "module.")),
        check=holds(MEAN, prefix="module."),
    ),
    Case(
        *("`.pt`", "float32", "compiled: `_orig_mod.`", "fused, prefix kept"),
        build=pt(prefixed(B, "_orig_mod.")),
        check=holds(MEAN, prefix="_orig_mod."),
    ),
    Case(
        *("`.pt`", "float32", "compiled and DDP: `_orig_mod.module.`", "fused, prefix kept"),
        build=pt(prefixed(B, "_orig_mod.module.")),
        check=holds(MEAN, prefix="_orig_mod.module."),
    ),
    Case(
        *("`.ckpt`", "float32", "Lightning: `state_dict` and `model.`", "fused, both kept"),
        build=pt({"state_dict": prefixed(B, "model."), "global_step": 7}),
        out="out.ckpt",
        check=holds(MEAN, "state_dict", prefix="model."),
    ),
    Case(
        *("`.pt`", "float32", "a layer that is really called `module`", "no prefix is stripped"),
        build=pt(
            {"module.weight": B["fc1.weight"], "head.weight": B["fc2.weight"]},
            {"module.weight": A["fc1.weight"], "head.weight": A["fc2.weight"]},
            *("--align", "none", "--arch", "mlp"),
        ),
        check=holds({"module.weight": MEAN["fc1.weight"], "head.weight": MEAN["fc2.weight"]}),
    ),
    Case(
        *("`.pt`", "float32", "`model` and `ema`", "exit 2, names both and `--key`"),
        build=pt({"model": B, "ema": A}),
        code=2,
        words=("model, ema", "--key"),
    ),
    Case(
        *("`.pt`", "float32", "`model` and `ema`, with `--key ema`", "fused, in `ema`"),
        build=pt({"model": A, "ema": B}, {"model": B, "ema": A}, *PLAIN, "--key", "ema"),
        check=holds(MEAN, "ema"),
    ),
    Case(
        *("`.pt`", "float32", "`model` and `model_avg`, or any other copy of the same names"),
        happens="exit 2, names both and `--key`",
        build=pt({"model": B, "model_avg": A}),
        code=2,
        words=("model, model_avg", "--key"),
    ),
    Case(
        *("`.pt`", "float32", "`model` and `ema`, the source a plain state dict, `--key ema`"),
        happens="fused, in `ema`: the source needs no key",
        build=pt({"model": A, "ema": B}, A, *PLAIN, "--key", "ema"),
        check=holds(MEAN, "ema"),
    ),
    Case(
        *("`.pt`", "float32", "timm: `state_dict` and `state_dict_ema`, `--key 1=...`"),
        happens="fused, in `state_dict_ema`",
        build=pt(
            {"state_dict": A, "state_dict_ema": B, "epoch": 3, "arch": "net"},
            *(A, *PLAIN, "--key", "1=state_dict_ema"),
        ),
        check=holds(MEAN, "state_dict_ema"),
    ),
    Case(
        *("`.pt`", "float32", "`module` in `ema`, with `--key ema.module`", "fused, in both"),
        build=pt({"ema": {"module": B}, "step": 3}, A, *PLAIN, "--key", "ema.module"),
        check=holds(MEAN, "ema", "module"),
    ),
    Case(
        *("`.ckpt`", "float32", "Lightning: a loss, an activation and a schedule beside"),
        happens="fused; they are skipped, nothing is imported",
        build=pt(
            {
                "state_dict": prefixed(B, "model."),
                "hyper_parameters": {
                    "criterion": torch.nn.MSELoss(),
                    "activation": functools.partial(torch.nn.GELU),
                    "net": torch.nn.Linear(2, 2),
                },
                "callbacks": {"ModelCheckpoint": {"best_model_score": torch.tensor(0.5)}},
                "optimizer_states": [{"state": {}, "param_groups": []}],
                "loops": {"fit_loop": {"state_dict": {}}},
            }
        ),
        out="out.ckpt",
        check=holds(MEAN, "state_dict", prefix="model."),
    ),
    Case(
        *("`.pt`", "float32", "fairseq: `args`, `extra_state` and the last optimizer's beside"),
        happens="fused, in `model`",
        build=pt(
            {
                "args": argparse.Namespace(arch="net"),
                "cfg": {"model": argparse.Namespace(layers=3)},
                "model": B,
                "criterion": None,
                "optimizer_history": [{"criterion_name": "x", "num_updates": 7}],
                "extra_state": {"train_iterator": {"epoch": 3}, "metrics": OrderedDict()},
                "last_optimizer_state": {"state": {0: {"exp_avg": B["fc1.weight"]}}},
            }
        ),
        check=holds(MEAN, "model"),
    ),
    Case(
        *("`.pt`", "float32", "torch's AveragedModel: `n_averaged` and `module.`"),
        happens="fused, both kept",
        build=pt({"n_averaged": torch.tensor(4), **prefixed(B, "module.")}),
        check=holds({"n_averaged": torch.tensor(4), **prefixed(MEAN, "module.")}),
    ),
    Case(
        *("`.pt`", "float32", "FSDP: `_fsdp_wrapped_module.` before and inside the names"),
        happens="fused, the names kept",
        build=pt({f"_fsdp_wrapped_module.{wrapped(n)}": t for n, t in B.items()}),
        check=holds({f"_fsdp_wrapped_module.{wrapped(n)}": t for n, t in MEAN.items()}),
    ),
    Case(
        *("`.pt`", "float32", "all names of the source begin with `net.`"),
        happens="fused, under the anchor's names",
        build=pt(B, prefixed(A, "net.")),
        check=holds(MEAN),
    ),
    Case(
        *("`.pt`", "float32", "most names of the source begin with `net.`"),
        happens="exit 4, names the prefix",
        build=pt(B, {**prefixed(A, "net."), "step": torch.tensor(3.0)}),
        code=4,
        words=("the prefix net.", "step"),
    ),
    Case(
        *("`.pt`", "float32", "strings and numbers among the weights", "fused without them"),
        build=pt({**B, "note": "x", "version": 1.5}),
        check=holds(MEAN),
    ),
    Case(
        *("`.pt`", "float32", "Namespace, NumPy number, Path, datetime, defaultdict beside"),
        happens="fused; they are skipped, nothing is imported",
        build=pt({"model": B, **COMPANY}),
        check=holds(MEAN, "model"),
    ),
    Case(
        *("`.pt` before torch 1.6", "float32", "nothing", "fused, in today's format"),
        build=pt(B, _use_new_zipfile_serialization=False),
        check=holds(MEAN),
    ),
    Case(
        *("`.safetensors`", "float32", "nothing", "fused"),
        build=st(B),
        out="out.safetensors",
        check=holds(MEAN),
    ),
    Case(
        *("safetensors named `.pt`", "float32", "its name", "recognised by content, fused"),
        build=lambda folder: [
            (folder / "b.safetensors").rename(folder / "b.pt") if "b.saf" in str(line) else line
            for line in st(B)(folder)
        ],
        check=holds(MEAN),
    ),
    Case(
        *("torch file named `.safetensors`", "float32", "its name", "recognised, fused"),
        build=lambda folder: [
            (folder / "b.pt").rename(folder / "b.safetensors") if "b.pt" in str(line) else line
            for line in pt(B)(folder)
        ],
        out="out.safetensors",
        check=holds(MEAN),
    ),
    Case(
        *("Hugging Face folder", "float32", "safetensors shards"),
        happens="a folder: shards, index, config and tokenizer",
        build=hf(),
        out="out",
        check=is_folder,
    ),
    Case(
        *("Hugging Face folder", "float32", "`.bin` shards", "a folder of safetensors"),
        build=hf(kind=".bin"),
        out="out",
        check=is_folder,
    ),
    Case(
        *("Hugging Face folder", "float32", "output is a file", "one file with all tensors"),
        build=hf(),
        out="out.safetensors",
        check=holds(MEAN),
    ),
    Case(
        *("Hugging Face folder", "float32", "a shard of the index is missing", "exit 3, names it"),
        build=hf(lambda f: (f / "model-00002-of-00002.safetensors").unlink()),
        code=3,
        words=("a shard is missing", "model-00002-of-00002.safetensors"),
    ),
    Case(
        *("Hugging Face folder", "float32", "a shard holds a tensor that the index lacks"),
        happens="exit 3, names both",
        build=hf(lambda f: save_file({"x": torch.rand(1)}, f / "model-00002-of-00002.safetensors")),
        code=3,
        words=("tensor x", "model-00002-of-00002.safetensors"),
    ),
    Case(
        *("Hugging Face folder", "float32", "shards, but no index", "exit 3, names the index"),
        build=hf(lambda f: (f / "model.safetensors.index.json").unlink()),
        code=3,
        words=("model.safetensors.index.json",),
    ),
    Case(
        *("Hugging Face folder", "codes", "`quantization_config` in config.json", "exit 3"),
        build=hf(lambda f: (f / "config.json").write_text('{"quantization_config": {"a": 1}}')),
        code=3,
        words=("a quantised checkpoint", "config.json"),
    ),
    Case(
        *("torch.distributed folder", "float32", "nothing", "fused, in the wrapper it had"),
        build=distributed(),
        check=holds(MEAN, "model"),
    ),
    Case(
        *("torch.distributed folder", "float32", "a `.distcp` file is missing", "exit 3, names it"),
        build=distributed(lambda f: (f / "__0_0.distcp").unlink()),
        code=3,
        words=("__0_0.distcp",),
    ),
    Case(
        *("folder", "none", "no weights in it", "exit 3"),
        build=lambda f: [*pt(B)(f)[:1], (f / "empty").mkdir() or f / "empty"],
        code=3,
        words=("a folder without weights",),
    ),
    Case(
        *("whole module", "float32", "`torch.save(model)`", "exit 3, with the line to run instead"),
        build=pt(torch.nn.Linear(3, 2)),
        code=3,
        words=("a whole module", "torch.save(model.state_dict(), 'weights.pt')"),
    ),
    Case(
        *("TorchScript", "float32", "a compiled program", "exit 3, with the line to run instead"),
        build=scripted,
        code=3,
        words=("torch.jit.load",),
    ),
    Case(
        *("`.pt`", "float32", "a pickle that runs a command"),
        happens="exit 3, names the call; nothing runs",
        build=hostile,
        code=3,
        words=("posix.system", "nothing was run"),
        check=untouched,
    ),
    Case(
        *("`.pt`", "none", "a Git LFS pointer", "exit 3, says `git lfs pull`"),
        build=raw(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        code=3,
        words=("git lfs pull",),
    ),
    Case(*("`.pt`", "none", "0 bytes", "exit 3"), build=raw(b""), code=3, words=("an empty file",)),
    Case(
        *("`.pt`", "float32", "cut short", "exit 3"),
        build=cut(pt(B), 0.6),
        code=3,
        words=("cut short",),
    ),
    Case(
        *("`.pt` before torch 1.6", "float32", "cut short", "exit 3"),
        build=cut(pt(B, _use_new_zipfile_serialization=False), 0.9),
        code=3,
        words=("cut short",),
    ),
    Case(
        *("`.safetensors`", "float32", "cut short", "exit 3, says by how much"),
        build=cut(st(B), 0.6),
        code=3,
        words=("cut short", "the file has"),
    ),
    Case(
        *("HDF5", "unknown", "another format", "exit 3, names it"),
        build=raw(b"\x89HDF\r\n\x1a\n" + bytes(100), "b.h5"),
        code=3,
        words=("HDF5",),
    ),
    Case(
        *("`.keras`", "unknown", "another format", "exit 3, names it and what reads it"),
        build=keras,
        code=3,
        words=("a Keras archive", "keras.saving.load_model"),
    ),
    Case(
        *("`.pt`", "float32", "an optimizer only", "exit 3, says what it holds"),
        build=pt({"state": {0: {"exp_avg": torch.rand(2)}}, "param_groups": []}),
        code=3,
        words=("no tensors found", "param_groups"),
    ),
]

TENSORS = [
    *(
        Case(
            *(kind, name, "the source is float32", f"computed in float32, stored as {name}"),
            build=build(cast(B, dtype)),
            out=out,
            check=holds(cast(MEAN, dtype), tolerance=2e-2),
        )
        for kind, build, out in (
            ("`.pt`", pt, "out.pt"),
            ("`.safetensors`", st, "out.safetensors"),
        )
        for name, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16))
    ),
    Case(
        *("`.safetensors`", "float8_e4m3fn", "nothing", "computed in float32, stored as it was"),
        build=st(cast(B, torch.float8_e4m3fn), cast(A, torch.float8_e4m3fn)),
        out="out.safetensors",
        check=is_fp8,
    ),
    Case(
        *("`.pt`", "float64", "the source is float32", "computed and stored in float64"),
        build=pt(cast(B, torch.float64)),
        check=holds(cast(MEAN, torch.float64)),
    ),
    Case(
        *("`.pt`", "int64 counters", "5 and 70001 steps", "the larger one, still int64"),
        build=pt(counted(1, 70001), counted(0, 5)),
        check=counters,
    ),
    Case(
        *("`.pt`", "bool and int buffers", "they differ", "the anchor's"),
        build=pt(
            {**B, "fc1.mask": torch.ones(9).bool(), "fc1.ids": torch.arange(9)},
            {**A, "fc1.mask": torch.zeros(9).bool(), "fc1.ids": torch.zeros(9).long()},
            *PLAIN,
        ),
        check=kept_buffers,
    ),
    Case(
        *("`.pt`", "0-d float", "a temperature", "averaged"),
        build=pt({**B, "t": torch.tensor(2.0)}, {**A, "t": torch.tensor(1.0)}),
        check=holds({**MEAN, "t": torch.tensor(1.5)}),
    ),
    Case(
        *("`.pt`", "tied", "two names for one tensor", "tie kept"),
        build=pt(tied_state(B), tied_state(A)),
        check=tied,
    ),
    Case(
        *("`.pt`", "float32", "views of one storage, transposed", "each stored on its own"),
        build=pt(views()),
        check=holds(MEAN),
    ),
    Case(
        *("`.pt`", "float32", "a few numbers of a 4 MB storage", "stored without the rest"),
        build=pt(huge()),
        check=small,
    ),
    Case(
        *("`.pt`", "float32", "channels_last", "fused, stored contiguous"),
        build=pt(channels_last(conv(1)), channels_last(conv(1))),
        check=holds(conv(1)),
    ),
    Case(
        *("`.pt`", "complex64", "its axes stay in place", "averaged"),
        build=rotary_pair,
        check=turned,
    ),
    Case(
        *("`.pt`", "complex64", "its units would be matched", "exit 4, names the tensor"),
        build=pt(complex_layer(B), complex_layer(A), "--align", "wts"),
        code=4,
        words=("a complex tensor with units to match", "fc2.weight"),
    ),
    Case(
        *("`.safetensors`", "codes and scales", "`weight_scale`", "exit 3, names the tensor"),
        build=st({**B, "fc1.weight_scale": torch.rand(1)}),
        code=3,
        words=("a quantised checkpoint", "fc1.weight_scale"),
    ),
    Case(
        *("`.safetensors`", "int8 weights", "codes without scales", "exit 3, names the tensor"),
        build=st({**B, "fc1.weight": B["fc1.weight"].to(torch.int8)}),
        code=3,
        words=("a quantised checkpoint", "fc1.weight"),
    ),
    Case(
        *("`.safetensors`", "float8", "scales beside it, of any name", "exit 3, names both"),
        build=st({**B, "fc1.weight": B["fc1.weight"].to(torch.float8_e4m3fn), "fc1.s": SCALE}),
        code=3,
        words=("a quantised checkpoint", "fc1.weight", "fc1.s"),
    ),
    Case(
        *("`.pt`", "qint8", "a quantised tensor", "exit 3, names the tensor"),
        build=quietly(lambda folder: pt(quantised())(folder)),
        code=3,
        words=("quantised", "fc1.weight"),
    ),
    Case(
        *("`.pt`", "sparse", "a sparse tensor", "exit 3, names the tensor"),
        build=pt({**B, "fc1.weight": B["fc1.weight"].to_sparse()}),
        code=3,
        words=("sparse", "fc1.weight"),
    ),
    *(
        Case(
            *("`.pt`", "float32", f"one {name} in a source of weight 1e-9"),
            happens="exit 3, names file and tensor",
            build=pt(B, with_nan(value), "--weights", "1e-9,1"),
            code=3,
            words=("a.pt", "fc2.weight", "not finite"),
        )
        for name, value in (("NaN", float("nan")), ("infinity", float("inf")))
    ),
    Case(
        *("`.pt`", "float32", "a row of zeros (masked pruning)", "fused"),
        build=pt(B, dead_row(), "--align", "wts"),
    ),
]

MODELS = [
    Case(
        *("`.pt`", "float32", "the anchor widened: every unit twice, outgoing weights halved"),
        happens="the anchor, at any weight",
        build=lambda f: pt(B, widened(B), *W73)(f),
        check=holds(B),
    ),
    Case(
        *("`.pt`", "float32", "the widened model is the anchor"),
        happens="it computes what both compute",
        build=lambda f: pt(widened(B), B, *W73)(f),
        check=same_function,
    ),
    *(
        Case(
            *("`.safetensors`", "float32", f"{name}: the anchor with units permuted"),
            happens="the anchor",
            build=st(make(3), permuted(make(3), seed=9), *W73),
            out="out.safetensors",
            check=holds(make(3)),
        )
        for name, make in (("MLP", mlp), ("VGG with BatchNorm", conv), ("ResNet", resnet))
    ),
    Case(
        *("`.safetensors`", "float32", "a ResNet permuted, with noise, weight 1"),
        happens="near the anchor: one map for the residual stream",
        build=noisy_twin,
        out="out.safetensors",
        check=near(resnet(3)),
    ),
    Case(
        *("`.pt`", "float32", "the classes in another order", "classes stay in place"),
        build=pt(B, rolled(), "--align", "wts", "--repair", "none"),
        check=classes_in_place,
    ),
    Case(
        *("`.pt`", "float32", "7 classes and 5", "exit 4, names both sizes"),
        build=pt(B, MORE, "--align", "wts"),
        code=4,
        words=("[7, 7]", "[5, 7]", "--vocab common"),
    ),
    Case(
        *("`.pt`", "float32", "7 classes and 5, `--vocab common`", "the first 5 averaged"),
        build=pt(B, MORE, "--align", "none", "--vocab", "common"),
        check=common_classes,
    ),
    Case(
        *("`.pt`", "float32", "a tensor is missing in the source", "exit 4, names it"),
        build=pt(B, {n: t for n, t in A.items() if n != "fc2.bias"}),
        code=4,
        words=("fc2.bias", "--no-strict"),
    ),
    Case(
        *("`.pt`", "float32", "a tensor is missing, `--no-strict`", "the anchor's is kept"),
        build=pt(B, {n: t for n, t in A.items() if n != "fc2.bias"}, *PLAIN, "--no-strict"),
        check=holds({**MEAN, "fc2.bias": B["fc2.bias"]}),
    ),
    Case(
        *("`.pt`", "float32", "a tensor has another number of axes", "exit 4, names both shapes"),
        build=pt(B, {**A, "fc2.weight": A["fc2.weight"][None]}),
        code=4,
        words=("fc2.weight", "[1, 8, 9]", "[8, 9]"),
    ),
    Case(
        *("`.pt`", "float32", "weights of 10 times the size, `--solver sinkhorn --epsilon 0.01`"),
        happens="the source counts: plans have their mass",
        build=pt(
            {n: 10 * t for n, t in B.items()},
            {n: 10 * t for n, t in A.items()},
            *("--solver", "sinkhorn", "--epsilon", "0.01", "--matcher", "sweep"),
        ),
        check=source_counts,
    ),
]

OUTPUTS = [
    Case(
        *("any", "any", "OUT exists", "exit 6, it is not touched"),
        build=exists(pt(B), "out.pt"),
        code=6,
        words=("exists already", "--overwrite"),
        check=lambda out: None,
    ),
    Case(
        *("any", "any", "OUT is an input, `--overwrite`", "exit 6, it is not touched"),
        build=pt(B, A, *PLAIN, "--overwrite"),
        out="a.pt",
        code=6,
        words=("the output is one of the inputs",),
    ),
    Case(
        *("any", "any", "OUT is a folder with other files, `--overwrite`"),
        happens="exit 6, it is not touched",
        build=lambda f: [(f / "out").mkdir(), *exists(pt(B, A, "--overwrite"), "out/diary")(f)][1:],
        out="out",
        code=6,
        words=("diary",),
    ),
    Case(
        *("any", "any", "OUT has a suffix that is not known", "exit 2, lists those that are"),
        build=pt(B),
        out="out.onnx",
        code=2,
        words=(".onnx", ".safetensors"),
        check=gone,
    ),
    *(
        Case(
            *("any", "any", f"the disk fills up while {kind} is written"),
            happens="exit 6, nothing is left",
            build=pt(B),
            out=out,
            code=6,
            words=("File too large",),
            during=full_disk,
            check=gone,
        )
        for kind, out in (
            ("a torch file", "out.pt"),
            ("a safetensors file", "out.safetensors"),
            ("a folder", "out"),
        )
    ),
    Case(
        *("any", "any", "OUT is larger than the room on the disk"),
        happens="exit 6, before anything is matched",
        build=pt(B),
        code=6,
        words=("does not fit on the disk", "100 are free"),
        during=no_room,
        check=gone,
    ),
    Case(
        *("any", "any", "the folder of OUT is read-only", "exit 6, nothing is left"),
        build=pt(B),
        code=6,
        words=("may not be written to",),
        during=read_only,
        check=gone,
    ),
    Case(
        *("`.pt`", "float32", "an input shrinks while it is read", "exit 3, nothing is left"),
        build=pt(B, A, "--align", "wts"),
        code=3,
        words=("a.pt", "ends too early"),
        during=shrinking,
        check=gone,
    ),
]

CASES = [*CONTAINERS, *TENSORS, *MODELS, *OUTPUTS]
