"""Fourier transforms, and real and imaginary parts: frequencies and parts stay in place."""

from __future__ import annotations

from collections.abc import Sequence

from ...model import OpKind
from ..call import Call, Labels
from .table import rule

FREQUENCIES = "frequencies"
PARTS = "real and imaginary part"
ONE_AXIS = ("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft")
TWO_AXES = ("fft_fft2", "fft_ifft2", "fft_rfft2", "fft_irfft2", "fft_hfft2", "fft_ihfft2")
ANY_AXES = (
    "fft_fftn", "fft_ifftn", "fft_rfftn", "fft_irfftn", "fft_hfftn", "fft_ihfftn",
    "fft_fftshift", "fft_ifftshift", "_fft_r2c", "_fft_c2r", "_fft_c2c",
)  # fmt: skip


@rule(*ONE_AXIS, *TWO_AXES, *ANY_AXES)
def fourier(call: Call) -> Labels:
    """Linear: every other axis passes, under any map."""
    value = call.value("self")
    axes = {axis % value.ndim for axis in _axes(call, value.ndim)}
    call.pin(value.pick(sorted(axes)), FREQUENCIES)
    labels = list(value.labels)
    for axis in axes:
        labels[axis] = call.pinned(call.shape[axis], FREQUENCIES)
    call.op(OpKind.OTHER, reads=[value.labels], writes=labels)
    return labels


def _axes(call: Call, ndim: int) -> Sequence[int]:
    """Axes transformed: those named, else the last ones that sizes are given for, else all."""
    dims = call.get("dim")
    if dims is not None:
        return [dims] if isinstance(dims, int) else list(dims)
    sizes = call.get("s")
    return range(ndim) if sizes is None else range(-len(sizes), 0)


@rule("view_as_complex")
def complex_view(call: Call) -> Labels:
    """Pairs of numbers, as the last axis, become one number."""
    value = call.value("self")
    call.pin(value.labels[-1], PARTS)
    return value.labels[:-1]


@rule("view_as_real")
def real_view(call: Call) -> Labels:
    """Back: a last axis of two positions."""
    return [*call.value("self").labels, call.pinned(2, PARTS)]


@rule("stft", "istft")
def short_time(call: Call) -> Labels:
    """Windows in time to frequencies, and back; signals beside one another pass."""
    value = call.value("self")
    window = call.optional("window")
    if window is not None:
        call.pin(window.labels, FREQUENCIES)
    # A signal has one axis, its spectrum two, and a third one where its parts are an axis.
    signals = value.ndim - 1 if call.name == "stft" else len(call.shape) - 1
    call.pin(value.labels[signals:], FREQUENCIES)
    lead = value.labels[:signals]
    return [*lead, *call.pinned_axes(call.shape[signals:], FREQUENCIES)]
