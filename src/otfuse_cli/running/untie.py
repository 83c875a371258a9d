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
    embeds = {n for names in tied for n in names if _is_embedding(children.get(_layer(n)))}
    layers = {_layer(n) for names in tied if embeds & {*names} for n in names if n not in embeds}
    found = []
    for names in tied:
        own = [n for n in names if _layer(n) in layers and n not in embeds]
        if own:
            rest = tuple(n for n in names if n not in own)
            found.append((*((rest,) if rest else ()), *((n,) for n in own)))
    return tuple(found)


def untie(module: nn.Module) -> None:
    """Give every class of names in `output_splits` a parameter of its own, with the same values."""
    for split in output_splits(module):
        for (name,) in split[1:]:
            layer, _, part = name.rpartition(".")
            shared = module.get_parameter(name)
            own = nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad)
            setattr(module.get_submodule(layer), part, own)


def _is_embedding(child: nn.Module | None) -> bool:
    return isinstance(child, nn.Embedding | nn.EmbeddingBag)


def _layer(name: str) -> str:
    return name.rpartition(".")[0]
