"""`--cluster`: the same bytes from other processes, in any order, and what goes wrong there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import otfuse_cli
from conftest import ROOT, Cli
from far_away import InProcessRay, RayError, RayTaskError, nearby
from nets import Mlp, ResNet, randomise, state, zoo
from otfuse_cli.cluster import ray_cluster
from otfuse_cli.cluster.parcels import pack, unpack
from otfuse_cli.cluster.piece import Assignment, SharedName, do_piece, settings_here
from otfuse_cli.cluster.ray_cluster import RayWorkers
from otfuse_cli.errors import (
    IncompatibleModels,
    OtfuseError,
    SolveFailed,
    UnreadableInput,
    UsageError,
)
from otfuse_cli.graph.trace.from_module import export
from otfuse_cli.graph.trace.program import labelled_program
from otfuse_cli.report.records import Report
from otfuse_cli.running.execute import Walk, flat_inputs
from otfuse_cli.running.samples import Samples
from otfuse_cli.session import pieces

__all__ = ["nearby"]

COUNT = 330  # three full batches, and part of one


def normed() -> tuple[nn.Module, torch.Tensor]:
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Conv2d(6, 5, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(45, 4),
    )  # fmt: skip
    return net, torch.zeros(4, 3, 8, 8)


def residual() -> tuple[nn.Module, torch.Tensor]:
    return ResNet((6, 6, 9)), torch.zeros(4, 3, 8, 8)


def behind() -> tuple[nn.Module, torch.Tensor]:
    """A norm behind an activation, which belongs to no layer."""
    net = nn.Sequential(nn.Linear(9, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 4))
    return net, torch.zeros(4, 9)


def narrow() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(9, 5), nn.ReLU(), nn.Linear(5, 4)), torch.zeros(4, 9)


def wide() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 4)), torch.zeros(4, 9)


def same(one: tuple[dict[str, torch.Tensor], Report], other: Any) -> None:
    """Tensors to the bit, and reports but for seconds and memory."""
    assert one[0].keys() == other[0].keys()
    for name, tensor in one[0].items():
        assert tensor.dtype == other[0][name].dtype
        assert torch.equal(tensor, other[0][name]), name
    bare = [report.replace(timings={}, peak_rss_bytes=0) for _, report in (one, other)]
    rounded = [report.replace(checks=report.checks.replace(max_error=0.0)) for report in bare]
    assert rounded[0] == rounded[1]


def files(folder: Path, count: int, suffix: str = ".safetensors", widths: Any = None) -> list[Path]:
    paths = []
    for seed in range(count):
        tensors = state(randomise(Mlp(*(widths or ())), seed))
        paths.append(folder / f"{seed}{suffix}")
        if suffix == ".pt":
            torch.save({"state_dict": dict(tensors)}, paths[-1])
        else:
            safetensors.torch.save_file({n: t.contiguous() for n, t in tensors.items()}, paths[-1])
    return paths


# What is sent


def test_tensors_arrive_as_they_lie() -> None:
    a = torch.arange(24.0).view(4, 6)
    images = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    sent = {
        "whole": a, "turned": a.t(), "part": a[1:, 2], "one": torch.tensor(2.0),
        "expanded": torch.ones(1, 3).expand(4, 3), "images": images, "none": torch.empty(0, 3),
        "half": torch.ones(3, dtype=torch.bfloat16), "parameter": nn.Parameter(torch.ones(2)),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    }  # fmt: skip
    came = unpack(pack(sent))
    for name, tensor in sent.items():
        assert torch.equal(came[name], tensor), name
        assert (came[name].dtype, came[name].stride()) == (tensor.dtype, tensor.stride()), name
    came["whole"].add_(1)
    assert a[0, 0] == 0
    assert torch.equal(came["turned"], came["whole"].t())  # one storage still
    assert pack({"part": torch.zeros(1000, 1000)[0]}).nbytes < 5000


def test_what_is_no_tensor_arrives_too() -> None:
    operator = torch.ops.aten.relu.default
    sent = (operator, torch.contiguous_format, MappingProxyType({"a": 1}))
    assert unpack(pack(sent)) == sent
    with pytest.raises(TypeError):
        pack(lambda: None)


@pytest.mark.quick_cases("resnet-basic-bn")
@pytest.mark.parametrize("name", list(zoo()))
def test_a_program_runs_as_it_did(name: str) -> None:
    net, shape = zoo()[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    program = labelled_program(export(net.eval(), (x,)), batch=len(x))
    again = unpack(pack(program))
    for node, made in zip(program.nodes, again.nodes, strict=True):
        assert (made.name, list(map(str, made.users))) == (node.name, list(map(str, node.users)))
    said = []
    for runs in (program, again):
        walk = Walk(runs, state(net), flat_inputs(runs, Samples((x,)), "cpu"))
        said.append(walk.said(len(x)))
    assert torch.equal(*said)


# The same bytes


@pytest.mark.slow_cases(".pt")
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_many_models(nearby: InProcessRay, tmp_path: Path, suffix: str) -> None:
    paths = files(tmp_path, 5, suffix)
    here = otfuse_cli.merge(*paths)
    same(here, otfuse_cli.merge(*paths, cluster="auto"))
    # Five files are read, four are matched, the tensors are averaged together.
    assert nearby.tasks == 5 + 4 + 1
    digests = [record.sha256 for record in here[1].inputs]
    assert None not in digests


def _told(item: tuple[Any, Any]) -> tuple[frozenset[str], tuple[str, ...]]:
    return frozenset(item[1]), ("f" * 64,)


def test_what_workers_have_read_is_not_read_here(
    nearby: InProcessRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests are theirs, and they have looked for NaN."""
    paths = files(tmp_path, 3)
    monkeypatch.setattr(pieces, "_survey", _told)
    _, report = otfuse_cli.merge(*paths, cluster="auto")
    assert {record.sha256 for record in report.inputs} == {"f" * 64}


