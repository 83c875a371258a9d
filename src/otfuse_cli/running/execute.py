"""One forward pass that can be stopped at any value, with the tensors of any parent.

The exported program is run operation by operation. A value lives until its last reader has run, so
that a stopped pass holds what is still to be read and no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from ..graph.trace.program import Program
from ..runtime import full_precision
from .samples import Samples


class Walk:
    """A pass of one batch through one network.

    Tensors are looked up when an operation reads them: whoever changes `tensors` while the pass
    stands still changes what is computed after.
    """

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, Tensor],
        inputs: Sequence[Tensor] | None = None,
        keep: Iterable[str] = (),
    ) -> None:
        """Stand before the first operation.

        Args:
            program: What to run.
            tensors: By name in the checkpoint, in the dtype to compute in.
            inputs: The network's inputs, flat; None for a pass that will `resume` another's.
            keep: Values that stay until they are dropped.
        """
        self.program, self.tensors, self.keep = program, tensors, set(keep)
        self._at = 0
        self._values: dict[str, Any] = {}
        if inputs is not None:
            names = (name for name in program.inputs if name is not None)
            self._values.update(zip(names, inputs, strict=True))

    def __getitem__(self, name: str) -> Any:
        """A value that was computed and not dropped yet, or a tensor of the network."""
        if name in self._values:
            return self._values[name]
        stored = self.program.tensors.get(name)
        return self.program.constants[name] if stored is None else self.tensors[stored]

    def state(self) -> tuple[int, dict[str, Any], set[str]]:
        """Where it stands, and what it holds there."""
        return self._at, self._values, self.keep

    def resume(self, state: tuple[int, dict[str, Any], set[str]]) -> Walk:
        """This pass, put where another one of the same network stood."""
        self._at, self._values, self.keep = state
        return self

    @torch.no_grad()
    def to(self, name: str) -> Any:
        """Run until `name` is computed, and return it."""
        position = self.program.position[name]
        self._run(position + 1)
        return self[name]

    @torch.no_grad()
    def before(self, name: str) -> None:
        """Run everything that comes before `name`."""
        self._run(self.program.position[name])

    def outputs(self) -> list[Tensor]:
        """Run to the end; what the network returns."""
        return [self.to(name) for name in self.program.outputs]

    def cut(self, value: Tensor, count: int) -> Tensor:
        """A value on the first `count` samples of the batch: others may only fill it up."""
        return value[: len(value) * count // self.program.batch]

    def said(self, count: int) -> Tensor:
        """What the network returns on the first `count` samples of the batch, on the CPU."""
        return self.cut(self.outputs()[0], count).cpu()

    def outputs_with_gradient(self) -> list[Tensor]:
        """Run to the end under autograd, as far as the caller has it on."""
        self._run(len(self.program.nodes))
        return [self[name] for name in self.program.outputs]

    def replace(self, name: str, value: Tensor) -> None:
        """Put another value in the place of one that was computed."""
        self._values[name] = value

    def release(self, name: str) -> None:
        """Stop keeping a value; it goes once nothing reads it any more."""
        self.keep.discard(name)
        last = self.program.last_reader.get(name)
        if last is None or self.program.position[last.name] < self._at:
            self._values.pop(name, None)

    def live_bytes(self) -> int:
        """Memory of the values that are held."""
        total = 0
        for leaf in pytree.tree_leaves(self._values):
            if isinstance(leaf, Tensor):
                total += leaf.numel() * leaf.element_size()
        return total

    @full_precision()
    def _run(self, end: int) -> None:
        for node in self.program.nodes[self._at : end]:
            if node.op == "call_function":
                self._values[node.name] = self._call(node)
                for used in node.all_input_nodes:
                    self._release(used, node)
                if not node.users:  # nobody will read it, and nobody will release it
                    self._release(node, node)
        self._at = max(self._at, end)

    def _call(self, node: Node) -> Any:
        args = map_arg(node.args, lambda n: self[n.name])
        kwargs = map_arg(node.kwargs, lambda n: self[n.name])
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def _release(self, used: Node, by: Node) -> None:
        done = self.program.last_reader.get(used.name) is by or not used.users
        if done and used.name not in self.keep and used.name not in self.program.outputs:
            self._values.pop(used.name, None)


def flat_inputs(program: Program, samples: Samples, device: str) -> list[Tensor]:
    """A batch as the program takes it: flat, filled up to the program's batch by repetition."""
    short = program.batch - samples.count
    inputs: tuple[Any, Any] = (samples.args, dict(samples.kwargs))
    leaves, _ = pytree.tree_flatten(inputs)
    tensors = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            continue
        if short > 0:
            leaf = torch.cat([leaf, leaf[-1:].expand(short, *leaf.shape[1:])])
        tensors.append(_laid_out(leaf.to(device)))
    return tensors


def _laid_out(tensor: Tensor) -> Tensor:
    """Images with their channels last: convolutions on a CPU are half again as fast."""
    if tensor.dim() == 4 and tensor.is_floating_point():
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor
