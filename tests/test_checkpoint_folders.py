"""Folders of weights: Hugging Face's and torch.distributed's, read and written."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import signal
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

import otfuse_cli
from otfuse_cli.checkpoint import draft
from otfuse_cli.checkpoint.open import open_checkpoint
from otfuse_cli.checkpoint.write import open_writer
from otfuse_cli.errors import OtfuseError, OutputRefused, UnreadableInput, UsageError
from otfuse_cli.output_names import parse_size

STATE = {
    "embed.weight": torch.arange(40.0).reshape(10, 4),
    "block.weight": torch.arange(24.0).reshape(6, 4).bfloat16(),
    "block.bias": torch.arange(6, dtype=torch.float16),
    "block.fp8": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
    "block.count": torch.tensor(3),
}
HALVES = (list(STATE)[:2], list(STATE)[2:])


def hf_folder(folder: Path, kind: str = "safetensors", **config: object) -> Path:
    """A model of two shards with index and config, as transformers writes it."""
    folder.mkdir()
    stem, suffix = ("model", ".safetensors") if kind == "safetensors" else ("pytorch_model", ".bin")
    weight_map = {}
    for number, names in enumerate(HALVES, start=1):
        file = f"{stem}-{number:05d}-of-00002{suffix}"
        part = {name: STATE[name] for name in names}
        if kind == "safetensors":
            save_file(part, folder / file, metadata={"format": "pt"})
        else:
            torch.save(part, folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / f"{stem}{suffix}.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"model_type": "x", **config}))
    return folder


def same(folder: Path, wanted: dict[str, torch.Tensor] = STATE, **options: Any) -> bool:
    with open_checkpoint(folder, **options) as checkpoint:
        assert set(checkpoint.infos) == set(wanted)
        for name, tensor in wanted.items():
            got = checkpoint.read(name)
            assert got.dtype == tensor.dtype, name
            assert torch.equal(got.float(), tensor.float()), name
    return True


def refusal(path: Path, kind: type[OtfuseError] = UnreadableInput) -> OtfuseError:
    with pytest.raises(kind) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value.where)
    return caught.value


# -- Hugging Face


def test_what_could_be_meant_is_named_as_far_as_it_can_be_read(tmp_path: Path) -> None:
    """Ten checkpoints side by side: eight are named, and how to name one."""
    for letter in "abcdefghij":
        save_file(STATE, tmp_path / f"{letter}.safetensors")
    with pytest.raises(UsageError) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.what == "several checkpoints in one folder"
    named = ", ".join(f"{letter}.safetensors" for letter in "abcdefgh")
    assert caught.value.why == f"any of these could be meant: {named}"
    assert caught.value.fix == f"name one of them, for example {tmp_path}/a.safetensors"


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_shards_with_an_index(tmp_path: Path, kind: str) -> None:
    folder = hf_folder(tmp_path / "model", kind)
    assert same(folder)
    with open_checkpoint(folder) as checkpoint:
        form = "safetensors-folder" if kind == "safetensors" else "pt-folder"
        assert checkpoint.container.format == form
        assert checkpoint.path == folder
        assert list(checkpoint.infos) == list(STATE)
    (index,) = folder.glob("*.index.json")
    assert same(index)


def test_the_hash_is_that_of_sha256sum(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "model")
    names = sorted([*(f"model-0000{n}-of-00002.safetensors" for n in (1, 2))])
    names.append("model.safetensors.index.json")
    lines = "".join(
        f"{hashlib.sha256((folder / n).read_bytes()).hexdigest()}  {n}\n" for n in names
    )
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.sha256() == hashlib.sha256(lines.encode()).hexdigest()


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "pytorch_model.bin", "diffusion_pytorch_model.safetensors", "other.pt"],
)
def test_a_single_file_in_a_folder(tmp_path: Path, name: str) -> None:
    if name.endswith(".safetensors"):
        save_file(STATE, tmp_path / name)
    else:
        torch.save(STATE, tmp_path / name)
    for beside in ("optimizer.pt", "scheduler.pt", "training_args.bin", "rng_state_0.pth"):
        torch.save({"state": {"x": torch.rand(2)}}, tmp_path / beside)
    (tmp_path / "config.json").write_text("{}")
    assert same(tmp_path)


def test_safetensors_go_before_pickles(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "model.safetensors")
    torch.save({"other": torch.rand(2)}, tmp_path / "pytorch_model.bin")
    assert same(tmp_path)


def test_ties_in_shards(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "model", "bin")
    file = folder / "pytorch_model-00002-of-00002.bin"
    part = {n: STATE[n] for n in HALVES[1]}
    torch.save({**part, "block.tied": part["block.bias"]}, file)
    index = json.loads((folder / "pytorch_model.bin.index.json").read_text())
    index["weight_map"]["block.tied"] = file.name
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with open_checkpoint(folder) as checkpoint:
        assert dict(checkpoint.aliases) == {"block.bias": ("block.tied",)}


def _edit_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


DEFECTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (
        lambda f: (f / "model-00002-of-00002.safetensors").unlink(),
        "a shard is missing",
    ),
    "tensor not in its shard": (
        lambda f: _edit_index(
            f, lambda i: i["weight_map"].update(ghost="model-00001-of-00002.safetensors")
        ),
        "does not hold tensor ghost",
    ),
    "tensor not in the index": (
        lambda f: _edit_index(f, lambda i: i["weight_map"].pop("block.bias")),
        "holds tensor block.bias, which it does not say",
    ),
    "tensor in another shard": (
        lambda f: _edit_index(
            f, lambda i: i["weight_map"].update({"block.bias": "model-00001-of-00002.safetensors"})
        ),
        "holds tensor block.bias",
    ),
    "stray shard": (
        lambda f: _edit_index(
            f,
            lambda i: [
                i["weight_map"].pop(n)
                for n, file in list(i["weight_map"].items())
                if file.startswith("model-00002")
            ],
        ),
        "model-00002-of-00002.safetensors is there",
    ),
    "outside": (
        lambda f: _edit_index(f, lambda i: i["weight_map"].update(x="../secret.safetensors")),
        "lies in no file of this folder",
    ),
    "no weight map": (lambda f: _edit_index(f, lambda i: i.pop("weight_map")), "no weight_map"),
    "not JSON": (
        lambda f: (f / "model.safetensors.index.json").write_text("{"),
        "no valid JSON",
    ),
    "deep JSON": (
        lambda f: (f / "model.safetensors.index.json").write_text("[" * 100_000),
        "no valid JSON",
    ),
    "truncated shard": (
        lambda f: os.truncate(f / "model-00001-of-00002.safetensors", 200),
        "cut short",
    ),
    "no index": (lambda f: (f / "model.safetensors.index.json").unlink(), "without their index"),
    "quantised": (
        lambda f: (f / "config.json").write_text(
            '{"quantization_config": {"quant_method": "gptq"}}'
        ),
        "weights are codes (gptq)",
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_broken_folders(tmp_path: Path, name: str) -> None:
    folder = hf_folder(tmp_path / "model")
    break_it, words = DEFECTS[name]
    break_it(folder)
    assert words in str(refusal(folder))


def test_folders_without_one_meaning(tmp_path: Path) -> None:
    assert "no file that ends in" in str(refusal(tmp_path))
    for name in ("a.safetensors", "b.safetensors"):
        save_file(STATE, tmp_path / name)
    error = refusal(tmp_path, UsageError)
    assert "a.safetensors, b.safetensors" in str(error.why)
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    assert "a.safetensors.index.json" in str(refusal(tmp_path, UsageError).why)


# -- torch.distributed.checkpoint


def saved(folder: Path, value: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process only
        dcp.save(value, checkpoint_id=folder, no_dist=True)
    return folder


def test_a_distributed_checkpoint(tmp_path: Path) -> None:
    optimizer = {"state": {"block.bias": {"exp_avg": torch.rand(6)}}, "param_groups": [{"lr": 1}]}
    folder = saved(tmp_path / "dcp", {"model": STATE, "optim": optimizer, "epoch": 3})
    assert same(folder)
    with open_checkpoint(folder) as checkpoint:
        assert str(checkpoint.container) == "dcp (model)"


def test_a_distributed_checkpoint_with_ddp_names_and_no_wrapper(tmp_path: Path) -> None:
    folder = saved(tmp_path / "dcp", {f"module.{n}": t for n, t in STATE.items()})
    assert same(folder)


def test_ema_in_a_distributed_checkpoint_needs_a_key(tmp_path: Path) -> None:
    folder = saved(tmp_path / "dcp", {"model": STATE, "ema": STATE})
    assert "--key" in str(refusal(folder, UsageError))
    assert same(folder, key="ema")


def pieces(folder: Path, boxes: dict[tuple[int, int], torch.Tensor], size: tuple[int, int]) -> Path:
    """A tensor dealt out to ranks, one file each, as torch's own records describe it."""
    folder.mkdir()
    chunks, places = [], {}
    for rank, (offsets, box) in enumerate(boxes.items()):
        file = f"__{rank}_0.distcp"
        torch.save(box, folder / file)
        at = torch.Size(offsets)
        chunks.append(dcp_metadata.ChunkStorageMetadata(at, box.shape))
        where = dcp_metadata.MetadataIndex("w", at, rank)
        places[where] = _StorageInfo(file, 0, (folder / file).stat().st_size)
    properties = dcp_metadata.TensorProperties(dtype=next(iter(boxes.values())).dtype)
    record = dcp_metadata.TensorStorageMetadata(properties, torch.Size(size), chunks)
    whole = dcp_metadata.Metadata({"w": record}, {"w": ("w",)}, places)
    (folder / ".metadata").write_bytes(pickle.dumps(whole))
    return folder


