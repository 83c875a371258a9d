"""Reading: every format and dtype against torch's and safetensors' own loaders; what is refused."""

import hashlib
import json
import os
import threading
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import safetensors.torch
import torch

from otfuse_cli.checkpoint.disk import Disk
from otfuse_cli.checkpoint.finite import require_finite
from otfuse_cli.checkpoint.names import TensorInfo
from otfuse_cli.checkpoint.open import Checkpoint, open_checkpoint
from otfuse_cli.errors import ExitCode, UnreadableInput

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
]


def save(value: object, path: Path, kind: str) -> Path:
    if kind == "safetensors":
        safetensors.torch.save_file(value, path)
    else:
        torch.save(value, path, _use_new_zipfile_serialization=kind == "zip")
    return path


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(checkpoint: Checkpoint, name: str, wanted: torch.Tensor) -> bool:
    got = checkpoint.read(name)
    info = checkpoint.infos[name]
    return (
        got.is_contiguous()
        and info == TensorInfo(name, tuple(wanted.shape), wanted.dtype)
        and (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        and bits(got) == bits(wanted)
    )


def awkward_tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(24.0).reshape(4, 6)
    qkv = torch.arange(27.0).reshape(9, 3)
    return {
        "transposed": base.t(),
        "channels_last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "q": qkv[:3],
        "k": qkv[3:6],
        "v": qkv[6:],
        "rows": torch.rand(1000, 100)[7:9],
        "step": base[:, ::2],
        "expanded": torch.rand(3, 1).expand(3, 5),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "int": torch.tensor([70001]),
        "conj": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "neg": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "parameter": torch.nn.Parameter(torch.rand(3)),
    }


@pytest.mark.parametrize("kind", ["safetensors", "zip", "legacy"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_read_bit_for_bit(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    values = torch.tensor([[0.0, 1.0, 2.0], [3.0, 1.5, 0.25]]).to(dtype)
    state = {"a.values": values, "a.scalar": values[0, 1].clone(), "a.empty": values[:, :0].clone()}
    with open_checkpoint(save(state, tmp_path / "x.any", kind)) as checkpoint:
        assert list(checkpoint.infos) == sorted(state) or list(checkpoint.infos) == list(state)
        for name, wanted in state.items():
            assert same(checkpoint, name, wanted), name
            require_finite(checkpoint, name, checkpoint.read(name))


@pytest.mark.parametrize("kind", ["zip", "legacy", "memory"])
def test_views_are_read_compactly(tmp_path: Path, kind: str) -> None:
    state = awkward_tensors()
    source = state if kind == "memory" else save(state, tmp_path / "x.pt", kind)
    with open_checkpoint(source) as checkpoint:
        for name, tensor in state.items():
            got, wanted = checkpoint.read(name), tensor.detach().resolve_conj().resolve_neg()
            assert torch.equal(got, wanted), name
            assert got.is_contiguous(), name
            assert got.untyped_storage().nbytes() == got.nbytes, name
            assert not got.requires_grad, name
        assert not checkpoint.aliases


@pytest.mark.parametrize("kind", ["safetensors", "zip", "legacy", "memory"])
def test_what_is_read_is_a_copy(tmp_path: Path, kind: str) -> None:
    state = {"w": torch.arange(6.0)}
    source = state if kind == "memory" else save(state, tmp_path / "x", kind)
    with open_checkpoint(source) as checkpoint:
        checkpoint.read("w").zero_()
        assert torch.equal(checkpoint.read("w"), torch.arange(6.0))


@pytest.mark.parametrize("kind", ["zip", "legacy", "memory"])
def test_ties_keep_the_first_name(tmp_path: Path, kind: str) -> None:
    shared, hollow = torch.rand(4, 4), torch.empty(0)
    state = {
        "embed": shared,
        "head": shared,
        "again": shared.view(4, 4),
        "flat": shared.view(16),
        "turned": shared.t(),
        "equal": shared.clone(),
        "none": hollow,
        "nothing": hollow,
    }
    source = state if kind == "memory" else save(state, tmp_path / "x.pt", kind)
    with open_checkpoint(source) as checkpoint:
        assert dict(checkpoint.aliases) == {"embed": ("head", "again")}
        assert list(checkpoint.infos) == [n for n in state if n not in ("head", "again")]
        assert checkpoint.container.keys == tuple(state)
        for name in checkpoint.infos:
            assert same(checkpoint, name, state[name])


@pytest.mark.parametrize("kind", ["zip", "legacy"])
def test_content_decides_not_the_suffix(tmp_path: Path, kind: str) -> None:
    misnamed = save({"w": torch.rand(3)}, tmp_path / "x.safetensors", kind)
    with open_checkpoint(misnamed) as checkpoint:
        assert checkpoint.container.format == {"zip": "pt", "legacy": "pt-legacy"}[kind]
    other = save({"w": torch.rand(3)}, tmp_path / "x.pt", "safetensors")
    with open_checkpoint(other) as checkpoint:
        assert checkpoint.container.format == "safetensors"


def test_record_and_hash(tmp_path: Path) -> None:
    path = save({"model": {"w": torch.rand(3, 2), "n": torch.tensor(3)}}, tmp_path / "x.pt", "zip")
    with open_checkpoint(str(path), label="x.pt") as checkpoint:
        record = checkpoint.record()
    assert record.path == "x.pt"
    assert record.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (record.container, record.tensors, record.parameters) == ("pt (model)", 2, 7)
    assert record.dtypes == {"float32": 1, "int64": 1}
    assert open_checkpoint({"w": torch.rand(1)}).record().sha256 is None


def test_cuda_saved_legacy_file_is_read_without_cuda(tmp_path: Path) -> None:
    # Storages carry the device they were saved from; the bytes are the same.
    path = save({"w": torch.arange(3.0)}, tmp_path / "x.pt", "legacy")
    data = path.read_bytes()
    assert data.count(b"X\x03\x00\x00\x00cpu") == 1
    path.write_bytes(data.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0"))
    with open_checkpoint(path) as checkpoint:
        assert torch.equal(checkpoint.read("w"), torch.arange(3.0))


def test_parallel_reads(tmp_path: Path) -> None:
    state = {f"w{i}": torch.full((1000,), float(i)) for i in range(40)}
    wrong: list[str] = []
    with open_checkpoint(save(state, tmp_path / "x.pt", "zip")) as checkpoint:

        def work() -> None:
            wrong.extend(n for n in state if not torch.equal(checkpoint.read(n), state[n]))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_module_versions_are_kept(tmp_path: Path) -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    with open_checkpoint(save({"model": state}, tmp_path / "x.pt", "zip")) as checkpoint:
        assert checkpoint.container.versions == {"": {"version": 2}}


def safetensors_bytes(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def f32(begin: int, end: int, shape: object = None, dtype: object = "F32") -> dict[str, object]:
    size = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": size, "data_offsets": [begin, end]}


ONE = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
BROKEN = {
    "empty": (b"", "an empty file"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "Git LFS pointer"),
    "noise": (bytes(range(7, 200)), "not a checkpoint"),
    "one byte": (b"\x80", "not a checkpoint"),
    "html": (b"<!DOCTYPE html><html>", "not a checkpoint"),
    "gguf": (b"GGUF" + bytes(40), "a GGUF file"),
    "zip head": (b"PK\x03\x04" + bytes(100), "cut short"),
    "pickle head": (b"\x80\x02}q\x00", "broken torch checkpoint"),
    "other pickle": (b"\x80\x02}q\x00.", "written by torch.save"),
    "header too large": (safetensors_bytes({}, length=1 << 62), "is the limit"),
    "header short": (safetensors_bytes({}, length=5000), "cut short"),
    "bad json": (safetensors_bytes(b"{nonsense}"), "no valid JSON"),
    "deep json": (safetensors_bytes(b'{"a":' + b"[" * 100_000), "no valid JSON"),
    "duplicate": (safetensors_bytes(b"{" + ONE + b"," + ONE + b"}", bytes(4)), "given twice"),
    "data short": (safetensors_bytes({"a": f32(0, 8)}, bytes(7)), "cut short"),
    "data long": (safetensors_bytes({"a": f32(0, 8)}, bytes(9)), "belong to none"),
    "gap": (safetensors_bytes({"a": f32(4, 8)}, bytes(8)), "starts at byte 4"),
    "overlap": (safetensors_bytes({"a": f32(0, 8), "b": f32(4, 8)}, bytes(8)), "not at 8"),
    "backwards": (safetensors_bytes({"a": f32(8, 4, [1])}, bytes(8)), "a: -4 bytes"),
    "size": (safetensors_bytes({"a": f32(0, 8, [3])}, bytes(8)), "8 bytes for F32"),
    "bool shape": (safetensors_bytes({"a": f32(0, 4, [True])}, bytes(4)), "malformed"),
    "negative shape": (safetensors_bytes({"a": f32(0, 4, [-1, -1])}, bytes(4)), "malformed"),
    "huge shape": (safetensors_bytes({"a": f32(0, 0, [0, 2**62, 4])}), "impossible shape"),
    "many axes": (safetensors_bytes({"a": f32(0, 4, [1] * 65)}, bytes(4)), "impossible shape"),
    "unknown dtype": (safetensors_bytes({"a": f32(0, 1, [2], "F4")}, bytes(1)), "stored as F4"),
    "dtype list": (safetensors_bytes({"a": f32(0, 4, [1], ["F32"])}, bytes(4)), "malformed"),
    "escape": (safetensors_bytes({"a\x1b[2J\n": f32(0, 4)}, bytes(4)), "name a?[2J? is no"),
    "no entry": (safetensors_bytes({"a": 3}), "malformed"),
    "no tensors": (safetensors_bytes({"__metadata__": {"format": "pt"}}), "no tensors found"),
    "surrogate": (
        safetensors_bytes(b'{"\\ud800":' + json.dumps(f32(0, 4)).encode() + b"}", bytes(4)),
        "is no printable text",
    ),
}


def refusal(source: object, **options: str) -> UnreadableInput:
    with pytest.raises(UnreadableInput) as caught:
        open_checkpoint(source, **options)  # type: ignore[arg-type]
    error = caught.value
    assert error.exit_code is ExitCode.UNREADABLE
    assert error.what
    assert error.where
    assert all("\n" not in text for text in (error.what, error.where, error.why or ""))
    return error


@pytest.mark.parametrize("name", BROKEN)
def test_broken_bytes_are_refused(tmp_path: Path, name: str) -> None:
    data, words = BROKEN[name]
    path = tmp_path / "x.bin"
    path.write_bytes(data)
    error = refusal(path)
    assert words in str(error)
    assert str(path) in str(error.where)


@pytest.mark.parametrize("kind", ["safetensors", "zip", "legacy"])
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.999])
def test_truncated_files_are_refused(tmp_path: Path, kind: str, part: float) -> None:
    path = save({"w": torch.rand(500)}, tmp_path / "x", kind)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])
    refusal(path)


def test_missing_folder_fifo_and_bad_path(tmp_path: Path) -> None:
    assert "no such file" in str(refusal(tmp_path / "none.pt"))
    assert "a folder" in str(refusal(tmp_path))
    os.mkfifo(tmp_path / "fifo")
    assert "not a regular file" in str(refusal(tmp_path / "fifo"))
    assert "can't open" in str(refusal("a\0b"))


def test_file_that_shrinks_while_open(tmp_path: Path) -> None:
    path = save({"w": torch.rand(5000)}, tmp_path / "x.pt", "zip")
    with open_checkpoint(path) as checkpoint:
        os.truncate(path, 1000)
        with pytest.raises(UnreadableInput, match="ends too early"):
            checkpoint.read("w")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({}, "it is empty"),
        ([1, 2], "it holds a list"),
        (torch.rand(3), "single tensor"),
        ({"epoch": 3, "name": "x"}, "epoch, name"),
        ({"state": {0: {"exp_avg": torch.rand(3)}}, "param_groups": [{"lr": 1}]}, "state, param"),
    ],
)
def test_files_without_a_state_dict(tmp_path: Path, value: object, words: str) -> None:
    error = refusal(save(value, tmp_path / "x.pt", "zip"))
    assert error.what == "no tensors found"
    assert words in str(error.why)


