"""Replay of single operators: permute the inputs as labelled, and the outputs must follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_lowercase
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from otfuse_cli.graph.trace import atoms
from otfuse_cli.graph.trace.atoms import Atom, Form, Plus, Times, head
from otfuse_cli.graph.trace.call import Label, Value
from otfuse_cli.graph.trace.deferred import is_settled
from otfuse_cli.graph.trace.label_operations import Propagation, Step, label_operations


@dataclass
class Replay:
    """A small program, labelled with nothing pinned but what its operators pin."""

    graph: GraphModule
    found: Propagation
    inputs: list[Value]
    outputs: list[Sequence[Label]]
    results: dict[Node, Any]

    def operators(self) -> set[str]:
        return {str(step.node.target) for step in self.found.steps}

    def signature(self) -> str:
        """One letter per free atom, `.` for a pinned one: what the labels say, in short."""
        letters: dict[Atom, str] = {}
        return " -> ".join(
            ", ".join("".join(_render(x.form, letters) for x in labels) for labels in side)
            for side in ([v.labels for v in self.inputs], self.outputs)
        )

    def errors(self, seed: int = 0) -> dict[str, float]:
        """Largest relative error by operator."""
        generator = torch.Generator().manual_seed(seed)
        worst: dict[str, float] = {}
        for step in self.found.steps:
            error = replay_step(step, self.results, generator)
            if error is not None:
                name = str(step.node.target)
                worst[name] = max(error, worst.get(name, 0.0))
        return worst


def replay(function: Callable[..., Any], *args: Any) -> Replay:
    """Trace `function` on `args` and label it; every tensor argument is free."""
    graph = make_fx(function, tracing_mode="fake", pre_dispatch=True)(*args)
    found = Propagation()
    inputs: list[Value] = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            labels = tuple(Label(Atom(int(n))) for n in node.meta["val"].shape)
            inputs.append(Value(labels, data=True))
            found.values[node] = inputs[-1]
    label_operations(graph.graph, found)
    results = run_all(graph, pytree.tree_leaves(args))
    (last,) = (node for node in graph.graph.nodes if node.op == "output")
    outputs = [
        found.values[node].labels for node in pytree.tree_leaves(last.args)
        if isinstance(node, Node)
    ]  # fmt: skip
    return Replay(graph, found, inputs, outputs, results)


def run_all(graph: GraphModule, args: Iterable[Any]) -> dict[Node, Any]:
    """What every node computes."""
    results: dict[Node, Any] = {}

    class Recorder(Interpreter):
        def run_node(self, n: Node) -> Any:
            results[n] = super().run_node(n)
            return results[n]

    with torch.no_grad():
        Recorder(graph).run(*args)
    return results


def replay_step(
    step: Step, results: Mapping[Node, Any], generator: torch.Generator
) -> float | None:
    """Relative error of one operation; None where an axis is still undecided."""
    decided = [output for output in step.outputs if _is_decided(output)]
    labels = [x for _, value in step.inputs for x in value.labels]
    if not decided or not _is_decided(labels):
        return None
    labels += [x for output in decided for x in output]
    maps: dict[Atom, Tensor] = {}
    for label in labels:
        for leaf in atoms.leaves(label.form):
            if leaf.reason is None and leaf not in maps:
                maps[leaf] = torch.randperm(leaf.size, generator=generator)
    moved = {node: _moved(results[node], value.labels, maps) for node, value in step.inputs}

    def given(node: Node) -> Any:
        return moved[node] if node in moved else results[node]

    args = torch.fx.map_arg(step.node.args, given)
    kwargs = torch.fx.map_arg(step.node.kwargs, given)
    assert callable(step.node.target)
    made = [t for t in pytree.tree_leaves(step.node.target(*args, **kwargs)) if _is_tensor(t)]
    expected = [t for t in pytree.tree_leaves(results[step.node]) if _is_tensor(t)]
    return max(
        _gap(new, _moved(old, output, maps))
        for new, old, output in zip(made, expected, step.outputs, strict=True)
        if _is_decided(output)
    )


def _is_decided(labels: Sequence[Label]) -> bool:
    return all(is_settled(x.form) for x in labels)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _gap(new: Tensor, old: Tensor) -> float:
    if new.numel() == 0:
        return 0.0
    if new.is_complex():
        new, old = torch.view_as_real(new), torch.view_as_real(old)
    a, b = new.double(), old.double()
    gap = torch.where(a == b, 0.0, (a - b).abs()).max()
    return float(gap / b.abs().max().clamp_min(1e-30))


def _moved(tensor: Tensor, labels: Sequence[Label], maps: Mapping[Atom, Tensor]) -> Tensor:
    for axis, label in enumerate(labels):
        tensor = tensor.index_select(axis, form_index(label.form, maps))
    return tensor


def form_index(form: Form, maps: Mapping[Atom, Tensor]) -> Tensor:
    top = head(form)
    if isinstance(top, Atom):
        return maps[top] if top in maps else torch.arange(top.size)
    if isinstance(top, Times):
        flat = torch.zeros(1, dtype=torch.int64)
        for factor in top.factors:
            own = form_index(factor, maps)
            flat = (flat[:, None] * len(own) + own[None]).reshape(-1)
        return flat
    pieces, start = [], 0
    for part in top.parts:
        pieces.append(form_index(part, maps) + start)
        start += len(pieces[-1])
    return torch.cat(pieces)


def _render(form: Form, letters: dict[Atom, str], *, inner: bool = False) -> str:
    if not is_settled(form):
        return "?"
    top = head(form)
    if isinstance(top, Atom):
        if top.reason is not None:
            return "."
        if top.size == 1:
            return "1"
        return letters.setdefault(top, ascii_lowercase[len(letters)])
    if isinstance(top, Times):
        body = "*".join(_render(f, letters, inner=True) for f in top.factors)
        return f"({body})"
    assert isinstance(top, Plus)
    body = "+".join(_render(p, letters, inner=True) for p in top.parts)
    return f"({body})"
