"""What `--width` means, and what it doesn't go with: refused before any file is opened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..errors import UsageError
from ..fusion.widths import Width
from ..requests.requests import MergeRequest
from ..requests.tensor_weights import Rules


def asked_width(request: MergeRequest, weights: Sequence[float], rules: Rules) -> Width | None:
    """How wide the result is to be; None where it has the anchor's widths.

    Raises:
        UsageError: A width that can't be, or what can't be had at one.
    """
    if not request.asks_for_width:
        return None
    if request.width is None and not request.layer:
        raise UsageError(
            "--width-multiple without a width",
            where=f"--width-multiple {request.width_multiple}",
            fix="add --width F, or --layer NAME=F",
        )
    for where, why, fix in _unfit(request, rules):
        raise UsageError("this does not go with --width", where=where, why=why, fix=fix)
    parents = sum(weight > 0 for weight in weights)
    layers = dict(request.layer or {})
    width = Width(request.width or 1.0, parents, layers, request.width_multiple or 1)
    named = {f"--layer {name}={factor:g}": factor for name, factor in layers.items()}
    if request.width is not None:
        named = {f"--width {request.width:g}": request.width, **named}
    for where, factor in named.items():
        require_factor(where, factor, parents)
    if not request.has_inputs:
        _require_whole(width, named)
    return width


def _unfit(request: MergeRequest, rules: Rules) -> Iterator[tuple[str, str, str]]:
    """Options given that mean nothing beside `--width`: where, why, what to do."""
    joint = "only joint fusion makes a network that is wider or narrower than the anchor"
    if request.blend not in (None, "auto", "joint"):
        yield f"--blend {request.blend}", joint, "use --blend joint, or leave out --width"
    if rules:
        yield (
            "--weights FILE",
            "all tensors are made anew, from all parents",
            "give one weight each",
        )
    if request.skip or request.only:
        yield "--skip, --only", "all tensors are made anew", "leave them out"
    if request.calibrate not in (None, "none"):
        yield f"--calibrate {request.calibrate}", "layers are fitted already", "leave it out"
    if request.residual == "orthogonal":
        yield "--residual orthogonal", "nothing is aligned", "leave it out"
    if request.paper or request.align == "none":
        where = "--paper" if request.paper else "--align none"
        yield where, joint, "leave it out"


def require_factor(where: str, factor: float, parents: int) -> None:
    """Refuse a width that no units are there for.

    Raises:
        UsageError: It is not above 0, or wider than all models together.
    """
    if not factor > 0:
        raise UsageError(
            "a width is a factor above 0", where=where, fix="1.5 is half as wide again"
        )
    if factor > parents:
        counted = "1 checkpoint has" if parents == 1 else f"{parents} checkpoints have"
        raise UsageError(
            "wider than all checkpoints together",
            where=where,
            why=f"{counted} a weight, and units are theirs: {parents} keeps all of them",
            fix=f"use at most {parents}",
        )


def _require_whole(width: Width, named: dict[str, float]) -> None:
    """Without inputs nothing can be left out: nobody knows what it is made up for by."""
    if width.whole and width.multiple == 1:
        return
    where = next((w for w, factor in named.items() if factor < width.parents), None)
    if where is None and width.whole:
        where = f"--width-multiple {width.multiple}"
    raise UsageError(
        "this width needs inputs",
        where=where or "--layer: the others keep the anchor's width",
        why=f"without inputs all units of all {width.parents} checkpoints stay, and nothing else "
        "is exact",
        fix=f"use --width {width.parents} alone, or add --arch with --samples FILE or --synthetic",
    )
