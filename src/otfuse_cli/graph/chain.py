"""Plain chains: layers that feed one another in order, nothing beside them.

Turns `chain: [features.*, classifier.*]` into spec lines. The input of a layer is the output of
the one before, times a fixed factor where a feature map was flattened.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ..errors import IncompatibleModels
from .order import base_order
from .patterns import Pattern
from .spec import PINNED, Line


def chain_modules(
    patterns: Sequence[Pattern], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, list[str]]:
    """Modules that the patterns name, pattern by pattern, in order, with their tensors."""
    modules: dict[str, list[str]] = {}
    for name in base_order(list(shapes)):
        if shapes[name]:
            modules.setdefault(name.rpartition(".")[0], []).append(name)
    found: dict[str, list[str]] = {}
    for pattern in patterns:
        candidates = [pattern.text] if pattern.literal else list(modules)
        for module in candidates:
            if module in modules and module not in found and pattern.match(module) is not None:
                found[module] = modules[module]
    return found


def matrix_of(tensors: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """The tensor of two or more axes among a module's tensors, None for a norm."""
    return next((t for t in tensors if len(shapes[t]) > 1), None)


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
    layers = {m: w for m, ts in modules.items() if (w := matrix_of(ts, shapes)) is not None}
    if not layers:
        raise IncompatibleModels(
            "the chain is empty",
            where=f"chain: [{', '.join(p.text for p in patterns)}] of {where}",
            why="no layer of the checkpoint has such a name",
            fix="name the modules that hold the layers, for example features.*",
        )
    last = list(layers)[-1]
    lines: list[Line] = []
    before, width, group = "in", 0, ""
    for module in modules:
        if module not in layers:  # a norm on the output of the layer before it
            if not group:
                raise _broken(module, modules[module][0], where, "a norm comes before any layer")
            line = lines[-1]
            lines[-1] = Line((*line.patterns, Pattern(module)), line.text, line.out, line.inp)
            continue
        weight = layers[module]
        rows, columns = shapes[weight][:2]
        factor, rest = divmod(columns, width) if width else (1, 0)
        if rest or not factor or (factor > 1 and len(shapes[weight]) > 2):
            why = f"axis 1 has {columns} positions, the layer before it makes {width}"
            raise _broken(module, weight, where, why)
        group = "out" if module == last else _space(module)
        source = before if factor == 1 else f"{before} * {factor}"
        lines.append(Line((Pattern(module),), f"{group} <- {source}", out=group, inp=source))
        before, width = group, rows
    return tuple(lines)


def _space(module: str) -> str:
    """A name that the expression grammar takes: modules of a bare Sequential are numbers."""
    name = re.sub(r"[^\w.]", "_", module)
    plain = (name[:1].isalpha() or name[:1] == "_") and name not in PINNED
    return name if plain else f"layer_{name}"


def _broken(module: str, tensor: str, where: str, why: str) -> IncompatibleModels:
    return IncompatibleModels(
        "not a plain chain",
        where=f"{tensor}, module {module}, of {where}",
        why=why,
        fix="write a spec with one line per module (docs/spec.md)",
    )
