"""The types of the values in a report: what they are, and what its schema says of them besides."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec


def promise(description: str | None = None, **keywords: Any) -> msgspec.Meta:
    """What the schema says of a value beyond its type: keywords of JSON Schema.

    They bind who writes a report. The reader holds values against their types alone, so that it
    takes a cost of -1e-17, or the kinds and commands of a newer release.
    """
    return msgspec.Meta(description=description, extra_json_schema=keywords or None)


# A whole number stays whole, so that a report that is read back is written as it was.
Number: TypeAlias = int | float
Count = Annotated[int, promise(minimum=0)]
Positive = Annotated[int, promise(minimum=1)]
Amount = Annotated[Number, promise(minimum=0)]
Share = Annotated[Number, promise(minimum=0, maximum=1)]
Percent = Annotated[Number, promise(minimum=0, maximum=100)]
# Below zero where a layer of the second network is larger than that of the first (prune-fuse).
Sparsity = Annotated[Number, promise(maximum=1)]
Digest = Annotated[str, promise(pattern="^[0-9a-f]{64}$")]
Command = Annotated[
    str,
    promise(enum=["merge", "inspect", "prune-fuse", "prune", "check", "eval", "curve", "demo"]),
]
