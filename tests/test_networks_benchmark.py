"""What benchmarks/networks.py takes, and the page that it writes, without running a network."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

import libraries
from conftest import ROOT
from nets import Mlp
from otfuse_cli.graph.spec.from_shapes import layer_graph

FAMILIES = {f"family{n}": [f"net{n}_{size}" for size in (40, 10, 30)] for n in range(9)}
TRACED = {"status": "traced", "reason": "", "cpu": 1.5, "peak": 2**29, "spaces": 3}
RESULTS = [
    {
        "name": "timm/a",
        **TRACED,
        "touched": 0.5,
        "held": {"unused": 0.4, "output": 0.1},
        "twin": "kept",
        "error": 1e-15,
        "allowed": 1e-10,
        "warnings": ["no rule: fft; stays (a.py:1)", "no rule: fft; stays (a.py:2)"],
    },
    {
        "name": "timm/b",
        **TRACED,
        "touched": 0.7,
        "twin": "not kept",
        "error": 0.25,
        "allowed": 1e-10,
        "wrong": ["s1 (fc.weight:0): 2.5e-01"],
    },
    {"name": "timm/c", "status": "not traced", "reason": "an `if` on a tensor", "cpu": 0.5},
    {"name": "timm/d", "status": "not traced", "reason": "an `if` on a tensor", "cpu": 0.5},
    {"name": "torchvision/e", "status": "not run", "reason": "ValueError: no such size"},
]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The modules of benchmarks/ can be imported as when one of them is run."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    names = ("networks", "network_table", "network_libraries", "network_configs")
    for name in names:  # examples have a module of the first name, too
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("networks")
    for name in names:
        sys.modules.pop(name, None)


def size(name: str) -> float:
    return float(name.rpartition("_")[2])


def test_the_choice_has_the_smallest_of_every_family(benchmark):
    chosen = benchmark.network_libraries.chosen_members(FAMILIES, 12, 0, size)
    assert len(set(chosen)) == len(chosen) == 12
    assert chosen[:9] == [f"net{n}_10" for n in range(9)]
    assert {size(name) for name in chosen[9:]} == {30}
    assert chosen == benchmark.network_libraries.chosen_members(FAMILIES, 12, 0, size)


@pytest.mark.slow
def test_the_choice_covers_every_module_of_timm(benchmark):
    timm = libraries.timm()
    choose = benchmark.network_libraries.chosen_members
    chosen = choose(benchmark.network_libraries.timm_families(), benchmark.TIMM, 16, len)
    assert len(set(chosen)) == benchmark.TIMM
    modules = {timm.models.model_entrypoint(name).__module__ for name in chosen}
    assert {module.rpartition(".")[2] for module in modules} == set(timm.list_modules())


def test_types_are_those_named_and_as_many_drawn_as_are_missing(benchmark):
    always = benchmark.network_configs.ALWAYS
    available = {kind: "Net" for kind in (*always, *map(str, range(50)))}
    chosen = benchmark.network_configs.chosen_types(len(always) + 5, 0, available)
    assert len(set(always)) == len(always) >= 60
    assert chosen[: len(always)] == list(always)
    assert len(set(chosen)) == len(always) + 5


def test_fields_that_are_sizes_become_small(benchmark):
    shrunk = benchmark.network_configs._shrunk
    assert shrunk("hidden_size", 4096) == 32
    assert shrunk("hidden_size", 16) == 16
    assert shrunk("hidden_sizes", (96, 192, 384)) == [16, 32, 64]
    assert shrunk("eos_token_id", 50256) == 3
    assert shrunk("num_layers", True) is None
    assert shrunk("initializer_range", 0.02) is None


def test_the_share_touched_counts_parameters_once_and_no_buffers(benchmark):
    net = Mlp((4, 8, 3))
    graph = layer_graph("mlp", {name: tuple(t.shape) for name, t in net.state_dict().items()})
    assert benchmark.touched_share(net, graph) == (8 * 4 + 8 + 3 * 8) / (8 * 4 + 8 + 3 * 8 + 3)


def test_what_is_held_is_told_by_reason(benchmark):
    net = Mlp((4, 8, 3))
    graph = layer_graph("mlp", {name: tuple(t.shape) for name, t in net.state_dict().items()})
    held = benchmark.held_shares(net, graph)
    assert list(held.values()) == [3 / (8 * 4 + 8 + 3 * 8 + 3)]


def test_the_page_counts_what_ran_and_groups_failures_by_reason(benchmark):
    page = benchmark.document(RESULTS)
    rows = {line.split(" | ")[0]: line for line in page.splitlines() if line.startswith("| ")}
    assert rows["| timm"] == "| timm | 4 | 4 | 2 (50.0 %) | 2 | 1 (50.0 %) | 60.0 % |"
    assert rows["| torchvision"] == "| torchvision | 1 | 0 | 0 | 0 | 0 |  |"
    assert rows["| timm/b"].split(" | ")[6:9] == ["not kept", "2.5e-01", "1e-10"]
    assert "- timm/c, timm/d: ``an `if` on a tensor``\n" in page
    assert "- timm/b: `s1 (fc.weight:0): 2.5e-01`\n" in page
    assert "- timm/a: `no rule: fft`\n" in page
    assert page.endswith("- `unused`: timm/a (40%)\n")
    assert page.index("a wrong graph") < page.index("### Not traced") < page.index("### Not run")


def test_of_two_results_of_a_network_the_last_counts(benchmark, tmp_path):
    file = tmp_path / "results.jsonl"
    file.write_text(
        '{"name": "timm/a", "status": "not built"}\n{"name": "timm/a", "status": "x"}\n'
    )
    assert benchmark.read_results(file) == [{"name": "timm/a", "status": "x"}]
    assert benchmark.read_results(tmp_path / "none.jsonl") == []


def test_reasons_are_one_line_without_paths_of_this_machine(benchmark):
    error = ValueError("at /home/me/lib/site-packages/timm/models/x.py:3\n  it broke")
    assert benchmark._reason(error) == "ValueError: at timm/models/x.py:3 it broke"
