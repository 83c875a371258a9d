"""Weights by tensor: patterns of names, and the file that gives them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import UnreadableInput, UsageError
from .requests import normalised

Rules = tuple[tuple[str, tuple[float, ...]], ...]


def weight_rules(
    weights: Mapping[str, Sequence[float]] | Sequence[float] | None, count: int
) -> tuple[tuple[float, ...], Rules]:
    """Weights of all tensors, and patterns with weights of their own, the first match first.

    Raises:
        UsageError: As for `normalised`; names the pattern.
    """
    if not isinstance(weights, Mapping):
        return normalised(weights, count), ()
    rules = []
    for pattern, given in weights.items():
        try:
            rules.append((pattern, normalised(given, count)))
        except UsageError as error:
            raise UsageError(
                error.what, where=f"--weights, pattern {pattern}", why=error.why, fix=error.fix
            ) from error
    # What no pattern means has equal weights; a last `*` says otherwise, and is then the rest.
    if rules and rules[-1][0] == "*":
        return rules[-1][1], tuple(rules[:-1])
    return normalised(None, count), tuple(rules)


def read_weights(path: Path) -> dict[str, tuple[float, ...]]:
    """Patterns of tensor names to weights, from a YAML file (docs/checkpoints.md).

    Raises:
        UnreadableInput: It can't be read.
        UsageError: It holds something else.
    """
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnreadableInput(
            "can't read the weights", where=f"--weights {path}", why=error.strerror
        ) from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UnreadableInput(
            "not a YAML file", where=f"--weights {path}", why=" ".join(str(error).split())
        ) from error
    if not isinstance(data, dict) or not all(
        isinstance(pattern, str)
        and isinstance(row, list)
        and all(isinstance(w, int | float) and not isinstance(w, bool) for w in row)
        for pattern, row in data.items()
    ):
        raise UsageError(
            "weights by tensor must be a list for each pattern",
            where=f"--weights {path}",
            fix='one line per pattern, for example "layer1.*": [0.7, 0.3]',
        )
    return {pattern: tuple(float(w) for w in row) for pattern, row in data.items()}
