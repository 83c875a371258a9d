"""A network without some of its blocks: checked in the user's own module, and written."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor, nn

from ..checkpoint.config import read_config
from ..checkpoint.derived import DerivedCheckpoint
from ..checkpoint.open import Checkpoint
from ..errors import IncompatibleModels, OtfuseError, SolveFailed
from ..graph.analysis.residual_blocks import same_work
from ..matching.models import Model
from ..pruning.advice import Advice
from ..pruning.choose_units import KeptUnits
from ..pruning.compact import Pruner
from ..pruning.renumber import belongs_to, renumbered
from ..report.records import Checks, FileRecord
from ..running.architecture import Architecture, module_state, real_network, shapes_by_name
from ..running.checkpoint_names import required_names
from ..running.execute import Walk, flat_inputs
from ..running.factory import Network, build
from ..running.function_change import outputs_of, relative_difference, rounding
from ..running.inputs import is_program
from ..runtime import Runtime
from .function_check import first_line, size_remark, too_large
from .outputs import kept_extras, require_room, sink, target_info
from .pruned_network import Destination
from .remove_blocks import Shallower


def check_shallower(
    architecture: Architecture, model: Model, work: Shallower, changes: Advice
) -> tuple[Checks, tuple[str, ...]]:
    """Run the network with fewer blocks as its own code makes it, on the tensors that are written.

    From its config, or by a factory that takes shapes, it is built anew; otherwise the blocks are
    taken out of the module. What it computes must be what was fitted.

    Returns:
        The verdict (null where that can't be run), and remarks: why, and what a number changes.

    Raises:
        SolveFailed: It computes something else.
    """
    remarks = _other_work(work)
    if too_large(model):
        return Checks(), (*remarks, size_remark(model))
    tensors = _written(model, work)
    try:
        network, anew = _network(architecture, tensors, model, work, changes)
        names = required_names(
            network.module,
            {name: tuple(tensor.shape) for name, tensor in tensors.items()},
            _aliases(model.checkpoint, work),
            "the result",
            network.source,
        )
        error, allowed = _difference(network, names, tensors, work, model.device)
    except (OtfuseError, RuntimeError, TypeError, ValueError, AttributeError, IndexError) as failed:
        return Checks(), (
            *remarks,
            f"the function was not checked: without these blocks its module can't be run: "
            f"{first_line(failed)}",
        )
    if not error <= allowed:
        raise SolveFailed(
            "the network with fewer blocks computes something else",
            where=f"{architecture.graph.source}: outputs differ by {error:.2g} (relative)",
            why="its code makes a block by its number, and numbers have changed"
            if remarks
            else "its code does more with these blocks than the operations show",
            fix="let other blocks go (--only), so that those that stay are where they belong",
        )
    return Checks("kept", error), () if anew else remarks


def _other_work(work: Shallower) -> tuple[str, ...]:
    """Blocks that come to a number where another kind of block was."""
    whole, remarks = work.whole, list[str]()
    for modules in work.lists:
        for number, new in modules.moved.items():
            old_name, new_name = (f"{modules.stem}{at}" for at in (number, new))
            if number != new and not same_work(whole, old_name, new_name):
                remarks.append(
                    f"{old_name} is {new_name} now, and does other operations than the block that "
                    "was there: build each block as it was, whatever its number"
                )
    return tuple(remarks[:1])


def _network(
    architecture: Architecture,
    tensors: Mapping[str, Tensor],
    model: Model,
    work: Shallower,
    changes: Advice,
) -> tuple[Network, bool]:
    """The network with fewer blocks, and whether its code has built it anew.

    Raises:
        IncompatibleModels: It can't be had.
    """
    network = architecture.network
    assert network is not None
    if is_program(network):
        raise IncompatibleModels("a saved program has one number of blocks")
    if architecture.takes_shapes:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        named = shapes_by_name(shapes, _aliases(model.checkpoint, work))
        return network.again(named), True
    if network.source.startswith("hf:") and changes.config:
        return _from_config(network, changes), True
    whole = real_network(architecture)
    assert whole is not None
    return replace(whole, module=_taken_out(whole.module, architecture, work)), False


def _from_config(network: Network, changes: Advice) -> Network:
    """The network that transformers builds from the config.json that is written."""
    said = read_config(Path(network.source.removeprefix("hf:"))) or {}
    with TemporaryDirectory() as folder:
        config = json.dumps({**said, **changes.config})
        (Path(folder) / "config.json").write_text(config, encoding="utf-8")
        return build(f"hf:{folder}", device="cpu", untied=network.untied)


def _taken_out(module: nn.Module, architecture: Architecture, work: Shallower) -> nn.Module:
    """A copy of a module without the blocks: lists of modules close up by themselves.

    Raises:
        IncompatibleModels: They are in no list of modules.
    """
    module = copy.deepcopy(module)
    for modules in work.lists:
        inside = [n for n, ours in architecture.names.items() if ours.startswith(modules.stem)]
        # The module's own name of the list, which may have another prefix than the checkpoint's.
        ours = architecture.names[inside[0]]
        path = inside[0].removesuffix(ours[len(modules.stem) :]).rstrip(".")
        holder = module.get_submodule(path)
        if not isinstance(holder, nn.ModuleList | nn.Sequential):
            raise IncompatibleModels(f"holds {modules.name} in no list of modules")
        for number in sorted(modules.gone, reverse=True):
            del holder[number]
    listed = {f"{m.stem}{n}" for m in work.lists for n in m.gone}
    apart = [name for name in work.gone if name not in listed]
    if apart:
        raise IncompatibleModels(f"holds {apart[0]} in no list of modules")
    return module


def _written(model: Model, work: Shallower) -> dict[str, Tensor]:
    """What is written, in float32, under its new names."""
    tensors = {}
    for name in work.left:
        tensor = work.tensors[name].cpu() if name in work.tensors else model.stored(name)
        tensors[renumbered(name, work.lists)] = (
            tensor.float() if tensor.is_floating_point() else tensor
        )
    return tensors


def _difference(
    network: Network,
    names: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    work: Shallower,
    device: str,
) -> tuple[float, float]:
    """How far outputs of the module with fewer blocks are from what was fitted, and may be."""
    program = work.program
    first = work.samples.take(slice(0, program.batch))
    held = {name: ours for name, ours in names.items() if ours in tensors}
    state = module_state(network, held, tensors.__getitem__)
    keywords = {k: v for k, v in network.kwargs.items() if not isinstance(v, Tensor)}
    call = network.module, first.args, {**keywords, **first.kwargs}, state
    own = {name: tensors[renumbered(name, work.lists)].to(device) for name in work.left}
    fitted = Walk(program, own, flat_inputs(program, first, device)).outputs()
    differences = []
    for said, wanted in zip(outputs_of(*call), fitted, strict=True):
        differences.append(relative_difference(said, wanted[: len(said)].cpu()))
    return max(differences, default=0.0), rounding(*call)


def write_shallower(
    model: Model, work: Shallower, changes: Advice, to: Destination, runtime: Runtime
) -> tuple[tuple[str, ...], tuple[FileRecord, ...]]:
    """Write what is left; returns what could not be written along with it, and what was."""
    request, checkpoint = to.request, model.checkpoint
    config, remarks = to.config(changes)
    pruner = Pruner(model, KeptUnits({}), work.tensors)
    modules, infos = [removal.block.name for removal in work.removals], []
    names: dict[str, list[str]] = {}
    for name in work.left:
        own = (name, *(n for n in to.copies.get(name, ()) if not belongs_to(n, modules)))
        names[name] = [renumbered(n, work.lists) for n in own]
        info = target_info(checkpoint.infos[name], request.dtype)
        infos += [replace(info, name=n) for n in names[name]]
    require_room(to.output, infos)
    extras, lost = kept_extras(checkpoint, request)
    stored = _renumbered(to.like, work)
    with sink(
        to.output, stored, infos, request, to.outputs, also=to.also, extras=extras, config=config
    ) as out:
        for done, name in enumerate(work.left):
            runtime.progress("write", done, len(work.left))
            dtype = target_info(checkpoint.infos[name], request.dtype).dtype
            tensor = pruner.tensor(name, dtype)
            for at, new in enumerate(names[name]):
                out.put(new, tensor.clone() if at else tensor)
    runtime.progress("write", len(work.left), len(work.left))
    return (*lost, *remarks), out.written


def _renumbered(stored: Checkpoint, work: Shallower) -> Checkpoint:
    """A checkpoint without the blocks, as its writer sees it: under the new names."""
    aliases = _aliases(stored, work)
    gone = {*chain.from_iterable(removal.block.tensors for removal in work.removals)}
    entries = {}
    for name, entry in stored.entries.items():
        if name not in gone and not belongs_to(name, work.gone):
            entries[renumbered(name, work.lists)] = entry
    return DerivedCheckpoint(stored, entries=entries, aliases=aliases)


def _aliases(checkpoint: Checkpoint, work: Shallower) -> dict[str, tuple[str, ...]]:
    """Other names of tied tensors that stay, under the new names."""
    aliases: dict[str, tuple[str, ...]] = {}
    for name, others in checkpoint.aliases.items():
        stay: Sequence[str] = [n for n in others if not belongs_to(n, work.gone)]
        if name in work.left and stay:
            aliases[renumbered(name, work.lists)] = tuple(renumbered(n, work.lists) for n in stay)
    return aliases
