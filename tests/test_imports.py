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
    {
        "app",
        "comparisons",
        "help",
        "option_table",
        "options",
        "outcomes",
        "render",
        "running",
        "tables",
    },
    {"", "commands"},
    {"plot"},
    {"prune", "fuse"},
    {"align"},
    {"network"},
    {"graph"},
    {"transport"},
    {"stored"},
    {"checkpoint"},
    {"report", "errors", "runtime", "values"},
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


def imports(module):
    """Absolute names of everything a module imports, inside functions too."""
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, base]) if base else ".".join(parent)
            yield from (f"{base}.{alias.name}" for alias in node.names)


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


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
    upwards = [name for name in ours(module) if LEVEL[room(name)] < LEVEL[room(module)]]
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


def test_only_specs_and_weights_are_yaml():
    found = importers("yaml") - {f"{NAME}.commands.weights"}
    assert {room(module) for module in found} <= {"graph"}


def test_only_the_top_knows_the_terminal():
    assert {room(module) for module in importers("typer", "rich")} <= LEVELS[0]


def test_graph_and_command_line_hold_no_numbers():
    """Neither torch nor numpy in the rooms that `--help` and the layer graph live in."""
    heavy = importers("torch", "numpy", "scipy", "safetensors")
    assert {room(module) for module in heavy} & (
        LEVELS[0] | {"stored", "report", "errors"}
    ) == set()


def prints(module):
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in {"print", "typer.echo", "typer.secho", "sys.stdout.write"}:
                yield node.lineno
            if called in {"sys.stderr.write", "warnings.warn"}:
                yield node.lineno


# manners hands on what the user's own module prints while it is traced.
MAY_PRINT = {f"{NAME}.render", f"{NAME}.graph.manners"}


@pytest.mark.parametrize("module", [m for m in MODULES if m not in MAY_PRINT])
def test_only_the_renderer_prints(module):
    assert list(prints(module)) == []


def test_this_test_sees_relative_and_nested_imports():
    assert f"{NAME}.stored" in set(ours(f"{NAME}.app"))
    assert f"{NAME}.commands.merge" in set(ours(f"{NAME}.app"))
    assert "typer.core.TyperCommand" in set(imports(f"{NAME}.help"))
