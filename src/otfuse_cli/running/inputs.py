"""What a network takes: its tensor inputs by name, shape and dtype, read off the example inputs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import UsageError
from ..graph.trace.export_settings import eval_mode, no_fast_path, without_cache
from .factory import Network


@dataclass(frozen=True)
class Slot:
    """A tensor that the network takes.

    Attributes:
        name: The parameter of `forward`, or `input 0` where it has none.
        position: Among the positional arguments; None for a keyword.
        shape: Of one sample, the first axis left out.
        dtype: Of the example.
    """

    name: str
    position: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def integer(self) -> bool:
        """Whether it takes ids or masks, not measurements."""
        return not self.dtype.is_floating_point


def slots(network: Network) -> tuple[Slot, ...]:
    """The tensor inputs, positional ones first; everything else is a constant of the network.

    Raises:
        UsageError: There are none, or they are packed in lists.
    """
    names = _positional_names(network.module)
    tensor_slots: list[Slot] = []
    for at, value in enumerate(network.args):
        if _is_batch(value):
            name = names.get(at, f"input {at}")
            tensor_slots.append(Slot(name, at, tuple(value.shape[1:]), value.dtype))
    for name, value in network.kwargs.items():
        if _is_batch(value):
            tensor_slots.append(Slot(name, None, tuple(value.shape[1:]), value.dtype))
    if not tensor_slots:
        raise UsageError(
            "the network takes no plain tensor",
            where=network.source,
            why="its inputs are packed in lists or dicts, or it has none",
            fix="wrap it in a module whose forward takes tensors",
        )
    return tuple(tensor_slots)


def is_program(network: Network) -> bool:
    """Whether the network is an exported program: its shapes are fixed, and it checks none."""
    return network.source.endswith(".pt2")


def static_batch(network: Network) -> int | None:
    """The batch size that an exported program is bound to; None where any will do."""
    if not is_program(network):
        return None
    program = getattr(network.module, "graph", None)
    for node in getattr(program, "nodes", ()):
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, Tensor) and value.ndim:
            return value.shape[0] if isinstance(value.shape[0], int) else None
    return None


def accepted_keywords(module: nn.Module) -> frozenset[str]:
    """Names of the parameters of `forward`."""
    parameters = inspect.signature(module.forward).parameters.values()
    return frozenset(
        p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    )


def callable_form(network: Network) -> Network:
    """The network itself, or built again on the CPU where it can't be called on the meta device."""
    if not any(t.is_meta for t in network.module.state_dict().values()):
        return network
    try:
        example_call(network)
    except Exception:  # noqa: BLE001 - a forward that looks at values, whatever it raises
        return network.again()
    return network


def example_call(network: Network) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What the network returns for its example inputs, and these, copied to its device."""
    module = network.module
    device = next((t.device for t in module.state_dict().values()), torch.device("cpu"))
    inputs = tuple(network.args), without_cache(module, dict(network.kwargs))
    args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.to(device).clone(), inputs)
    with eval_mode(module), no_fast_path(), torch.no_grad():
        return module(*args, **kwargs), args, kwargs


def vocabularies(network: Network) -> dict[str, int]:
    """Rows of the embedding that reads an integer input, by the input's name.

    One pass over the example inputs tells which embedding reads which input.
    """
    network = callable_form(network)
    watch = _EmbeddingWatch()
    with watch:
        _, args, kwargs = example_call(network)
    # By storage: a view of the ids, as most networks make one, is still that input.
    storages: dict[int, str] = {}
    for slot in slots(network):
        if slot.integer:
            ids = kwargs[slot.name] if slot.position is None else args[slot.position]
            storages[_storage(ids)] = slot.name
    rows_of: dict[str, int] = {}
    for storage, rows in watch.seen:
        if storage in storages:
            name = storages[storage]
            rows_of[name] = min(rows, rows_of.get(name, rows))
    return rows_of


class _EmbeddingWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the storage of every index that an embedding is given, and the embedding's rows."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[int, int]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.embedding.default:
            self.seen.append((_storage(args[1]), int(args[0].shape[0])))
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_batch(value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _positional_names(module: nn.Module) -> dict[int, str]:
    parameters = inspect.signature(module.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return dict(enumerate(p.name for p in parameters if p.kind in kinds))
