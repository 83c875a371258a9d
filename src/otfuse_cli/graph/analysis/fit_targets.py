"""Which layers of a program have a closed-form fit, and what each should produce.

A layer is a linear map or a convolution whose weight is a tensor of the checkpoint. Its target is
its own output, after the BatchNorm that follows; where it is the last one to feed an addition, it
is what the addition should give, less the other operand (docs/methods/refit.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.fx import Node

from ..trace.nodes import named_arguments, operator_name
from .batch_norms import Norm, batch_norm, norm_after, only_reader

if TYPE_CHECKING:
    from ..trace.program import Program

_LINEAR = frozenset({"linear", "addmm", "mm", "matmul"})
_CONV = frozenset({"conv1d", "conv2d", "conv3d", "convolution"})
_TRANSPOSED = frozenset({"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"})
# Operations that hand on what they are given, in eval mode.
_SAME = frozenset({"dropout", "alias", "clone", "contiguous", "detach"})
# Functions that keep the order of scores.
_MONOTONE = frozenset({"sigmoid", "softmax", "_softmax", "log_softmax", "_log_softmax"})
# Operations that keep the rows of a linear layer in order, where the last axis stays as it is.
_VIEWS = frozenset(
    {"view", "reshape", "_unsafe_view", "unflatten", "flatten", "squeeze", "unsqueeze"}
)
_TURNS = frozenset({"t", "transpose", "permute", "numpy_T"})


@dataclass(frozen=True)
class KernelWindow:
    """How a convolution looks at its input; lists have one entry per spatial dimension."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool = False
    output_padding: tuple[int, ...] = ()


@dataclass(frozen=True)
class Layer:
    """A linear map of the program.

    Attributes:
        node: The value that it computes, bias included.
        input: The value that it reads.
        weight: Tensor name.
        bias: Tensor name, if it has one.
        turned: The weight is stored (inputs, outputs).
        window: Of a convolution; None for a linear layer.
    """

    node: str
    input: str
    weight: str
    bias: str | None
    turned: bool
    window: KernelWindow | None


@dataclass(frozen=True)
class NormFit:
    """A BatchNorm that belongs to no layer: behind an activation, on a sum, on a concatenation."""

    norm: Norm

    @property
    def target(self) -> str:
        """The value whose mean over the parents is aimed at."""
        return self.norm.node

    @property
    def tensors(self) -> tuple[str, ...]:
        """Tensors that a solution changes."""
        return tuple(self.norm.tensors.values())

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.norm.tensors["weight"].removesuffix(".weight")


@dataclass(frozen=True)
class Fit:
    """A layer to be fitted.

    Attributes:
        layer: What is solved for.
        norm: The BatchNorm that is solved for together with it.
        target: The value whose mean over the parents is aimed at.
        minus: What else goes into `target`; None when the layer makes it alone.
    """

    layer: Layer
    norm: Norm | None
    target: str
    minus: str | None

    @property
    def tensors(self) -> tuple[str, ...]:
        """Tensors that a solution changes."""
        bias = () if self.layer.bias is None else (self.layer.bias,)
        norm = () if self.norm is None else tuple(self.norm.tensors.values())
        return (self.layer.weight, *bias, *norm)

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.layer.weight.removesuffix(".weight")


def linear_layers(program: Program) -> tuple[Layer, ...]:
    """Every linear map whose weight is a tensor of the checkpoint and reads data."""
    return tuple(_layers(program))


def fits(program: Program) -> tuple[tuple[Fit, ...], tuple[str, ...]]:
    """Layers to be fitted, in execution order, and names of tensors that are used twice or tied.

    What is used twice has no target of its own and is left as it is.
    """
    uses = _uses(program)
    plan, shared = [], []
    for layer in linear_layers(program):
        if uses[layer.weight] > 1 or (layer.bias is not None and uses[layer.bias] > 1):
            shared.append(layer.weight)
        else:
            plan.append(_fit(program, layer))
    return tuple(plan), tuple(dict.fromkeys(shared))


def scores(program: Program) -> str:
    """The value whose last axis (of images: channels) is one score for each class.

    The first output, before functions that keep the order.
    """
    node = next(node for node in program.nodes if node.name == program.outputs[0])
    while node.op == "call_function" and operator_name(node) in _SAME | _MONOTONE:
        node = node.all_input_nodes[0]
    return node.name


def norm_fits(program: Program) -> tuple[NormFit, ...]:
    """BatchNorms in eval mode that are not part of a layer's fit, in execution order."""
    uses = _uses(program)
    plan, _ = fits(program)
    folded = {fit.norm.node for fit in plan if fit.norm is not None}
    unfolded = []
    for node in program.nodes:
        norm = batch_norm(program, node) if node.name not in folded else None
        if norm is not None and all(uses[name] == 1 for name in norm.tensors.values()):
            unfolded.append(NormFit(norm))
    return tuple(unfolded)


