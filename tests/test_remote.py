"""Files at URLs: names, ranges, kept blocks, secrets; inputs and outputs in memory, on the web."""

from __future__ import annotations

import importlib
import json
import pickle
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import otfuse_cli
import web_server
from conftest import Cli
from otfuse_cli.checkpoint.open import open_checkpoint
from otfuse_cli.checkpoint.publication import Publication
from otfuse_cli.checkpoint.remote_draft import RemoteDraft
from otfuse_cli.errors import OtfuseError, OutputRefused, UnreadableInput, UsageError
from otfuse_cli.remote import ranges, store
from otfuse_cli.remote.kept_blocks import VARIABLE
from otfuse_cli.remote.location import RemotePath, is_remote, location
from otfuse_cli.remote.ranges import RangeReader
from otfuse_cli.remote.scrub import scrubbed
from otfuse_cli.remote.upload import Upload
from otfuse_cli.running.sample_files import read_entries
from otfuse_cli.session.parents import open_checkpoints

fsspec = pytest.importorskip("fsspec")

SIGNED = "https://host/dir/a.pt?X-Amz-Signature=0123456789abcdef&x=1"


@pytest.fixture
def memory() -> Iterator[Any]:
    """The store of this process, empty."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]


@pytest.fixture
def pair(memory: Any, demo_pair: tuple[Path, Path]) -> tuple[str, str]:
    """The bundled pair in memory."""
    for path in demo_pair:
        memory.pipe_file(f"/in/{path.name}", path.read_bytes())
    return "memory://in/a.safetensors", "memory://in/b.safetensors"


@pytest.fixture
def web(demo_pair: tuple[Path, Path]) -> Iterator[web_server.WebServer]:
    """A web server that has the bundled pair."""
    with web_server.serving() as server:
        server.files = {path.name: path.read_bytes() for path in demo_pair}
        state = {"0.weight": torch.arange(200_000, dtype=torch.float32).reshape(400, 500)}
        server.files["large.safetensors"] = safetensors.torch.save(state)
        yield server


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "DELAYS", (0.0, 0.0, 0.0))
    monkeypatch.delenv(VARIABLE, raising=False)


# Names


@pytest.mark.parametrize(
    ("text", "name", "suffix", "parent"),
    [
        ("s3://bucket/a.safetensors", "a.safetensors", ".safetensors", "s3://bucket"),
        ("s3://bucket/dir/model", "model", "", "s3://bucket/dir"),
        ("s3://bucket/dir/model/", "model", "", "s3://bucket/dir"),
        ("s3://bucket", "", "", "s3://bucket"),
        ("hf://org/model@main/x/a.pt", "a.pt", ".pt", "hf://org/model@main/x"),
        (SIGNED, "a.pt", ".pt", "https://host/dir"),
        ("gs://b/what?.pt", "what?.pt", ".pt", "gs://b"),
        ("s3://b/a.pt?versionId=1", "a.pt", ".pt", "s3://b"),
    ],
)
def test_a_url_answers_like_a_path(text: str, name: str, suffix: str, parent: str) -> None:
    path = location(text)
    assert is_remote(path)
    assert isinstance(path, Path)
    assert (path.name, path.suffix, str(path.parent)) == (name, suffix, parent)
    if name:
        assert str(path.with_suffix(".x")) == f"{parent}/{name.removesuffix(suffix)}.x"
        assert path.parent in path.parents
    assert str(path / "in" / "b.json").endswith("/in/b.json")
    assert pickle.loads(pickle.dumps(path)) == path
    with pytest.raises(TypeError):
        open(path)  # noqa: SIM115 - it must not


@pytest.mark.parametrize("text", ["a.pt", "/tmp/a.pt", "c:/a.pt", "file.py:loader", "1=ema", "-"])
def test_a_path_stays_one(text: str) -> None:
    assert location(text) == Path(text)
    assert type(location(text)) is type(Path())


def test_file_urls_are_paths() -> None:
    assert location("file:///tmp/a%20b.pt") == Path("/tmp/a b.pt")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://me:hunter22@host/a.pt", "https://***@host/a.pt"),
        (SIGNED, "https://host/dir/a.pt?***"),
        ("hf://gpt2@main/a.pt", "hf://gpt2@main/a.pt"),
    ],
)
def test_the_text_of_a_url_holds_no_secret(url: str, shown: str) -> None:
    path = RemotePath(url)
    assert str(path) == f"{path}" == shown
    assert path.url == url
    assert shown in repr(path)


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("GET https://me:hunter22@host/a failed", "hunter22"),
        ("404, url='https://host/a?X-Amz-Signature=feedbeef01&x=2'", "feedbeef01"),
        ("the key AKIAIOSFODNN7EXAMPLE is none", "AKIAIOSFODNN7EXAMPLE"),
        ("url='https://host/a?sv=1&sig=feedbeef01'", "feedbeef01"),
        ("Authorization: Bearer abc.def.ghi", "abc.def.ghi"),
        ('{"secret_access_key": "wJalrXUtn/K7"}', "wJalrXUtn/K7"),
        ("token hf_abcdefghijklmnopqrstuv", "hf_abcdefghijklmnopqrstuv"),
        ("no wait: from-the-environment was it", "from-the-environment"),
    ],
)
def test_messages_of_libraries_lose_their_secrets(
    text: str, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_SECRET", "from-the-environment")
    assert secret not in scrubbed(text)
    assert "***" in scrubbed(text)


def test_secrets_of_the_url_itself_are_found_anywhere() -> None:
    said = scrubbed("wrong password hunter22 (hunter%2222)", "https://me:hunter22@host/a")
    assert "hunter22" not in said


# Ranges


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ahead", [False, True])
def test_any_reads_give_the_bytes_of_the_file(
    seed: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "PIECE", 512)
    monkeypatch.setattr(ranges, "_WINDOW", 64)
    monkeypatch.setattr(ranges, "_HELD", 1024)
    monkeypatch.setattr(ranges, "_ORDERLY", 128)
    draw = random.Random(seed)
    data = draw.randbytes(5000)
    reader = RangeReader(lambda start, end: data[start:end], len(data))
    if ahead:
        reader.read_ahead()
    at = 0
    for _ in range(200):
        at = draw.choice([at, at, max(0, at - 40), draw.randrange(len(data))])
        buffer = memoryview(bytearray(draw.choice([0, 1, 30, 200, 1500])))
        got = reader.read_into(buffer, at)
        assert bytes(buffer[:got]) == data[at : at + len(buffer)]
        at = min(at + got, len(data) - 1)
    starts = [draw.randrange(len(data)) for _ in range(40)]
    assert reader.read_each(starts, 30) == [data[s : s + 30] for s in starts]


def test_reading_in_order_fetches_each_byte_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight, then its bias, which lies before it: so a network has them, and so a file."""
    fetched: list[tuple[int, int]] = []

    def fetch(start: int, end: int) -> bytes:
        fetched.append((start, end))
        return bytes(end - start)

    size = 24 << 20
    reader = RangeReader(fetch, size)
    reader.read_ahead()
    for start in range(0, size, 3 << 20):
        reader.read_into(memoryview(bytearray((3 << 20) - 4096)), start + 4096)
        reader.read_into(memoryview(bytearray(4096)), start)
    assert sum(end - start for start, end in fetched) < 1.1 * size
    assert len(fetched) <= 10  # of 4 MiB: what comes next was asked for ahead


