"""Keywords of the library's verbs to requests: every option in its natural Python type. No torch.

What a text means is read as on the command line, so that the two can't drift.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from ..output_names import parse_size
from ..remote.location import is_remote, location
from .option_text import parse_shape, parse_shares, parse_weights, parse_widths
from .python_values import (
    Reader,
    bad_value,
    many,
    options_of,
    path,
    real,
    text,
    text_or_path,
    whole,
    wholes,
)
from .requests import Source
from .tensor_weights import read_weights

Request = TypeVar("Request")


def request(kind: type[Request], **given: Any) -> Request:
    """The request of a verb.

    Raises:
        UsageError: No such option, or a value that can't be meant.
    """
    return kind(**options_of(kind, given, SPECIAL))


def checkpoints(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Checkpoints as arguments, or in one sequence or generator."""
    if len(given) == 1 and not _is_source(given[0]) and isinstance(given[0], Iterable):
        return tuple(given[0])
    return given


def _is_source(value: Any) -> bool:
    return isinstance(value, str | bytes | os.PathLike | Mapping) or _has_state(value)


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and not isinstance(value, type)


def _source(name: str, value: Any) -> Source:
    """A path, a mapping of names to tensors, or what has such a state: a module."""
    if isinstance(value, Mapping):
        return value
    if _has_state(value):
        state: Source = value.state_dict()
        return state
    if isinstance(value, str | os.PathLike):
        return path(name, value)
    raise bad_value(
        name, value, "a checkpoint is a path, a state dict, or a module", "give one of these"
    )


def _sources(name: str, value: Any) -> tuple[Source, ...]:
    given = many(name, value, lambda _, one: one)
    return tuple(_source(f"checkpoint {at}", one) for at, one in enumerate(given))


def _weights(name: str, value: Any) -> Any:
    """One for each checkpoint, for all tensors or by patterns of names; or the option's text."""
    if isinstance(value, os.PathLike):
        return read_weights(path(name, value))
    if isinstance(value, str):
        by_file = value.endswith((".yaml", ".yml"))
        return read_weights(path(name, value)) if by_file else parse_weights(value)
    if isinstance(value, Mapping):
        return {
            text(name, pattern): tuple(many(f"{name}[{pattern!r}]", row, real))
            for pattern, row in value.items()
        }
    return tuple(many(name, value, real))


def _anchor(name: str, value: Any) -> str:
    """`last`, `first`, `medoid`, or a position: a number, or as text."""
    return value if isinstance(value, str) else str(whole(name, value))


def _layer(name: str, value: Any) -> dict[str, float]:
    """Shares by name; or texts, `fc1=0.9`."""
    if isinstance(value, Mapping):
        return {text(name, key): real(f"{name}[{key!r}]", share) for key, share in value.items()}
    return parse_shares([value] if isinstance(value, str) else many(name, value, text))


def _input_shape(name: str, value: Any) -> tuple[int, ...]:
    shape = parse_shape(value) if isinstance(value, str) else wholes(name, value)
    return parse_shape(",".join(map(str, shape)))


def _widths(name: str, value: Any) -> tuple[float, ...]:
    given = value if isinstance(value, str) else ",".join(map(str, many(name, value, real)))
    return parse_widths(given)


def _arch(name: str, value: Any) -> Any:
    """A name, a factory, a module; texts or a mapping for several checkpoints."""
    if isinstance(value, str | os.PathLike):
        return text_or_path(name, value)
    if isinstance(value, Mapping) or callable(value):
        return value
    return tuple(many(name, value, text))


def _key(name: str, value: Any) -> Any:
    """A name; texts or a mapping of positions to names for several checkpoints; None for none."""
    if value is None or isinstance(value, Mapping):
        return value
    return text(name, value) if isinstance(value, str) else tuple(many(name, value, text))


def _samples(name: str, value: Any) -> Any:
    """A path, or arrays: those are looked at once the network is known."""
    if value is None:
        raise bad_value(name, value, "a file, or arrays in memory, are meant")
    if isinstance(value, str) and is_remote(at := location(value)):
        return at
    return path(name, value) if isinstance(value, os.PathLike) else value


def _device(name: str, value: Any) -> str:
    """A name, a torch.device, or the number of a CUDA device."""
    if isinstance(value, str) or type(value).__name__ == "device":
        return str(value)
    return f"cuda:{whole(name, value)}"


def _dtype(name: str, value: Any) -> str:
    """A name, or torch's or numpy's own."""
    if isinstance(value, str):
        return value
    said = getattr(value, "__name__", None) if isinstance(value, type) else str(value)
    if said is None or isinstance(value, bool | int | float | list | tuple | Mapping):
        raise bad_value(name, value, "a dtype is meant")
    return said.removeprefix("torch.")


def _shard_size(name: str, value: Any) -> str:
    """`5GB`, or a number of bytes."""
    size = value if isinstance(value, str) else str(whole(name, value))
    parse_size(size)
    return size


# Fields whose type says too little, by name.
SPECIAL: Mapping[str, Reader] = {
    "checkpoints": _sources,
    "checkpoint": _source,
    "dense": _source,
    "pruned": _source,
    "weights": _weights,
    "anchor": _anchor,
    "layer": _layer,
    "input_shape": _input_shape,
    "arch": _arch,
    "key": _key,
    "spec": text_or_path,
    "samples": _samples,
    "inputs": _samples,
    "widths": _widths,
    "device": _device,
    "dtype": _dtype,
    "shard_size": _shard_size,
}
