"""Scaled dot-product attention, fused or not, with masks and grouped queries."""

from __future__ import annotations

from ...model import OpKind
from ..atoms import Times
from ..call import Call, Label, Labels, Value
from .table import rule


@rule(
    "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math",
)
def softmax_attention(call: Call) -> object:
    """Softmax(q k^T + mask) v."""
    q, k, v = (call.value(name) for name in ("query", "key", "value"))
    if not q.ndim == k.ndim == v.ndim:
        raise ValueError("operands of different rank")
    depth = call.unify(q.labels[-1], k.labels[-1])
    # q R R^T k^T = q k^T: any rotation of the head's inside keeps the scores.
    call.restrict(depth, "orth")
    keys = call.unify(k.labels[-2], v.labels[-2])
    call.restrict([keys, q.labels[-2]])
    if call.flag("is_causal"):
        call.pin([keys, q.labels[-2]], "causal mask")
    lead = _leading(call, q, k, v)
    call.restrict(lead)
    for label in lead:
        call.keep(label)
    mask = call.optional("attn_mask") or call.optional("attn_bias")
    if mask is not None:
        _mask(call, mask, [*lead, q.labels[-2], keys])
    call.joint([*lead, q.labels[-2], keys, depth])
    call.joint([*lead, q.labels[-2], keys, v.labels[-1]])
    call.op(
        OpKind.OTHER,
        reads=[q.labels, k.labels, v.labels],
        writes=[*lead, v.labels[-1]],
        detail="attention",
    )
    out = [*lead, q.labels[-2], v.labels[-1]]
    if len(call.shapes) == 1:
        return out
    rest = [_other_output(call, shape, [*lead, q.labels[-2]]) for shape in call.shapes[1:]]
    return [out, *rest]


def _leading(call: Call, q: Value, k: Value, v: Value) -> list[Label]:
    """Batch and heads; with grouped queries a query head is kv head * member of its group."""
    lead: list[Label] = []
    for d in range(q.ndim - 2):
        labels = [value.labels[d] for value in (q, k, v)]
        sizes = {label.size for label in labels}
        # The axis of heads is the one before rows and depth.
        if call.flag("enable_gqa") and d == q.ndim - 3:
            lead.append(_grouped(call, *labels))
        elif len(sizes) == 1:
            lead.append(call.unify(*labels))
        else:
            wide = [label for label in labels if label.size == max(sizes)]
            lead.append(call.unify(*wide))
    return lead


def _grouped(call: Call, query: Label, key: Label, value: Label) -> Label:
    if key.size != value.size:
        raise ValueError("key and value heads differ in number")
    heads = call.unify(key, value)
    call.restrict(heads)
    call.keep(heads)
    member = call.fresh(query.size // heads.size)
    call.unify(query, Label(Times((heads.form, member.form))))
    call.keep(member)
    return query


def _mask(call: Call, mask: Value, axes: Labels) -> None:
    for label, axis in zip(mask.labels, axes[len(axes) - mask.ndim :], strict=True):
        if label.size != 1:
            call.unify(label, axis)


def _other_output(call: Call, shape: tuple[int, ...], lead: Labels) -> Labels:
    """Log-sum-exp follows the rows; seeds and offsets belong to nobody."""
    if shape == tuple(label.size for label in lead):
        return lead
    return call.pinned_axes(shape, "attention state")
