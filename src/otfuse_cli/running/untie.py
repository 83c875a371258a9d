"""Output layers that share their weight with an embedding: found, and given one of their own.

Canonical forms and joint bases treat what writes to a residual stream and what reads it each in its
own way; one tensor can't do both.
"""

from __future__ import annotations

from torch import nn

from ..checkpoint.untied import Split


def output_splits(module: nn.Module) -> tuple[Split, ...]:
    """Tied tensors of layers that are tied to an embedding, by the module's names.

    Whatever else such a layer shares (a bias) is its own afterwards too; embeddings that share
    their tensor among themselves go on doing so.
    """
    children = dict(module.named_modules(remove_duplicate=False))
    groups: dict[int, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    tied = [names for names in groups.values() if len(names) > 1]
    embeds: set[str] = set()
    layers: set[str] = set()  # that share a tensor with an embedding, and are none
    for names in tied:
        inside = {name for name in names if _is_embedding(children.get(_layer(name)))}
        embeds |= inside
        if inside:
            layers.update(_layer(name) for name in names if name not in inside)
    splits: list[Split] = []
    for names in tied:
        untied = [name for name in names if _layer(name) in layers and name not in embeds]
        if not untied:
            continue
        split: list[tuple[str, ...]] = [(name,) for name in untied]
        rest = tuple(name for name in names if name not in untied)
        if rest:
            split.insert(0, rest)
        splits.append(tuple(split))
    return tuple(splits)


def untie(module: nn.Module) -> None:
    """Give every class of names in `output_splits` a parameter of its own, with the same values."""
    for split in output_splits(module):
        for (name,) in split[1:]:
            layer, _, part = name.rpartition(".")
            shared = module.get_parameter(name)
            copy = nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad)
            setattr(module.get_submodule(layer), part, copy)


def _is_embedding(child: nn.Module | None) -> bool:
    return isinstance(child, nn.Embedding | nn.EmbeddingBag)


def _layer(name: str) -> str:
    return name.rpartition(".")[0]