@pytest.mark.parametrize(
    "name", ["a.weight_scale", "a.weight_scale_inv", "a.qweight", "a._packed_params"]
)
def test_scaled_quantised_names_are_refused(tmp_path: Path, name: str) -> None:
    state = {"a.weight": torch.rand(3), name: torch.rand(3)}
    for kind in ("zip", "safetensors"):
        error = refusal(save(state, tmp_path / "x", kind))
        assert error.what == "a quantised checkpoint"
        assert name in str(error.where)


def test_tensors_that_are_not_dense(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says, once, that it will drop these
        codes = torch.quantize_per_tensor(torch.rand(4), 0.1, 0, torch.qint8)
    for tensor, words in [
        (codes, "quantised"),
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.empty(3, device="meta"), "meta"),
    ]:
        state = {"ok": torch.rand(2), "bad": tensor}
        for source in (state, save(state, tmp_path / "x.pt", "zip")):
            error = refusal(source)
            assert words in str(error.why)
            assert "tensor bad" in str(error.where)


def rezip(source: Path, target: Path, change: dict[str, bytes | None], **options: int) -> Path:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", **options) as new:
        for record in old.infolist():
            name = record.filename.split("/", 1)[1]
            data = change.get(name, old.read(record))
            if data is not None:
                new.writestr(record.filename, data)
        for name in change.keys() & {"constants.pkl"}:
            new.writestr(f"x/{name}", change[name] or b"")
    return target


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({"data/0": None}, {}, "the data of tensor w is missing"),
        ({"data/0": b"1234567"}, {}, "tensor w lies outside its storage"),
        ({"byteorder": b"big"}, {}, "big-endian"),
        ({"data.pkl": None}, {}, "no data.pkl"),
        ({"constants.pkl": b""}, {}, "TorchScript"),
        ({}, {"compression": zipfile.ZIP_DEFLATED}, "compressed"),
    ],
)
def test_odd_zip_archives(
    tmp_path: Path, change: dict[str, bytes | None], options: dict[str, int], words: str
) -> None:
    path = save({"w": torch.rand(5)}, tmp_path / "x.pt", "zip")
    assert words in str(refusal(rezip(path, tmp_path / "y.pt", change, **options)))


