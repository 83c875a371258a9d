"""Writing: the bytes, torch's and safetensors' own loaders as oracles, nothing half-written."""

import errno
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from otfuse_cli.checkpoint import draft
from otfuse_cli.checkpoint.names import TensorInfo
from otfuse_cli.checkpoint.open import Checkpoint, open_checkpoint
from otfuse_cli.checkpoint.write import check_output, open_writer
from otfuse_cli.errors import ExitCode, OutputRefused, UsageError
from otfuse_cli.output_names import suffix_of

STATE = {
    "a.weight": torch.arange(6.0).reshape(2, 3),
    "a.count": torch.tensor(7),
    "a.half": torch.arange(5, dtype=torch.float16),
    "a.flag": torch.tensor([True, False, True]),
    "a.empty": torch.empty(0, 3),
    "a.fp8": torch.tensor([1.0, 2.0, 0.5]).to(torch.float8_e4m3fn),
}


@pytest.fixture(params=["nameless", "named"])
def folder(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A folder, with and without the system's support for files that have no name yet."""
    if request.param == "named":
        monkeypatch.setattr(draft, "_open_nameless", lambda folder: None)
    yield tmp_path
    assert not list(tmp_path.glob(".otfuse*")), "a temporary file was left"


def write(path: Path, like: Any = STATE, *, overwrite: bool = False, turned: bool = False) -> Path:
    checkpoint = like if isinstance(like, Checkpoint) else open_checkpoint(like)
    names = list(checkpoint.infos)
    with open_writer(
        path, checkpoint.infos.values(), like=checkpoint, overwrite=overwrite
    ) as writer:
        for name in reversed(names) if turned else names:
            writer.put(name, checkpoint.read(name))
    return path


def same_bits(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return got.keys() == wanted.keys() and all(
        got[n].dtype == wanted[n].dtype
        and got[n].shape == wanted[n].shape
        and torch.equal(
            got[n].contiguous().reshape(-1).view(torch.uint8),
            wanted[n].contiguous().reshape(-1).view(torch.uint8),
        )
        for n in wanted
    )


def test_golden_bytes(folder: Path) -> None:
    state = {"b": torch.tensor([1, 2], dtype=torch.uint8), "é": torch.tensor([[1.5]])}
    path = write(folder / "x.safetensors", state)
    header = (
        '{"__metadata__":{"format":"pt"},'
        '"b":{"dtype":"U8","shape":[2],"data_offsets":[4,6]},'
        '"é":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]}}'
    ).encode()
    assert len(header) == 140
    padded = header + b" " * 4
    assert path.read_bytes() == b"\x90\0\0\0\0\0\0\0" + padded + b"\0\0\xc0\x3f\x01\x02"


def test_safetensors_library_reads_it(folder: Path) -> None:
    path = write(folder / "x.safetensors")
    assert same_bits(safetensors.torch.load_file(path), STATE)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt", ".checkpoint"])
def test_torch_reads_it(folder: Path, suffix: str) -> None:
    path = write(folder / f"x{suffix}")
    assert same_bits(torch.load(path, weights_only=True), STATE)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_two_runs_give_the_same_bytes(folder: Path, suffix: str) -> None:
    first = write(folder / f"first{suffix}").read_bytes()
    assert write(folder / f"second{suffix}", turned=True).read_bytes() == first
    assert write(folder / f"first{suffix}", overwrite=True).read_bytes() == first


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_mode_follows_the_umask(folder: Path, suffix: str, umask: int, mode: int) -> None:
    old = os.umask(umask)
    try:
        path = write(folder / f"x{suffix}")
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.parametrize(
    ("wrap", "prefix"),
    [
        (lambda s: s, ""),
        (lambda s: {"state_dict": s, "epoch": 3}, "model."),
        (lambda s: {"model": {"state_dict": s}}, "module."),
        (lambda s: {"net": s, "args": {"lr": 1}}, "_orig_mod.module."),
    ],
)
def test_output_is_wrapped_like_its_model(
    folder: Path, wrap: Callable[[Any], Any], prefix: str
) -> None:
    inner = {prefix + name: tensor for name, tensor in STATE.items()}
    torch.save(wrap(inner), folder / "in.pt")
    with open_checkpoint(folder / "in.pt") as like:
        out = torch.load(write(folder / "out.pt", like), weights_only=True)
        write(folder / "out.safetensors", like)
        for key in like.container.wrapper:
            assert list(out) == [key]
            out = out[key]
    assert same_bits(out, inner)
    assert list(out) == list(inner)
    assert same_bits(safetensors.torch.load_file(folder / "out.safetensors"), inner)


@pytest.mark.parametrize("kind", ["zip", "legacy", "memory"])
def test_ties_are_kept(folder: Path, kind: str) -> None:
    shared = torch.rand(50, 20)
    state = {"embed": shared, "mid": torch.rand(3), "head": shared}
    source: Any = state
    if kind != "memory":
        source = folder / "in.pt"
        torch.save(state, source, _use_new_zipfile_serialization=kind == "zip")
    with open_checkpoint(source) as like:
        out = torch.load(write(folder / "out.pt", like), weights_only=True)
        write(folder / "out.safetensors", like)
    assert list(out) == ["embed", "mid", "head"]
    assert out["embed"].data_ptr() == out["head"].data_ptr()
    assert same_bits(out, state)
    assert (folder / "out.pt").stat().st_size < 1.5 * shared.nbytes
    names = safetensors.torch.load_file(folder / "out.safetensors").keys()
    assert names == {"embed", "mid"}


def test_a_tied_name_put_by_itself_is_untied(tmp_path: Path) -> None:
    shared = torch.zeros(2)
    like = open_checkpoint({"a": shared, "b": shared})
    infos = [TensorInfo(n, (2,), torch.float32) for n in "ab"]
    with open_writer(tmp_path / "x.pt", infos, like=like) as writer:
        writer.put("a", torch.zeros(2))
        writer.put("b", torch.ones(2))
    out = torch.load(tmp_path / "x.pt", weights_only=True)
    assert torch.equal(out["b"], torch.ones(2))


def test_strict_load_after_a_round_trip(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))
    torch.save(module.state_dict(), tmp_path / "in.pt")
    with open_checkpoint(tmp_path / "in.pt") as like:
        out = torch.load(write(tmp_path / "out.pt", like), weights_only=True)
    assert out._metadata == module.state_dict()._metadata
    module.load_state_dict(out, strict=True)


def test_views_do_not_bloat(folder: Path) -> None:
    big = torch.rand(1000, 1000)
    state = {"rows": big[3:5], "turned": big[:5, :3].t()}
    for suffix in (".pt", ".safetensors"):
        like = open_checkpoint({n: t.clone() for n, t in state.items()})
        path = folder / f"x{suffix}"
        with open_writer(path, like.infos.values(), like=like) as writer:
            for name, tensor in state.items():
                writer.put(name, tensor)
        assert path.stat().st_size < 12_000
        with open_checkpoint(path) as back:
            assert all(torch.equal(back.read(n), state[n]) for n in state)


def test_put_takes_a_copy(folder: Path) -> None:
    like = open_checkpoint({"a": torch.zeros(3), "b": torch.zeros(3)})
    for suffix in (".pt", ".safetensors"):
        buffer = torch.zeros(3)
        with open_writer(folder / f"x{suffix}", like.infos.values(), like=like) as writer:
            for number, name in enumerate("ab"):
                writer.put(name, buffer.fill_(number))
        with open_checkpoint(folder / f"x{suffix}") as back:
            assert back.read("a").tolist() == [0, 0, 0]
            assert back.read("b").tolist() == [1, 1, 1]


def test_dtype_may_differ_from_the_model(tmp_path: Path) -> None:
    like = open_checkpoint({"w": torch.rand(3)})
    with open_writer(
        tmp_path / "x.safetensors", [TensorInfo("w", (4,), torch.bfloat16)], like=like
    ) as writer:
        writer.put("w", torch.ones(4, dtype=torch.bfloat16))
    assert safetensors.torch.load_file(tmp_path / "x.safetensors")["w"].dtype == torch.bfloat16


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize(
    "puts",
    [
        [],
        [("w", torch.rand(3)), ("w", torch.rand(3))],
        [("other", torch.rand(3))],
        [("w", torch.rand(4))],
        [("w", torch.rand(3).double())],
    ],
    ids=["missing", "twice", "unknown", "shape", "dtype"],
)
def test_wrong_puts(folder: Path, suffix: str, puts: list[tuple[str, torch.Tensor]]) -> None:
    like = open_checkpoint({"w": torch.rand(3)})

    def attempt() -> None:
        with open_writer(folder / f"x{suffix}", like.infos.values(), like=like) as writer:
            for name, tensor in puts:
                writer.put(name, tensor)

    with pytest.raises(ValueError, match="tensor"):
        attempt()
    assert os.listdir(folder) == []


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_nothing(folder: Path, suffix: str, error: type[BaseException]) -> None:
    like = open_checkpoint(STATE)
    (folder / f"old{suffix}").write_bytes(b"old")

    def attempt(name: str) -> None:
        with open_writer(folder / name, like.infos.values(), like=like, overwrite=True) as writer:
            writer.put("a.weight", like.read("a.weight"))
            raise error

    for name in (f"new{suffix}", f"old{suffix}"):
        with pytest.raises(error):
            attempt(name)
    assert os.listdir(folder) == [f"old{suffix}"]
    assert (folder / f"old{suffix}").read_bytes() == b"old"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="needs files without a name")
