"""Sums over a shared axis: linear layers and everything else that multiplies matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_letters

from ...model import OpKind, Role
from ..call import Call, Label, Labels, Value, any_data, data_and_weights
from .table import rule


def contract(
    call: Call, terms: Sequence[str], result: str, operands: Sequence[Value]
) -> dict[str, Label]:
    """Unify the axes of `operands` by their letters, as in `einsum`; labels by letter.

    Says everything there is to say about a contraction: roles of weights, kinds of map that keep
    it, and its joint index space. A single position broadcasts.
    """
    uses_of: dict[str, list[tuple[int, Label]]] = {}
    for i, (term, value) in enumerate(zip(terms, operands, strict=True)):
        for letter, label in zip(term, value.labels, strict=True):
            uses_of.setdefault(letter, []).append((i, label))
    labels: dict[str, Label] = {}
    for letter, uses in uses_of.items():
        wide = [label for _, label in uses if label.size != 1]
        labels[letter] = call.unify(*(wide or [label for _, label in uses]))
        _judge(call, uses, labels[letter], operands, kept=letter in result)
    call.joint([labels[letter] for letter in labels])
    return labels


def _judge(
    call: Call,
    uses: list[tuple[int, Label]],
    label: Label,
    operands: Sequence[Value],
    *,
    kept: bool,
) -> None:
    data = {i for i, _ in uses if operands[i].data}
    if any_data(operands):
        for i, label_there in uses:
            if not operands[i].data:
                call.role(label_there, Role.PRODUCE if kept else Role.CONSUME)
    elif not kept and len(uses) == 2:
        call.weight_product(uses[0][1], uses[1][1])
    if len(uses) > 1 and kept:
        call.restrict(label)  # a batch axis: position by position
    elif not kept and (len(uses) != 2 or uses[0][0] == uses[1][0]):
        call.restrict(label)  # summed away, or no product of two
    elif not kept and len(data) == 2:
        call.restrict(label, "orth")  # x R R^T y: between two values a rotation cancels
    call.keep(label)


def _product(
    call: Call,
    terms: Sequence[str],
    result: str,
    operands: Sequence[Value],
    *,
    bias: Value | None = None,
    bias_letters: str = "",
) -> Labels:
    labels = contract(call, terms, result, operands)
    out = [labels[letter] for letter in result]
    tensors: dict[str, Value | None] = {}
    data, weights = data_and_weights(operands)
    if bias is not None:
        _add_bias(call, bias, bias_letters, labels, data=bool(data) or bias.data)
        if data and not bias.data:
            tensors["bias"] = bias
    _record(call, data, weights, labels, terms, out, tensors, operands)
    return out


def _record(
    call: Call,
    data: list[Value],
    weights: list[Value],
    labels: Mapping[str, Label],
    terms: Sequence[str],
    out: Labels,
    tensors: dict[str, Value | None],
    operands: Sequence[Value],
) -> None:
    if len(data) == 1 and len(weights) == 1:
        term = terms[operands.index(weights[0])]
        other = terms[operands.index(data[0])]
        contracted = [labels[letter] for letter in term if letter in other]
        produced = [labels[letter] for letter in term if letter not in other]
        # A weight with more axes (a stack of experts, an attention over heads) is no plain matrix.
        linear = len(contracted) == 1 and len(produced) == 1
        kind = OpKind.LINEAR if linear else OpKind.OTHER
        call.op(
            kind,
            reads=[contracted if linear else data[0].labels],
            writes=produced if linear else out,
            tensors={"weight": weights[0], **tensors},
            detail="linear" if linear else call.name,
        )
    elif data:
        call.op(OpKind.OTHER, reads=[value.labels for value in data], writes=out, detail="matmul")


def _add_bias(
    call: Call, bias: Value, letters: str, labels: dict[str, Label], *, data: bool
) -> None:
    for letter, label in zip(letters[len(letters) - bias.ndim :], bias.labels, strict=True):
        if data and not bias.data:
            call.role(label, Role.VECTOR)
        if label.size != 1:
            labels[letter] = call.unify(labels[letter], label)


@rule("linear")
def linear(call: Call) -> Labels:
    """Y = x W^T + b."""
    x, weight = call.value("input"), call.value("weight")
    lead = ascii_letters[2 : 2 + x.ndim - 1]  # `a` is contracted, `b` produced
    row = "b" if weight.ndim == 2 else ""
    return _product(
        call, [f"{lead}a", f"{row}a"], f"{lead}{row}", [x, weight],
        bias=call.optional("bias"), bias_letters=row,
    )  # fmt: skip


@rule("mm", "bmm", "mv", "dot", "vdot", "inner", "matmul")
def matmul(call: Call) -> Labels:
    """Matrix products; leading axes broadcast."""
    x, y = call.operands()
    return _matmul(call, x, y)


def _matmul(call: Call, x: Value, y: Value, bias: Value | None = None) -> Labels:
    batch = max(x.ndim, y.ndim, 2) - 2
    lead = ascii_letters[3 : 3 + batch]  # (lead, b, a) times (lead, a, c)
    left = "a" if x.ndim == 1 else f"{lead[batch - (x.ndim - 2) :]}ba"
    right = "a" if y.ndim == 1 else f"{lead[batch - (y.ndim - 2) :]}ac"
    result = lead + ("b" if x.ndim > 1 else "") + ("c" if y.ndim > 1 else "")
    return _product(call, [left, right], result, [x, y], bias=bias, bias_letters=result)


@rule("addmm", "baddbmm", "addmv")
def addmm(call: Call) -> Labels:
    """Matrix product plus bias."""
    bias, x, y = call.operands()
    return _matmul(call, x, y, bias)


@rule("addbmm")
def addbmm(call: Call) -> Labels:
    """Batched product summed over the batch, plus bias."""
    bias, x, y = call.operands()
    return _product(call, ["dba", "dac"], "bc", [x, y], bias=bias, bias_letters="bc")


@rule("ger", "outer", "addr")
def outer(call: Call) -> Labels:
    """Outer product."""
    *bias, x, y = call.operands()
    return _product(
        call, ["a", "b"], "ab", [x, y], bias=bias[0] if bias else None, bias_letters="ab"
    )


@rule("bilinear")
def bilinear(call: Call) -> Labels:
    """y_k = x1_i W_kij x2_j + b_k."""
    x, y, weight = call.value("input1"), call.value("input2"), call.value("weight")
    lead = ascii_letters[3 : 3 + x.ndim - 1]
    return _product(
        call, [f"{lead}a", f"{lead}b", "cab"], f"{lead}c", [x, y, weight],
        bias=call.optional("bias"), bias_letters="c",
    )  # fmt: skip


@rule("einsum")
def einsum(call: Call) -> Labels:
    """Any contraction, any number of operands."""
    operands: list[Value] = list(call["tensors"])
    terms, result = _einsum_terms(call["equation"], [value.ndim for value in operands])
    return _product(call, terms, result, operands)


def _einsum_terms(equation: str, ndims: Sequence[int]) -> tuple[list[str], str]:
    """Letters per operand and of the result, the ellipsis spelled out."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    unused = [c for c in ascii_letters if c not in equation]
    # How many axes the ellipsis of each operand stands for; shorter ones broadcast, aligned right.
    covered = [n - len(t.replace("...", "")) for t, n in zip(terms, ndims, strict=True)]
    width = max((n for t, n in zip(terms, covered, strict=True) if "..." in t), default=0)
    rest = "".join(unused[:width])
    spelled = []
    for term, hidden in zip(terms, covered, strict=True):
        spelled.append(term.replace("...", rest[width - hidden :] if hidden else ""))
    if arrow:
        return spelled, right.replace("...", rest)
    # Without an arrow the result has every letter that occurs once, in alphabetical order.
    letters = "".join(spelled)
    once = sorted(c for c in set(letters) if letters.count(c) == 1 and c not in rest)
    return spelled, rest + "".join(once)


@rule("_grouped_mm", "transformers::grouped_mm_fallback")
def grouped_matmul(call: Call) -> Labels:
    """Rows sorted by expert, each block times its expert's matrix: experts and rows stay."""
    x, weight, *rest = call.operands()
    if weight.ndim != 3 or x.ndim != 2:
        raise ValueError("only rows times a stack of matrices has known axes")
    call.pin([x.labels[0], weight.labels[0]], "experts")
    for value in rest[:1]:
        call.pin(value.labels, "experts")
    bias = rest[1] if len(rest) > 1 else None
    return _product(call, ["ta", "eac"], "tc", [x, weight], bias=bias, bias_letters="tc")


@rule("tensordot")
def tensordot(call: Call) -> Labels:
    """Contraction over listed pairs of axes."""
    x, y = call.value("self"), call.value("other")
    left = list(ascii_letters[: x.ndim])
    right = list(ascii_letters[26 : 26 + y.ndim])
    for i, j in zip(call["dims_self"], call["dims_other"], strict=True):
        right[j % y.ndim] = left[i % x.ndim]
    result = [c for c in left if c not in right] + [c for c in right if c not in left]
    return _product(call, ["".join(left), "".join(right)], "".join(result), [x, y])
