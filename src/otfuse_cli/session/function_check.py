"""Promise 2, checked on the real maps: an aligned source computes what it computed before.

What was run decides the word. A network that the user or a library gave proves it (`kept`); one
that we built from names and shapes proves our arithmetic only, so the graph stays `assumed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from ..errors import NETWORKS, GateFailed, IncompatibleModels, SolveFailed
from ..fusion.average import Aligned
from ..fusion.fused import Fused
from ..graph.model import LayerGraph
from ..matching.apply import transport
from ..matching.models import Model
from ..report.records import Checks
from ..running.architecture import Architecture, module_state, real_network
from ..running.factory import Network
from ..running.function_change import Change, change_allowed, outputs_of
from ..running.relabel import draw_maps, relabel_state
from ..transport.maps import Permutation
from .parents import Parents

# Two copies of the source are held for the check; larger models are not worth that much memory.
_LARGEST_BYTES = 2 << 30

Verdict = tuple[Checks, tuple[str, ...]]
Reader = Callable[[str], torch.Tensor]


def declared(graph: LayerGraph) -> Checks:
    """What can be said of the function before anything is run: that it is assumed, or nothing."""
    if graph.assumes is None:
        return Checks()
    return Checks("assumed", assumption=graph.assumes)


def require_proof(graph: LayerGraph, align: str = "wts", *, asked: bool) -> None:
    """`--require-proof` (`asked`), as far as it can be told before any work is done.

    Raises:
        GateFailed: Names and shapes are all that the graph rests on, or nothing will be aligned.
    """
    if asked and align == "none":
        raise _not_proven("--align none", "nothing is aligned", "use --align wts")
    if asked and graph.assumes is not None:
        fix = f"give the network: {NETWORKS}"
        raise _not_proven(graph.source, f"assumed: {graph.assumes}", fix)


def require_kept(checks: Checks, remarks: Sequence[str], graph: LayerGraph, *, asked: bool) -> None:
    """`--require-proof` (`asked`), once the network was run, or was not.

    Raises:
        GateFailed: It was not run, with the reason.
    """
    if asked and checks.function != "kept":
        why = "; ".join(remarks) or "no source was aligned, so that nothing had to be run"
        raise _not_proven(graph.source, why, "leave out --require-proof, or remove the reason")


def _not_proven(where: str, why: str, fix: str) -> GateFailed:
    return GateFailed("the function is not proven (--require-proof)", where=where, why=why, fix=fix)


def check_function(parents: Parents, aligned: Sequence[Aligned], *, seed: int = 0) -> Verdict:
    """Run the sources before and after alignment, and compare outputs.

    A source whose units are permuted is run with its own maps. Where units are merged (different
    widths, soft maps), nothing is kept exactly by design: there the anchor is run with its units
    in a random order, which shows that the graph is right.

    Returns:
        The verdict (null where nothing was aligned or could be run), and remarks on what was not
        checked.

    Raises:
        SolveFailed: The outputs differ by more than rounding.
    """
    if not aligned:
        return Checks(), ()
    architecture = parents.shared_architecture
    verdict = declared(architecture.graph)
    unlike = [a for a in aligned if a.alignment.overrides or a.alignment.scales]
    if architecture.network is None:
        return verdict, ()
    if unlike and not any(a.alignment.hard for a in aligned):
        return verdict, ("the function was not checked: these maps don't keep it",)
    if not parents.complete:
        return verdict, ("the function was not checked: not every model has all that is run",)
    if too_large(parents.anchor):
        return verdict, (size_remark(parents.anchor),)
    anchor = parents.architecture(parents.anchor_index)
    network = real_network(anchor)
    assert network is not None
    worst = 0.0
    for source in aligned:
        if source.alignment.hard:
            of_source = parents.architecture(source.model.index)
            worst = max(worst, _checked_source(network, anchor, source, of_source))
    if not all(a.alignment.hard for a in aligned):
        try:
            change = _reordered(network, anchor, parents.anchor, seed)
        except RuntimeError as error:  # a module that runs at the widths it was built with only
            return verdict, (f"the function was not checked: {first_line(error)}",)
        worst = max(worst, _required(change, parents.anchor, "the anchor in another order"))
    if verdict.function == "assumed":
        return Checks("assumed", worst, verdict.assumption), ()
    if unlike:
        return Checks(), ("the function was not checked: some of the maps don't keep it",)
    return Checks("kept", worst), tuple(_only_alike(parents, anchor, aligned))


def _only_alike(
    parents: Parents, anchor: Architecture, aligned: Sequence[Aligned]
) -> Iterator[str]:
    """Sources of other widths whose network is other code: running can't compare the two."""
    for source in aligned:
        of_source = parents.architecture(source.model.index)
        if of_source is not anchor and not of_source.takes_shapes and not source.alignment.hard:
            yield (
                f"{source.model.checkpoint.label} has a network of its own and other widths: that "
                "both compute alike is shown by their operations only"
            )


def reordered_change(
    architecture: Architecture, model: Model
) -> tuple[Change | None, tuple[str, ...]]:
    """Change of a model's outputs with its units in another order.

    Returns:
        None, and why, where that can't be run.
    """
    if architecture.network is None:
        return None, ()
    if too_large(model):
        return None, (size_remark(model),)
    network = real_network(architecture)
    assert network is not None
    try:
        return _reordered(network, architecture, model, seed=0), ()
    except RuntimeError as error:  # a module that runs at the widths it was built with only
        return None, (f"the function was not checked: {first_line(error)}",)


