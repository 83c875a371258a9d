"""Why a module can't be traced, in words that its author can act on."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from ...errors import IncompatibleModels

WRAPPER = (
    "wrap the part that can be traced in a module of its own and name that one, "
    "or describe the network in a spec (--arch spec.yaml), which runs no code"
)
OURS = Path(__file__).resolve().parents[2]
TORCH = Path(torch.__file__).resolve().parent


def refuse_scripted(module: nn.Module) -> None:
    """Raise for TorchScript modules: they have no Python code to follow.

    Raises:
        IncompatibleModels: `module` is or contains a scripted module.
    """
    for path, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise IncompatibleModels(
                "a TorchScript module can't be traced",
                where=path or type(module).__name__,
                why="torch.export follows Python code, and a scripted module has none",
                fix=f"use the module from before torch.jit.script; or {WRAPPER}",
            )


def explain(
    error: Exception, module: nn.Module, others: Sequence[Exception] = ()
) -> IncompatibleModels:
    """The failure of an export, with the user's line, the cause, torch's words, the way round.

    `others`: how it failed in other ways.
    """
    text = str(error)
    line = user_line(error)
    message = f"{type(error).__name__}: {text}"
    quoted = f"torch.export: {_quoted(error)}"
    for other in others:
        if _quoted(other) not in quoted:
            quoted += f"; and tried otherwise: {_quoted(other)}"
    cause, way_out = quoted, f"check that the module runs on its example inputs; or {WRAPPER}"
    for pattern, why, fix in CAUSES:
        if re.search(pattern, message, re.IGNORECASE):
            cause, way_out = f"{why} ({quoted})", fix
            break
    return IncompatibleModels(
        f"{type(module).__name__} can't be traced", where=line, why=cause, fix=way_out
    )


def _quoted(error: Exception) -> str:
    return _first_line(str(error)) or type(error).__name__


def is_data_dependent(error: IncompatibleModels) -> bool:
    """Whether a failure comes of a size or a number that depends on the data."""
    said = f"{error.what} {error.why}"
    return re.search(DATA_DEPENDENT, said, re.IGNORECASE) is not None


# Sizes and numbers that are known only once the network is run.
DATA_DEPENDENT = (
    r"GuardOnDataDependent|data-dependent|depends on the data|Could not (guard|extract)|unbacked|"
    r"\.item\(\)|_local_scalar_dense"
)
# What torch's messages say, by version and way of exporting; why that is; the way round. The first
# that matches is taken: a data-dependent shape is often the consequence of one of those before.
CAUSES = (
    (
        r"fake impl|FakeTensor.*kernel|meta kernel|UnsupportedOperator|no fake|"
        r"Meta.*not (been )?implemented|UnsupportedFakeTensor",
        "a custom operator has no fake implementation, so its output shape is unknown",
        "register one (torch.library.register_fake): the operator is then pinned, and everything "
        f"around it still aligned; or {WRAPPER}",
    ),
    (
        r"not a known type|unsupported.*(output|input) type|DynamicCache|EncoderDecoderCache",
        "it returns or takes an object that is no tensor, tuple, list or dict (a cache, say)",
        "return tensors only (use_cache=False for transformers), "
        f"or register the type with torch.utils._pytree; or {WRAPPER}",
    ),
    (
        r"\.numpy\(\)|cannot convert.*numpy|Numpy is not|numpy\(\)",
        "the data leaves torch (.numpy()), so what depends on it can't be followed",
        f"use the torch function of the same name there; or {WRAPPER}",
    ),
    (
        DATA_DEPENDENT,
        "control flow or a number depends on the data (an `if` on a tensor, .item(), a loop until "
        "convergence), so there is no single graph",
        "use torch.where or a fixed number of steps there, or take a flag set when the module is "
        f"built; or {WRAPPER}",
    ),
)


def user_line(error: BaseException) -> str | None:
    """`file:line in function: code` of the innermost frame that is neither torch's nor ours."""
    chosen: traceback.FrameSummary | None = None
    cause: BaseException | None = error
    while cause is not None and chosen is None:
        for frame in traceback.extract_tb(cause.__traceback__):
            file = Path(frame.filename)
            if file.is_file() and not _within(file, TORCH) and not _within(file, OURS):
                chosen = frame
        cause = cause.__cause__ or cause.__context__
    if chosen is None:
        return None
    code = f": {chosen.line}" if chosen.line else ""
    return f"{chosen.filename}:{chosen.lineno} in {chosen.name}{code}"


def _within(file: Path, folder: Path) -> bool:
    return file.resolve().is_relative_to(folder)


def _first_line(text: str) -> str:
    """The first line, and the second where that one is what the first announces."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    announced = bool(lines) and lines[0].endswith(":")
    return " ".join(lines[: 2 if announced else 1])