FULL = torch.arange(24.0).reshape(6, 4)
ROWS = {(0, 0): FULL[:2], (2, 0): FULL[2:3], (3, 0): FULL[3:]}
GRID = {(0, 0): FULL[:4, :1], (0, 1): FULL[:4, 1:], (4, 0): FULL[4:, :2], (4, 2): FULL[4:, 2:]}


@pytest.mark.parametrize("boxes", [ROWS, GRID], ids=["rows", "grid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e5m2, torch.int64])
def test_a_tensor_in_pieces(
    tmp_path: Path, boxes: dict[tuple[int, int], torch.Tensor], dtype: torch.dtype
) -> None:
    cast = {at: box.contiguous().to(dtype) for at, box in boxes.items()}
    folder = pieces(tmp_path / "dcp", cast, (6, 4))
    assert same(folder, {"w": FULL.to(dtype)})
    if dtype is torch.float32:  # torch's own loader agrees
        target = {"w": torch.zeros(6, 4)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(target, checkpoint_id=folder, no_dist=True)
        assert torch.equal(target["w"], FULL)


@pytest.mark.parametrize(
    ("boxes", "size", "words"),
    [
        ({(0, 0): FULL[:2], (3, 0): FULL[3:]}, (6, 4), "do not make it up"),
        ({(0, 0): FULL[:4], (3, 0): FULL[4:]}, (6, 4), "do not make it up"),
        ({(0, 0): FULL[:4], (2, 0): FULL[2:4]}, (6, 4), "do not make it up"),
        ({(0, 0): FULL}, (5, 4), "do not make it up"),
        ({(0, 0): FULL}, (1 << 40, 1 << 40), "impossible shape"),
    ],
)
def test_pieces_that_make_no_tensor(
    tmp_path: Path, boxes: dict[tuple[int, int], torch.Tensor], size: tuple[int, int], words: str
) -> None:
    assert words in str(refusal(pieces(tmp_path / "dcp", boxes, size)))


def _metadata(folder: Path, change: Callable[[Any], object]) -> None:
    path = folder / ".metadata"
    whole = pickle.loads(path.read_bytes())
    change(whole)
    path.write_bytes(pickle.dumps(whole))


def _places(change: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda whole: [change(info) for info in whole.storage_data.values()]


BROKEN_DCP: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing file": (lambda f: (f / "__1_0.distcp").unlink(), "without one of its files"),
    "outside": (
        lambda f: _metadata(f, _places(lambda i: setattr(i, "relative_path", "../x"))),
        "outside the folder",
    ),
    "short file": (lambda f: os.truncate(f / "__1_0.distcp", 100), "does not fit"),
    "no place": (lambda f: _metadata(f, lambda w: w.storage_data.clear()), "nothing says where"),
    "compressed": (
        lambda f: _metadata(f, _places(lambda i: setattr(i, "transform_descriptors", ["zstd"]))),
        "compressed",
    ),
    "negative offset": (
        lambda f: _metadata(f, _places(lambda i: setattr(i, "offset", -1))),
        "not what torch writes",
    ),
    "no metadata": (lambda f: (f / ".metadata").write_bytes(b""), "broken"),
    "other pickle": (
        lambda f: (f / ".metadata").write_bytes(pickle.dumps({"a": 1})),
        "not what torch writes",
    ),
}


@pytest.mark.parametrize("name", BROKEN_DCP)
def test_broken_distributed_checkpoints(tmp_path: Path, name: str) -> None:
    folder = pieces(tmp_path / "dcp", ROWS, (6, 4))
    break_it, words = BROKEN_DCP[name]
    break_it(folder)
    assert words in str(refusal(folder))


def test_a_piece_of_another_shape_is_named(tmp_path: Path) -> None:
    folder = pieces(tmp_path / "dcp", ROWS, (6, 4))
    for box in (FULL[:1].clone(), FULL[:2].double().clone(), {"w": FULL}):
        torch.save(box, folder / "__0_0.distcp")
        size = (folder / "__0_0.distcp").stat().st_size
        _metadata(
            folder,
            _places(lambda i, s=size: i.relative_path[2] == "0" and setattr(i, "length", s)),
        )
        with open_checkpoint(folder) as checkpoint:
            with pytest.raises(UnreadableInput, match="broken") as caught:
                checkpoint.read("w")
            assert "w" in str(caught.value.where)


class _Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
        return os.system, (f"touch {self.marker}",)


def test_hostile_metadata_and_pieces_run_nothing(tmp_path: Path) -> None:
    folder, marker = pieces(tmp_path / "dcp", ROWS, (6, 4)), tmp_path / "ran"
    _metadata(folder, lambda whole: setattr(whole, "planner_data", _Evil(marker)))
    assert "could run code" in str(refusal(folder))
    other = pieces(tmp_path / "other", ROWS, (6, 4))
    torch.save(_Evil(marker), other / "__0_0.distcp")
    size = (other / "__0_0.distcp").stat().st_size
    _metadata(other, _places(lambda i: i.relative_path[2] == "0" and setattr(i, "length", size)))
    with open_checkpoint(other) as checkpoint, pytest.raises(UnreadableInput, match="run code"):
        checkpoint.read("w")
    assert not marker.exists()


# -- writing


def write(path: Path, source: Any, **options: Any) -> Path:
    with (
        open_checkpoint(source) as like,
        open_writer(path, like.infos.values(), like=like, **options) as writer,
    ):
        for name in like.infos:
            writer.put(name, like.read(name))
    return path


def test_a_folder_comes_out_as_it_went_in(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "model", dtype="float32")
    for name in ("tokenizer.json", "merges.txt", "LICENSE"):
        (folder / name).write_text(name)
    for name in ("README.md", "optimizer.pt", "modeling_x.py"):
        (folder / name).write_text(name)
    out = write(tmp_path / "out", folder, shard_size=170)
    assert same(out)
    assert sorted(p.name for p in out.iterdir()) == [
        *("LICENSE", "config.json", "merges.txt"),
        *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        *("model.safetensors.index.json", "tokenizer.json"),
    ]
    assert (out / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in STATE.values())
    for name, file in index["weight_map"].items():
        assert name in load_file(out / file)


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("model.safetensors", "model"),
        ("pytorch_model.bin", "model"),
        ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model"),
        ("diffusion_pytorch_model.bin", "diffusion_pytorch_model"),
        ("diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model"),
        ("adapter_model.safetensors", "adapter_model"),
        ("ema_of_mine.safetensors", "model"),
    ],
)
@pytest.mark.parametrize("shard_size", [None, "100"])
def test_weights_are_called_as_their_library_looks_for_them(tmp_path, given, written, shard_size):
    tensors = {"a.weight": torch.ones(8, 4), "b.weight": torch.ones(2, 8)}
    source = tmp_path / "in"
    source.mkdir()
    (source / "config.json").write_text("{}")
    if given.endswith(".bin"):
        torch.save(tensors, source / given)
    else:
        save_file(tensors, source / given)
    out = tmp_path / "out"
    otfuse_cli.merge(source, source, output=out, align="none", shard_size=shard_size)
    names = {path.name for path in out.iterdir()} - {"config.json", "report.json"}
    if shard_size is None:
        assert f"{written}.safetensors" in names
    else:
        assert f"{written}.safetensors.index.json" in names
        assert f"{written}-00001-of-00002.safetensors" in names
    again, _ = otfuse_cli.merge(out, out, align="none")
    assert again.keys() == tensors.keys()


def test_one_shard_has_no_index_and_code_comes_along_when_the_config_names_it(
    tmp_path: Path,
) -> None:
    folder = hf_folder(tmp_path / "model", auto_map={"AutoModel": "modeling_x.X"})
    (folder / "modeling_x.py").write_text("")
    out = write(tmp_path / "out", folder)
    names = ["config.json", "model.safetensors", "modeling_x.py"]
    assert sorted(p.name for p in out.iterdir()) == names
    assert same(out)


def test_the_config_says_another_dtype(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "model", torch_dtype="float32", hidden_size=4)
    out = write(tmp_path / "out", folder, dtype="float16")
    assert json.loads((out / "config.json").read_text()) == {
        "model_type": "x",
        "torch_dtype": "float16",
        "hidden_size": 4,
    }


def test_a_folder_from_a_single_file(tmp_path: Path) -> None:
    torch.save({"model": {f"module.{n}": t for n, t in STATE.items()}}, tmp_path / "x.pt")
    out = write(tmp_path / "out-1.5", tmp_path / "x.pt")
    assert [p.name for p in out.iterdir()] == ["model.safetensors"]
    assert set(load_file(out / "model.safetensors")) == {f"module.{n}" for n in STATE}


def test_shards_hold_ties_once_and_name_them(tmp_path: Path) -> None:
    shared = torch.rand(4, 3)
    torch.save({"a": shared, "b": torch.rand(9), "c": shared}, tmp_path / "x.pt")
    out = write(tmp_path / "out", tmp_path / "x.pt", shard_size=40)
    assert len(list(out.glob("*.safetensors"))) == 2
    with open_checkpoint(out / "model-00001-of-00002.safetensors") as part:
        assert dict(part.aliases) == {"a": ("c",)}


def test_two_folders_have_the_same_bytes_and_the_umask_decides_their_mode(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "model")
    old = os.umask(0o027)
    try:
        outs = [write(tmp_path / name, folder, shard_size=100) for name in ("one", "two")]
    finally:
        os.umask(old)
    assert stat.S_IMODE(outs[0].stat().st_mode) == 0o750
    for path in outs[0].iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        assert path.read_bytes() == (outs[1] / path.name).read_bytes()


def test_existing_folders(tmp_path: Path) -> None:
    folder, out = hf_folder(tmp_path / "model"), tmp_path / "out"
    out.mkdir()
    assert same(write(out, folder))
    with pytest.raises(OutputRefused, match="exists already"):
        write(out, folder)
    write(out, folder, overwrite=True, shard_size=100)
    assert not (out / "model.safetensors").exists()
    (out / "diary.txt").write_text("mine")
    with pytest.raises(OutputRefused, match=r"diary\.txt"):
        write(out, folder, overwrite=True)
    assert (out / "diary.txt").read_text() == "mine"
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputRefused, match="it is none"):
        write(tmp_path / "file", folder, overwrite=True)
    assert not list(tmp_path.glob(".otfuse*"))