def _uses(program: Program) -> Counter[str]:
    """How often each tensor is read."""
    uses: Counter[str] = Counter()
    for node in program.nodes:
        if node.op == "call_function":
            for used in node.all_input_nodes:
                if used.name in program.tensors:
                    uses[program.tensors[used.name]] += 1
    return uses


def _layers(program: Program) -> Iterator[Layer]:
    for node in program.nodes:
        if node.op != "call_function" or node.name not in program.data:
            continue
        name = operator_name(node)
        if name in _LINEAR:
            layer = _linear(program, node, name)
        elif name in _CONV | _TRANSPOSED:
            layer = _convolution(program, node, name)
        else:
            continue
        if layer is not None:
            yield layer


def _linear(program: Program, node: Node, name: str) -> Layer | None:
    operands = list(node.args)
    bias = operands.pop(0) if name == "addmm" else None
    if name == "addmm" and (node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("beta", 1) != 1):
        return None
    if name == "linear" and len(operands) > 2:
        bias = operands[2]
    values, weight = operands[0], operands[1]
    if not isinstance(values, Node) or values.name not in program.data:
        return None
    stored, turns = _stored(program, weight)
    if stored is None or len(program.axes.get(_name(weight), ())) != 2:
        return None
    bias_name = _tensor(program, bias)
    if bias is not None and bias_name is None:
        return None
    # `linear` takes (outputs, inputs), the products take (inputs, outputs); every `t` turns it.
    turned = (turns % 2 == 1) == (name == "linear")
    return Layer(node.name, values.name, stored, bias_name, turned, None)


def _convolution(program: Program, node: Node, name: str) -> Layer | None:
    arguments = named_arguments(node, {n: n for n in node.all_input_nodes})
    values, weight, bias = arguments["input"], arguments["weight"], arguments.get("bias")
    stored, turns = _stored(program, weight)
    bias_name = _tensor(program, bias)
    if (
        stored is None
        or turns
        or values.name not in program.data
        or (bias is not None and not bias_name)
    ):
        return None
    space = len(program.axes[weight.name]) - 2
    if isinstance(arguments["padding"], str) or len(program.axes[values.name]) != space + 2:
        return None
    window = KernelWindow(
        stride=_each(arguments["stride"], space),
        padding=_each(arguments["padding"], space),
        dilation=_each(arguments["dilation"], space),
        groups=int(arguments["groups"]),
        transposed=bool(arguments.get("transposed", name in _TRANSPOSED)),
        output_padding=_each(arguments.get("output_padding", 0), space),
    )
    return Layer(node.name, values.name, stored, bias_name, False, window)


def _each(value: Any, count: int) -> tuple[int, ...]:
    many = list(value) if isinstance(value, (list, tuple)) else [value]
    return tuple(int(v) for v in (many * count if len(many) == 1 else many))


def _stored(program: Program, value: Any) -> tuple[str | None, int]:
    """The tensor that a value is, and how often it was transposed on the way."""
    turns = 0
    while isinstance(value, Node) and value.op == "call_function":
        if operator_name(value) not in _TURNS:
            return None, 0
        turns += 1
        value = value.args[0]
    return _tensor(program, value), turns


def _tensor(program: Program, value: Any) -> str | None:
    return program.tensors.get(value.name) if isinstance(value, Node) else None


def _name(value: Any) -> str:
    return value.name if isinstance(value, Node) else ""


def _fit(program: Program, layer: Layer) -> Fit:
    by_name = {node.name: node for node in program.nodes}
    norm = norm_after(program, by_name[layer.node])
    output = norm.node if norm is not None else layer.node
    last = by_name[output]
    # Through what hands the rows on, to the addition that they go into.
    while (after := only_reader(last)) is not None and _hands_on(layer, last, after):
        last = after
    if after is not None and operator_name(after) == "add" and not _scaled(after):
        other = _other_operand(after, last)
        # The other operand has to be there when the layer is fitted: the last one to feed the
        # addition is the one that can make up for what all before it have missed.
        earlier = other is not None and program.position[other.name] < program.position[layer.node]
        if other is not None and earlier and _same_shape(after, last):
            return Fit(layer, norm, after.name, other.name)
    return Fit(layer, norm, output, None)


def _other_operand(sum_node: Node, operand: Node) -> Node | None:
    """What a sum of two values adds to `operand`; None where that is itself, or a number."""
    others = [node for node in sum_node.all_input_nodes if node is not operand]
    return others[0] if len(sum_node.all_input_nodes) == 2 else None


def _hands_on(layer: Layer, node: Node, after: Node) -> bool:
    """Whether `after` holds the rows of `node` unchanged and in order."""
    name = operator_name(after)
    if name in _SAME:
        return True
    keeps_last = name in _VIEWS and after.meta["val"].shape[-1] == node.meta["val"].shape[-1]
    return layer.window is None and keeps_last


def _scaled(node: Node) -> bool:
    return bool(node.kwargs.get("alpha", 1) != 1)


def _same_shape(one: Node, other: Node) -> bool:
    return bool(one.meta["val"].shape == other.meta["val"].shape)
