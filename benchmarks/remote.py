"""`merge` from and to an object store on loopback, against the same merge on the disk.

    python benchmarks/remote.py [--mib 200] [--only compare|break] [--folder DIR]

Writes two synthetic MLPs (float32) of that size, locally and to a store (moto, in a process of its
own), and averages them, which reads and writes as every fusion does: bytes that the store sent and
took, wall seconds, peak memory. Then a weight of 0, a folder of kept blocks, faults, a kill in the
middle and wrong credentials. What must hold is asserted; times on loopback say little of a network.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import processes

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import object_store

OTFUSE = "import sys; from otfuse_cli.cli.app import main; sys.exit(main(sys.argv[1:]))"
LAYERS = 50  # of 1024 units at 200 MiB
_MIB = 1 << 20


def write(path: Path, mib: float, seed: int) -> None:
    """An MLP of square layers."""
    import torch
    from safetensors.torch import save_file

    side = int((mib * _MIB / 4 / LAYERS) ** 0.5)
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for at in range(LAYERS):
        state[f"{at}.weight"] = torch.randn(side, side, generator=generator) / side**0.5
        state[f"{at}.bias"] = torch.randn(side, generator=generator)
    save_file(state, path)


@dataclass
class Bench:
    """Two checkpoints on the disk of this machine and in a store, and merges of them.

    Attributes:
        store: The object store.
        folder: Where the local ones are.
        mib: The size of one.
    """

    store: object_store.ObjectStore
    folder: Path
    mib: float

    def command(self, at: str, out: str, *options: str) -> list[str]:
        """A merge of the two checkpoints in a place."""
        line = ["merge", f"{at}/a.safetensors", f"{at}/b.safetensors", "-o", out]
        more = ["--arch", "mlp", "--align", "none", "-q", "--overwrite", *options]
        return [sys.executable, "-c", OTFUSE, *line, *more]

    @property
    def bucket(self) -> str:
        """Where the checkpoints in the store are."""
        return f"s3://{object_store.BUCKET}"

    def environment(self, **more: str) -> Mapping[str, str]:
        """Of a process that may talk to the store."""
        return {**os.environ, **self.store.environment(), **more}

    def measure(self, what: str, at: str, out: str, *options: str, **more: str) -> processes.Taken:
        """Run a merge, and note what it took."""
        self.store.counts()
        # The system counts the memory of who started a process as that of the process.
        report = self.folder / "measured.json"
        line = self.command(at, out, "--report", str(report), *options)
        taken = processes.run(line, self.environment(**more))
        peak = json.loads(report.read_text())["peak_rss_bytes"] / _MIB
        taken = replace(taken, peak=peak)
        counts = self.store.counts()
        sent, got = counts.get("sent", 0) / _MIB, counts.get("taken", 0) / _MIB
        requests = sum(n for name, n in counts.items() if name not in ("sent", "taken"))
        numbers = f"{sent:.1f} | {got:.1f} | {requests} | {taken.wall:.1f} | {taken.peak:.0f}"
        print(f"| {what} | {numbers} |", flush=True)
        return taken

    def upload(self) -> None:
        """Put the local checkpoints into the store."""
        for name in ("a", "b"):
            self.files.put(
                str(self.folder / f"{name}.safetensors"),
                f"{object_store.BUCKET}/{name}.safetensors",
            )

    @property
    def files(self):
        """The store, as its library shows it."""
        import fsspec

        return fsspec.filesystem(
            "s3",
            key=object_store.KEY,
            secret=object_store.SECRET,
            endpoint_url=self.store.url,
            use_listings_cache=False,
        )

    def fails(self, command: Sequence[str], **more: str) -> subprocess.CompletedProcess[str]:
        """What becomes of a command that must not work."""
        return subprocess.run(
            command, env=self.environment(**more), capture_output=True, text=True, check=False
        )


def compare(bench: Bench) -> None:
    """The same merge here and there."""
    local = bench.measure("files here", str(bench.folder), str(bench.folder / "f.safetensors"))
    there = bench.measure("in the store", bench.bucket, f"{bench.bucket}/f.safetensors")
    same = bench.files.cat_file(f"{object_store.BUCKET}/f.safetensors")
    assert same == (bench.folder / "f.safetensors").read_bytes(), "other bytes"
    ratio = there.peak / local.peak
    print(f"the same bytes; peak memory {ratio:.2f} of local, wall {there.wall / local.wall:.2f}")
    assert ratio <= 1.3, ratio
    bench.measure("weights 0,1", bench.bucket, f"{bench.bucket}/f.safetensors", "--weights", "0,1")
    with tempfile.TemporaryDirectory() as kept:
        for run in ("first", "second"):
            bench.measure(
                f"OTFUSE_CACHE, {run} run", bench.bucket, f"{bench.bucket}/f.safetensors",
                OTFUSE_CACHE=kept,
            )  # fmt: skip


def break_things(bench: Bench) -> None:
    """Faults, a kill in the middle, wrong credentials."""
    out = f"{bench.bucket}/broken.safetensors"
    bench.store.fail("500 GET", "drop GET", "500 PUT", "drop PUT")
    bench.measure("two errors 500, two dropped connections", bench.bucket, out)
    name = f"{object_store.BUCKET}/killed.safetensors"
    unfinished = 0
    for number, said in ((signal.SIGKILL, "killed"), (signal.SIGINT, "Ctrl-C")):
        line = bench.command(bench.bucket, f"s3://{name}")
        with subprocess.Popen(line, env=bench.environment(), stderr=subprocess.DEVNULL) as process:
            bench.store.counts()
            # In the middle of the upload: at least one of its parts has arrived.
            taken = 0
            while taken < 8 * _MIB and process.poll() is None:
                time.sleep(0.02)
                taken += bench.store.counts().get("taken", 0)
            process.send_signal(number)
            code = process.wait()
        left = bench.store.unfinished() - unfinished
        unfinished += left
        print(f"{said} after {taken / _MIB:.0f} MiB: exit {code}, {left} unfinished uploads")
        assert not bench.files.exists(name), said
        if number == signal.SIGINT:  # who is killed can't abort
            assert (code, left) == (130, 0), (code, left)
    secret = "not-the-secret-of-anybody"
    line = bench.command(bench.bucket, str(bench.folder / "no.safetensors"), "--debug")
    wrong = {"AWS_ACCESS_KEY_ID": "AKIANOBODYNOBODY0000", "AWS_SECRET_ACCESS_KEY": secret}
    done = bench.fails(line, **wrong)
    assert done.returncode == 3, done
    assert not any(text in done.stdout + done.stderr for text in wrong.values()), done
    print("wrong credentials: exit 3;", done.stderr.strip().splitlines()[-2])


def main() -> None:
    """Measure, and assert what must hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=float, default=200.0)
    parser.add_argument("--only", choices=("compare", "break"))
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as place, object_store.serving() as store:
        bench = Bench(store, Path(place), options.mib)
        for seed, name in enumerate(("a", "b")):
            write(bench.folder / f"{name}.safetensors", options.mib, seed)
        bench.upload()
        print("| | MiB sent by the store | MiB taken | requests | wall s | peak MiB |")
        print("|---|---|---|---|---|---|")
        if options.only != "break":
            compare(bench)
        if options.only != "compare":
            break_things(bench)


if __name__ == "__main__":
    main()
