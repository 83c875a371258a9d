"""What is no checkpoint of ours: each is told, and its owner is told what to do (exit 3)."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import pickle
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from otfuse_cli.checkpoint.formats.refused import REFUSALS
from otfuse_cli.checkpoint.open import open_checkpoint
from otfuse_cli.errors import ExitCode, UnreadableInput

ARRAYS = {"fc.weight": np.ones((3, 2), np.float32), "fc.bias": np.zeros(3, np.float32)}
Build = Callable[[Path], object]


def field(number: int, value: int | bytes) -> bytes:
    """A field of a protobuf message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    groups = [value & 0x7F]
    while value := value >> 7:
        groups.append(value & 0x7F)
    return bytes(group | 0x80 for group in groups[:-1]) + bytes(groups[-1:])


def raw(data: bytes) -> Build:
    return lambda path: path.write_bytes(data)


def archive(*names: str) -> Build:
    def build(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as file:
            for name in names:
                file.writestr(name, b"{}")

    return build


def folder(*names: str) -> Build:
    """A folder of these files; a name that ends in a slash is a folder in it."""

    def build(path: Path) -> None:
        path.mkdir()
        for name in names:
            if name.endswith("/"):
                (path / name).mkdir()
            else:
                (path / name).write_bytes(b"\x08\x01")

    return build


def pickled(value: Any, protocol: int = 4) -> Build:
    return raw(pickle.dumps(value, protocol))


def traced() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is on its way out
        return torch.jit.trace(torch.nn.Linear(2, 3), torch.rand(1, 2))


def torchscript(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(traced(), path)


def mobile(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced()._save_for_lite_interpreter(str(path))


def exported(path: Path) -> None:
    program = torch.export.export(torch.nn.Linear(2, 3), (torch.rand(1, 2),))
    with path.open("wb") as file:
        torch.export.save(program, file)


def packaged(path: Path) -> None:
    from torch.package import PackageExporter

    with PackageExporter(path) as package:
        package.save_text("notes", "notes.txt", "nothing")


def fitted() -> object:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression().fit([[0.0], [1.0]], [0, 1])


def tarred(path: Path) -> None:
    with tarfile.open(path, "w") as file:
        file.add(__file__, "model_weights.ckpt")


PADDLE = {**ARRAYS, "StructuredToParameterName@@": {"fc.weight": "linear_0.w_0"}}
NODE = field(1, b"input") + field(2, b"Placeholder")
GRAPH = field(1, field(1, b"x") + field(4, b"Gemm"))
XML = b'<?xml version="1.0" ?>\n<net name="torch_jit" version="11"><layers/></net>'
ONNX = field(1, 8) + field(2, b"pytorch") + field(7, GRAPH) + field(8, field(2, 17))
FLAX_ARRAY = b"\x81\xa6kernel\xc7\x09\x01\x93\x91\x02\xa7float32"
FLAX = b"\x81\xa6params\x81\xa6kernel\xc7\x09\x01\x93\x91\x02\xa7float32"

# Name, how it is made, what it is called, and a word of what to do.
CASES: list[tuple[str, Build, str, str]] = [
    ("empty.pt", raw(b""), "an empty file", "download"),
    (
        "pointer.safetensors",
        raw(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "a Git LFS pointer",
        "git lfs pull",
    ),
    ("model.ptl", mobile, "a program of PyTorch Mobile", "torch.jit.load"),
    ("flat.ptl", raw(b"\x18\0\0\0PTMF" + bytes(60)), "a program of PyTorch Mobile", "torch.jit"),
    ("script.pt", torchscript, "a TorchScript archive", "torch.jit.load"),
    ("program.pt2", exported, "a program of torch.export", "torch.export.load"),
    (
        "old.pt2",
        archive("serialized_exported_program.json", "serialized_state_dict.pt", "version"),
        "a program of torch.export",
        "--arch",
    ),
    ("package.pt", packaged, "a package of torch.package", "torch checkpoint"),
    ("model.mar", archive("MAR-INF/MANIFEST.json", "m.pt"), "TorchServe", "unpack"),
    ("model.pte", raw(b"\x1c\0\0\0ET12" + bytes(60)), "ExecuTorch", "torch checkpoint"),
    ("deepspeed", folder("zero_to_fp32.py", "latest", "step1/"), "DeepSpeed", "zero_to_fp32.py"),
    ("m.gguf", raw(b"GGUF" + struct.pack("<IQQ", 3, 0, 0)), "a GGUF file", "made from"),
    ("ggml.bin", raw(b"tjgg" + struct.pack("<I", 3)), "a GGML file", "made from"),
    (
        "model.keras",
        archive("metadata.json", "config.json", "model.weights.h5"),
        "a Keras archive",
        "keras.saving.load_model",
    ),
    ("m.h5", raw(b"\x89HDF\r\n\x1a\n\0\0\0\0\0\x08\x08" + bytes(80)), "HDF5", "h5py.File"),
    ("saved_model.pb", raw(field(1, 1) + field(2, GRAPH)), "TensorFlow (.pb)", "saved_model"),
    (
        "frozen.pb",
        raw(field(1, NODE) * 2 + field(4, field(1, 27))),
        "TensorFlow (.pb)",
        "copy the arrays",
    ),
    (
        "many.pb",
        raw(field(4, field(1, 27)) + field(1, NODE) * 500),
        "TensorFlow (.pb)",
        "copy the arrays",
    ),
    ("saved", folder("saved_model.pb", "variables/"), "TensorFlow (.pb)", "saved_model.load"),
    (
        "model.ckpt.index",
        raw(bytes(60) + (0xDB4775248B80FB57).to_bytes(8, "little")),
        "a checkpoint of TensorFlow",
        "tf.train.load_checkpoint",
    ),
    (
        "model.ckpt.data-00000-of-00001",
        raw(np.linspace(1, 2, 40, dtype=np.float32).tobytes()),
        "the data of a TensorFlow checkpoint",
        "tf.train.load_checkpoint",
    ),
    (
        "checkpoint",
        raw(b'model_checkpoint_path: "model.ckpt"\n'),
        "a checkpoint of TensorFlow",
        "tf.train.load_checkpoint",
    ),
    (
        "tf1",
        folder("checkpoint", "model.ckpt.index", "model.ckpt.data-00000-of-00001"),
        "a checkpoint of TensorFlow",
        "tf.train.load_checkpoint",
    ),
    ("m.tflite", raw(b"\x1c\0\0\0TFL3" + bytes(60)), "a TensorFlow Lite model", "made from"),
    ("orbax", folder("_METADATA", "_sharding", "manifest.ocdbt", "d/"), "orbax", "orbax"),
    ("flax_model.msgpack", raw(FLAX), "flax", "msgpack_restore"),
    ("kernel.msgpack", raw(FLAX_ARRAY), "flax", "msgpack_restore"),
    ("hub", folder("config.json", "flax_model.msgpack"), "flax", "msgpack_restore"),
    ("m.pdparams", pickled(PADDLE), "PaddlePaddle", "copy the arrays"),
    ("m2.pdparams", pickled(PADDLE, 2), "PaddlePaddle", "copy the arrays"),
    ("m.params", raw(b"\x12\x01" + bytes(40)), "MXNet", "copy the arrays"),
    ("model.pkl", lambda path: pickled(fitted())(path), "scikit-learn", "networks of torch"),
    ("model.joblib", lambda path: joblib.dump(fitted(), path), "nothing was run", "of torch"),
    ("z.joblib", lambda path: joblib.dump(fitted(), path, compress=3), "zlib", "unpack"),
    ("m.onnx", raw(ONNX), "an ONNX graph", "onnx.load"),
    ("runtime", folder("config.json", "model.onnx"), "an ONNX graph", "onnx.load"),
    (
        "m.mlmodel",
        raw(field(1, 4) + field(2, field(1, b"x")) + field(500, b"layers")),
        "a Core ML model",
        "made from",
    ),
    ("m.mlpackage", folder("Manifest.json", "Data/"), "a Core ML model", "made from"),
    ("m.xml", raw(XML), "a model of OpenVINO", "made from"),
    ("openvino", folder("openvino_model.xml", "openvino_model.bin"), "OpenVINO", "made from"),
    ("m.engine", raw(b"ptrt" + bytes(40)), "TensorRT", "made from"),
    ("weights.npz", lambda path: np.savez(path, **ARRAYS), "(.npz)", "torch.from_numpy"),
    ("w.npy", lambda path: np.save(path, ARRAYS["fc.bias"]), "a NumPy array", "torch.from_numpy"),
    ("arrays.pkl", pickled({"model": ARRAYS}), "a pickle of NumPy arrays", "if you trust"),
    ("arrays2.pkl", pickled({"model": ARRAYS}, 2), "a pickle of NumPy arrays", "if you trust"),
    ("m.mat", raw(b"MATLAB 5.0 MAT-file" + bytes(120)), "a MATLAB file", "scipy.io.loadmat"),
    ("m.gz", raw(gzip.compress(b"x")), "a gzip archive", "unpack"),
    ("m.xz", raw(lzma.compress(b"x")), "an xz archive", "unpack"),
    ("m.bz2", raw(bz2.compress(b"x")), "a bzip2 archive", "unpack"),
    ("m.zst", raw(b"\x28\xb5\x2f\xfd\x20\x01\x09\0\0x"), "a zstd archive", "unpack"),
    ("m.lz4", raw(b"\x04\x22\x4d\x18\x64\x40\xa7"), "an lz4 archive", "unpack"),
    ("m.7z", raw(b"7z\xbc\xaf\x27\x1c\0\x04"), "a 7z archive", "unpack"),
    ("m.rar", raw(b"Rar!\x1a\x07\x01\0"), "a rar archive", "unpack"),
    ("m.nemo", tarred, "a tar archive", "model_weights.ckpt"),
    ("page.pt", raw(b"\n<!DOCTYPE html>\n<html>"), "a web page", "download the file again"),
    ("page2.pt", raw(b"<HTML><BODY>"), "a web page", "download the file again"),
    ("m.svg", raw(b"<svg>"), "XML text", "give the file"),
    ("config.json", raw(json.dumps({"a": 1}).encode()), "JSON text", "index.json"),
    ("nothing", folder("README.md"), "ends in .safetensors", "that holds the weights"),
    ("parts", folder("model_index.json", "unet/", "vae/", ".git/"), "ends in", "unet, vae"),
]


@pytest.mark.parametrize(("name", "build", "kind", "remedy"), CASES, ids=[c[0] for c in CASES])
def test_a_refusal_says_what_it_is_and_what_to_do(
    tmp_path: Path, name: str, build: Build, kind: str, remedy: str
) -> None:
    path = tmp_path / name
    build(path)
    with pytest.raises(UnreadableInput) as caught:
        open_checkpoint(path)
    error = caught.value
    assert error.exit_code == ExitCode.UNREADABLE
    assert kind in f"{error.what} {error.why}"
    assert error.where == str(path)
    assert remedy in str(error.fix)


def test_every_row_is_tried() -> None:
    """Whatever the table has, a case above shows."""
    kinds = [kind for _, _, kind, _ in CASES]
    untried = [row.kind for row in REFUSALS if not any(kind in row.kind for kind in kinds)]
    assert untried == []


def test_what_a_zip_without_weights_is_called(tmp_path: Path) -> None:
    archive("readme.txt", "data/x")(tmp_path / "x.zip")
    with pytest.raises(UnreadableInput, match="a zip file, but no torch checkpoint"):
        open_checkpoint(tmp_path / "x.zip")


@pytest.mark.parametrize(
    "data",
    [
        field(1, 8) + field(2, b"pytorch") + field(7, GRAPH),  # no versions of operators
        ONNX + field(99, 1),
        ONNX[:-1],
        field(1, 2) + field(2, b"x") + field(9, b"y"),
        field(1, NODE),
        b"\x81\xa6params\x05",
        b"\x81\xa4p\x01ms\x81\xa1",
        b"\xff" * 40,
    ],
)
def test_bytes_that_only_resemble_a_structure(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(UnreadableInput, match="its bytes are in no known format"):
        open_checkpoint(tmp_path / "x.pt")


def test_weights_beside_what_is_refused_are_read(tmp_path: Path) -> None:
    """A folder of the hub often has the weights in several formats."""
    folder("config.json", "flax_model.msgpack", "tf_model.h5", "model.onnx")(tmp_path / "hub")
    (tmp_path / "hub" / "config.json").write_text("{}")
    save_file({"w": torch.ones(2)}, tmp_path / "hub" / "model.safetensors")
    with open_checkpoint(tmp_path / "hub") as checkpoint:
        assert list(checkpoint.infos) == ["w"]


def test_a_header_as_long_as_a_brace_is_a_checkpoint(tmp_path: Path) -> None:
    """The length of a safetensors header is its first bytes, which may spell anything."""
    text = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'.ljust(ord("{"))
    data = len(text).to_bytes(8, "little") + text + bytes(4)
    assert data.startswith(b"{")
    (tmp_path / "x").write_bytes(data)
    with open_checkpoint(tmp_path / "x") as checkpoint:
        assert list(checkpoint.infos) == ["w"]


def test_more_than_arrays_in_a_joblib_dump_is_a_danger(tmp_path: Path) -> None:
    program = b"\x80\x04cjoblib.numpy_pickle\nNumpyArrayWrapper\n0cos\nsystem\n."
    (tmp_path / "x.joblib").write_bytes(program)
    with pytest.raises(UnreadableInput, match="a pickle that could run code"):
        open_checkpoint(tmp_path / "x.joblib")
