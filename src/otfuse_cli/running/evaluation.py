"""What outputs are worth: accuracy, cross-entropy, perplexity, agreement; ensembles of outputs.

Outputs are logits or log-probabilities. Classes are on axis 1; on the last axis where the network
gives one row of logits for each position of a sequence (labels then have one more axis, too).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, isfinite, log

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import UsageError
from .samples import IGNORED, Samples

MEANS = ("logits", "probabilities")


@dataclass(frozen=True)
class Score:
    """How well outputs predict labels.

    Attributes:
        predictions: Number of labels compared with (positions count one by one).
        accuracy: Share of right ones, in percent.
        cross_entropy: Mean negative log-probability of the label, in nats; infinite or NaN as is.
        tokens: Whether they are positions of sequences, so that perplexity means something.
    """

    predictions: int
    accuracy: float
    cross_entropy: float
    tokens: bool = False

    @property
    def perplexity(self) -> float | None:
        """exp(cross-entropy); None beyond the range of floats, or where it means nothing."""
        if not self.tokens or not isfinite(self.cross_entropy) or self.cross_entropy > 700:
            return None
        return exp(self.cross_entropy)


class Tally:
    """A score, added up batch by batch in float64."""

    def __init__(self) -> None:
        self._count, self._hits, self._loss, self._tokens = 0, 0, 0.0, False

    def add(self, logits: Tensor, samples: Samples) -> None:
        """Count a batch of outputs for `samples`.

        Raises:
            UsageError: No labels and none to be had, or labels that the outputs can't have.
        """
        rows, labels, tokens = targets(logits, samples)
        keep = labels != IGNORED
        rows, labels = rows[keep], labels[keep]
        self._tokens = tokens
        self._count += len(labels)
        self._hits += int((rows.argmax(1) == labels).sum())
        self._loss += float(F.cross_entropy(rows, labels, reduction="sum").double())

    def score(self) -> Score:
        """The score so far.

        Raises:
            UsageError: Every label was one to be ignored.
        """
        if not self._count:
            raise UsageError("no labels to compare with", why=f"all of them are {IGNORED}")
        accuracy = 100 * self._hits / self._count
        return Score(self._count, accuracy, self._loss / self._count, self._tokens)


def score(logits: Tensor, samples: Samples) -> Score:
    """The score of all outputs for `samples`."""
    tally = Tally()
    tally.add(logits, samples)
    return tally.score()


def targets(logits: Tensor, samples: Samples) -> tuple[Tensor, Tensor, bool]:
    """Outputs as rows of logits, a label for each, and whether they are positions of sequences.

    Language models: without labels, or with labels that repeat the inputs, each position is
    compared with the next token; padding (an `attention_mask` of 0) is left out.

    Raises:
        UsageError: No labels and none to be had; wrong shape; a label beyond the last class.
    """
    if logits.ndim < 2:
        raise UsageError("one number for each sample is no classification", where="the outputs")
    labels, ids = samples.labels, _token_ids(samples)
    if ids is not None and class_axis(logits, samples) == -1:
        if labels is None or _repeats(labels, ids):
            labels = _next_tokens(ids if labels is None else labels, samples)
            logits = logits[:, :-1]
        if labels.shape != logits.shape[:2]:
            raise _misfit(logits, labels)
        rows, wanted, tokens = logits.flatten(0, 1), labels.flatten(), True
    elif labels is None:
        raise UsageError(
            "samples without labels",
            where="--samples",
            fix="add class indices as y or labels",
        )
    elif labels.shape == (logits.shape[0], *logits.shape[2:]):
        rows, wanted, tokens = logits.movedim(1, -1).flatten(0, -2), labels.flatten(), False
    else:
        raise _misfit(logits, labels)
    _require_range(wanted, rows.shape[1])
    return rows.float(), wanted.to(torch.int64), tokens


def agreement(one: Tensor, other: Tensor) -> float:
    """Share of rows (classes on axis 1) whose largest entries are in the same place, 0 to 1."""
    return float((one.argmax(1) == other.argmax(1)).double().mean())


def ensemble(outputs: Sequence[Tensor], *, mean: str = "logits", axis: int = 1) -> Tensor:
    """Outputs of an ensemble of equal members.

    Args:
        outputs: Of each member, all of one shape.
        mean: `logits` averages these; `probabilities` averages what softmax makes of them, and
            returns the logarithm.
        axis: The one with the classes (`class_axis`).

    Raises:
        ValueError: Another `mean`, or no outputs.
    """
    if mean not in MEANS or not outputs:
        raise ValueError(f"mean {mean!r} of {len(outputs)} outputs")
    stacked = torch.stack([o.double() for o in outputs])
    if mean == "logits":
        return stacked.mean(0).float()
    logs = stacked.log_softmax(axis + 1 if axis >= 0 else axis)
    return (logs.logsumexp(0) - log(len(outputs))).float()


def class_axis(logits: Tensor, samples: Samples) -> int:
    """Where the classes are: last for a token model, else axis 1."""
    ids = _token_ids(samples)
    tokens = ids is not None and logits.ndim == 3 and logits.shape[:2] == ids.shape
    return -1 if tokens else 1


def _token_ids(samples: Samples) -> Tensor | None:
    """The ids of a token model: the first integer input with positions."""
    for tensor in (*samples.args, *samples.kwargs.values()):
        if not tensor.is_floating_point():
            return tensor if tensor.ndim == 2 else None
    return None


def _repeats(labels: Tensor, ids: Tensor) -> bool:
    """Whether labels are the ids themselves, but for those that are ignored."""
    return labels.shape == ids.shape and bool(((labels == ids) | (labels == IGNORED)).all())


def _next_tokens(labels: Tensor, samples: Samples) -> Tensor:
    labels = labels.to(torch.int64)
    mask = samples.kwargs.get("attention_mask")
    if mask is not None and mask.shape == labels.shape:
        labels = labels.masked_fill(mask == 0, IGNORED)
    return labels[:, 1:]


def _misfit(logits: Tensor, labels: Tensor) -> UsageError:
    return UsageError(
        "labels that don't fit the outputs",
        where=f"labels {list(labels.shape)}, outputs {list(logits.shape)}",
        why="there is one class index for each sample, or for each of its positions",
        fix="store labels without the axis of the classes",
    )


def _require_range(labels: Tensor, classes: int) -> None:
    if classes < 2:
        raise UsageError("one output is no classification", where="the network has one logit")
    highest = int(labels.max()) if labels.numel() else 0
    if highest >= classes:
        raise UsageError(
            "a label beyond the last class",
            where=f"label {highest}",
            why=f"the network has {classes} outputs, labels count from 0",
            fix="use the labels that the network was trained with",
        )