def test_written_files_have_the_same_bytes(nearby: InProcessRay, tmp_path: Path, cli: Cli) -> None:
    paths = files(tmp_path, 3)
    for out, more in (("a.safetensors", ()), ("b.safetensors", ("--cluster", "auto"))):
        assert cli("merge", *paths, "-o", tmp_path / out, "--weights", "1,2,3", *more).code == 0
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert nearby.tasks


def test_state_dicts_in_memory_are_sent(nearby: InProcessRay) -> None:
    states = [state(randomise(Mlp(), seed)) for seed in range(3)]
    same(otfuse_cli.merge(*states), otfuse_cli.merge(*states, cluster="auto"))


@pytest.mark.slow
def test_rounds_and_the_medoid(nearby: InProcessRay, tmp_path: Path) -> None:
    paths = files(tmp_path, 4)
    asked: dict[str, Any] = {"iterate": 2, "anchor": "medoid", "passes": 2}
    same(otfuse_cli.merge(*paths, **asked), otfuse_cli.merge(*paths, **asked, cluster="auto"))
    assert nearby.tasks >= 12 + 4 + 3 + 4 + 1


def test_plain_averages_and_a_weight_of_zero(nearby: InProcessRay, tmp_path: Path) -> None:
    paths = files(tmp_path, 3, widths=((9, 7, 5),))
    for asked in ({"align": "none"}, {"weights": [1, 0, 1]}, {"dtype": "float16"}):
        one, two = (otfuse_cli.merge(*paths, **asked, **far) for far in ({}, {"cluster": "auto"}))  # type: ignore[arg-type]
        same(one, two)


@pytest.mark.usefixtures("kept_graphs")
def test_prune_fuse(nearby: InProcessRay) -> None:
    dense = state(randomise(wide()[0], 0))
    pruned, _ = otfuse_cli.prune(dense, amount=0.4, arch="mlp")
    here = otfuse_cli.prune_fuse(dense, pruned)
    same(here, otfuse_cli.prune_fuse(dense, pruned, cluster="auto"))
    assert nearby.tasks == 2


WITH_INPUTS: list[tuple[str, Callable[[], Any], dict[str, Any]]] = [
    ("refit", normed, {"blend": "average"}),
    ("joint", normed, {"blend": "joint"}),
    ("every way", behind, {}),
    ("residual", residual, {"blend": "average", "num_samples": 150}),
    ("norms", normed, {"refit": False, "calibrate": "bn"}),
    ("moments", behind, {"refit": False, "calibrate": "repair"}),
    ("activations", normed, {"align": "acts", "refit": False}),
]


