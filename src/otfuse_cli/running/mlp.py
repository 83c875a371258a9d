"""Networks that are linear layers with ReLU between them, built from their layer graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..graph.axes import Axis
from ..graph.model import LayerGraph, Op, OpKind, Role, Shapes
from ..graph.spec.stored_shapes import integers
from .factory import Network

_EXAMPLES = 4  # inputs to trace and check on: more than one, so that a batch is seen as such


class Mlp(nn.Module):
    """Linear layers in order; each sits at its path, so tensors have the checkpoint's names.

    Takes batch x features; whatever has more axes is flattened.
    """

    def __init__(self, layers: Sequence[tuple[str, nn.Linear]], relu_after: Sequence[bool]) -> None:
        super().__init__()
        for path, layer in layers:
            _place(self, path, layer)
        self._paths = [path for path, _ in layers]
        self._relu_after = list(relu_after)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch."""
        x = x.flatten(1)
        for path, relu in zip(self._paths, self._relu_after, strict=True):
            x = self.get_submodule(path)(x)
            x = x.relu() if relu else x
        return x


def mlp_network(graph: LayerGraph, shapes: Shapes) -> Network | None:
    """The network of a graph whose operations are a chain of linear layers and ReLU.

    Its tensors are zero; run it on those of a checkpoint. Its example inputs are drawn, the same
    ones every time.

    Args:
        graph: From names and shapes, or from a spec.
        shapes: Of the checkpoint's tensors.

    Returns:
        None where the graph holds anything else, or doesn't say what it holds.
    """
    if graph.derived:
        return None  # weights that are computed
    layers: list[tuple[str, nn.Linear]] = []
    relu_after: list[bool] = []
    before: Axis | None = None
    for op in graph.ops:
        if layers and op.reads != (before,):
            return None
        if op.kind is OpKind.LINEAR and _is_plain(op, graph):
            layers.append((op.name, _linear(op, shapes)))
            relu_after.append(False)
        elif op.kind is OpKind.ACT and op.detail == "relu" and layers:
            relu_after[-1] = True
        else:
            return None
        before = op.writes
    # Two layers with nothing between them: the graph doesn't know what is there.
    if not layers or not all(relu_after[:-1]):
        return None
    network = _assembled(layers, relu_after)
    if network is None or set(network.state_dict()) != shapes.keys() - integers(shapes):
        return None
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(_EXAMPLES, layers[0][1].in_features, generator=generator)
    return Network("mlp", network, (inputs,))


def _assembled(layers: Sequence[tuple[str, nn.Linear]], relu_after: Sequence[bool]) -> Mlp | None:
    try:
        return Mlp(layers, relu_after).eval()
    except (KeyError, ValueError):  # a module called `forward`, or one without a name
        return None


def _is_plain(op: Op, graph: LayerGraph) -> bool:
    """Whether it is `weight @ x + bias`, with the weight as torch holds it."""
    weight = op.tensors.get("weight")
    if weight is None or not op.tensors.keys() <= {"weight", "bias"} or len(op.reads) != 1:
        return False
    axes = graph.tensors[weight].axes
    return (
        len(axes) == 2
        and axes[0].expr == op.writes
        and axes[1].expr == op.reads[0]
        and Role.PRODUCE in axes[0].roles
    )


def _linear(op: Op, shapes: Shapes) -> nn.Linear:
    rows, columns = shapes[op.tensors["weight"]]
    # Without initial values: drawing them would use up torch's global random numbers.
    # And not by `to_empty`, which imports sympy: a second more for the smallest of merges.
    layer = nn.Linear(columns, rows, bias="bias" in op.tensors, device="meta")
    for name, tensor in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(torch.zeros(tensor.shape, dtype=tensor.dtype)))
    return layer


def _place(root: nn.Module, path: str, layer: nn.Module) -> None:
    *above, last = path.split(".")
    for name in above:
        if name not in root._modules:
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    root.add_module(last, layer)
