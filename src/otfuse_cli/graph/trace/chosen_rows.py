"""What a network chooses by its data (`x[mask]`, `nonzero`, non-maximum suppression), traced whole.

How much is chosen depends on the data, so that `torch.export` can't follow it. Which axes carry
which units does not: for a layer graph everything may be chosen. The axis that is chosen from stays
in place, as the operators that stand for the choice look at its order. What is computed is another
thing: a program that is to be run must not be traced so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CHOSEN = (
    "how much is chosen depends on the data (a mask, non-maximum suppression): traced as if "
    "everything were chosen"
)


class EverythingChosen(TorchFunctionMode):
    """While it is entered, whatever is chosen by data is all that there is to choose from.

    Attributes:
        used: Whether something was chosen by data.
    """

    def __init__(self) -> None:
        super().__init__()
        self.used = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, or what stands for it."""
        keywords: Mapping[str, Any] = kwargs or {}
        instead = _instead(func, args, keywords)
        if instead is None:
            return func(*args, **keywords)
        self.used = True
        return instead(*args, **keywords)


def _instead(
    func: Any, args: tuple[Any, ...], keywords: Mapping[str, Any]
) -> Callable[..., Any] | None:
    if func is Tensor.__getitem__ or (func is Tensor.__setitem__ and _has_rows(args[2])):
        return _by_index(func) if any(map(_is_mask, _indices(args[1]))) else None
    # Operators go by their names: those of other libraries (torchvision::nms) aren't known here.
    name = str(getattr(func, "__name__", "")).partition(".")[0]
    if name == "where" and len(args) + len(keywords) > 1:
        return None
    return _BY_NAME.get(name)


def _has_rows(written: Any) -> bool:
    """Whether what is written is more than a number, which may be written any number of times."""
    return isinstance(written, Tensor) and written.numel() > 1


def _indices(index: Any) -> tuple[Any, ...]:
    return tuple(index) if isinstance(index, (tuple, list)) else (index,)


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) and index.ndim > 0


def _by_index(func: Callable[..., Any]) -> Callable[..., Any]:
    def run(value: Tensor, index: Any, *written: Any) -> Any:
        places: list[Any] = []
        for at in _indices(index):
            places.extend(_nonzero(at, as_tuple=True) if _is_mask(at) else (at,))
        return func(value, tuple(places), *written)

    return run


def _order(values: Tensor) -> Tensor:
    """Every position of all axes as one: an order, which holds them in place."""
    return values.reshape(-1).argsort()


def _nonzero(values: Tensor, *, as_tuple: bool = False) -> Any:
    rest, places = _order(values), []
    for size in reversed(values.shape):
        places.append(rest % size)
        rest = rest // size
    return tuple(places[::-1]) if as_tuple else torch.stack(places[::-1], dim=-1)


def _where(condition: Tensor) -> Any:
    return _nonzero(condition, as_tuple=True)


def _masked_select(values: Tensor, mask: Tensor) -> Tensor:
    both = values + mask  # in the shape that they have together
    return values.expand_as(both).reshape(-1)[_order(mask.expand_as(both))]


def _unique(values: Tensor, *_: Any, **said: Any) -> Any:
    """One value, of which everything is: a loop over many would be run for each."""
    dim = said.get("dim")
    if dim is not None:
        raise NotImplementedError("unique rows")
    first = values.reshape(-1)[_order(values)][:1]
    made = [first]
    if said.get("return_inverse"):
        made.append(torch.zeros_like(values, dtype=torch.long))
    if said.get("return_counts"):
        made.append(torch.full_like(first, values.numel(), dtype=torch.long))
    return made[0] if len(made) == 1 else tuple(made)


def _suppressed(boxes: Tensor, scores: Tensor, *_: Any, **__: Any) -> Tensor:
    """All boxes, (boxes, 4), in an order that looks at scores, (boxes,), and coordinates."""
    return (scores + boxes.argsort(dim=-1)[:, 0]).argsort()


_BY_NAME: dict[str, Callable[..., Any]] = {
    "nonzero": _nonzero,
    "argwhere": _nonzero,
    "where": _where,
    "masked_select": _masked_select,
    "unique": _unique,
    "unique_consecutive": _unique,
    "nms": _suppressed,
}