@pytest.mark.parametrize("call", ["pwrite", "fsync", "replace"])
@pytest.mark.parametrize("before", [False, True])
def test_a_full_disk_leaves_no_folder_and_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, before: bool
) -> None:
    folder, out = hf_folder(tmp_path / "model"), tmp_path / "out"
    if before:
        write(out, folder)
    real, calls = getattr(os, call), []
    # The second fsync is that of the folder, where failing does no harm.
    last = {"pwrite": 2, "fsync": 3, "replace": 2 if before else 1}[call]

    def fail(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == last:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **options)

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OutputRefused, match="No space left") as caught:
        write(out, folder, overwrite=before, shard_size=100)
    monkeypatch.undo()
    assert str(caught.value.where).startswith(str(out))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", *(["out"] if before else [])]
    assert not before or same(out)


def test_an_exception_leaves_no_folder(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "model")

    def attempt() -> None:
        with (
            open_checkpoint(folder) as like,
            open_writer(tmp_path / "out", like.infos.values(), like=like) as writer,
        ):
            writer.put("block.bias", like.read("block.bias"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt()
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="needs files without a name")
def test_a_killed_process_leaves_no_folder(tmp_path: Path) -> None:
    if draft._open_nameless(tmp_path) is None:
        pytest.skip("this file system has no files without a name")
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from otfuse_cli.checkpoint.draft import FolderDraft\n"
        "folder = FolderDraft(Path(sys.argv[1]))\n"
        "folder.add('model.safetensors').write_at(memoryview(b'half of it'), 0)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGKILL)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 kib", 1536), ("77", 77), ("2MiB", 1 << 21)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "0", "5TB", "1e9", "0.0001KB"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(UsageError, match="not a size"):
        parse_size(text)