def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    if draft._open_nameless(tmp_path) is None:
        pytest.skip("this file system has no files without a name")
    script = textwrap.dedent("""
        import sys, time
        from pathlib import Path
        from otfuse_cli.checkpoint.draft import Draft
        Draft(Path(sys.argv[1])).write_at(memoryview(b"half of it"), 0)
        print("ready", flush=True)
        time.sleep(60)
    """)
    command = [sys.executable, "-c", script, str(tmp_path / "x.safetensors")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGKILL)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_full_disk_is_a_refusal(
    folder: Path, suffix: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    if call == "write" and suffix == ".pt":
        monkeypatch.setattr(torch, "save", fail)
    else:
        monkeypatch.setattr(os, {"write": "pwrite"}.get(call, call), fail)
    with pytest.raises(OutputRefused, match="No space left") as caught:
        write(folder / f"x{suffix}")
    assert caught.value.exit_code is ExitCode.OUTPUT_REFUSED
    monkeypatch.undo()
    assert os.listdir(folder) == []


def test_existing_files(folder: Path) -> None:
    path = folder / "x.pt"
    path.write_bytes(b"old")
    with pytest.raises(OutputRefused, match="exists already"):
        write(path)
    assert path.read_bytes() == b"old"
    write(path, overwrite=True)
    assert same_bits(torch.load(path, weights_only=True), STATE)


def test_a_name_taken_meanwhile_is_not_overwritten(folder: Path) -> None:
    like, path = open_checkpoint({"w": torch.rand(3)}), folder / "x.pt"

    def attempt() -> None:
        with open_writer(path, like.infos.values(), like=like) as writer:
            writer.put("w", like.read("w"))
            path.write_bytes(b"theirs")

    with pytest.raises(OutputRefused, match="appeared"):
        attempt()
    assert path.read_bytes() == b"theirs"


def test_overwriting_the_input_itself(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(3.0)}, tmp_path / "x.pt")
    with open_checkpoint(tmp_path / "x.pt") as like:
        write(tmp_path / "x.pt", like, overwrite=True)
        assert like.read("w").tolist() == [0, 1, 2]