def test_zip_with_two_records_of_one_name(tmp_path: Path) -> None:
    path = save({"w": torch.rand(5)}, tmp_path / "x.pt", "zip")
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x/data/0", bytes(20))
    assert "same name" in str(refusal(path))


def test_zip_record_that_reaches_beyond_the_file(tmp_path: Path) -> None:
    path = save({"w": torch.rand(5)}, tmp_path / "x.pt", "zip")
    data = bytearray(path.read_bytes())
    entry = data.rindex(b"PK\x01\x02", 0, data.rindex(b"x/data/0"))
    data[entry + 24 : entry + 28] = (1 << 20).to_bytes(4, "little")
    path.write_bytes(data)
    assert "beyond the end" in str(refusal(path))


def test_legacy_storage_of_another_size(tmp_path: Path) -> None:
    path = save({"w": torch.arange(5.0)}, tmp_path / "x.pt", "legacy")
    data = bytearray(path.read_bytes())
    assert data[-28:-20] == (5).to_bytes(8, "little")
    data[-28] = 4
    path.write_bytes(data)
    assert "another size" in str(refusal(path))


def test_broken_part_beside_the_state_dict_is_not_looked_at(tmp_path: Path) -> None:
    value = {"model": {"w": torch.arange(5.0)}, "rest": {"v": torch.rand(7)}}
    path = rezip(save(value, tmp_path / "x.pt", "zip"), tmp_path / "y.pt", {"data/1": None})
    with open_checkpoint(path) as checkpoint:
        assert torch.equal(checkpoint.read("w"), torch.arange(5.0))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64]
)
def test_non_finite_values_are_named(value: float, dtype: torch.dtype) -> None:
    tensor = torch.ones(3, 4)
    tensor[1, 2] = value
    checkpoint = open_checkpoint({"a.weight": tensor.to(dtype)}, label="a.pt")
    with pytest.raises(UnreadableInput) as caught:
        require_finite(checkpoint, "a.weight", checkpoint.read("a.weight"))
    assert caught.value.where == "a.pt, tensor a.weight"
    assert str(caught.value.why).startswith("1 of its")


def test_integers_and_large_finite_values_pass() -> None:
    state = {"i": torch.tensor([2**62]), "b": torch.tensor([True]), "e": torch.empty(0)}
    state["h"] = torch.full((1000,), 65504.0, dtype=torch.float16)
    checkpoint = open_checkpoint(state)
    for name in state:
        require_finite(checkpoint, name, checkpoint.read(name))


def test_expanded_bomb_is_refused(tmp_path: Path) -> None:
    path = save(OrderedDict(w=torch.rand(1).expand(1 << 40)), tmp_path / "x.pt", "zip")
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.infos["w"].shape == (1 << 40,)
        with pytest.raises(UnreadableInput, match="far larger"):
            checkpoint.read("w")


def test_disk_refuses_to_read_past_the_end(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    disk = Disk(tmp_path / "x", "x")
    assert disk.read_bytes(1, 10) == b"bc"
    with pytest.raises(UnreadableInput, match="ends too early"):
        disk.read_into(memoryview(bytearray(4)), 0)
    disk.close()
