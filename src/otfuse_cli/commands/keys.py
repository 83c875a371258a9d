"""`--key`: which entry of which checkpoint holds the model. Torch-free: the command line reads it.

`NAME` is meant for all checkpoints, and one that holds a single model doesn't need it; `INDEX=NAME`
is meant for the one at that position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import UsageError

Key = str | Sequence[str] | Mapping[int, str]


@dataclass(frozen=True)
class Keys:
    """Names of entries: `bare` for all checkpoints, `own` by position."""

    bare: str | None = None
    own: Mapping[int, str] = field(default_factory=dict)

    def at(self, index: int) -> tuple[str | None, bool]:
        """The key of a checkpoint, and whether it is the bare one."""
        return (self.own[index], False) if index in self.own else (self.bare, True)


def read_keys(key: Key | None, count: int | None = None) -> Keys:
    """`ema`, `1=ema`, several of them, or a mapping of positions to names.

    Raises:
        UsageError: Two for one checkpoint, or a position of none of the `count` checkpoints.
    """
    if key is None:
        return Keys()
    if isinstance(key, Mapping):
        texts = [f"{at}={name}" for at, name in key.items()]
    else:
        texts = [key] if isinstance(key, str) else list(key)
    bare: str | None = None
    own: dict[int, str] = {}
    for text in texts:
        position, equals, name = text.partition("=")
        if not (equals and position.strip().isdecimal()):
            if bare is not None or isinstance(key, Mapping):
                raise _refused(text, "only one can be meant for all checkpoints")
            bare = text
            continue
        at = int(position)
        if not name or at in own:
            raise _refused(text, f"checkpoint {at} has two" if name else "it names no entry")
        if count is not None and at >= count:
            raise _refused(text, f"there are {count} checkpoints, counted from 0")
        own[at] = name
    return Keys(bare, own)


def _refused(text: str, why: str) -> UsageError:
    return UsageError(
        "not a key",
        where=f"--key {text}",
        why=why,
        fix="write --key NAME, or --key INDEX=NAME for one of several checkpoints",
    )
