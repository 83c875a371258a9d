"""Whole runs where nothing of POSIX is there, and files behave as they do on Windows."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from otfuse_cli import runtime
from otfuse_cli.checkpoint import draft
from otfuse_cli.checkpoint.disk import Disk
from otfuse_cli.checkpoint.formats.dcp import is_plain_name
from otfuse_cli.checkpoint.publication import Publication
from otfuse_cli.errors import UnreadableInput
from otfuse_cli.output_names import is_folder_name, named_suffix
from otfuse_cli.running.factory import build
from otfuse_cli.running.sample_files import read_entries
from otfuse_cli.running.user_code import find_callable, names_a_module, split_spec
from test_publication import mlp, snapshot

pytestmark = pytest.mark.usefixtures("kept_graphs")

_POSIX = (
    *("preadv", "pread", "pwritev", "pwrite", "O_TMPFILE", "O_CLOEXEC", "O_DIRECTORY", "O_PATH"),
    *("sched_getaffinity", "posix_fallocate", "fchmod", "umask", "getuid", "sysconf"),
    *("sendfile", "copy_file_range", "fdatasync", "sync", "mkfifo"),
)


class NoMalloc:
    """A C library without `mallopt` and `malloc_trim`."""

    def __init__(self, *_: object) -> None:
        pass


def is_open(path: Any) -> bool:
    """Whether this process has the file, or one inside the folder, open."""
    wanted = os.path.realpath(path)
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target == wanted or target.startswith(f"{wanted}{os.sep}"):
            return True
    return False


@contextmanager
def elsewhere(*, links: bool = True) -> Iterator[None]:
    """A system without what only POSIX has."""
    missing = (*_POSIX, *([] if links else ["link"]))
    real = {name: getattr(os, name) for name in ("open", "replace", "rename", "unlink")}
    real_text = Path.read_text

    def opened(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        if os.path.isdir(path):
            raise PermissionError(13, "Permission denied", str(path))
        return int(real["open"](path, flags, mode, **more))

    def refuse_open(*paths: Any) -> None:
        for path in paths:
            if is_open(path):
                raise PermissionError(13, "The process cannot access the file", str(path))

    def replaced(source: Any, target: Any) -> None:
        refuse_open(source, target)
        if os.path.isdir(target):
            raise PermissionError(13, "Access is denied", str(target))
        real["replace"](source, target)

    def renamed(source: Any, target: Any) -> None:
        refuse_open(source)
        if os.path.lexists(target):
            raise FileExistsError(17, "Cannot create a file when it exists", str(target))
        real["rename"](source, target)

    def unlinked(path: Any, **more: Any) -> None:
        refuse_open(path)
        real["unlink"](path, **more)

    def text(path: Path, *args: Any, **more: Any) -> str:
        if str(path).startswith("/proc"):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return real_text(path, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        for name in missing:
            patch.delattr(os, name, raising=False)
        for name, function in {
            "open": opened,
            "replace": replaced,
            "rename": renamed,
            "unlink": unlinked,
        }.items():
            patch.setattr(os, name, function)
        for name in ("supports_dir_fd", "supports_fd", "supports_follow_symlinks"):
            patch.setattr(os, name, set())
        for name in ("resource", "fcntl", "termios", "pwd", "grp"):
            patch.setitem(sys.modules, name, None)
        patch.setattr(shutil, "_use_fd_functions", False)
        patch.setattr(Path, "read_text", text)
        patch.setattr(ctypes, "CDLL", NoMalloc)
        patch.setattr(draft, "_FLAGS", 0)
        yield


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    given, work = tmp_path / "given", tmp_path / "work"
    given.mkdir()
    work.mkdir()
    for seed, name in enumerate("ab"):
        state = mlp(seed)
        safetensors.torch.save_file(state, given / f"{name}.safetensors")
        torch.save(state, given / f"{name}.pt")
        torch.save({"state_dict": state, "ema": state}, given / f"{name}.ckpt")
        torch.save(state, given / f"{name}.old.pt", _use_new_zipfile_serialization=False)
        (given / name).mkdir()
        safetensors.torch.save_file(state, given / name / "model.safetensors")
        (given / name / "config.json").write_text("{}")
    torch.save({n: t.half() for n, t in mlp(2).items()}, given / "half.pt")
    x = np.random.default_rng(0).standard_normal((40, 3), dtype=np.float32)
    np.savez(given / "s.npz", x=x, y=np.arange(40) % 2)
    monkeypatch.chdir(work)
    return given


LINES: dict[str, Callable[[Path], list[object]]] = {
    "safetensors": lambda g: ["merge", g / "a.safetensors", g / "b.safetensors", "-o", "x.pt"],
    "pt": lambda g: ["merge", g / "a.pt", g / "b.pt", "-o", "x.safetensors"],
    "ckpt": lambda g: ["merge", g / "a.ckpt", g / "b.ckpt", "-o", "x.ckpt", "--key", "ema"],
    "legacy": lambda g: ["merge", g / "a.old.pt", g / "b.old.pt", "-o", "x.pt"],
    "folders": lambda g: ["merge", g / "a", g / "b", "-o", "x"],
    "shards": lambda g: ["merge", g / "a", g / "b", "-o", "x", "--shard-size", "0.05KB"],
    "dtypes": lambda g: ["merge", g / "half.pt", g / "b.pt", "-o", "x.pt", "--dtype", "bfloat16"],
    "samples": lambda g: [
        *("merge", g / "a.pt", g / "b.pt", "-o", "x.pt", "--samples", g / "s.npz"),
        *("--arch", "mlp", "--force"),
    ],
    "prune": lambda g: ["prune", g / "a.pt", "-o", "x.pt", "--amount", "0.5"],
    "prune-fuse": lambda g: ["prune-fuse", g / "a.pt", g / "b.pt", "-o", "x.safetensors"],
    "inspect": lambda g: [
        *("inspect", g / "a.pt", g / "b.pt", "--report", "r.json", "--plot", "p.html"),
        *("--write-spec", "s.yaml"),
    ],
}


def results(folder: Path) -> dict[str, bytes | None]:
    """Outputs without what differs from run to run."""
    files = snapshot(folder)
    for name in files:
        if name.endswith(("r.json", ".report.json")):
            report = json.loads(files[name] or b"")
            files[name] = json.dumps({**report, "timings": 0, "peak_rss_bytes": 0}).encode()
    return files


def run(cli: Any, line: list[object]) -> dict[str, bytes | None]:
    done = cli(*line)
    assert done.code == 0, done.err
    return results(Path.cwd())


# Every run without hard links, and those that publish in different ways with them.
RUNS = [(kind, False) for kind in LINES]
RUNS += [("safetensors", True), ("shards", True), ("inspect", True)]


@pytest.mark.quick_cases("prune-False", "inspect-False")
@pytest.mark.parametrize(("kind", "links"), RUNS)
def test_a_run_without_posix_gives_the_same_bytes(
    cli: Any, inputs: Path, kind: str, links: bool
) -> None:
    line = LINES[kind](inputs)
    here = run(cli, line)
    for path in Path.cwd().iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with elsewhere(links=links):
        there = run(cli, line)
        assert run(cli, [*line, "--overwrite"]) == there
    assert there == here
    assert here


def test_the_system_is_really_without(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")
    with elsewhere():
        assert not any(hasattr(os, name) for name in _POSIX)
        with pytest.raises(ImportError):
            import resource  # noqa: F401
        with pytest.raises(PermissionError):
            os.open(tmp_path, os.O_RDONLY)
        with (tmp_path / "x").open(), pytest.raises(PermissionError):
            os.replace(tmp_path / "x", tmp_path / "y")


@pytest.mark.quick_cases("link")
@pytest.mark.parametrize("what", ["preadv", "sched_getaffinity", "O_TMPFILE", "pwrite", "link"])
def test_each_alone_may_be_missing(
    cli: Any, inputs: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    here = run(cli, LINES["pt"](inputs))
    monkeypatch.delattr(os, what)
    assert run(cli, [*LINES["pt"](inputs), "--overwrite"]) == here


@pytest.mark.slow
def test_threads_share_a_file_without_positional_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = np.arange(100_000, dtype=np.int32)
    (tmp_path / "x").write_bytes(data.tobytes())
    monkeypatch.delattr(os, "preadv")
    disk = Disk(tmp_path / "x", "x")

    def part(start: int) -> bool:
        got = np.frombuffer(disk.read_bytes(start * 4, 400), dtype=np.int32)
        return bool((got == np.arange(start, start + 100)).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(part, list(range(0, 99_900, 37))))
    disk.close()
    cut = Disk(tmp_path / "x", "x")
    os.truncate(tmp_path / "x", 100)
    with pytest.raises(UnreadableInput, match="too early"):
        cut.read_bytes(0, 400)
    cut.close()


def test_bytes_are_written_to_their_places_in_any_order(tmp_path: Path) -> None:
    with elsewhere(), Publication(overwrite=False) as outputs:
        file = outputs.file(tmp_path / "x")
        file.write_at(memoryview(b"world"), 6)
        file.write_at(memoryview(b"hello "), 0)
    assert (tmp_path / "x").read_bytes() == b"hello world"


def test_memory_is_measured_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with elsewhere():
        assert runtime.peak_rss_bytes() == 0
        assert runtime.cores() >= 1
        runtime.return_freed_memory()

    class Function:
        restype = argtypes = None

        def __init__(self, call: Callable[..., int]) -> None:
            self._call = call

        def __call__(self, *args: Any) -> int:
            return self._call(*args)

    class Kernel:
        GetCurrentProcess = Function(lambda: -1)
        K32GetProcessMemoryInfo = Function(
            lambda process, counters, size: (
                setattr(counters._obj, "PeakWorkingSetSize", 12345 if size == 72 else 0) or 1
            )
        )

    monkeypatch.setattr(ctypes, "WinDLL", lambda name: Kernel, raising=False)
    with elsewhere():
        assert runtime.peak_rss_bytes() == 12345


# -- names


@pytest.mark.parametrize(
    ("spec", "place", "name"),
    [
        (r"C:\models\net.py:make_net", r"C:\models\net.py", "make_net"),
        ("C:/models/net.py:make_net", "C:/models/net.py", "make_net"),
        (r"d:\net.py:Net.make", r"d:\net.py", "Net.make"),
        ("C:net.py:make", "C:net.py", "make"),
        (r"models\net.py:make", r"models\net.py", "make"),
        (r"\\server\share\net.py:make", r"\\server\share\net.py", "make"),
        (r"C:\net.py", r"C:\net.py", ""),
        (r"C:\net.py:", r"C:\net.py", ""),
        (r"hf:C:\models\gpt", "hf", r"C:\models\gpt"),
        ("net.py:make", "net.py", "make"),
        ("pkg.mod:make", "pkg.mod", "make"),
        ("m:make", "m", "make"),
        ("timm:resnet18", "timm", "resnet18"),
        ("family", "family", ""),
    ],
)
def test_the_colon_of_a_drive_separates_nothing(spec: str, place: str, name: str) -> None:
    assert split_spec(spec) == (place, name)


@pytest.mark.parametrize(
    ("arch", "module"),
    [
        (r"C:\specs\net.yaml", False),
        ("C:/graph.pt2", False),
        (r"C:\net.py:make", True),
        ("m:make", True),
        ("vgg", False),
        (r"hf:C:\gpt", True),
    ],
)
def test_a_spec_on_a_drive_is_no_module(arch: str, module: bool) -> None:
    assert names_a_module(arch) is module


NET = """
import torch
from otfuse_cli.output_names import is_folder_name