# -- from the command line


def digits_folder(source: Path, folder: Path) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(source.read_bytes())
    (folder / "config.json").write_text('{"model_type": "digits"}')
    return folder


def test_folders_in_folder_out_and_in_again(cli: Any, demo_pair: Any, tmp_path: Path) -> None:
    a, b = (digits_folder(p, tmp_path / p.stem) for p in demo_pair)
    out = tmp_path / "fused"
    done = cli("merge", a, b, "-o", out, "--shard-size", "10KB", "--matcher", "sweep", "--json")
    assert done.code == 0, done.err
    report = json.loads((out / "fused.report.json").read_text())
    assert json.loads(done.out)["report"] == report
    assert report["output"][0]["container"] == "safetensors-folder"
    assert report["recipe"]["shard_size"] == "10KB"
    assert len(list(out.glob("model-*.safetensors"))) > 1
    assert cli("inspect", out, "--ot-costs").code == 0
    again = cli("merge", out, b, "-o", out, "--overwrite")
    assert (again.code, "one of the inputs" in again.err) == (6, True)
    inside = cli("merge", out / "model.safetensors.index.json", b, "-o", out, "--overwrite")
    assert (inside.code, "one of the inputs" in inside.err) == (6, True)
    assert cli("merge", a, b, "-o", out, "--overwrite", "--matcher", "sweep").code == 0
    assert sorted(p.name for p in out.iterdir()) == [
        *("config.json", "fused.report.json", "model.safetensors")
    ]
    done = cli("merge", a, b, "-o", tmp_path / "x.pt", "--shard-size", "1GB")
    assert (done.code, "--shard-size needs a folder" in done.err) == (2, True)