@pytest.mark.usefixtures("kept_graphs")
@pytest.mark.quick_cases("waiting-refit", "anew-moments")
@pytest.mark.parametrize(
    ("build", "asked"), [case[1:] for case in WITH_INPUTS], ids=[case[0] for case in WITH_INPUTS]
)
@pytest.mark.parametrize("memory", [4.0, 0.0], ids=["waiting", "anew"])
def test_inputs(
    nearby: InProcessRay, build: Callable[[], Any], asked: dict[str, Any], memory: float
) -> None:
    """Fits, candidates and calibration; batches that wait, and batches that run anew."""
    nearby.cpus = 1  # fewer at a time than there are batches
    example = build()[1]
    x = torch.randn(COUNT, *example.shape[1:], generator=torch.Generator().manual_seed(5))
    states = [state(randomise(build()[0], seed)) for seed in (0, 1, 2)]
    how = {"arch": build, "samples": {"x": x}, "num_samples": COUNT, "pass_memory": memory, **asked}
    same(otfuse_cli.merge(*states, **how), otfuse_cli.merge(*states, **how, cluster="auto"))
    assert nearby.tasks > 10


@pytest.mark.slow
@pytest.mark.usefixtures("kept_graphs")
def test_inputs_with_other_widths(nearby: InProcessRay) -> None:
    """Soft maps are aimed at through moments of both."""
    x = torch.randn(COUNT, 9, generator=torch.Generator().manual_seed(5))
    states = [state(randomise(wide()[0], 0)), state(randomise(narrow()[0], 1))]
    how: dict[str, Any] = {
        "arch": {0: wide, 1: narrow}, "samples": {"x": x}, "num_samples": COUNT,
        "blend": "average",
    }  # fmt: skip
    same(otfuse_cli.merge(*states, **how), otfuse_cli.merge(*states, **how, cluster="auto"))


# What goes wrong


def test_a_file_that_no_worker_sees(nearby: InProcessRay, tmp_path: Path, cli: Cli) -> None:
    paths = files(tmp_path, 3)
    nearby.before = lambda number: paths[1].unlink(missing_ok=True)
    done = cli("merge", *paths, "-o", tmp_path / "f.safetensors", "--cluster", "auto")
    assert done.code == 3
    assert f"{paths[1]}, on worker node here (127.0.0.1)" in done.err
    assert "no such file" in done.err
    assert not list(tmp_path.glob("f.*"))


def test_another_file_under_the_name(nearby: InProcessRay, tmp_path: Path) -> None:
    paths = files(tmp_path, 2)
    other = (tmp_path / "other").absolute()
    other.mkdir()
    (theirs,) = files(other, 1)

    def swap(number: int) -> None:
        paths[0].unlink()
        content = bytearray(theirs.read_bytes())
        content[-1] ^= 1  # of one size
        paths[0].write_bytes(content)
        nearby.before = lambda number: None

    nearby.before = swap
    with pytest.raises(UnreadableInput, match="another file"):
        otfuse_cli.merge(*paths, cluster="auto")


def test_nan_is_found_there(nearby: InProcessRay, tmp_path: Path) -> None:
    paths = files(tmp_path, 2)
    tensors = safetensors.torch.load_file(paths[0])
    next(iter(tensors.values()))[0] = torch.nan
    safetensors.torch.save_file(tensors, paths[0])
    errors = []
    for far in ({}, {"cluster": "auto"}):
        with pytest.raises(UnreadableInput) as caught:
            otfuse_cli.merge(*paths, **far)  # type: ignore[arg-type]
        errors.append(caught.value)
    assert errors[0].what == errors[1].what
    assert errors[1].where == f"{errors[0].where}, on worker node here (127.0.0.1)"


def _refuse(item: str) -> None:
    raise SolveFailed(item, where="there", why="so", fix="do", report={"a": 1})


def _fail(item: str) -> None:
    raise ZeroDivisionError(item)


def order(settings: Any = None) -> Assignment:
    return Assignment(settings or settings_here(), SharedName(os.urandom(4).hex()), None, False)


def test_errors_arrive_as_they_were_raised() -> None:
    outcome, beside = do_piece(order(), "node", pack(_refuse), [pack("what")])
    error = unpack(outcome.value)
    assert outcome.failed
    assert beside is None
    assert isinstance(error, SolveFailed)
    assert error.to_dict() == {
        "type": "SolveFailed", "exit_code": 5, "what": "what", "where": "there", "why": "so",
        "fix": "do",
    }  # fmt: skip
    with pytest.raises(ZeroDivisionError):  # a bug is Ray's to carry
        do_piece(order(), "node", pack(_fail), [pack("")])