def make_net():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU()), torch.zeros(1, 3)

def loader():
    return {"x": torch.arange(3.0)}
"""


@pytest.mark.parametrize("drive", ["C:\\", "d:/", "X:\\sub\\"])
def test_a_factory_on_a_drive_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drive: str
) -> None:
    """Here such a path is a file of an odd name, which is all that matters for finding it."""
    monkeypatch.chdir(tmp_path)
    file = Path(f"{drive}net.py")
    file.parent.mkdir(exist_ok=True)
    file.write_text(NET)
    assert build(f"{drive}net.py:make_net", device="cpu").args[0].shape == (1, 3)
    assert find_callable(f"{drive}net.py:loader", option="--samples")()["x"].tolist() == [0, 1, 2]
    entries, _ = read_entries(f"{drive}net.py:loader")
    assert entries["x"].tolist() == [0, 1, 2]
    np.savez(Path(f"{drive}x.npz"), x=np.ones(3))
    assert read_entries(f"{drive}x.npz")[0]["x"].tolist() == [1, 1, 1]
    with pytest.raises(UnreadableInput, match="no such file"):
        read_entries(f"{drive}gone.npz")


@pytest.mark.parametrize("flavour", [PureWindowsPath, PurePosixPath])
@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("out.safetensors", ".safetensors"),
        ("a.pt", ".pt"),
        ("llama-3.1-8b", ""),
        ("folder", ""),
        ("x.txt", None),
        (".pt", None),
        ("a.b.ckpt", ".ckpt"),
    ],
)
def test_a_suffix_is_that_of_the_name(
    flavour: type[PurePath], name: str, suffix: str | None
) -> None:
    folders = ["C:\\", "C:\\run.1\\", "sub.pt\\", "\\\\server\\share\\"]
    for folder in folders if flavour is PureWindowsPath else ["/run.1/", "sub.pt/"]:
        path = flavour(folder + name)
        assert named_suffix(path) == suffix
        assert is_folder_name(path) is (path.suffix[1:2].isalpha() is False)


@pytest.mark.parametrize(
    "name", ["C:x", "C:\\x", "..\\x", "a\\b", "a/b", "\\x", "", ".", "..", "/x", "x\n", "c:x.pt"]
)
def test_a_file_outside_the_folder_is_no_plain_name(name: str) -> None:
    assert not is_plain_name(name)


@pytest.mark.parametrize(
    "name", ["model-00001-of-00002.safetensors", "__0_0.distcp", ".x", "a b", "é.pt", "x.y.z"]
)
def test_a_file_in_the_folder_is_a_plain_name(name: str) -> None:
    assert is_plain_name(name)
