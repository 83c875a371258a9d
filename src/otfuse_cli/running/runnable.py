"""The network of `--arch` as a program to run on samples, one for each set of widths."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils import _pytree as pytree

from ..errors import IncompatibleModels
from ..graph.model import LayerGraph
from ..graph.trace.from_module import export, trace, with_lines
from ..graph.trace.program import Program, labelled_program
from .architecture import (
    Architecture,
    module_state,
    other_widths,
    real_network,
    shapes_by_name,
)
from .exported_file import load_program
from .factory import Network
from .inputs import is_program
from .samples import Samples

if TYPE_CHECKING:
    from torch.export import ExportedProgram

# What to do where code fixes the widths that its module was built with.
OWN_WIDTHS = (
    "let the factory take the checkpoint's shapes, and build it for them: def make_net(shapes): "
    "...; or give a factory for each checkpoint: --arch INDEX=file.py:factory"
)
# Samples in one pass: enough to keep the cores busy, few enough for the caches.
BATCH = 100


def runnable(
    architecture: Architecture,
    samples: Samples,
    *,
    device: str,
    read: Mapping[str, Tensor] | None = None,
    graph: LayerGraph | None = None,
    batch: int = BATCH,
) -> Program:
    """Export the network on a batch of `samples`, so that it can be run batch by batch.

    Args:
        architecture: With a network.
        samples: What it is to be run on.
        device: Where.
        read: Tensors of a parent, whose widths may not be those of the network; None for the
            network's own.
        graph: Of another network of this structure, whose names of spaces are taken; None for
            the network's own.
        batch: Samples in a pass, at most.

    Raises:
        IncompatibleModels: It can't be exported on such inputs, or not with those widths.
    """
    network = architecture.network
    assert network is not None
    named = architecture.graph if graph is None else graph
    if read is not None:
        shapes, built_shapes = _shapes(read), _shapes(_tensors(network, architecture))
        # With the widths that it was built with, nothing has to be built again.
        read = None if all(shapes[name] == built_shapes[name] for name in built_shapes) else read
    if is_program(network):
        return _saved(network, named, architecture.names, read, device)
    if read is None:
        network = real_network(architecture)
        assert network is not None
    else:
        network = network_at(architecture, read)
    module = network.module
    first = samples.take(slice(0, batch))
    # What is no tensor is no input: flags and numbers stay what the network's example has.
    keywords: dict[str, Any] = {}
    for name, value in network.kwargs.items():
        if not isinstance(value, Tensor):
            keywords[name] = value
    keywords.update(first.kwargs)
    names = _names(module, architecture.names)

    def exported(*, lines: bool) -> ExportedProgram:
        moved = copy.deepcopy(module).to(device)
        try:
            return export(moved, first.args, keywords, lines=lines)
        except IncompatibleModels as error:
            if read is not None:
                error.fix = OWN_WIDTHS
            raise

    labelled = partial(labelled_program, batch=first.count, graph=named, name_map=names)
    return with_lines(exported, labelled)[1]


def network_at(architecture: Architecture, read: Mapping[str, Tensor]) -> Network:
    """The network with tensors of other widths: built for them where its factory takes shapes."""
    built = real_network(architecture)
    assert built is not None
    return _with(_built_for(built, architecture, _shapes(read)), architecture, read)


def graph_at(architecture: Architecture, read: Mapping[str, Tensor]) -> LayerGraph:
    """The layer graph of the network with tensors of other widths, traced with these.

    Widths alone don't tell how many heads a layer has; what the network makes of them does.
    """
    return _traced(network_at(architecture, read), architecture)


def sizes_at(
    architecture: Architecture, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, int] | None:
    """Sizes of the spaces in the network with tensors of other shapes, as its own code has them.

    None where no network can be traced so: there is none, or it is a saved program, or its code
    fixes widths. No value of a tensor is needed.
    """
    network = architecture.network
    if network is None or is_program(network):
        return None
    try:
        graph = _traced(_blank(network, architecture, shapes), architecture)
    except (IncompatibleModels, RuntimeError):
        return None
    same = graph.spaces.keys() == architecture.graph.spaces.keys()
    return {id: space.size for id, space in graph.spaces.items()} if same else None


def at_widths(
    architecture: Architecture, shapes: Mapping[str, tuple[int, ...]], label: str
) -> Architecture:
    """The architecture of a checkpoint, where its network was built at other widths.

    Raises:
        IncompatibleModels: Its code does not take the checkpoint's.
    """
    network = architecture.network
    other = other_widths(architecture, shapes)
    if network is None or not other:
        return architecture
    why = "a saved program has one set of widths"
    if not is_program(network):
        try:
            return replace(
                architecture, graph=_traced(_blank(network, architecture, shapes), architecture)
            )
        except (IncompatibleModels, RuntimeError) as error:
            why = getattr(error, "why", None) or str(error).strip().partition("\n")[0]
    name = other[0]
    built = list(architecture.graph.tensors[name].shape)
    raise IncompatibleModels(
        "the network was built at other widths than the checkpoint's, and does not run at these",
        where=f"{name}: {list(shapes[name])} in {label}, {built} in {network.source}",
        why=why,
        fix=OWN_WIDTHS,
    )


def _built_for(
    network: Network, architecture: Architecture, shapes: Mapping[str, tuple[int, ...]]
) -> Network:
    """Built again for `shapes`, where its factory takes them."""
    if network.shapes is None:
        return network
    return network.again({**network.shapes, **shapes_by_name(shapes, architecture.aliases)})


def _blank(
    network: Network, architecture: Architecture, shapes: Mapping[str, tuple[int, ...]]
) -> Network:
    """The network with tensors of other shapes that hold nothing."""
    network = _built_for(network, architecture, shapes)
    like = _tensors(network, architecture)
    return _with(
        network, architecture, {n: like[n].new_zeros(shapes[n]) for n in shapes if n in like}
    )


def _tensors(network: Network, architecture: Architecture) -> dict[str, Tensor]:
    """The network's own, by the checkpoint's names."""
    state = network.module.state_dict()
    return {architecture.names[n]: t for n, t in state.items() if n in architecture.names}


def _with(network: Network, architecture: Architecture, read: Mapping[str, Tensor]) -> Network:
    state = module_state(network, architecture.names, read.__getitem__)
    return replace(network, module=with_tensors(network.module, state))


def _traced(network: Network, architecture: Architecture) -> LayerGraph:
    source = architecture.graph.source
    graph = trace(
        network.module, network.args, network.kwargs, source=source, name_map=architecture.names
    )
    return replace(
        graph, tensors={name: graph.tensors[name] for name in architecture.graph.tensors}
    )


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Shapes by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def with_tensors(module: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """A copy of `module` that holds other tensors, of other widths as well; ties are kept."""
    module = copy.deepcopy(module)
    owned: dict[int, Tensor] = {}
    for path, child in module.named_modules():
        prefix = f"{path}." if path else ""
        for table in (child._parameters, child._buffers):
            for name, tensor in table.items():
                if tensor is None or f"{prefix}{name}" not in state:
                    continue
                replacement = state[f"{prefix}{name}"]
                if id(tensor) not in owned:
                    value = replacement.detach().clone()
                    if isinstance(tensor, nn.Parameter):
                        value = nn.Parameter(value, requires_grad=False)
                    owned[id(tensor)] = value
                table[name] = owned[id(tensor)]
        _resize(child)
    return module


def _resize(child: nn.Module) -> None:
    """Set what a module that holds tensors of other widths says of its widths."""
    weight = getattr(child, "weight", None)
    if not isinstance(weight, Tensor):
        return
    if isinstance(child, nn.LayerNorm):
        child.normalized_shape = tuple(weight.shape)
    elif isinstance(child, _ConvNd) and child.groups > 1:
        outer, inner = child.out_channels, child.in_channels
        if child.transposed:
            outer, inner = inner, outer
        if weight.shape[1] == inner // child.groups:  # groups are as large as they were
            child.groups = max(1, weight.shape[0] * child.groups // outer)
    elif type(child).__name__ == "Conv1D" and hasattr(child, "nf"):
        setattr(child, "nf", weight.shape[1])  # noqa: B010 - the linear layer of GPT-2


def _names(module: nn.Module, names: Mapping[str, str]) -> dict[str, str]:
    """Names in the checkpoint for every one of the module's, tied ones under the stored name."""
    state = module.state_dict(keep_vars=True)
    stored = {id(t): names[n] for n, t in state.items() if n in names}
    return {n: stored[id(t)] for n, t in state.items() if id(t) in stored}


def _saved(
    network: Network,
    graph: LayerGraph,
    names: Mapping[str, str],
    read: Mapping[str, Tensor] | None,
    device: str,
) -> Program:
    if read is not None:
        raise IncompatibleModels(
            "a saved program has one set of widths",
            where=f"--arch {network.source}",
            why="the models differ in width",
            fix="give a factory (file.py:factory), which is exported for each, or a program for "
            "each: --arch INDEX=graph.pt2",
        )
    exported = load_program(Path(network.source))
    batch = _batch(network)
    if device != "cpu":
        exported = _move(exported, device)
    return labelled_program(exported, batch=batch, graph=graph, name_map=dict(names))


def _batch(network: Network) -> int:
    leaves, _ = pytree.tree_flatten((network.args, dict(network.kwargs)))
    return next(int(t.shape[0]) for t in leaves if isinstance(t, Tensor) and t.dim())


def _move(exported: ExportedProgram, device: str) -> ExportedProgram:
    from torch.export.passes import move_to_device_pass

    return move_to_device_pass(exported, device)
