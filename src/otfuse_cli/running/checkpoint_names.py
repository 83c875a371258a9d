"""What a checkpoint calls the tensors of a module, one by one."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from torch import nn

from ..errors import IncompatibleModels, only_in
from ..graph.model import Shapes
from .user_code import saved_names

Aliases = Mapping[str, tuple[str, ...]]


def stored_names(names: Mapping[str, str], shapes: Shapes) -> dict[str, str]:
    """The names of those of a module's tensors that the checkpoint holds."""
    return {name: ours for name, ours in names.items() if ours in shapes}


def required_names(
    module: nn.Module, shapes: Shapes, aliases: Aliases, label: str, arch: str
) -> dict[str, str]:
    """The checkpoint's name for each of the module's tensors; for tied ones, the stored name.

    Raises:
        IncompatibleModels: A tensor of the checkpoint that the module lacks, or the reverse.
    """
    state = module.state_dict(keep_vars=True)
    names = checkpoint_names(module, shapes, aliases)
    tied: dict[int, list[str]] = {}  # by identity: names of one tensor stand together
    for name, tensor in state.items():
        tied.setdefault(id(tensor), []).append(name)
    for group in tied.values():
        stored = next((names[n] for n in group if names[n] in shapes), None)
        if stored is not None:
            names[group[0]] = stored
    covered = {names[group[0]] for group in tied.values()}
    missing = sorted(covered - shapes.keys())
    # A counter or a constant buffer that the checkpoint doesn't hold has no units to move.
    parameters = {names[name] for name, _ in module.named_parameters()}
    missing = [name for name in missing if name in parameters]
    extra = sorted(shapes.keys() - covered)
    twice = [n for n in extra if n in names.values()]
    if twice and twice == extra and not missing:
        group = next(g for g in tied.values() if any(names[name] == twice[0] for name in g))
        raise IncompatibleModels(
            "the module ties tensors that are stored with different values",
            where=f"{names[group[0]]} and {twice[0]} of {label}; --arch {arch}",
            why="one tensor of the module can't hold both",
            fix="build the module untied (tie_word_embeddings=False)",
        )
    if missing or extra:
        sides = []
        if extra:
            sides.append(only_in(extra, label, "the module"))
        if missing:
            sides.append(only_in(missing, "the module", label))
        raise IncompatibleModels(
            "the module and the checkpoint hold different tensors",
            where=f"--arch {arch} and {label}",
            why="; ".join(sides),
            fix="build the module that the checkpoint was saved from",
        )
    return {name: ours for name, ours in names.items() if ours in shapes or name != ours}


def checkpoint_names(module: nn.Module, shapes: Shapes, aliases: Aliases) -> dict[str, str]:
    """What the checkpoint calls, or would call, each of the module's tensors."""
    state = module.state_dict(keep_vars=True)
    stored = {*shapes, *chain.from_iterable(aliases.values())}
    saved = saved_names(module) if state.keys() - stored else {}
    saved = {name: saved.get(name, name) for name in state}
    prefix = _prefix(set(saved.values()), stored)
    stripped = {name: ours.removeprefix(prefix[0]) for name, ours in saved.items()}
    return {name: prefix[1] + ours for name, ours in stripped.items()}


def _prefixes(names: set[str]) -> set[str]:
    """Every run of whole parts that some name begins with: `model.`, `model.encoder.`."""
    prefixes: set[str] = set()
    for name in names:
        parts = name.split(".")
        for at in range(1, len(parts)):
            prefixes.add(".".join(parts[:at]) + ".")
    return prefixes


def _prefix(module: set[str], checkpoint: set[str]) -> tuple[str, str]:
    """(prefix of the module's names, prefix of the checkpoint's): one holds the other's inside."""
    best = ("", "")
    overlap = len(module & checkpoint)
    for names, other, in_module in ((module, checkpoint, True), (checkpoint, module, False)):
        for prefix in _prefixes(names):
            inside = {n.removeprefix(prefix) for n in names if n.startswith(prefix)}
            if len(inside & other) > overlap:
                overlap = len(inside & other)
                best = (prefix, "") if in_module else ("", prefix)
    return best
