"""`--arch`, resolved: a layer graph, and the network itself where the user gave one to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint.untied import Split
from ..errors import IncompatibleModels, UsageError, few
from ..graph.model import LayerGraph, Role, Shapes
from ..graph.spec.from_shapes import layer_graph
from .arch_value import Arch, arch_label
from .checkpoint_names import Aliases, checkpoint_names, required_names, stored_names
from .exported_file import load_program
from .factory import Network, build
from .mlp import mlp_network
from .untie import output_splits
from .user_code import names_a_module

_RELU_ASSUMED = (
    "run as linear layers with ReLU between them, as the names suggest; --arch mlp confirms it"
)


@dataclass(frozen=True)
class Architecture:
    """What is known of a network.

    Attributes:
        graph: In the checkpoint's names.
        network: What to run it with; None when only names and shapes are known.
        names: The checkpoint's name for each tensor of the module that the checkpoint holds.
        assumption: What nobody said and the network was built on; None for nothing.
        aliases: Other names in the checkpoint of tied tensors.
        remarks: What whoever gets the result must know of how it was found.
    """

    graph: LayerGraph
    network: Network | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    assumption: str | None = None
    aliases: Aliases = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    @property
    def takes_shapes(self) -> bool:
        """Whether the network is built for the shapes of a checkpoint."""
        return self.network is not None and self.network.shapes is not None


def other_widths(architecture: Architecture, shapes: Shapes) -> list[str]:
    """Tensors in `shapes` of other shapes than those that the network was built with."""
    return [n for n, node in architecture.graph.tensors.items() if shapes[n] != node.shape]


def real_network(architecture: Architecture) -> Network | None:
    """The network with tensors that hold values: built again where it was traced without."""
    network = architecture.network
    if network is None or not any(t.is_meta for t in network.module.state_dict().values()):
        return network
    return network.again()


def require_network(architecture: Architecture, arch: Arch, why: str) -> Network:
    """The network with tensors that hold values.

    Raises:
        UsageError: Only names and shapes are known, and `why` needs more.
    """
    network = real_network(architecture)
    if network is None:
        raise UsageError(
            f"{why} needs a network to run",
            where=f"--arch {arch_label(arch)}",
            why="names and shapes of tensors don't say what is computed from them",
            fix="give it: --arch file.py:factory, graph.pt2, hf:DIR, timm:NAME, torchvision:NAME; "
            "or mlp, for linear layers with ReLU between them",
        )
    return network


def module_state(
    network: Network, names: Mapping[str, str], read: Callable[[str], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint under the module's names; what it lacks is the module's own.

    Tied tensors come under each of their names.
    """
    state = network.module.state_dict(keep_vars=True)
    stored = {id(tensor): names[name] for name, tensor in state.items() if name in names}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        held_as = stored.get(id(tensor))
        tensors[name] = tensor.detach() if held_as is None else read(held_as)
    return tensors


def shapes_by_name(shapes: Shapes, aliases: Aliases) -> dict[str, tuple[int, ...]]:
    """Shapes of a checkpoint's tensors under all their names: what a factory is given."""
    named = dict(shapes)
    for name, others in aliases.items():
        named.update(dict.fromkeys(others, shapes[name]))
    return named


def architecture(
    arch: Arch,
    shapes: Shapes,
    *,
    aliases: Aliases | None = None,
    config: Mapping[str, Any] | None = None,
    label: str = "the checkpoint",
    free_outputs: bool = False,
    untied: bool = False,
) -> Architecture:
    """The layer graph that `--arch` says, and the network to run, if it says that too.

    Args:
        arch: `auto`, a family, `mlp`, `spec.yaml`, a factory (`pkg.mod:f`, `file.py:f`,
            `torchvision:NAME`, `timm:NAME`, `hf:DIR`, `diffusers:DIR`, or the function or module
            itself), or a saved program (`graph.pt2`).
        shapes: Of every tensor of the checkpoint, in the order of the file.
        aliases: Other names of tied tensors.
        config: What the config.json beside the checkpoint says.
        label: What messages call the checkpoint.
        free_outputs: Leave the units of a traced network's outputs free.
        untied: Give the output layer of a network a weight of its own (see `untie`).

    Raises:
        OtfuseError: See `spec.from_shapes`, `trace.from_module`, `factory`, `exported_file`.
    """
    # By what is named: a program, code to run, else names and shapes.
    if isinstance(arch, str) and arch.endswith(".pt2"):
        return _from_program(arch, shapes, aliases or {}, label, free_outputs)
    if not isinstance(arch, str) or names_a_module(arch):
        return _from_factory(arch, shapes, aliases or {}, label, free_outputs, untied)
    if free_outputs:
        raise UsageError(
            "--free-outputs needs a network to trace",
            where=f"--arch {arch}",
            fix="give a factory or a .pt2, or leave the output out of the spec",
        )
    graph = layer_graph(arch, shapes, aliases=aliases, config=config, label=label)
    network = mlp_network(graph, shapes)
    if network is None:
        return Architecture(graph)
    confirmed = arch == "mlp" or arch.endswith((".yaml", ".yml"))
    return Architecture(
        graph, network, {n: n for n in shapes}, None if confirmed else _RELU_ASSUMED
    )


