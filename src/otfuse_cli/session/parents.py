"""The parents of a fusion, opened and compared: checkpoints, one graph, weights, anchor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoint.config import read_config
from ..checkpoint.open import Checkpoint, open_checkpoint
from ..checkpoint.untied import Split, Untied
from ..errors import IncompatibleModels, UsageError, few
from ..graph.analysis.agreement import agreed_sizes
from ..graph.analysis.streams import has_heads
from ..graph.sizes import resize
from ..matching.models import Model
from ..matching.passes import medoid
from ..requests.indexed_option import per_index
from ..requests.option_groups import Key, Source
from ..requests.recipe import Recipe
from ..running.architecture import Architecture, output_ties
from ..runtime import Runtime
from .architectures import arch_of_each, layers_of
from .find_architecture import find_architectures, library_arch_of, shapes_of
from .naming import named_alike
from .reconcile import reconcile
from .tied_tensors import OneTensor, tie

if TYPE_CHECKING:
    from ..matching.counterpart import Counterpart
    from ..matching.stream_counterpart import StreamCounterpart


@dataclass(frozen=True)
class Parents:
    """Models in the order in which they were named, which one is the anchor, what is known.

    Attributes:
        models: What all checkpoints have (see `reconcile`): usually all of each.
        anchor_index: Position of the anchor.
        shared_architecture: Of all models, or of the anchor.
        whole: The anchor with all its tensors and rows.
        kept: Tensors of the anchor that are not averaged, since the models differ in them.
        complete: Every model has all tensors and rows of the anchor.
        warnings: What differs.
        stored_like: The checkpoint that the output is written like, if not like the anchor.
        store: A fused tensor of the anchor as the tensors of `stored_like`.
        weights: In place of the plan's, where they follow from what the models are.
        config: What the config.json of an output folder is to say in place of the anchor's.
        copies: Names under which `stored_like` holds a tensor again.
        own_architectures: Of models that have a network of their own, by index.
        given_anchor: Index of the model that was named as anchor, where the anchor is a network of
            other widths that holds nothing yet (`--width`).
        other_depth: Models with other layers than the anchor, by index.
        counterparts: What of these stands for what of it, once inputs have told.
    """

    models: tuple[Model, ...]
    anchor_index: int
    shared_architecture: Architecture
    whole: Model
    kept: frozenset[str] = frozenset()
    complete: bool = True
    warnings: tuple[str, ...] = ()
    stored_like: Checkpoint | None = None
    store: Callable[[str, torch.Tensor], Mapping[str, torch.Tensor]] | None = None
    weights: tuple[float, ...] | None = None
    config: Mapping[str, Any] | None = None
    copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    own_architectures: Mapping[int, Architecture] = field(default_factory=dict)
    given_anchor: int | None = None
    other_depth: frozenset[int] = frozenset()
    counterparts: Mapping[int, Counterpart | StreamCounterpart] = field(default_factory=dict)

    def names(self, name: str) -> tuple[str, ...]:
        """Every name under which a tensor of the anchor is stored."""
        return (name, *self.copies.get(name, ()))

    def architecture(self, index: int) -> Architecture:
        """That of one model: with the network that runs at its widths, where there is one."""
        return self.own_architectures.get(index, self.shared_architecture)

    def stored(self, name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """What is written for one fused tensor of the anchor."""
        if self.store is None:
            return {name: tensor, **{n: tensor.clone() for n in self.copies.get(name, ())}}
        return self.store(name, tensor)

    @property
    def anchor(self) -> Model:
        """The model the others are aligned to."""
        return self.models[self.anchor_index]

    @property
    def named_anchor(self) -> int:
        """Index of the model that was named as anchor."""
        return self.anchor_index if self.given_anchor is None else self.given_anchor

    @property
    def sources(self) -> tuple[Model, ...]:
        """The models that are aligned."""
        return tuple(m for m in self.models if m.index != self.anchor_index)


@contextmanager
def open_checkpoints(sources: Sequence[Source], key: Key | None) -> Iterator[list[Checkpoint]]:
    """Open every checkpoint (headers only, where the format has one); close them at the end.

    Raises:
        UnreadableInput: One can't be opened, or is another one in the end than it was.
        UsageError: A key that leads nowhere; a bare one must lead somewhere in one of the files.
    """
    keys = per_index(key, len(sources), "--key")
    number = len(sources) > 1
    checkpoints = []
    with ExitStack() as stack:
        for at, source in enumerate(sources):
            name, bare = keys[at], at not in keys.single
            label = None if _is_path(source) else "state dict" + f" {at}" * number
            opened = open_checkpoint(source, key=name, bare=bare, label=label)
            checkpoints.append(stack.enter_context(opened))
        meant = [c for at, c in enumerate(checkpoints) if at not in keys.single]
        if keys.rest is not None and not any(c.keyed for c in meant):
            raise UsageError(
                "no such entry in any checkpoint",
                where=f"--key {keys.rest}",
                why=f"{few([c.label for c in meant])}: each holds one model, under another name"
                if meant
                else "every checkpoint has a key of its own",
                fix="leave it away, or name an entry that is there",
            )
        yield checkpoints
        for checkpoint in checkpoints:
            checkpoint.require_unchanged()


def _is_path(source: Source) -> bool:
    return not hasattr(source, "keys")


def assemble(
    checkpoints: Sequence[Checkpoint],
    anchor_index: int,
    arch: Any,
    device: str,
    *,
    free_outputs: bool = False,
    strict: bool = True,
    vocab: str = "refuse",
    untie: bool = False,
    plain: bool = False,
    any_depth: bool = False,
) -> Parents:
    """Find the anchor's layer graph and fit it to the others; on request, untied.

    `plain`: units will stay in their places, so that an unknown architecture is no obstacle.
    `any_depth`: models may have other layers than the anchor, each in a network of its own.

    Raises:
        IncompatibleModels: No graph, or models that differ in more than widths and in more than
            `strict` and `vocab` allow.
        UsageError: An output layer that can't be untied.
    """
    checkpoints = named_alike(checkpoints, anchor_index)
    splits: tuple[Split, ...] = ()
    stored = checkpoints[anchor_index]
    named = arch_of_each(arch, len(checkpoints))[anchor_index]
    one = OneTensor(tuple(checkpoints)) if untie else tie(checkpoints, anchor_index, named)
    checkpoints = one.checkpoints
    if untie:
        anchor = checkpoints[anchor_index]
        config, shapes = read_config(anchor.path), shapes_of(anchor)
        splits = output_ties(
            library_arch_of(anchor, named),
            shapes,
            aliases=anchor.aliases,
            config=config,
            label=anchor.label,
        )
        if splits:
            checkpoints = tuple(Untied(c, splits) for c in checkpoints)
    of_anchor, separate = find_architectures(
        checkpoints,
        anchor_index,
        arch,
        free_outputs=free_outputs,
        untied=bool(splits),
        plain=plain,
        any_depth=any_depth,
    )
    parents = fit(
        of_anchor,
        checkpoints,
        anchor_index,
        device,
        strict=strict,
        vocab=vocab,
        separate=separate,
        any_depth=any_depth,
    )
    parents = replace(parents, warnings=(*one.warnings, *parents.warnings))
    if one.copies:
        parents = replace(parents, stored_like=stored, copies=one.copies)
    return _told(parents, splits) if untie else parents


def _told(parents: Parents, splits: Sequence[Split]) -> Parents:
    """What `--untie` means for whoever loads the output."""
    if not splits:
        return replace(parents, warnings=(*parents.warnings, "--untie: nothing is tied"))
    names = [kept[0] for split in splits for kept in split[1:]]
    whose = "a tensor of its own" if len(names) == 1 else "tensors of their own"
    warning = f"--untie: {few(names)} got {whose}: build the network with tie_word_embeddings=False"
    config = {**(parents.config or {}), "tie_word_embeddings": False}
    return replace(parents, warnings=(*parents.warnings, warning), config=config)


def fit(
    of_anchor: Architecture,
    checkpoints: Sequence[Checkpoint],
    anchor_index: int,
    device: str,
    *,
    strict: bool = True,
    vocab: str = "refuse",
    separate: Mapping[int, Architecture] | None = None,
    any_depth: bool = False,
) -> Parents:
    """The anchor's graph, fitted to the others; `separate`: networks of theirs, by index.

    With `any_depth` those with other tensors keep a graph of their own.

    Raises:
        IncompatibleModels: Models that differ in more than widths and in more than `strict` and
            `vocab` allow.
    """
    separate = separate or {}
    anchor = checkpoints[anchor_index]
    common = reconcile(checkpoints, anchor_index, of_anchor.graph, strict=strict, vocab=vocab)
    models, guesses = [], list[str]()
    held = [layers_of(shapes_of(c)) for c in checkpoints]
    deeper = {at for at, own in enumerate(held) if any_depth and own != held[anchor_index]}
    for index, checkpoint in enumerate(common.checkpoints):
        graph, shapes = common.graph, shapes_of(checkpoint)
        if index in deeper:
            graph = separate[index].graph
        elif index != anchor_index:
            sizes = None
            if index in separate:
                sizes = agreed_sizes(
                    separate[index].graph,
                    of_anchor.graph,
                    names=graph.tensors,
                    label=checkpoint.label,
                    anchor_label=anchor.label,
                )
            elif shapes != shapes_of(common.checkpoints[anchor_index]) and has_heads(graph):
                # Widths alone don't tell how many heads there are; the network's code may.
                from ..running.runnable import sizes_at

                sizes = sizes_at(of_anchor, shapes)
                if sizes is None and of_anchor.network is not None:
                    guesses.append(_guessed(checkpoint.label, index))
            graph = resize(
                graph, shapes, label=checkpoint.label, anchor=anchor.label, known_sizes=sizes
            )
        models.append(Model(index, checkpoint, graph, device))
    return Parents(
        tuple(models),
        anchor_index,
        of_anchor,
        Model(anchor_index, anchor, of_anchor.graph, device),
        common.kept,
        common.complete,
        (
            *of_anchor.remarks,
            *(c.remark for c in checkpoints if c.remark),
            *common.warnings,
            *guesses,
        ),
        own_architectures=separate,
        other_depth=frozenset(deeper),
    )


def _guessed(label: str, index: int) -> str:
    """What is said where the network's code can't tell how wide the heads of a parent are."""
    return (
        f"{label}: the network does not run at these widths, so that how many heads they make is a "
        f"guess; give it a network of its own: --arch {index}=file.py:factory"
    )


def find_medoid(parents: Parents, recipe: Recipe, runtime: Runtime) -> int:
    """The model that all others are cheapest to align to.

    Raises:
        IncompatibleModels: Different widths: costs of different layers don't compare.
    """
    first = parents.models[0]
    for model in parents.models[1:]:
        for space in model.graph.free():
            size = first.graph.spaces[space.id].size
            if space.size != size:
                raise IncompatibleModels(
                    "models of different widths have no medoid",
                    where=f"{model.checkpoint.label}: space {space.id} has {space.size} units, "
                    f"{size} in {first.checkpoint.label}",
                    why="the output has the widths of the anchor, which only you can choose",
                    fix="use --anchor first, last, or a number",
                )
    return medoid(parents.models, recipe, runtime)


# In place of a position until the models are open.
MEDOID = -1


def anchor_index(anchor: str, count: int) -> int:
    """`last`, `first` or a position from 0; `MEDOID` for `medoid`, which takes a look inside.

    Raises:
        UsageError: Anything else.
    """
    named = {"first": 0, "last": count - 1}
    if anchor == "medoid":
        return MEDOID
    index = named.get(anchor, int(anchor) if anchor.isdecimal() else -1)
    if not 0 <= index < count:
        raise UsageError(
            "no such anchor",
            where=f"--anchor {anchor}",
            why=f"there are {count} checkpoints",
            fix=f"use first, last, medoid, or a number from 0 to {count - 1}",
        )
    return index