def test_prune_fuse_names_a_folder_beside_the_pruned_one(
    cli: Any, demo_pair: Any, tmp_path: Path
) -> None:
    a, b = (digits_folder(p, tmp_path / p.stem) for p in demo_pair)
    assert cli("prune-fuse", a, b, "--matcher", "sweep").code == 0
    assert (tmp_path / "b-fused" / "b-fused.report.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_transformers_loads_what_merge_writes(cli: Any, tmp_path: Path, kind: str) -> None:
    """Sharded in, sharded out; GPT-2 with its embedding tied to the head."""
    transformers = pytest.importorskip("transformers")
    if kind == "llama":
        config = transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=60,
        )
    else:
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=60)
    models = []
    for seed, name in enumerate(("a", "b")):
        torch.manual_seed(seed)
        models.append(transformers.AutoModelForCausalLM.from_config(config))
        models[-1].save_pretrained(tmp_path / name, max_shard_size="30KB")
    line = ["merge", tmp_path / "a", tmp_path / "b", "--align", "none"]
    for out in ("sharded", "single"):
        size = ["--shard-size", "30KB"] if out == "sharded" else []
        done = cli(*line, "-o", tmp_path / out, *size)
        assert done.code == 0, done.err
        fused = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / out)
        mine = fused.state_dict()
        for name, tensor in models[1].state_dict().items():
            expected = tensor + 0.5 * (models[0].state_dict()[name] - tensor)
            torch.testing.assert_close(mine[name], expected, rtol=1e-5, atol=1e-6)
