"""From names and shapes to a layer graph: `--arch auto`, a family's name, `mlp`, a spec file.

A bundled family is accepted only when all its tensors are covered, every size fits, and nothing
in the checkpoint speaks against it. What several families explain differently, or none explains,
is refused with the ways to go on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any

from ...errors import IncompatibleModels, UnreadableInput, few
from ...runtime import without_collection
from ..derived_tensors import spec_view
from ..model import LayerGraph, OpKind, Shapes
from .adapters import refuse_adapter
from .bind import bind, first_unproven
from .chain import GIVE_THE_NETWORK
from .chain_evidence import against_chain
from .config_sizes import Config
from .evidence import against_family, against_model
from .grammar import Spec, load_specs, parse_specs
from .patterns import Pattern, Present
from .stored_shapes import in_order, integers

HOW_TO_GO_ON = (
    GIVE_THE_NETWORK + " (a function that makes it; or hf:DIR, timm:NAME, torchvision:NAME); or "
    "describe it: --arch spec.yaml with one line per module (docs/spec.md), --arch FAMILY "
    "({families}), --arch mlp (linear layers in order)"
)

A_CHAIN = "a chain of linear layers, activations unit by unit, no skips"


@cache
def families() -> Mapping[str, tuple[Spec, ...]]:
    """The bundled families: name to spec documents, any of which may fit."""
    by_name: dict[str, list[Spec]] = {}
    folder = resources.files(__package__) / "families"
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        if file.name.endswith(".yaml"):
            stem = file.name.removesuffix(".yaml")
            for spec in parse_specs(file.read_text("utf-8"), where=file.name, name=stem):
                by_name.setdefault(spec.name, []).append(spec)
    return {name: tuple(specs) for name, specs in by_name.items()}


def layer_graph(
    arch: str,
    shapes: Shapes,
    *,
    aliases: Mapping[str, tuple[str, ...]] | None = None,
    config: Config | None = None,
    label: str = "the checkpoint",
) -> LayerGraph:
    """The layer graph of a checkpoint, as `--arch` says.

    Args:
        arch: `auto`, a family's name, `mlp`, or a path to a spec.
        shapes: Shape of every tensor, in the order of the file.
        aliases: Other names of tied tensors.
        config: What the model's config.json says: numbers that shapes don't tell (heads).
        label: What messages call the checkpoint.

    Raises:
        IncompatibleModels: Nothing fits, or several things do.
        UnreadableInput: A spec file that is missing or not YAML.
    """
    with without_collection():
        return _layer_graph(arch, shapes, aliases or {}, config, label)


def _layer_graph(
    arch: str,
    shapes: Shapes,
    aliases: Mapping[str, tuple[str, ...]],
    config: Config | None,
    label: str,
) -> LayerGraph:
    graph = _seen_plainly(arch, shapes, aliases=aliases, config=config, label=label)
    if graph is not None:
        return graph
    bundled = families()
    it = _Evidence(shapes, aliases, config, label)
    if arch in ("auto", "mlp") or arch in bundled:
        refuse_adapter(shapes, label)
    if arch == "auto":
        return _recognise(it, bundled)
    if arch == "mlp":
        return _with_norms_told(it.bind(_mlp(shapes, label), "arch mlp"))
    if arch in bundled:
        return _first_fit(bundled[arch], it)
    if arch.endswith((".yaml", ".yml")):
        specs: list[Spec] = []
        for spec in load_specs(Path(arch)):
            specs.extend(_with_family(spec, bundled, arch))
        likely = [s for s in specs if it.present.all(s.require)]
        return _first_of(likely or specs, it, f"spec {arch}")
    if Path(arch).suffix:
        raise UnreadableInput(
            "not a spec", where=f"--arch {arch}", why="a spec ends in .yaml", fix=_ways(bundled)
        )
    raise IncompatibleModels("unknown architecture", where=f"--arch {arch}", fix=_ways(bundled))


def _seen_plainly(arch: str, shapes: Shapes, **options: Any) -> LayerGraph | None:
    """The graph with the vectors of spectral normalisation left out and put back; None: no such.

    A spec may call a parametrised weight by the name of its layer or by its own.
    """
    seen = spec_view(shapes)
    if not seen.hidden:
        return None
    try:
        return seen.restored(layer_graph(arch, seen.shapes, **options))
    except IncompatibleModels:
        if not seen.names or not arch.endswith((".yaml", ".yml")):
            raise
        seen = spec_view(shapes, rename=False)
        return seen.restored(layer_graph(arch, seen.shapes, **options))


@dataclass(frozen=True)
class _Evidence:
    """What is known of a checkpoint."""

    shapes: Shapes
    aliases: Mapping[str, tuple[str, ...]]
    config: Config | None
    label: str

    @cached_property
    def present(self) -> Present:
        """Its names, to ask for."""
        return Present(self.shapes)

    def bind(self, spec: Spec, where: str) -> LayerGraph:
        return bind(spec, self.shapes, aliases=self.aliases, config=self.config, where=where)


def _with_family(
    spec: Spec, bundled: Mapping[str, tuple[Spec, ...]], path: str
) -> tuple[Spec, ...]:
    """The family that `spec` names, with the sizes that it gives; else the spec itself."""
    if not spec.family:
        return (spec,)
    if spec.family not in bundled:
        raise IncompatibleModels(
            "not a valid spec",
            where=path,
            why=f"no bundled family is called {spec.family!r}",
            fix=f"families are {', '.join(sorted(bundled))}",
        )
    return tuple(replace(f, sizes={**f.sizes, **spec.sizes}) for f in bundled[spec.family])


def _ways(bundled: Mapping[str, object]) -> str:
    return HOW_TO_GO_ON.format(families=", ".join(sorted(bundled)))


def _recognise(it: _Evidence, bundled: Mapping[str, tuple[Spec, ...]]) -> LayerGraph:
    shapes, label = it.shapes, it.label
    fits: list[LayerGraph] = []
    misses: list[IncompatibleModels] = []
    for spec in chain(*bundled.values(), _numbered_chains(shapes)):
        if not it.present.all(spec.require):
            continue
        try:
            fits.append(_fit(spec, it))
        except IncompatibleModels as error:
            misses.append(error)
    different: list[LayerGraph] = []
    for graph in fits:
        if all(graphs_differ(graph, other) for other in different):
            different.append(graph)
    if len(different) == 1:
        return different[0]
    if different:
        names = [g.source for g in different]
        raise IncompatibleModels(
            "ambiguous architecture",
            where=label,
            why=f"the names and shapes fit {' and '.join(names)}, which differ",
            fix=f"choose one with --arch {names[0].removeprefix('family ')}",
        )
    shown = ", ".join(list(shapes)[:4]) + (", ..." if len(shapes) > 4 else "")
    why = f"no bundled family has these names and shapes: {shown}"
    if misses:
        # A name that no line covers says little: any family that knows some names comes that far.
        closest = min(misses, key=lambda miss: miss.what == "a tensor is not covered")
        why = f"closest: {closest.what}: {closest.where}; {closest.why}"
    raise IncompatibleModels("unknown architecture", where=label, why=why, fix=_ways(bundled))


def graphs_differ(one: LayerGraph, other: LayerGraph) -> bool:
    """Whether two graphs of one checkpoint group its axes differently (names don't matter)."""
    table: dict[str, str] = {}
    for name, tensor in one.tensors.items():
        for axis, other_axis in zip(tensor.axes, other.tensors[name].axes, strict=True):
            a = re.findall(r"[A-Za-z_][\w.:]*|\S", str(axis.expr))
            b = re.findall(r"[A-Za-z_][\w.:]*|\S", str(other_axis.expr))
            if len(a) != len(b):
                return True
            for x, y in zip(a, b, strict=True):
                if table.setdefault(x, y) != y:
                    return True
    # Names stand for one another one to one.
    return len(set(table.values())) != len(table)


def _first_fit(specs: Sequence[Spec], it: _Evidence) -> LayerGraph:
    """The first document of a family that fits; when named by hand, ambiguity is the user's say."""
    fitting = [s for s in specs if it.present.all(s.require)] or list(specs)
    for spec in fitting[:-1]:
        try:
            return _fit(spec, it, cautious=False)
        except IncompatibleModels:
            continue
    return _fit(fitting[-1], it, cautious=False)


def _first_of(specs: Sequence[Spec], it: _Evidence, where: str) -> LayerGraph:
    """The first document of a spec file that fits; what speaks against its family counts."""

    def bound(spec: Spec) -> LayerGraph:
        graph = it.bind(spec, where)
        if spec.require and (why := next(against_family(spec, graph, it.shapes), None)) is not None:
            raise _doubt(where, why)
        return graph

    for spec in specs[:-1]:
        try:
            return bound(spec)
        except IncompatibleModels:
            continue
    return bound(specs[-1])


def _fit(spec: Spec, it: _Evidence, *, cautious: bool = True) -> LayerGraph:
    """Bind a family, and refuse it where something in the checkpoint speaks against it."""
    where = f"family {spec.name}"
    graph = it.bind(spec, where)
    if (why := first_unproven(graph)) is not None:
        raise _doubt(where, why)
    # Who names the family answers for its name; what contradicts its structure counts all the same.
    signs = against_family(spec, graph, it.shapes)
    if cautious:
        signs = chain(signs, against_model(spec, it.config))
        if spec.chain:
            signs = chain(signs, against_chain(spec, it.shapes))
    if (why := next(signs, None)) is not None:
        raise _doubt(where, why)
    return _with_norms_told(graph) if spec.name == "mlp" else graph


def _with_norms_told(graph: LayerGraph) -> LayerGraph:
    """Norms without running statistics are no sign against linear layers; they are declared."""
    norms = [op.name for op in graph.ops if op.kind is OpKind.NORM and op.detail == "layer"]
    if not norms:
        return graph
    return replace(graph, assumes=f"{graph.assumes}, {few(norms)} a LayerNorm over all units")


def _doubt(where: str, why: str) -> IncompatibleModels:
    return IncompatibleModels("a family does not fit", where=where, why=why)


def _numbered_chains(shapes: Shapes) -> Iterator[Spec]:
    """A net whose layers are one numbered list: fc1..fc4, 0..6, layers.0..layers.4."""
    whole = integers(shapes)
    # Whatever else the file holds will be named as what no line covers.
    prefixes: set[str] = set()
    for name, shape in shapes.items():
        module = name.rpartition(".")[0]
        if len(shape) > 1 and name not in whole and re.search(r"\d$", module):
            prefixes.add(re.sub(r"\d+$", "", module))
    if len(prefixes) == 1:
        deep = any(len(shape) > 2 for n, shape in shapes.items() if n not in whole)
        norms = "batch" if deep else ""
        chain = (Pattern(f"{prefixes.pop()}*"),)
        yield Spec("mlp", chain=chain, act="relu", norms=norms, assumes=A_CHAIN)


def _mlp(shapes: Shapes, label: str) -> Spec:
    """Every linear layer, in order; the user says so."""
    whole = integers(shapes)
    floating = [n for n in in_order(shapes) if shapes[n] and n not in whole]
    deep = next((n for n in floating if len(shapes[n]) > 2), None)
    if deep is not None:
        raise IncompatibleModels(
            "not an MLP",
            where=f"{deep} {list(shapes[deep])} of {label}",
            why="it has more than two axes",
            fix=f"{GIVE_THE_NETWORK}, or write a spec (docs/spec.md)",
        )
    modules = dict.fromkeys(n.rpartition(".")[0] for n in floating)
    return Spec("mlp", chain=tuple(Pattern(m) for m in modules), act="relu", assumes=A_CHAIN)