def test_check_output(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "dangling").symlink_to("nowhere")
    check_output(tmp_path / "new", overwrite=False)
    check_output(tmp_path / "file", overwrite=True)
    for path, overwrite, words in [
        (tmp_path / "file", False, "exists already"),
        (tmp_path / "dangling", False, "exists already"),
        (tmp_path, True, "it is a folder"),
        (tmp_path / "none" / "x", True, "no folder"),
        (tmp_path / "file" / "x", True, "no folder"),
        (Path("/dev/null"), True, "no regular file"),
        (Path("a\0b"), True, "no valid path"),
    ]:
        with pytest.raises(OutputRefused) as caught:
            check_output(path, overwrite=overwrite)
        assert words in str(caught.value)
        assert str(path) in str(caught.value.where)


def test_unwritable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *args: False)  # root may write anywhere
    with pytest.raises(OutputRefused, match="may not be written to"):
        check_output(tmp_path / "x", overwrite=False)


@pytest.mark.parametrize("name", ["x.txt", "x.safetensors.gz", "x.PT", ".pt"])
def test_unknown_suffix(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"\.safetensors, \.pt, \.pth, \.bin, \.ckpt"):
        write(tmp_path / name)
    with pytest.raises(UsageError):
        suffix_of(name)


def test_dtype_that_safetensors_lacks(tmp_path: Path) -> None:
    state = {"w": torch.rand(2, dtype=torch.complex128)}
    with pytest.raises(UsageError, match="tensor w"):
        write(tmp_path / "x.safetensors", state)
    assert os.listdir(tmp_path) == []
    write(tmp_path / "x.pt", state)


def test_a_name_announced_twice(tmp_path: Path) -> None:
    like = open_checkpoint({"w": torch.rand(3)})
    infos = list(like.infos.values()) * 2
    with pytest.raises(ValueError, match="twice"), open_writer(tmp_path / "x.pt", infos, like=like):
        pass


def test_inputs_are_never_touched(tmp_path: Path) -> None:
    path = tmp_path / "in.pt"
    torch.save(OrderedDict(STATE), path)
    before = (path.read_bytes(), path.stat().st_mtime_ns)
    time.sleep(0.01)
    with open_checkpoint(path) as like:
        write(tmp_path / "out.pt", like)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


def test_safetensors_name_the_ties_as_their_library_does(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(5, 3)
            self.head = torch.nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    module = Tied()
    torch.save(module.state_dict(), tmp_path / "in.pt")
    with open_checkpoint(tmp_path / "in.pt") as like:
        path = write(tmp_path / "x.safetensors", like)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    other = Tied()
    safetensors.torch.load_model(other, path)
    assert torch.equal(other.head.weight, module.head.weight)
    # From safetensors of either make, the tie comes back.
    safetensors.torch.save_model(module, str(tmp_path / "theirs.safetensors"))
    for source in (path, tmp_path / "theirs.safetensors"):
        with open_checkpoint(source) as like:
            assert len(like.infos) == 1
            out = torch.load(write(tmp_path / "back.pt", like, overwrite=True), weights_only=True)
        assert set(out) == {"embed.weight", "head.weight"}
        assert out["embed.weight"].data_ptr() == out["head.weight"].data_ptr()


def test_metadata_that_only_looks_like_a_tie(tmp_path: Path) -> None:
    state = {"pt": torch.rand(2), "w": torch.rand(2)}
    safetensors.torch.save_file(state, tmp_path / "x.safetensors", {"format": "pt", "w": "pt"})
    with open_checkpoint(tmp_path / "x.safetensors") as checkpoint:
        assert set(checkpoint.infos) == {"pt", "w"}
        assert not checkpoint.aliases