def test_a_few_bytes_fetch_few(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[int] = []

    def fetch(start: int, end: int) -> bytes:
        fetched.append(end - start)
        return bytes(end - start)

    reader = RangeReader(fetch, 1 << 30)
    for start, size in ((0, 512), (0, 8), (8, 1000), ((1 << 30) - 22, 22), ((1 << 30) - 5000, 20)):
        reader.read_into(memoryview(bytearray(size)), start)
    assert sum(fetched) <= 2 << 16


# In memory: the whole way


def test_fused_in_memory_as_on_the_disk(
    cli: Cli, memory: Any, pair: tuple[str, str], demo_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    assert cli("merge", *demo_pair, "-o", tmp_path / "f.safetensors", "-q").code == 0
    done = cli("merge", *pair, "-o", "memory://out/f.safetensors", "-q")
    assert done.code == 0, done.err
    assert memory.cat_file("/out/f.safetensors") == (tmp_path / "f.safetensors").read_bytes()
    here = json.loads((tmp_path / "f.report.json").read_text())
    there = json.loads(memory.cat_file("/out/f.report.json"))
    assert there["output"][0]["sha256"] == here["output"][0]["sha256"]
    assert [record["path"] for record in there["inputs"]] == list(pair)
    assert [r["sha256"] for r in there["inputs"]] == [r["sha256"] for r in here["inputs"]]
    assert sorted(memory.find("/out")) == ["/out/f.report.json", "/out/f.safetensors"]


@pytest.mark.parametrize("out", ["f.pt", "folder"])
def test_other_containers_in_memory(
    out: str, cli: Cli, memory: Any, pair: tuple[str, str], tmp_path: Path
) -> None:
    line = ["--shard-size", "2KB"] if out == "folder" else []
    assert cli("merge", *pair, "-o", f"memory://out/{out}", "-q", *line).code == 0
    assert cli("merge", *pair, "-o", tmp_path / out, "-q", *line).code == 0
    names = [f"{out}/{p.name}" for p in (tmp_path / out).iterdir()] if line else [out]
    assert len(names) != 2
    for name in (n for n in names if not n.endswith(".report.json")):
        assert memory.cat_file(f"/out/{name}") == (tmp_path / name).read_bytes(), name
    # What was written is an input: a zip file by its directory, shards by their index.
    with open_checkpoint(f"memory://out/{out}") as there, open_checkpoint(tmp_path / out) as here:
        assert there.infos.keys() == here.infos.keys()
        assert all(torch.equal(there.read(name), here.read(name)) for name in here.infos)
        assert there.sha256() == here.sha256()


def test_a_replaced_folder_keeps_no_old_shards(
    cli: Cli, memory: Any, pair: tuple[str, str]
) -> None:
    line = ("merge", *pair, "-o", "memory://out/m", "-q", "--overwrite")
    assert cli(*line, "--shard-size", "2KB").code == 0
    assert len(memory.find("/out/m")) == 7
    assert cli(*line).code == 0
    assert memory.find("/out/m") == ["/out/m/m.report.json", "/out/m/model.safetensors"]


def test_a_folder_with_other_files_is_refused(cli: Cli, memory: Any, pair: tuple[str, str]) -> None:
    memory.pipe_file("/out/m/notes.txt", b"mine")
    done = cli("merge", *pair, "-o", "memory://out/m", "--overwrite")
    assert done.code == 6
    assert "notes.txt" in done.err
    assert memory.find("/out") == ["/out/m/notes.txt"]


def test_outputs_that_are_there_or_inputs_are_refused(
    cli: Cli, memory: Any, pair: tuple[str, str]
) -> None:
    memory.pipe_file("/out/f.pt", b"old")
    assert cli("merge", *pair, "-o", "memory://out/f.pt").code == 6
    done = cli("merge", *pair, "-o", pair[0], "--overwrite")
    assert done.code == 6
    assert "one of the inputs" in done.err
    assert memory.cat_file("/out/f.pt") == b"old"
    assert cli("merge", *pair, "-o", "memory://out/f.pt", "--overwrite", "-q").code == 0
    assert memory.cat_file("/out/f.pt")[:2] == b"PK"
    memory.pipe_file("/out/g.pt/x", b"theirs")
    done = cli("merge", *pair, "-o", "memory://out/g.pt", "--overwrite")
    assert (done.code, "it is a folder" in done.err) == (6, True)


@pytest.mark.parametrize("where", ["memory://out/r.json", "here"])
def test_output_and_report_may_lie_apart(
    where: str, cli: Cli, memory: Any, pair: tuple[str, str], tmp_path: Path
) -> None:
    out, report = ("memory://out/f.pt", tmp_path / "r.json") if where == "here" else (
        tmp_path / "f.pt", where
    )  # fmt: skip
    assert cli("merge", *pair, "-o", out, "--report", report, "-q").code == 0
    assert location(str(report)).is_file()
    assert location(str(out)).is_file()


@pytest.mark.parametrize("error", [OSError("the store burns"), KeyboardInterrupt()])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("old", [{}, {"/out/f.pt": b"old", "/out/f.report.json": b"old report"}])
def test_both_outputs_or_neither(
    old: dict[str, bytes],
    number: int,
    error: BaseException,
    cli: Cli,
    memory: Any,
    pair: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last steps fail one after the other: what was there before is there again."""
    for name, data in old.items():
        memory.pipe_file(name, data)
    commit, calls = Upload.commit, []

    def failing(self: Upload) -> None:
        calls.append(1)
        if len(calls) == number:
            raise error
        commit(self)

    monkeypatch.setattr(Upload, "commit", failing)
    done = cli("merge", *pair, "-o", "memory://out/f.pt", "--overwrite", "-q")
    assert done.code == (6 if isinstance(error, OSError) else 130)
    left = {name: memory.cat_file(name) for name in memory.find("/out")}
    assert left == old


@pytest.mark.parametrize("number", [1, 2])
def test_an_interrupt_while_the_store_answers(
    number: int, cli: Cli, memory: Any, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the last step it comes too late; before, what has appeared is taken back."""
    from concurrent.futures import Future

    result, calls = Future.result, []

    def interrupted(self: Any, timeout: float | None = None) -> Any:
        value = result(self, timeout)
        calls.append(value)
        if len(calls) == number:
            raise KeyboardInterrupt
        return value

    commit = Upload.commit

    def watched(self: Upload) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Future, "result", interrupted)
            commit(self)

    monkeypatch.setattr(Upload, "commit", watched)
    done = cli("merge", *pair, "-o", "memory://out/f.pt", "-q")
    assert done.code == (130, 0)[number - 1]
    assert len(memory.find("/out")) == (0, 2)[number - 1]


def test_what_appears_meanwhile_is_not_replaced(memory: Any) -> None:
    outputs = Publication(overwrite=False)
    outputs.write(RemotePath("memory://out/x.json"), "{}")
    memory.pipe_file("/out/x.json", b"theirs")
    with pytest.raises(OutputRefused, match="can't be written"):
        outputs.publish()
    outputs.discard()
    assert memory.cat_file("/out/x.json") == b"theirs"


def test_samples_from_memory(cli: Cli, memory: Any, pair: tuple[str, str], tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((60, 64), dtype=np.float32)
    np.savez(tmp_path / "s.npz", x=x, y=np.arange(60) % 10)
    np.save(tmp_path / "s.npy", x)
    for name in ("s.npz", "s.npy"):
        memory.pipe_file(f"/in/{name}", (tmp_path / name).read_bytes())
    line = ("--arch", "mlp", "--json")
    here = cli("eval", *pair, "--samples", tmp_path / "s.npz", *line)
    there = cli("eval", *pair, "--samples", "memory://in/s.npz", *line)
    assert there.code == 0, there.err
    there, here = (json.loads(done.out)["report"]["evaluation"] for done in (there, here))
    assert there == here
    for name in ("s.npz", "s.npy"):
        entries, label = read_entries(location(f"memory://in/{name}"))
        assert label == f"memory://in/{name}"
        assert torch.equal(entries["x"], torch.from_numpy(x))
    done = cli("eval", *pair, "--samples", "memory://in/none.npz", "--arch", "mlp")
    assert done.code == 3


def test_the_library_takes_urls(memory: Any, pair: tuple[str, str]) -> None:
    state, report = otfuse_cli.merge(*pair, output="memory://out/f.safetensors")
    written = safetensors.torch.load(memory.cat_file("/out/f.safetensors"))
    assert all(torch.equal(state[name], tensor) for name, tensor in written.items())
    assert report.output[0].path == "memory://out/f.safetensors"


def test_a_file_that_changes_while_it_is_read(memory: Any, pair: tuple[str, str]) -> None:
    with open_checkpoint(pair[0]) as checkpoint:
        memory.pipe_file("/in/a.safetensors", memory.cat_file("/in/a.safetensors"))
        with pytest.raises(UnreadableInput, match="changed while it was read"):
            checkpoint.sha256()
    with pytest.raises(UnreadableInput, match="changed while it was read"):  # noqa: SIM117
        with open_checkpoints(pair, None):  # also where no digest is taken
            memory.pipe_file("/in/b.safetensors", memory.cat_file("/in/b.safetensors"))


def test_files_before_torch_1_6_are_fetched_whole_and_said_so(
    memory: Any, pair: tuple[str, str], tmp_path: Path
) -> None:
    state = safetensors.torch.load(memory.cat_file("/in/a.safetensors"))
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    memory.pipe_file("/in/a.pt", (tmp_path / "a.pt").read_bytes())
    merged, report = otfuse_cli.merge("memory://in/a.pt", pair[1])
    assert any("fetched whole" in warning for warning in report.warnings)
    there, there_report = otfuse_cli.merge(*pair)
    assert all(torch.equal(merged[name], tensor) for name, tensor in there.items())
    assert not any("fetched whole" in warning for warning in there_report.warnings)


def test_what_is_sent_out_of_order_arrives_in_order(memory: Any) -> None:
    parts = [bytes([at]) * (100 + at) for at in range(9)]
    whole = b"".join(parts)
    draft = RemoteDraft(RemotePath("memory://out/x.bin"))
    draft.stream(len(whole))
    for at in (0, 3, 1, 2, 8, 7, 4, 6, 5):
        draft.write_at(memoryview(parts[at]), sum(map(len, parts[:at])))
    with pytest.raises(ValueError, match="sent already"):
        draft.write_at(memoryview(b"x"), 0)
    draft.flush()
    assert not memory.exists("/out/x.bin")
    draft.commit()
    draft.discard()
    assert memory.cat_file("/out/x.bin") == whole


def test_counters_among_weights_are_sent_in_the_order_of_the_file(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Integers of 64 bits lie first in a file, wherever the network has them: nothing waits."""
    early: list[int] = []
    waiting = RemoteDraft._send_waiting
    monkeypatch.setattr(
        RemoteDraft,
        "_send_waiting",
        lambda self, start, length: (early.append(length), waiting(self, start, length))[1],
    )
    states = []
    for seed in range(2):
        torch.manual_seed(seed)
        net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Conv2d(8, 4, 3)
        )
        states.append(net.state_dict())
    for out in ("memory://out/n.safetensors", str(tmp_path / "n.safetensors")):
        otfuse_cli.merge(*states, align="none", output=out)
    assert memory.cat_file("/out/n.safetensors") == (tmp_path / "n.safetensors").read_bytes()
    assert early == []


def test_pictures_and_specs_may_be_remote(cli: Cli, memory: Any, pair: tuple[str, str]) -> None:
    more = ("--write-spec", "memory://out/net.yaml", "--report", "memory://out/r.json")
    done = cli("inspect", *pair, "--plot", "memory://out/p.html", *more)
    assert done.code == 0, done.err
    assert sorted(memory.find("/out")) == ["/out/net.yaml", "/out/p.html", "/out/r.json"]


def test_a_gap_is_no_output(memory: Any) -> None:
    outputs = Publication(overwrite=False)
    draft = outputs.file(RemotePath("memory://out/x.bin"))
    draft.stream(20)
    draft.write_at(memoryview(b"0123456789"), 10)
    with pytest.raises(ValueError, match="not written"), outputs:
        pass
    assert memory.find("/") == []


# On the web


def test_by_ranges_from_the_web(cli: Cli, web: web_server.WebServer, tmp_path: Path) -> None:
    urls = [f"{web.url}{name}.safetensors" for name in "ab"]
    done = cli("merge", *urls, "-o", tmp_path / "f.pt", "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)["report"]
    assert not any("fetched whole" in warning for warning in report["warnings"])
    assert [record["path"] for record in report["inputs"]] == urls


def test_a_weight_of_zero_reads_the_header(web: web_server.WebServer, tmp_path: Path) -> None:
    for seed, name in enumerate(("x.safetensors", "y.safetensors")):
        torch.manual_seed(seed)
        shapes = {"0.weight": (512, 600), "0.bias": (512,), "1.weight": (600, 512)}
        state = {key: torch.randn(shape) for key, shape in shapes.items()}
        web.files[name] = safetensors.torch.save(state)
    urls = [f"{web.url}{name}" for name in ("x.safetensors", "y.safetensors")]
    for weights, most in (((0, 1), 0.2), ((1, 1), 10)):
        web.sent = 0
        otfuse_cli.merge(*urls, weights=weights, arch="mlp", align="none")
        of_anchor = 3 * len(web.files["y.safetensors"])
        assert web.sent <= of_anchor + most * len(web.files["x.safetensors"])
    assert web.sent > 1.5 * len(web.files["x.safetensors"])


def test_a_server_without_ranges_is_read_whole_and_said_so(
    web: web_server.WebServer, tmp_path: Path
) -> None:
    urls = [f"{web.url}{name}.safetensors" for name in "ab"]
    there, _ = otfuse_cli.merge(*urls)
    web.ranges = False
    here, report = otfuse_cli.merge(*urls)
    assert all(torch.equal(here[name], tensor) for name, tensor in there.items())
    said = [warning for warning in report.warnings if "fetched whole" in warning]
    assert len(said) == 2
    assert "a.safetensors" in said[0]


def test_shards_behind_an_index_on_the_web(
    cli: Cli, web: web_server.WebServer, demo_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "m"
    assert cli("merge", *demo_pair, "-o", out, "--shard-size", "2KB", "-q").code == 0
    web.files |= {f"m/{path.name}": path.read_bytes() for path in out.iterdir()}
    index = f"{web.url}m/model.safetensors.index.json"
    with open_checkpoint(index) as there, open_checkpoint(out) as here:
        assert all(torch.equal(there.read(name), here.read(name)) for name in here.infos)
        assert there.label == index
        assert there.record().sha256 == here.record().sha256
    del web.files["m/model-00002-of-00005.safetensors"]
    with pytest.raises(UnreadableInput, match="a shard is missing") as caught:
        open_checkpoint(index)
    assert str(caught.value.where).startswith(f"{web.url}m/model-00002")


@pytest.mark.parametrize("fault", [500, 503, "drop"])
def test_faults_that_pass_are_tried_again(fault: int | str, web: web_server.WebServer) -> None:
    with open_checkpoint(f"{web.url}large.safetensors") as checkpoint:
        web.faults = [fault, fault]
        assert checkpoint.sha256() is not None
    assert web.faults == []


def test_faults_that_stay_end_with_3(web: web_server.WebServer) -> None:
    with open_checkpoint(f"{web.url}large.safetensors") as checkpoint:
        web.faults, web.gets = [500] * 50, 0
        with pytest.raises(UnreadableInput, match="reading failed") as caught:
            checkpoint.sha256()
    assert caught.value.exit_code == 3
    assert "500" in str(caught.value.why)
    assert web.gets == 4


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_is_told_at_once_without_the_secret(
    status: int, cli: Cli, web: web_server.WebServer, tmp_path: Path
) -> None:
    signed = f"{web.url}a.safetensors?X-Amz-Signature=topsecret0123&X-Amz-Expires=60"
    user = signed.replace("http://", "http://somebody:passpass77@")
    for url in (signed, user):
        web.faults, web.gets = [status] * 50, 0
        done = cli("merge", url, url, "-o", tmp_path / "f.pt", "--debug")
        assert done.code == 3
        assert web.gets == 1
        said = done.out + done.err
        assert str(status) in said
        assert not any(text in said for text in ("topsecret0123", "passpass77", "somebody"))


def test_missing_on_the_web(cli: Cli, web: web_server.WebServer, tmp_path: Path) -> None:
    url = f"{web.url}none.safetensors"
    done = cli("merge", url, url, "-o", tmp_path / "f.pt")
    assert (done.code, "no such file" in done.err) == (3, True)


def test_the_web_takes_no_outputs(cli: Cli, pair: tuple[str, str]) -> None:
    for url in ("https://host/f.pt", "hf://org/model/f.pt"):
        done = cli("merge", *pair, "-o", url)
        assert done.code == 6
        assert "fix: write to" in done.err


def test_a_changed_file_on_the_web(web: web_server.WebServer) -> None:
    with open_checkpoint(f"{web.url}a.safetensors") as checkpoint:
        web.files["a.safetensors"] = web.files["b.safetensors"]
        with pytest.raises(UnreadableInput, match="changed while it was read"):
            checkpoint.sha256()


# Kept blocks


def test_kept_blocks_are_fetched_once(
    web: web_server.WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kept"))
    urls = [f"{web.url}{name}" for name in ("a.safetensors", "b.safetensors")]
    first, _ = otfuse_cli.merge(*urls)
    size = len(web.files["a.safetensors"]) + len(web.files["b.safetensors"])
    assert web.sent <= size + 100  # a byte each tells that the server knows ranges
    web.sent = 0
    again, _ = otfuse_cli.merge(*urls)
    assert web.sent <= 100
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())
    assert len(list((tmp_path / "kept").iterdir())) == 2
    assert (tmp_path / "kept").stat().st_mode & 0o077 == 0
    web.files["a.safetensors"] = web.files["b.safetensors"]
    otfuse_cli.merge(*urls)
    assert web.sent > size / 3


def test_a_folder_for_blocks_that_cannot_be(
    web: web_server.WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file"))
    with pytest.raises(UsageError, match="can't be made"):
        open_checkpoint(f"{web.url}a.safetensors")


# Libraries that are missing


@pytest.mark.parametrize(
    ("url", "module", "fix"),
    [
        ("memory://a.pt", "fsspec.core", "otfuse-cli[remote]"),
        ("hf://org/model/a.pt", "huggingface_hub", "otfuse-cli[remote]"),
        ("https://host/a.pt", "aiohttp", "otfuse-cli[remote]"),
        ("s3://bucket/a.pt", "s3fs", "pip install s3fs"),
        ("gs://bucket/a.pt", "gcsfs", "pip install gcsfs"),
        ("nobody://bucket/a.pt", "fsspec.none", "use a path"),
    ],
)
def test_what_is_missing_is_named(
    url: str, module: str, fix: str, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [n for n in sys.modules if n.startswith(("fsspec.implementations.h", "s3fs."))]:
        monkeypatch.delitem(sys.modules, name)
    for protocol in ("https", "s3", "gs", "hf"):  # what fsspec has imported already
        known = importlib.import_module("fsspec.registry")._registry
        monkeypatch.delitem(known, protocol, raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    done = cli("merge", url, url, "-o", tmp_path / "f.pt")
    assert done.code == 2, done.err
    assert fix in done.err


def test_errors_of_stores_are_ours(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a library raises, anywhere, it is one clear error."""

    def broken(self: Any, path: str, **_: Any) -> Any:
        raise RuntimeError("token=abcdefgh12345678 is bad")

    kind = type(fsspec.filesystem("memory"))
    for name, expected in (("info", UnreadableInput), ("cat_file", UnreadableInput)):
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, broken)
            with pytest.raises(OtfuseError) as caught:
                otfuse_cli.merge(*pair)
        assert isinstance(caught.value, expected)
        assert "abcdefgh12345678" not in str(caught.value)
    with monkeypatch.context() as patch:
        patch.setattr(kind, "_open", broken)
        with pytest.raises(OutputRefused):
            otfuse_cli.merge(*pair, output="memory://out/x.safetensors")
