"""Device, stopwatch and memory of the process."""

import gc
import platform
import subprocess
import sys

import numpy as np
import pytest
import torch

import nets
from otfuse_cli.cli import run_verb
from otfuse_cli.errors import UsageError
from otfuse_cli.graph.trace.from_module import export
from otfuse_cli.graph.trace.program import labelled_program
from otfuse_cli.running.execute import Walk
from otfuse_cli.running.factory import Network
from otfuse_cli.running.forward import logits
from otfuse_cli.running.samples import Samples
from otfuse_cli.runtime import ahead, full_precision, peak_rss_bytes

SAY_PEAK = "from otfuse_cli.runtime import peak_rss_bytes; print(peak_rss_bytes())"


def child_peak() -> int:
    return int(
        subprocess.run([sys.executable, "-c", SAY_PEAK], capture_output=True, check=True).stdout
    )


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere the peak is all that the system says"
)
def test_peak_memory_is_not_inherited():
    """A child of a large process says its own peak (`ru_maxrss` would be the parent's)."""
    ballast = np.ones(2**25)
    assert peak_rss_bytes() > ballast.nbytes
    assert 2**20 < child_peak() < ballast.nbytes


WAIT = """
import os, sys
from otfuse_cli.runtime import wait_asleep
if "loaded" in sys.argv:
    sys.modules["torch"] = None
wait_asleep()
print(os.environ.get("OMP_WAIT_POLICY"))
"""


@pytest.mark.parametrize(
    ("users", "loaded", "policy"),
    [(None, (), "PASSIVE"), ("ACTIVE", (), "ACTIVE"), (None, ("loaded",), "None")],
)
def test_threads_wait_asleep_unless_told_otherwise(monkeypatch, users, loaded, policy):
    """Not once torch is there: it has read what it does."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if users is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", users)
    command = [sys.executable, "-c", WAIT, *loaded]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    assert done.stdout.strip() == policy


def test_every_command_looks_for_garbage_rarely(cli):
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    try:
        assert cli("--version").code == 0
        assert gc.get_threshold()[0] > 5_000
    finally:
        gc.set_threshold(*before)


def test_every_command_waits_asleep(cli, monkeypatch):
    called = []
    monkeypatch.setattr(run_verb, "wait_asleep", lambda: called.append(True))
    assert cli("inspect", "nowhere.pt").code == 3
    assert called == [True]


# Arrays of 4 MiB with something small between them: once freed, holes in a heap.
HOLES = """
import sys
from pathlib import Path
from otfuse_cli.runtime import return_freed_memory, reuse_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

if sys.argv[1].startswith("returned"):
    return_freed_memory()
if sys.argv[1].endswith("reused"):
    reuse_freed_memory()
large = bytearray(b"x") * (8 << 20)
del large  # glibc maps arrays of this size no longer
before, kept, freed = resident(), [], []
for _ in range(30):
    freed.append(bytearray(b"x") * (4 << 20))
    kept.append(bytes(100_000))  # larger than any hole that imports have left
freed.clear()
print(resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="what glibc does"
)
def test_freed_memory_is_returned():
    """Where the process is ours, until networks run; another program's is left alone."""
    command = [sys.executable, "-c", HOLES]
    kept, returned, reused, alone = (
        int(subprocess.run([*command, how], capture_output=True, check=True).stdout)
        for how in ("kept", "returned", "returned, reused", "reused")
    )
    assert returned < 8 << 20 < 64 << 20 < kept
    assert reused > 64 << 20
    assert abs(alone - kept) < 8 << 20


def test_what_is_made_ahead_comes_in_order_and_not_further():
    made = []

    def items():
        for at in range(5):
            made.append(at)
            yield at

    for item in ahead(items()):
        assert item == made[item]
        if item == 2:
            break
    assert len(made) <= 4


def test_what_fails_ahead_fails_where_it_is_used():
    def items():
        yield 1
        raise UsageError("broken", where="there", fix="mend it")

    found = []
    with pytest.raises(UsageError, match="broken"):
        found.extend(ahead(items()))
    assert found == [1]


def test_networks_run_in_full_precision_and_leave_the_switches_as_they_were():
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.deterministic
    seen = []

    @full_precision()
    def step():
        seen.append((cudnn.allow_tf32, cudnn.deterministic))
        raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            step()
    assert seen == [(False, True)] * 2
    assert (cudnn.allow_tf32, cudnn.deterministic) == before


def test_every_pass_is_in_full_precision(monkeypatch):
    """Passes through exported programs, through modules, and with gradients."""
    seen = []
    network = nets.Mlp((4, 3, 2))
    exported = export(network, (torch.zeros(2, 4),), {})
    program = labelled_program(exported, batch=2)
    call = Walk._call

    def watched(walk, node):
        seen.append(torch.backends.cudnn.allow_tf32)
        return call(walk, node)

    monkeypatch.setattr(Walk, "_call", watched)
    Walk(program, dict(network.state_dict()), [torch.zeros(2, 4)]).outputs()
    network.register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.allow_tf32))
    logits(
        Network("", network, (torch.zeros(2, 4),)),
        network.state_dict(),
        Samples((torch.ones(2, 4),), {}),
    )
    assert len(seen) > 1
    assert not any(seen)


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="torch has one switch")
def test_precisions_set_by_operator_are_the_callers():
    cudnn = torch.backends.cudnn
    cudnn.conv.fp32_precision = "ieee"
    try:
        with full_precision():
            assert cudnn.conv.fp32_precision == "ieee"
        assert cudnn.conv.fp32_precision == "ieee"
    finally:
        cudnn.allow_tf32 = True