def output_ties(
    arch: Arch,
    shapes: Shapes,
    *,
    aliases: Aliases | None = None,
    config: Mapping[str, Any] | None = None,
    label: str = "the checkpoint",
) -> tuple[Split, ...]:
    """Tensors that the output layer shares with an embedding, in the checkpoint's names.

    Arguments are those of `architecture`.

    Raises:
        UsageError: A saved program.
    """
    if not isinstance(arch, str) or names_a_module(arch):
        module = _module(arch, shapes, aliases or {})
        names = checkpoint_names(module, shapes, aliases or {})
        renamed: list[Split] = []
        for split in output_splits(module):
            renamed.append(tuple(tuple(names[n] for n in together) for together in split))
        return tuple(renamed)
    if arch.endswith(".pt2"):
        raise UsageError(
            "a saved program can't be untied",
            where=f"--untie, --arch {arch}",
            why="which tensors it shares is part of it",
            fix="give a factory (file.py:factory), or export the network untied",
        )
    graph = architecture(arch, shapes, aliases=aliases, config=config, label=label).graph
    return _named_splits(graph)


def module_ties(arch: Arch, shapes: Shapes, aliases: Aliases) -> list[tuple[str, ...]] | None:
    """The checkpoint's names of what is one tensor in the network; None without a network.

    Arguments are those of `architecture`.
    """
    if isinstance(arch, str) and arch.endswith(".pt2"):
        module: nn.Module = load_program(Path(arch)).module(check_guards=False)
    elif names_a_module(arch):
        module = _module(arch, shapes, aliases)
    else:
        return None
    names = checkpoint_names(module, shapes, aliases)
    groups: dict[int, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(names[name])
    return [tuple(group) for group in groups.values() if len(group) > 1]


def _module(arch: Arch, shapes: Shapes, aliases: Aliases) -> nn.Module:
    """The module alone: on the meta device, where it can be built there."""
    named = shapes_by_name(shapes, aliases)
    try:
        return build(arch, device="meta", shapes=named).module
    except IncompatibleModels:
        return build(arch, device="cpu", shapes=named).module


def _named_splits(graph: LayerGraph) -> tuple[Split, ...]:
    """Tensors that make units and read them, and what else their layers share."""
    tied: list[tuple[str, ...]] = []
    layers: set[str] = set()
    for tensor in graph.tensors.values():
        names = (tensor.name, *tensor.aliases, *tensor.stands_for)
        if len(names) == 1:
            continue
        tied.append(names)
        # An embedding makes the units of a stream, the output layer reads them.
        if any({Role.CONSUME, Role.PRODUCE} <= axis.roles for axis in tensor.axes):
            layers.update(name.rpartition(".")[0] for name in names)
    splits: list[Split] = []
    for names in tied:
        if any(name.rpartition(".")[0] in layers for name in names):
            splits.append(tuple((name,) for name in names))
    return tuple(splits)


def _from_factory(
    arch: Arch, shapes: Shapes, aliases: Aliases, label: str, free_outputs: bool, untied: bool
) -> Architecture:
    """Trace on the meta device, where a model of any size has no weights; else on the CPU."""
    from ..graph.trace.from_module import trace

    named, arch_name = shapes_by_name(shapes, aliases), arch_label(arch)
    # Some code can't run without values: then with real ones, whose numbers don't matter.
    for device in ("meta", "cpu"):
        try:
            network = build(arch, device=device, untied=untied, shapes=named)
            names = required_names(network.module, shapes, aliases, label, arch_name)
            graph = trace(
                network.module,
                network.args,
                network.kwargs,
                source=f"traced {arch_name}",
                free_outputs=free_outputs,
                name_map=names,
            )
        except IncompatibleModels:
            if device == "cpu":
                raise
        else:
            stored = stored_names(names, shapes)
            return Architecture(_held(graph, shapes, label), network, stored, aliases=aliases)
    raise AssertionError


def _from_program(
    arch: str, shapes: Shapes, aliases: Aliases, label: str, free_outputs: bool
) -> Architecture:
    from ..graph.trace.from_module import graph_from_program

    program = load_program(Path(arch))
    module = program.module(check_guards=False)
    args, kwargs = program.example_inputs or ((), {})
    names = required_names(module, shapes, aliases, label, arch)
    graph = graph_from_program(
        program, source=f"program {arch}", free_outputs=free_outputs, name_map=names
    )
    network = Network(arch, module, args, kwargs)
    return Architecture(_held(graph, shapes, label), network, stored_names(names, shapes))


def _held(graph: LayerGraph, shapes: Shapes, label: str) -> LayerGraph:
    """The graph of what the checkpoint holds, in its order.

    Raises:
        IncompatibleModels: A tensor of the checkpoint that the traced network does not use.
    """
    lost = [n for n in shapes if n not in graph.tensors]
    if lost:
        raise IncompatibleModels(
            "the traced network does not use a tensor",
            where=f"{few(lost)} of {label}",
            fix="trace the module that the checkpoint was saved from",
        )
    return replace(graph, tensors={name: graph.tensors[name] for name in shapes})
