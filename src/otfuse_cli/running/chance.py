"""Whether one of two is ahead of the other by more than chance, on the same inputs."""

from __future__ import annotations

from torch import Tensor

# Standard errors by which the first in order has to be beaten, where several try.
SEVERAL_TRY = 2.0


def clearly_more(one: Tensor, other: Tensor, *, errors: float = 1.0) -> bool:
    """Whether one is right more often than the other is, and by more than chance.

    Where only one of the two is, a coin would say which: the lead has to pass so many standard
    deviations (`errors`) of as many tosses. With few inputs, `other` is the prior.
    """
    lead = one.double() - other.double()
    return bool(lead.sum() > errors * lead.abs().sum().sqrt())


def clearly_nearer(one: Tensor, other: Tensor) -> bool:
    """Whether one's squared distances are smaller, by more than chance (two standard errors)."""
    lead = other.double() - one.double()
    return bool(lead.sum() > SEVERAL_TRY * lead.square().sum().sqrt())