def check_fused_outputs(parents: Parents, fused: Fused) -> tuple[str, ...]:
    """Run the fused network once on its example inputs: what comes out has to be finite.

    Returns:
        Remarks: why it was not run, or that the anchor's own outputs are not finite either.

    Raises:
        SolveFailed: They aren't, and the anchor's are.
    """
    of_anchor, whole = parents.architecture(parents.anchor_index), fused.whole
    if of_anchor.network is None or not parents.complete:
        return ()
    if too_large(whole):
        return (f"the fused network was not run: {_held(whole)}",)
    infos = whole.checkpoint.infos

    def averaged(name: str) -> torch.Tensor:
        return fused.tensor(name, dtype=infos[name].dtype)

    try:
        network = _network_of(of_anchor, parents, averaged)
        outputs = _outputs(network, of_anchor, averaged)
    except (RuntimeError, IncompatibleModels) as error:
        return (f"the fused network was not run: {first_line(error)}",)
    if all(bool(torch.isfinite(y).all()) for y in outputs):
        return ()
    # Some networks mark what they rule out by infinities: the anchor shows which.
    given = parents.models[parents.named_anchor]
    model = whole if parents.given_anchor is None else given
    of_model = parents.architecture(parents.named_anchor)
    expected = _outputs(_network_of(of_model, parents, model.stored), of_model, model.stored)
    if not any(
        bool((torch.isfinite(b) & ~torch.isfinite(a)).any())
        for a, b in zip(outputs, expected, strict=True)
    ):
        return ("outputs on the example inputs are not finite, and neither are the anchor's",)
    raise SolveFailed(
        "the fused network's outputs are not finite",
        where=f"{of_anchor.graph.source}, on its example inputs",
        why=f"the anchor's are ({whole.checkpoint.label}); fusing broke something",
        fix="try --repair none, or leave tensors out of the average with --skip",
    )


def _network_of(architecture: Architecture, parents: Parents, read: Reader) -> Network:
    """The network to run a model at the result's widths in."""
    if parents.given_anchor is None:
        network = real_network(architecture)
        assert network is not None
        return network
    from ..running.runnable import network_at

    return network_at(architecture, {n: read(n) for n in parents.whole.checkpoint.infos})


def first_line(error: Exception) -> str:
    """What an error says first."""
    return str(error).strip().partition("\n")[0]


def too_large(model: Model) -> bool:
    """Whether a model is not worth the memory of several copies."""
    return sum(i.nbytes for i in model.checkpoint.infos.values()) > _LARGEST_BYTES


def _held(model: Model) -> str:
    size = sum(info.nbytes for info in model.checkpoint.infos.values())
    return f"each model holds {size >> 30} GiB"


def size_remark(model: Model) -> str:
    """Why a large model was not checked."""
    return f"the function was not checked: {_held(model)}"


def _checked_source(
    network: Network, anchor: Architecture, source: Aligned, of_source: Architecture
) -> float:
    """Relative change of a hard-mapped source's outputs: in its own network, then in the anchor's.

    Raises:
        SolveFailed: It is more than rounding.
    """
    model = source.model
    source_network = network if of_source is anchor else real_network(of_source)
    assert source_network is not None
    before = module_state(source_network, of_source.names, model.stored)
    after = module_state(network, anchor.names, partial(_aligned, source))
    change = _change(source_network, model.graph, before, after, _indices(source), network)
    other = (
        () if source_network is network else (f"or {of_source.graph.source} is another network",)
    )
    return _required(change, model, "an aligned source", *other)


def _reordered(network: Network, architecture: Architecture, model: Model, seed: int) -> Change:
    """Change of a model's outputs with its units in a random order."""
    graph = model.graph
    stored = {name: model.stored(name) for name in model.checkpoint.infos}
    maps = draw_maps(graph, torch.Generator().manual_seed(seed))
    moved = relabel_state(stored, graph, maps)
    before, after = (
        module_state(network, architecture.names, s.__getitem__) for s in (stored, moved)
    )
    return _change(network, graph, before, after, maps)


def _required(change: Change, model: Model, what: str, *more: str) -> float:
    if change.error <= change.allowed:
        return change.error
    raise SolveFailed(
        f"{what} computes something else",
        where=f"{model.checkpoint.label}: outputs differ by {change.error:.2g} (relative)",
        why=", ".join((f"{model.graph.source} calls units interchangeable that are not", *more)),
        fix="find the claim with otfuse check, or correct the spec",
    )


def _aligned(source: Aligned, name: str) -> torch.Tensor:
    model = source.model
    return transport(model.stored(name), name, model.graph, source.alignment)


def _indices(source: Aligned) -> dict[str, torch.Tensor]:
    """The hard maps as index vectors; of a family, one row for each anchor unit of its index."""
    maps, families = source.alignment.maps, source.alignment.families
    indices = {s: m.index_M for s, m in maps.items() if isinstance(m, Permutation)}
    for space, inner in families.items():
        indices[space] = torch.stack([m.index_M for m in inner if isinstance(m, Permutation)])
    return indices


def _change(
    network: Network,
    graph: LayerGraph,
    before: Mapping[str, torch.Tensor],
    after: Mapping[str, torch.Tensor],
    maps: Mapping[str, torch.Tensor],
    other: Network | None = None,
) -> Change:
    called = network.module, network.args, network.kwargs
    reader = None if other is None else other.module
    return change_allowed(*called, before, after, graph=graph, maps=maps, other=reader)


def _outputs(network: Network, architecture: Architecture, read: Reader) -> list[torch.Tensor]:
    state = module_state(network, architecture.names, read)
    return outputs_of(network.module, network.args, network.kwargs, state)
