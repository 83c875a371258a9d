"""Merges from and to an object store in a process of its own: `object_store`, which is moto."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import object_store
from object_store import BUCKET, ObjectStore

pytestmark = pytest.mark.slow
pytest.importorskip("moto")
pytest.importorskip("s3fs")

OTFUSE = "import sys; from otfuse_cli.cli.app import main; sys.exit(main(sys.argv[1:]))"
LAYERS, SIDE = 16, 512  # 16 MiB: several parts of an upload


@pytest.fixture(scope="module")
def started() -> Iterator[ObjectStore]:
    with object_store.serving() as running:
        yield running


@pytest.fixture
def store(started: ObjectStore) -> ObjectStore:
    started.fail()
    started.counts()
    return started


@pytest.fixture(scope="module")
def files(started: ObjectStore) -> Any:
    import fsspec

    return fsspec.filesystem(
        "s3",
        key=object_store.KEY,
        secret=object_store.SECRET,
        endpoint_url=started.url,
        use_listings_cache=False,
    )


@pytest.fixture(scope="module")
def pair(files: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints in a folder, and in the store."""
    folder = tmp_path_factory.mktemp("pair")
    for seed, name in enumerate(("a", "b")):
        generator = torch.Generator().manual_seed(seed)
        state = {}
        for at in range(LAYERS):
            state[f"{at}.weight"] = torch.randn(SIDE, SIDE, generator=generator)
            state[f"{at}.bias"] = torch.randn(SIDE, generator=generator)
        safetensors.torch.save_file(state, folder / f"{name}.safetensors")
        torch.save(state, folder / f"{name}.pt")
        for suffix in ("safetensors", "pt"):
            files.put(str(folder / f"{name}.{suffix}"), f"{BUCKET}/{name}.{suffix}")
    return folder


def command(at: str | Path, out: str | Path, *more: str, suffix: str = "safetensors") -> list[str]:
    inputs = [f"{at}/a.{suffix}", f"{at}/b.{suffix}"]
    options = ["--arch", "mlp", "--align", "none", "-q", "--overwrite", *more]
    return [sys.executable, "-c", OTFUSE, "merge", *inputs, "-o", str(out), *options]


def run(store: ObjectStore, line: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **store.environment(), **more}
    return subprocess.run(line, env=environment, capture_output=True, text=True, check=False)


S3 = f"s3://{BUCKET}"


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_the_same_bytes_as_on_the_disk(
    suffix: str, store: ObjectStore, files: Any, pair: Path
) -> None:
    here = run(store, command(pair, pair / f"f.{suffix}", suffix=suffix))
    there = run(store, command(S3, f"{S3}/f.{suffix}", suffix=suffix))
    assert (here.returncode, there.returncode) == (0, 0), there.stderr
    assert files.cat_file(f"{BUCKET}/f.{suffix}") == (pair / f"f.{suffix}").read_bytes()
    assert files.exists(f"{BUCKET}/f.report.json")
    assert store.unfinished() == 0


def test_a_weight_of_zero_is_its_header(store: ObjectStore, pair: Path) -> None:
    size = (pair / "a.safetensors").stat().st_size
    sent = {}
    for weights in ("1,1", "0,1"):
        store.counts()
        done = run(store, command(S3, f"{S3}/w.safetensors", "--weights", weights))
        assert done.returncode == 0, done.stderr
        sent[weights] = store.counts()["sent"]
    assert sent["1,1"] > 3 * size
    assert sent["0,1"] < 0.55 * sent["1,1"]


@pytest.mark.parametrize("fault", ["500 GET", "drop GET", "500 PUT", "drop PUT", "500 HEAD"])
def test_faults_are_tried_again(fault: str, store: ObjectStore, files: Any, pair: Path) -> None:
    store.fail(fault, fault)
    done = run(store, command(S3, f"{S3}/t.safetensors"))
    assert done.returncode == 0, done.stderr
    done = run(store, command(pair, pair / "t.safetensors"))
    assert files.cat_file(f"{BUCKET}/t.safetensors") == (pair / "t.safetensors").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_stopped_in_the_middle_there_is_no_object(
    number: signal.Signals, store: ObjectStore, files: Any, pair: Path
) -> None:
    before = store.unfinished()
    store.fail(*["wait PUT"] * 4)  # else a quick command is done before it is stopped
    line = command(S3, f"{S3}/k.safetensors")
    environment = {**os.environ, **store.environment()}
    with subprocess.Popen(line, env=environment, stderr=subprocess.PIPE) as process:
        taken, ends = 0, time.monotonic() + 120
        while taken < 8 << 20 and time.monotonic() < ends and process.poll() is None:
            taken += store.counts().get("taken", 0)
        process.send_signal(number)
        process.communicate()
    store.fail()
    assert taken >= 8 << 20
    assert not files.exists(f"{BUCKET}/k.safetensors")
    assert not files.exists(f"{BUCKET}/k.report.json")
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert store.unfinished() == before


def test_wrong_credentials(store: ObjectStore, pair: Path) -> None:
    wrong = {"AWS_ACCESS_KEY_ID": "AKIANOBODYNOBODY0000", "AWS_SECRET_ACCESS_KEY": "not-the-one"}
    for out, code in ((pair / "c.safetensors", 3), (f"{S3}/c.safetensors", 6)):
        done = run(store, command(S3, out, "--debug"), **wrong)
        assert done.returncode == code, done.stderr
        assert "Forbidden" in done.stderr
        assert not any(secret in done.stdout + done.stderr for secret in wrong.values())


def test_a_bucket_that_is_none_is_told_before_any_work(store: ObjectStore, pair: Path) -> None:
    done = run(store, command(S3, "s3://nowhere/f.safetensors"))
    assert done.returncode == 6
    assert store.counts().get("sent", 0) < 10_000


def test_an_object_that_changes_while_it_is_read(
    store: ObjectStore, files: Any, pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from otfuse_cli.checkpoint.open import open_checkpoint
    from otfuse_cli.errors import UnreadableInput

    for name, value in store.environment().items():
        monkeypatch.setenv(name, value)
    files.put(str(pair / "a.safetensors"), f"{BUCKET}/changing.safetensors")
    with open_checkpoint(f"{S3}/changing.safetensors") as checkpoint:
        checkpoint.read("0.weight")
        files.put(str(pair / "b.safetensors"), f"{BUCKET}/changing.safetensors")
        with pytest.raises(UnreadableInput, match="changed while it was read"):
            checkpoint.sha256()


def test_peak_memory_is_near_that_of_the_disk(store: ObjectStore, pair: Path) -> None:
    """On 200 MiB, where it counts, `benchmarks/remote.py` measures it."""
    peaks = []
    for at, out in ((pair, pair / "m.safetensors"), (S3, f"{S3}/m.safetensors")):
        report = pair / "measured.json"
        done = run(store, command(at, out, "--report", str(report)))
        assert done.returncode == 0, done.stderr
        peaks.append(json.loads(report.read_text())["peak_rss_bytes"] >> 20)
    # MiB, whatever the size: s3fs itself (35), windows, pieces and parts on their way.
    assert peaks[1] < peaks[0] + 160
