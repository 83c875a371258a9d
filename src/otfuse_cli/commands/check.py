"""`check`: prove a layer graph on the module, by permuting its units (running/acid.py)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from .. import __version__
from ..checkpoint.config import read_config
from ..errors import GateFailed, UsageError
from ..graph.model import LayerGraph
from ..graph.spec.from_shapes import layer_graph
from ..graph.trace.from_module import graph_from_program, trace
from ..report.records import Checks, Report
from ..requests.requests import CheckRequest
from ..running.acid import AcidResult, LeaveOneOutResult, acid_test, leave_one_out
from ..running.arch_value import Arch, arch_label
from ..running.architecture import Architecture, real_network
from ..running.exported_file import load_program
from ..running.factory import Network
from ..running.inputs import is_program
from ..runtime import Progress, Stopwatch, peak_rss_bytes, silent
from ..session.architectures import arch_of_each, is_runnable
from ..session.find_architecture import find_architecture
from ..session.graph_records import graph_record, tensor_records
from ..session.parents import open_checkpoints
from ..session.tied_tensors import tie

# Leave-one-out costs a forward pass for each member; a larger graph is checked in part.
_MOST_MEMBERS = 1500


def run_check(request: CheckRequest, *, progress: Progress = silent) -> Report:
    """Test the graph of `request` on its module.

    Raises:
        GateFailed: The function changed under some permutation; names the spaces, carries the
            report.
        OtfuseError: See docs/exit-codes.md.
    """
    watch = Stopwatch()
    (arch,) = arch_of_each(request.arch, 1)
    with open_checkpoints((request.checkpoint,), request.key) as (stored,):
        with watch("graph"):
            checkpoint = tie((stored,), 0, arch).checkpoints[0]
            traced = find_architecture(checkpoint, arch, free_outputs=request.free_outputs)
            network = _require_module(traced, arch)
            config = read_config(checkpoint.path)
            graph = _graph_of_module(request, network, traced.graph, config)
        report = Report(
            command="check",
            version=__version__,
            inputs=(checkpoint.record(),),
            recipe={"arch": arch_label(arch), "spec": request.spec, "seed": request.seed},
            tensors=tensor_records(checkpoint, traced.graph),
            graph=graph_record(graph),
        )
    with watch("check"):
        acid = acid_test(network.module, network.args, network.kwargs, graph, seed=request.seed)
        wrong = [] if acid.passed else _wrong_spaces(request, network, graph, progress)
        left_out = leave_one_out(
            network.module,
            network.args,
            network.kwargs,
            graph,
            seed=request.seed,
            spaces=_affordable(graph),
        )
    report = report.replace(
        checks=Checks("kept" if acid.passed else "failed", acid.max_error),
        evaluation=_evaluation(acid, left_out),
        warnings=(*graph.warnings, *_remarks(graph, left_out)),
        timings=dict(watch.seconds),
        peak_rss_bytes=peak_rss_bytes(),
    )
    if not acid.passed:
        raise GateFailed(
            "the graph is wrong: permuting its units changes the function",
            where=", ".join(wrong) or "only all spaces together",
            why=f"outputs differ by {acid.max_error:.2g}, {acid.threshold:g} is allowed",
            fix=f"correct the lines of these spaces in {graph.source}",
            report=report,
        )
    return report


def _require_module(traced: Architecture, arch: Arch) -> Network:
    """The network to check against.

    Raises:
        UsageError: There is none; one that was built from the graph proves nothing about it.
    """
    network = real_network(traced) if is_runnable(arch) else None
    if network is None:
        raise UsageError(
            "nothing to check against",
            where=f"--arch {arch_label(arch)}",
            why="a family or a spec can't be run",
            fix="give the module: --arch file.py:factory; the spec goes into --spec",
        )
    return network


def _graph_of_module(
    request: CheckRequest,
    network: Network,
    traced: LayerGraph,
    config: Mapping[str, Any] | None,
) -> LayerGraph:
    """The graph under test in the module's own names: traced, or bound from `--spec`."""
    module = network.module
    if request.spec is not None:
        shapes, aliases = _tensors_of(module)
        return layer_graph(
            request.spec,
            shapes,
            aliases=aliases,
            config=config,
            label=f"the module {network.source}",
        )
    if is_program(network):
        return graph_from_program(
            load_program(Path(network.source)),
            source=traced.source,
            free_outputs=request.free_outputs,
        )
    return trace(
        module,
        network.args,
        network.kwargs,
        source=traced.source,
        free_outputs=request.free_outputs,
    )


def _tensors_of(
    module: nn.Module,
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[str, ...]]]:
    """Shapes by name, tied tensors once, and the other names of those."""
    groups: dict[int, list[str]] = {}
    state = module.state_dict(keep_vars=True)
    for name, tensor in state.items():
        groups.setdefault(id(tensor), []).append(name)
    shapes = {names[0]: tuple(state[names[0]].shape) for names in groups.values()}
    return shapes, {names[0]: tuple(names[1:]) for names in groups.values() if len(names) > 1}


def _affordable(graph: LayerGraph) -> list[str] | None:
    """As many spaces, in graph order, as leave-one-out may cost; None for all."""
    chosen: list[str] = []
    members = 0
    for space in graph.free():
        members += len(graph.members[space.id])
        if members > _MOST_MEMBERS:
            return chosen
        chosen.append(space.id)
    return None


def _wrong_spaces(
    request: CheckRequest, network: Network, graph: LayerGraph, progress: Progress
) -> list[str]:
    """Spaces that fail the acid test alone, with the tensors they claim."""
    wrong = []
    spaces = list(graph.free())
    for done, space in enumerate(spaces):
        progress("locate", done, len(spaces))
        alone = {space.id} | ({space.per} if space.per else set())
        result = acid_test(
            network.module,
            network.args,
            network.kwargs,
            graph,
            seed=request.seed,
            draws=1,
            spaces=alone,
        )
        if not result.passed:
            tensors = ", ".join(f"{name}:{dim}" for name, dim in graph.members[space.id][:4])
            wrong.append(f"space {space.id} ({tensors})")
    return wrong


def _evaluation(acid: AcidResult, left_out: LeaveOneOutResult) -> dict[str, object]:
    return {
        "acid test": "passed" if acid.passed else "failed",
        "largest error": acid.max_error,
        "allowed error": acid.threshold,
        "spaces permuted": acid.spaces,
        "draws": acid.draws,
        "members left out one by one": left_out.members,
        "members detected": left_out.members - len(left_out.undetected),
    }


def _remarks(graph: LayerGraph, left_out: LeaveOneOutResult) -> list[str]:
    remarks = [
        f"no output misses {member}: the network may not depend on its order"
        for member in left_out.undetected
    ]
    if (chosen := _affordable(graph)) is not None:
        remarks.append(f"only {len(chosen)} spaces were checked by leave-one-out, for time")
    return remarks
