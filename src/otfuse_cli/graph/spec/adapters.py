"""Files that hold an adapter: what is added to the weights of a base, as factors of a product."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ...errors import IncompatibleModels, few
from ..model import Shapes

# Parts of names that PEFT, loralib, diffusers, kohya and LyCORIS give to what an adapter learns:
# lora_A, lora_up, to_q_lora, hada_w1_a, lokr_w2, ia3_l, oft_blocks, vera_lambda_b.
_KINDS = re.compile(
    r"(?:lora|hada|lokr|ia3|oft|boft|vera|glora|dora)_\w+|lora|\w+_lora|dora_scale", re.IGNORECASE
)
# One factor's name, and the other's: lora_A and lora_B, lora.down and lora.up, hada_w1_a and _b.
_PAIRS = (
    (re.compile(r"(?<![A-Za-z])A(?![A-Za-z])"), "B"),
    (re.compile(r"(?<![A-Za-z])down(?![A-Za-z])"), "up"),
    (re.compile(r"(?<=w\d_)a(?![A-Za-z])"), "b"),
    (re.compile(r"(?<=_)w1(?![A-Za-z0-9])"), "w2"),
)


def refuse_adapter(shapes: Shapes, label: str) -> None:
    """Refuse a file whose names are those of an adapter: its factors mean nothing one by one.

    Raises:
        IncompatibleModels: It holds one, alone or beside the weights that it is added to.
    """
    learned: list[str] = []
    for name in shapes:
        if any(map(_KINDS.fullmatch, name.split("."))):
            learned.append(name)
    if not learned:
        return
    pair = next(_factors(learned, shapes), None)
    where = " and ".join(f"{n} {list(shapes[n])}" for n in pair or learned[:1])
    rest = len(learned) - len(pair or learned[:1])
    raise IncompatibleModels(
        "an adapter (LoRA or its like), not a network",
        where=f"{where} of {label}" + f", and {rest} more" * (rest > 0),
        why="the product of its factors is added to a weight of the base: factors that are matched "
        "or averaged one by one give another product"
        if pair
        else f"{few(learned)} change weights of a base, which are not all in this file",
        fix="merge the adapter into its base first (PEFT: merge_and_unload), once for each model, "
        "and fuse the merged models; or trace the network that holds it (--arch net.py:make_net)",
    )


def _factors(learned: list[str], shapes: Shapes) -> Iterator[tuple[str, str]]:
    """Pairs of tensors that are multiplied: by name, with a rank that both have."""
    for name in learned:
        for one, other in _PAIRS:
            partner = one.sub(other, name)
            if partner != name and partner in shapes and set(shapes[name]) & set(shapes[partner]):
                yield name, partner