def test_other_versions_are_refused() -> None:
    ours = settings_here()
    theirs = replace(ours, versions=(ours.versions[0], "Python 3.0", ours.versions[2]))
    outcome, _ = do_piece(order(theirs), "far", pack(len), [pack("four")])
    error = unpack(outcome.value)
    assert isinstance(error, IncompatibleModels)
    assert "Python 3.0 here" in str(error.why)
    assert "far" in str(error.where)
    outcome, _ = do_piece(order(), "far", pack(len), [pack("four")])
    assert unpack(outcome.value) == 4


def test_workers_compute_with_as_many_threads() -> None:
    before = torch.get_num_threads()
    settings = settings_here(before + 1)
    try:
        outcome, _ = do_piece(order(settings), "far", pack(_threads), [pack(None)])
        assert unpack(outcome.value) == before + 1
    finally:
        torch.set_num_threads(before)


def _threads(item: None) -> int:
    return torch.get_num_threads()


def workers(ray: InProcessRay, **changes: Any) -> RayWorkers:
    return RayWorkers(ray, replace(settings_here(), **changes))


def test_results_come_in_order_with_few_ahead(nearby: InProcessRay) -> None:
    taken: list[int] = []

    def items() -> Iterator[str]:
        for number in range(20):
            taken.append(number)
            yield "x" * number

    results = workers(nearby).each(len, items())
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    assert len(taken) <= 3 + 2 * nearby.cpus
    results.close()
    # Whoever stops asking wants nothing more of it.
    assert len(nearby.cancelled) == len(taken) - 3


def test_memory_and_processors_are_asked_for(nearby: InProcessRay) -> None:
    far = workers(nearby, threads=64)
    assert list(far.each(len, ["a"], memory=lambda item: 5 << 20)) == [1]
    (asked,) = nearby.asked
    assert asked["memory"] == (320 + 5) << 20
    assert asked["num_cpus"] == nearby.cpus  # the largest node that is alive
    assert asked["max_retries"] == 3
    nearby.memory = 1 << 29
    with pytest.raises(UsageError, match="no node of the cluster has the memory") as caught:
        list(far.each(len, ["a"], memory=lambda item: 1 << 29))
    assert "0.81 GiB" in str(caught.value.where)


def test_what_is_shared_is_sent_once_and_stages_stay(nearby: InProcessRay) -> None:
    far = workers(nearby)
    shared, work = far.share([1, 2]), far.share(_stage)
    (first, kept), (second, _) = far.stages(work, [(shared, 1, None), (shared, 2, None)])
    assert (first, second) == (4, 5)
    ((third, _),) = far.stages(work, [(shared, 0, kept)])
    assert third == 7


def _stage(item: tuple[list[int], int, int | None]) -> tuple[int, int]:
    shared, number, before = item
    total = sum(shared) + number + (before or 0)
    return total, total


def test_what_cannot_be_sent_is_done_here(nearby: InProcessRay) -> None:
    assert list(workers(nearby).each(lambda item: item + 1, [1, 2])) == [2, 3]
    assert nearby.tasks == 0


def test_a_piece_that_is_lost(nearby: InProcessRay) -> None:
    def die(number: int) -> None:
        raise RayError("the worker died unexpectedly\nand more")

    nearby.before = die
    with pytest.raises(SolveFailed, match="the cluster lost a piece") as caught:
        list(workers(nearby).each(len, ["a"]))
    assert caught.value.why == "RayError: the worker died unexpectedly"

    def bug(number: int) -> None:
        raise RayTaskError(KeyError("x"))

    nearby.before = bug
    with pytest.raises(KeyError):
        list(workers(nearby).each(len, ["a"]))

    def absent(number: int) -> None:
        raise RayTaskError(ModuleNotFoundError("No module named 'otfuse_cli'"))

    nearby.before = absent
    with pytest.raises(UsageError, match="don't have this package"):
        list(workers(nearby).each(len, ["a"]))


