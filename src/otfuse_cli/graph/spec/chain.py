"""Plain chains: layers that feed one another in order, nothing beside them.

Turns `chain: [features.*, classifier.*]` into spec lines. The input of a layer is the output of
the one before, times a fixed factor where a feature map was flattened.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ...errors import IncompatibleModels
from ..model import PINNED
from .grammar import Line
from .order import natural_key
from .patterns import Pattern
from .stored_shapes import in_order, integers

GIVE_THE_NETWORK = "give the network: --arch net.py:make_net"


def chain_modules(
    patterns: Sequence[Pattern], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, list[str]]:
    """Modules that the patterns name, pattern by pattern, in order, with their tensors."""
    modules: dict[str, list[str]] = {}
    whole = integers(shapes)
    for name in in_order(shapes):
        if shapes[name] and name not in whole:
            modules.setdefault(name.rpartition(".")[0], []).append(name)
    in_chain: dict[str, list[str]] = {}
    for pattern in patterns:
        candidates = [pattern.text] if pattern.literal else modules
        named = [m for m in candidates if m in modules and pattern.match(m) is not None]
        for module in _numbered(named):
            in_chain.setdefault(module, modules[module])
    return in_chain


def _numbered(modules: list[str]) -> list[str]:
    """Children of a Sequential by their numbers, whatever the order of the file; others as given.

    Files in several parts list their tensors part by part.
    """
    numbers = [module.rpartition(".")[2] for module in modules]
    return sorted(modules, key=natural_key) if all(map(str.isdigit, numbers)) else modules


def matrix_of(tensors: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """The tensor of two or more axes among a module's tensors, None for a norm."""
    return next((t for t in tensors if len(shapes[t]) > 1), None)


def weights_of(
    modules: Mapping[str, Sequence[str]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """The matrix of every module that has one."""
    weights: dict[str, str] = {}
    for module, tensors in modules.items():
        matrix = matrix_of(tensors, shapes)
        if matrix is not None:
            weights[module] = matrix
    return weights


def chain_lines(
    patterns: Sequence[Pattern], shapes: Mapping[str, tuple[int, ...]], where: str
) -> tuple[Line, ...]:
    """Spec lines of the chain; spaces are called after the module that makes them.

    Raises:
        IncompatibleModels: The layers don't follow one another, naming tensor and axis.
    """
    if not patterns:
        return ()
    modules = chain_modules(patterns, shapes)
    layers = weights_of(modules, shapes)
    if not layers:
        raise IncompatibleModels(
            "the chain is empty",
            where=f"chain: [{', '.join(p.text for p in patterns)}] of {where}",
            why="no layer of the checkpoint has such a name",
            fix="name the modules that hold the layers, for example features.*",
        )
    last = list(layers)[-1]
    lines: list[Line] = []
    # What the layer before made: its space, how wide it is, and whether positions go with it.
    before, width, group, deep = "in", 0, "", False
    for module in modules:
        if module not in layers:  # a norm on the output of the layer before it
            if not group:
                raise _broken(
                    module,
                    _shown(modules[module][0], shapes),
                    where,
                    "a norm comes before any layer",
                )
            line = lines[-1]
            lines[-1] = Line((*line.patterns, Pattern(module)), line.text, line.out, line.inp)
            continue
        weight = layers[module]
        rows, columns = shapes[weight][:2]
        # A linear layer behind a convolution reads every channel once for each position.
        factor, rest = divmod(columns, width) if width else (1, 0)
        if rest or not factor or (factor > 1 and len(shapes[weight]) > 2):
            why = f"axis 1 has {columns} positions, the layer before it makes {width}"
            raise _broken(module, _shown(weight, shapes), where, why)
        if factor > 1 and not deep:
            # Nothing is flattened between two linear layers: two branches are put together here.
            why = f"axis 1 has {columns} positions, {factor} times the {width} that the linear "
            raise _broken(module, _shown(weight, shapes), where, why + "layer before it makes")
        group = "out" if module == last else _space(module)
        source = before if factor == 1 else f"{before} * {factor}"
        lines.append(Line((Pattern(module),), f"{group} <- {source}", out=group, inp=source))
        before, width, deep = group, rows, len(shapes[weight]) > 2
    return tuple(lines)


def _space(module: str) -> str:
    """A name that the expression grammar takes: modules of a bare Sequential are numbers."""
    name = re.sub(r"[^\w.]", "_", module)
    plain = (name[:1].isalpha() or name[:1] == "_") and name not in PINNED
    return name if plain else f"layer_{name}"


def _shown(name: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    return f"{name} {list(shapes[name])}"


def _broken(module: str, tensor: str, where: str, why: str) -> IncompatibleModels:
    return IncompatibleModels(
        "not a plain chain",
        where=f"{tensor}, module {module}, of {where}",
        why=why,
        fix=f"{GIVE_THE_NETWORK}, or write a spec with one line per module (docs/spec.md)",
    )
