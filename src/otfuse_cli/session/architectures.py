"""`--arch` of several checkpoints: what each of them is, where they need networks of their own.

One network serves all as long as its code takes their widths. A factory that is given the shapes,
or one for each checkpoint (`INDEX=SPEC`), makes one for every set of widths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoint.config import read_config
from ..checkpoint.open import Checkpoint
from ..errors import UsageError
from ..requests.indexed_option import per_index
from ..running.arch_value import Arch, arch_label
from ..running.architecture import Architecture
from ..running.user_code import names_a_module


def arch_of_each(arch: Any, count: int) -> tuple[Arch, ...]:
    """What `--arch` says of each of `count` checkpoints.

    Raises:
        UsageError: No such checkpoint, one named twice, something that is no network, or networks
            to run beside names and shapes.
    """
    by_index = per_index(arch, count, "--arch")
    arches = tuple(
        _checked("auto" if by_index[at] is None else by_index[at]) for at in range(count)
    )
    silent = [at for at, one in enumerate(arches) if not is_runnable(one)]
    if silent and len(silent) < count:
        other = next(at for at in range(count) if at not in silent)
        said = [f"{at}={arch_label(arches[at])}" for at in sorted((other, silent[0]))]
        raise UsageError(
            "a network to run for one checkpoint, names and shapes for another",
            where=f"--arch {said[0]}, --arch {said[1]}",
            why=f"only a network can be compared with that of checkpoint {other}",
            fix=f"give one too: --arch {silent[0]}=file.py:factory; or one for all, without INDEX",
        )
    return arches


def arch_record(arch: Any, count: int) -> str | list[str]:
    """`--arch` as the report holds it: one text, or one for each checkpoint where they differ."""
    labels = [arch_label(one) for one in arch_of_each(arch, count)]
    return labels if len(set(labels)) > 1 else labels[0]


def built_from(arch: Arch, path: Path | None) -> Mapping[str, Any] | None:
    """The config.json that a network is built from: of `hf:DIR`, or the one beside a checkpoint."""
    if isinstance(arch, str) and arch.startswith("hf:"):
        return read_config(Path(arch.removeprefix("hf:")))
    return read_config(path)


def is_runnable(arch: Arch) -> bool:
    """Whether it is a network that runs, not names and shapes."""
    return names_a_module(arch) or (isinstance(arch, str) and arch.endswith(".pt2"))


def layers_of(shapes: Mapping[str, Sequence[int]]) -> frozenset[str]:
    """What layers a checkpoint has: tensors with several axes, by name.

    What else two checkpoints differ in (a counter, a bias) makes them no networks of other depth.
    """
    return frozenset(name for name, shape in shapes.items() if len(shape) > 1)


def own_architectures(
    shared: Architecture,
    checkpoints: Sequence[Checkpoint],
    of: int,
    arches: Sequence[Arch],
    find: Callable[[int], Architecture],
    *,
    any_depth: bool = False,
) -> dict[int, Architecture]:
    """Architectures of the checkpoints that need one of their own, by position.

    Args:
        shared: The architecture of the others.
        checkpoints: All of them.
        of: The checkpoint that `shared` was found for.
        arches: What `--arch` says of each.
        find: The architecture of one checkpoint.
        any_depth: Checkpoints with other tensors have other networks, whoever makes them.
    """
    shapes = [{name: info.shape for name, info in c.infos.items()} for c in checkpoints]
    built: list[tuple[int, Architecture]] = [(of, shared)]
    separate: dict[int, Architecture] = {}
    for at, arch in enumerate(arches):
        twin = next((k for o, k in built if arches[o] == arch and shapes[o] == shapes[at]), None)
        alike = not any_depth or layers_of(shapes[at]) == layers_of(shapes[of])
        if twin is None and alike and arch == arches[of] and not shared.takes_shapes:
            twin = shared  # its code is run with tensors of other widths
        if twin is None:
            twin = find(at)
            built.append((at, twin))
        if twin is not shared:
            separate[at] = twin
    return separate


def _checked(arch: Any) -> Arch:
    if isinstance(arch, Path):
        return str(arch)
    if isinstance(arch, str) or callable(arch):
        named: Arch = arch
        return named
    raise UsageError(
        "no network",
        where=f"--arch {type(arch).__name__}",
        why="it is a name, a function that returns a torch.nn.Module, or a module",
        fix="for several checkpoints: {0: ..., 1: ...}",
    )