def test_a_cluster_without_nodes(nearby: InProcessRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "_PATIENCE", 10.0)
    monkeypatch.setattr(nearby, "wait", lambda references, timeout: ([], references))
    nearby.cpus = 0
    with pytest.raises(SolveFailed, match="lost a piece") as caught:
        list(workers(nearby).each(len, ["a"]))
    assert "no node with a CPU is left" in str(caught.value.why)


def test_other_processors_are_told(nearby: InProcessRay) -> None:
    far = workers(nearby, processor="NONE")
    assert far.remarks == ()
    assert list(far.each(len, ["a"])) == [1]
    (remark,) = far.remarks
    assert "here (127.0.0.1) computes with" in remark
    assert "this machine with NONE" in remark


# Options


def test_without_ray(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    paths = files(tmp_path, 2)
    done = cli("merge", *paths, "-o", tmp_path / "f.pt", "--cluster", "auto")
    assert done.code == 2
    assert "pip install 'otfuse-cli[ray]'" in done.err
    assert not list(tmp_path.glob("f.*"))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--cluster", "somewhere"), "no name of a cluster"),
        (("--cluster", ""), "no name of a cluster"),
        (("--cluster", "auto", "--device", "cuda"), "a cluster computes on CPUs"),
    ],
)
def test_options_that_cannot_be(more: tuple[str, ...], said: str, cli: Cli, tmp_path: Path) -> None:
    done = cli("merge", *files(tmp_path, 2), "-o", tmp_path / "f.pt", *more)
    assert done.code == 2
    assert said in done.err


@pytest.mark.parametrize("where", ["ray://127.0.0.1:1", "auto"])
def test_nobody_answers(
    where: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within seconds, though Ray itself would ask for many minutes."""
    pytest.importorskip("ray", reason="needs the extra ray")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    begun = time.monotonic()
    done = cli("merge", *files(tmp_path, 2), "-o", tmp_path / "f.pt", "--cluster", where)
    assert done.code == 2, done.err
    assert "no such cluster" in done.err
    assert time.monotonic() - begun < 30


OTFUSE = "import sys; from otfuse_cli.cli.app import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.slow
def test_nothing_of_ray_is_loaded_without_the_option(tmp_path: Path) -> None:
    told = (
        "import atexit, sys; atexit.register(lambda: print(sorted("
        "m for m in sys.modules if m == 'ray' or m.startswith('otfuse_cli.cluster'))))\n" + OTFUSE
    )
    paths = files(tmp_path, 2)
    for arguments in (["--help"], ["merge", *map(str, paths), "-o", str(tmp_path / "f.pt"), "-q"]):
        done = subprocess.run(
            [sys.executable, "-c", told, *arguments], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip().endswith("[]")


# A cluster of two nodes with one core

of_ray = pytest.mark.filterwarnings("ignore")  # sockets and processes of Ray's


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """Two nodes of one core, and a third on request; this process is connected to them."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray = pytest.importorskip("ray", reason="needs the extra ray")
        cluster_utils = pytest.importorskip("ray.cluster_utils")
        node = {"num_cpus": 1, "object_store_memory": 200 << 20, "include_dashboard": False}
        cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=node)
        cluster.more = [cluster.add_node(**node)]
        cluster.node = node
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        try:
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.fixture
def two_nodes(nodes: Any) -> Any:
    """Both of them, whatever the test before did."""
    while not nodes.more:
        nodes.more.append(nodes.add_node(**nodes.node))
    return nodes


