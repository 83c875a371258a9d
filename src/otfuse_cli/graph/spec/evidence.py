"""What in a checkpoint speaks against a family whose names and shapes it has.

Names and shapes are a hypothesis. What contradicts it is told in words that name the tensors; what
remains possible is declared (`LayerGraph.assumes`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise

from ..model import LayerGraph, Op, OpKind, Shapes
from .config_sizes import Config
from .grammar import Spec
from .line_match import GAINS
from .patterns import Pattern
from .stored_shapes import in_defined_order

LAYERS = (OpKind.LINEAR, OpKind.CONV)
_SHIFTS = {"bias", "beta"}


def against_family(spec: Spec, graph: LayerGraph, shapes: Shapes) -> Iterator[str]:
    """Signs that hold whoever named the family."""
    yield from _wrong_norms(spec, graph)
    if spec.norms == "uniform":
        yield from _missing_norms(graph)
    if spec.norms in ("uniform", "batch"):
        yield from _norms_out_of_place(graph, shapes)
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in shapes))
    yield from _both_of_either(spec, modules)
    yield from _two_backbones(spec, modules)
    yield from _gaps(spec, modules)


def against_model(spec: Spec, config: Config | None) -> Iterator[str]:
    """A config.json that calls the model something else."""
    model_type = (config or {}).get("model_type")
    if spec.models and isinstance(model_type, str) and model_type not in spec.models:
        yield (
            f"config.json says that the model is a {model_type}, and the family is "
            f"{', '.join(spec.models)}"
        )


def _wrong_norms(spec: Spec, graph: LayerGraph) -> Iterator[str]:
    """GroupNorm mixes the units of a group, and LayerNorm all of them; BatchNorm mixes none."""
    for op in graph.ops:
        if op.kind is not OpKind.NORM:
            continue
        affine = bool(op.tensors.keys() & GAINS) and bool(op.tensors.keys() & _SHIFTS)
        # Names and shapes of a GroupNorm are those of a BatchNorm, but for the statistics.
        if spec.norms in ("uniform", "batch") and affine and "running_mean" not in op.tensors:
            yield (
                f"{_listed(op)} are a norm without running statistics, where the family has "
                "BatchNorm; GroupNorm, which mixes units, looks the same"
            )
        if spec.norms in ("layer", "rms") and "running_mean" in op.tensors:
            yield f"{_listed(op)} are a BatchNorm, where the family has another norm"
        if spec.norms == "rms" and op.tensors.keys() & _SHIFTS:
            yield f"{_listed(op)} are a norm with a bias, where the family has RMSNorm"


def _listed(op: Op) -> str:
    return ", ".join(op.tensors.values())


def _missing_norms(graph: LayerGraph) -> Iterator[str]:
    """Pre-activation variants have the same names but a layer without its norm somewhere."""
    writers = [op for op in graph.ops if op.kind in (*LAYERS, OpKind.NORM)]
    bare = normed = None
    for op, after in pairwise(writers):
        if op.kind is OpKind.CONV:
            if after.kind is OpKind.NORM:
                normed = op.name
            else:
                bare = op.name
    if bare and normed:
        yield f"{normed} is followed by a norm, {bare} is not"


def _norms_out_of_place(graph: LayerGraph, shapes: Shapes) -> Iterator[str]:
    """A class defines a norm right behind its layer: elsewhere, it also runs elsewhere."""
    listed = in_defined_order(shapes)
    if listed is None:
        return
    place = {name: at for at, name in enumerate(listed)}
    pairs: list[tuple[int, int]] = []
    for layer, norm in pairwise(graph.ops):
        follows = (
            layer.kind in LAYERS and norm.kind is OpKind.NORM and norm.reads[0] == layer.writes
        )
        weight, bias = norm.tensors.get("weight"), norm.tensors.get("bias")
        # A part of the file that is sorted by name (bias before weight) tells nothing.
        if follows and weight and bias and place[weight] < place[bias]:
            # The weight goes by another part's name where it is computed (spectral norms).
            made = next(n for part, n in layer.tensors.items() if part.startswith("weight"))
            pairs.append((place[made], place[weight]))
    pairs.sort()
    for at, behind in pairs:
        if behind < at:
            yield f"{listed[behind]} is listed before {listed[at]}: a norm in front of its layer"
        first, last = bisect_left(pairs, (at + 1, 0)), bisect_left(pairs, (behind, 0))
        # Two at least: a block may define all its layers first, then all its norms.
        if sum(norm < behind for _, norm in pairs[first:last]) > 1:
            yield (
                f"{listed[behind]} is listed far behind {listed[at]}, after other layers and their "
                "norms: a norm at the end of the network"
            )


def _both_of_either(spec: Spec, modules: list[str]) -> Iterator[str]:
    """Two layers that read the same units, of which the family has one."""
    for names in spec.either:
        met: dict[object, tuple[Pattern, str]] = {}
        for module in modules:
            for pattern in names:
                match = pattern.match(module)
                if match is None:
                    continue
                key = tuple(sorted(match.numbers.items()))
                first, other = met.setdefault(key, (pattern, module))
                if first is not pattern:
                    yield f"{other} and {module} are both there, and the family has one of them"


def _two_backbones(spec: Spec, modules: list[str]) -> Iterator[str]:
    """Names with and without the family's prefix: two networks, where a line would see one."""
    for line in spec.lines:
        for pattern in line.patterns:
            # Names of a backbone may have a prefix where it is part of a model: `(bert.)?encoder`.
            prefix, optional, _ = pattern.text.removeprefix("(").partition(")?")
            if not (optional and pattern.text.startswith("(") and prefix.endswith(".")):
                continue
            inside = outside = ""
            for module in modules:
                if pattern.match(module) is None:
                    continue
                if module.startswith(prefix):
                    inside = inside or module
                else:
                    outside = outside or module
            if inside and outside:
                yield f"{inside} and {outside} are both there, and the family has one of them"
                return


def _gaps(spec: Spec, modules: list[str]) -> Iterator[str]:
    """Blocks are numbered without a gap; what is missing has no tensors and runs all the same."""
    for pattern in spec.require:
        runs: dict[tuple[int, ...], dict[int, str]] = {}
        for module in modules:
            match = pattern.match(module)
            if match is not None and match.numbers:
                *outer, number = match.numbers.values()
                runs.setdefault(tuple(outer), {})[number] = module
        for numbers in runs.values():
            for one, after in pairwise(sorted(numbers)):
                if after > one + 1:
                    yield f"{numbers[after]} follows {numbers[one]}: a number is missing between"
