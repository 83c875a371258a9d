"""The rooms of the package: who may import whom, who may print (docs/architecture.md)."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import otfuse_cli

PACKAGE = Path(otfuse_cli.__file__).parent
NAME = "otfuse_cli"

# From top to bottom; a room imports from its own level and from those below it.
LEVELS = [
    {"cli"},
    {"", "commands", "flower"},
    {"federated"},
    {"session"},
    {"plot"},
    {"pruning", "fusion"},
    {"matching"},
    {"running"},
    {"graph"},
    {"transport"},
    {"checkpoint"},
    {"requests", "report"},
    {"remote", "cluster"},
    {"errors", "runtime", "output_names"},
]
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
FLOOR = LEVELS[-1]


def module_name(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join((NAME, *parts)).removesuffix(".__init__")


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def tree(module):
    return ast.parse(MODULES[module].read_text())


def room(module):
    return module.split(".")[1] if "." in module else ""


def statements(node):
    """All statements inside of `node`; no expression is looked into, which would take seconds."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            yield from statements(child)


@cache
def imports(module):
    """Absolute names of everything a module imports, inside functions too."""
    names = []
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in statements(tree(module)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, base]) if base else ".".join(parent)
            names += [f"{base}.{alias.name}" for alias in node.names]
    return names


def ours(module):
    """The modules of ours that a module imports."""
    for name in imports(module):
        if name.split(".")[0] == NAME and name != f"{NAME}.__version__":
            while name not in MODULES:
                name = name.rpartition(".")[0]
            yield name


def importers(*names):
    """The modules that import one of `names`, or something inside it."""
    dotted = tuple(f"{name}." for name in names)
    return {
        module
        for module in MODULES
        if any(name in names or name.startswith(dotted) for name in imports(module))
    }


def test_every_room_has_a_level():
    assert {room(module) for module in MODULES} <= set(LEVEL)


def test_imports_point_down():
    upwards = []
    for module in MODULES:
        above = [name for name in ours(module) if LEVEL[room(name)] < LEVEL[room(module)]]
        upwards += [(module, name) for name in above]
    assert upwards == []


def test_no_module_imports_itself_through_others():
    """No cycles, imports for types included: what stands on what is an order."""
    waiting = {module: set(ours(module)) - {module, NAME} for module in MODULES}
    while ready := [module for module, needs in waiting.items() if not needs & waiting.keys()]:
        for module in ready:
            del waiting[module]
    assert waiting == {}


# Rooms of the layer graph, from the bottom: what all know, names and shapes, traces, what is read
# off them.
GRAPH_LEVELS = ["", "spec", "trace", "analysis"]


def graph_level(module):
    parts = module.split(".")[2:]
    return GRAPH_LEVELS.index(parts[0]) if parts and parts[0] in GRAPH_LEVELS else 0


def test_rooms_of_the_graph_point_down_too():
    upwards = []
    for module in (m for m in MODULES if room(m) == "graph"):
        inside = [name for name in ours(module) if room(name) == "graph"]
        upwards += [(module, n) for n in inside if graph_level(n) > graph_level(module)]
    assert upwards == []


@pytest.mark.parametrize("module", sorted(FLOOR))
def test_floor_stands_on_errors_alone(module):
    allowed = set() if module == "errors" else {f"{NAME}.errors"}
    assert set(ours(f"{NAME}.{module}")) <= allowed


def test_only_solve_imports_solvers():
    assert importers("ot") <= {f"{NAME}.transport.solve"}
    assert importers("scipy.optimize", "lap") <= {f"{NAME}.transport.assignment"}


def test_only_plot_draws():
    assert importers("matplotlib") == {f"{NAME}.plot.drawing"}


def test_only_the_store_knows_fsspec():
    assert importers("fsspec", "huggingface_hub", "aiohttp", "s3fs") == {f"{NAME}.remote.store"}


def test_only_the_strategy_knows_flower():
    assert importers("flwr") == {f"{NAME}.flower"}
    assert importers(f"{NAME}.flower") == set()


def test_only_the_cluster_knows_ray():
    assert importers("ray") == {f"{NAME}.cluster.ray_cluster"}


def test_only_what_opens_workers_knows_the_cluster():
    """So that nothing of Ray, nor of ours for it, is loaded before it is asked for."""
    far = {f"{NAME}.session.far_workers"}
    assert importers(f"{NAME}.cluster.ray_cluster") == far


def test_only_specs_and_weights_are_yaml():
    found = importers("yaml")
    assert {room(module) for module in found} <= {"graph", "requests"}


def test_only_the_top_knows_the_terminal():
    assert {room(module) for module in importers("typer", "rich")} <= LEVELS[0]


def test_graph_and_command_line_hold_no_numbers():
    """Neither torch nor numpy in the rooms that `--help` and the layer graph live in."""
    heavy = importers("torch", "numpy", "scipy", "safetensors")
    light = LEVELS[0] | {"report", "remote", "errors", "output_names"}
    assert {room(module) for module in heavy} & light == set()


def prints(module):
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in {"print", "typer.echo", "typer.secho", "sys.stdout.write"}:
                yield node.lineno
            if called in {"sys.stderr.write", "warnings.warn"}:
                yield node.lineno


# export_settings hands on what the user's own module prints while it is traced.
MAY_PRINT = {f"{NAME}.cli.render", f"{NAME}.graph.trace.export_settings"}


def test_only_the_renderer_prints():
    found = {module: list(prints(module)) for module in MODULES if module not in MAY_PRINT}
    assert {module: lines for module, lines in found.items() if lines} == {}


def test_this_test_sees_relative_and_nested_imports():
    assert f"{NAME}.report.files" in set(ours(f"{NAME}.cli.app"))
    assert f"{NAME}.commands.merge" in set(ours(f"{NAME}.cli.app"))
    assert "typer.core.TyperCommand" in set(imports(f"{NAME}.cli.help"))