def while_one_goes(nodes: Any, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Let a node go once so many pieces are done, while others are under way."""
    done = 0
    take = RayWorkers._result

    def count(self: RayWorkers, reference: Any) -> Any:
        nonlocal done
        result = take(self, reference)
        done += 1
        if done == after:
            nodes.remove_node(nodes.more.pop(), allow_graceful=False)
        return result

    monkeypatch.setattr(RayWorkers, "_result", count)


def vgg_pair(shared: Path) -> tuple[list[Path], dict[str, Any]]:
    names = [f"cifar10-vgg11half-{k}.safetensors" for k in (0, 1)]
    how = {
        "arch": f"{ROOT}/examples/networks.py:vgg11half",
        "samples": f"{ROOT}/examples/evaluate.py:cifar_train",
        "num_samples": 250,
    }
    return [shared / "checkpoints" / name for name in names], how


def small_mlps(folder: Path) -> tuple[list[Path], dict[str, Any]]:
    folder.mkdir()
    return files(folder, 16, widths=((64, 48, 32, 10),)), {}


@pytest.fixture(scope="module", params=["vgg", "mlps"])
def merged_here(
    request: pytest.FixtureRequest, shared: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Path], dict[str, Any], Any]:
    folder = tmp_path_factory.mktemp("here")
    paths, how = vgg_pair(shared) if request.param == "vgg" else small_mlps(folder / "in")
    merged = otfuse_cli.merge(*paths, **how, output=folder / "f.safetensors")
    return paths, how, (merged, (folder / "f.safetensors").read_bytes())


def far(merged_here: Any, folder: Path) -> None:
    """Merge on the cluster: the same report, the same file."""
    paths, how, (here, content) = merged_here
    output = folder / "f.safetensors"
    there = otfuse_cli.merge(*paths, **how, output=output, cluster="auto")
    assert output.read_bytes() == content
    same(*((t, r.replace(output=())) for t, r in (here, there)))


@of_ray
@pytest.mark.slow
def test_two_workers(two_nodes: Any, merged_here: Any, tmp_path: Path) -> None:
    far(merged_here, tmp_path)


@of_ray
@pytest.mark.slow
def test_a_node_that_goes(
    two_nodes: Any, merged_here: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle; what remains is one worker, who does it all."""
    while_one_goes(two_nodes, monkeypatch, after=12)
    far(merged_here, tmp_path)
    assert not two_nodes.more


@of_ray
@pytest.mark.slow
def test_by_way_of_a_client(two_nodes: Any, tmp_path: Path) -> None:
    """`ray://`: this process is no part of the cluster."""
    paths, _ = small_mlps(tmp_path / "in")
    port = "25117"
    server = [sys.executable, "-m", "ray.util.client.server", "--address", two_nodes.address]
    server += ["--host", "127.0.0.1", "--port", port, "--mode", "legacy"]
    running = subprocess.Popen(server, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for_port(int(port))
        for out, more in (("a", []), ("b", ["--cluster", f"ray://127.0.0.1:{port}"])):
            command = ["merge", *map(str, paths), "-o", str(tmp_path / f"{out}.pt"), "-q", *more]
            done = subprocess.run(
                [sys.executable, "-c", OTFUSE, *command],
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert done.returncode == 0, done.stderr
    finally:
        running.terminate()
        running.wait()
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()


def _wait_for_port(port: int) -> None:
    import socket

    for _ in range(120):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise TimeoutError(port)


@of_ray
@pytest.mark.slow
def test_ctrl_c(tmp_path: Path) -> None:
    """On a cluster that the command itself has started: all of it is gone, nothing is written."""
    pytest.importorskip("ray", reason="needs the extra ray")
    paths, _ = small_mlps(tmp_path / "in")
    output = tmp_path / "f.safetensors"
    told = (
        "import time\n"
        "import otfuse_cli.cluster.ray_cluster as c\n"
        "take = c.RayWorkers._result\n"
        "def told(self, reference):\n"
        "    result = take(self, reference)\n"
        "    print(self.ray.get_runtime_context().gcs_address, flush=True)\n"
        "    time.sleep(60)\n"  # until it is interrupted, however quick the rest would be
        "    return result\n"
        "c.RayWorkers._result = told\n" + OTFUSE
    )
    command = ["merge", *map(str, paths), "-o", str(output), "--cluster", "auto", "--json"]
    running = subprocess.Popen(
        [sys.executable, "-c", told, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_ADDRESS": "local"},
        start_new_session=True,
    )
    assert running.stdout is not None
    address = running.stdout.readline().strip()
    running.send_signal(signal.SIGINT)
    said, _ = running.communicate(timeout=120)
    assert running.returncode == 130
    assert json.loads(said[said.index("{") :])["error"]["type"] == "Interrupted"
    assert not list(tmp_path.glob("f*"))
    import socket

    host, port = address.rsplit(":", 1)
    with pytest.raises(OSError):
        socket.create_connection((host, int(port)), 5)


def test_every_error_of_ours_can_be_sent() -> None:
    kinds = list(OtfuseError.__subclasses__())
    for kind in kinds:
        kinds += kind.__subclasses__()
        error = unpack(pack(kind("what", where="where", why="why", fix="fix")))
        assert type(error) is kind
        assert str(error) == "what\nwhere: where\nwhy: why\nfix: fix"
    assert len(kinds) >= 6
