"""Blocks of residual networks: what a network can do without, since a skip leads past it.

A branch begins at a value of a stream and ends at an addition that has this value among its terms;
all that lies between is read by nobody else. A block is the module that holds one branch, or
several one after another (attention and MLP), with whatever else the module does at its end (a
ReLU, a norm). Where it is taken out, who read its end reads its beginning (docs/methods/depth.md).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from torch.fx import Node

from ..trace.nodes import module_path, module_paths, operator_name

if TYPE_CHECKING:
    from ..trace.program import Program

# Operations that hand on what they are given, in eval mode.
_SAME = frozenset({"dropout", "alias", "clone", "contiguous", "detach"})


@dataclass(frozen=True)
class ResidualBlock:
    """A block that can be taken out.

    Attributes:
        name: Path of its module, in the checkpoint's names.
        start: The value of the stream that it is given.
        end: The value that it hands on.
        region: Its operations.
        tensors: What only these read.
    """

    name: str
    start: str
    end: str
    region: frozenset[str]
    tensors: frozenset[str]


@dataclass(frozen=True)
class _Branch:
    """From a value of a stream to an addition; `path`: the module that all its tensors share."""

    start: Node
    end: Node
    region: frozenset[Node]
    path: str

    def inside(self, other: _Branch) -> bool:
        """Whether another branch holds it."""
        return self.region < other.region


def residual_blocks(program: Program) -> tuple[ResidualBlock, ...]:
    """Every block with an identity skip, in execution order."""
    flow = _Flow(program)
    branches = _branches(flow)
    names = {branch: _block_name(branch, branches) for branch in branches}
    by_name: dict[str, list[_Branch]] = defaultdict(list)
    for branch, name in names.items():
        others = [(other, names[other]) for other in branches if other is not branch]
        # Of a branch inside another one: part of its block, or what the other is a stack of.
        part = any(branch.inside(other) and name == its for other, its in others)
        stack = any(other.inside(branch) and name != its for other, its in others)
        if not part and not stack:
            by_name[name].append(branch)
    blocks = [_block(flow, name, group) for name, group in by_name.items()]
    whole = [block for block in blocks if block is not None]
    return tuple(sorted(whole, key=lambda block: program.position[block.start]))


class _Flow:
    """Who reads what on the way to the outputs of a program."""

    def __init__(self, program: Program) -> None:
        self.program = program

    @cached_property
    def live(self) -> frozenset[Node]:
        """What the outputs that count are made of."""
        waiting = [self.program.node(name) for name in self.program.outputs]
        live: set[Node] = set()
        while waiting:
            node = waiting.pop()
            if node not in live:
                live.add(node)
                waiting += node.all_input_nodes
        return frozenset(live)

    def readers(self, node: Node) -> list[Node]:
        """The operations that read a value, and are not in vain."""
        return [user for user in node.users if user in self.live]

    def between(self, start: Node, end: Node) -> frozenset[Node]:
        """Operations on the ways from one value to another, the last one included."""
        position, nodes = self.program.position, self.program.nodes
        first, last = position[start.name], position[end.name]
        behind = {start}
        for node in nodes[first + 1 : last + 1]:
            if not behind.isdisjoint(node.all_input_nodes):
                behind.add(node)
        before = {end}
        for node in reversed(nodes[first + 1 : last]):
            if not before.isdisjoint(node.users):
                before.add(node)
        return frozenset(before & behind)

    def closed(self, region: Collection[Node], end: Node) -> bool:
        """Whether nobody outside of a region reads anything in it but its end."""
        outputs = self.program.outputs
        for node in region:
            outside = not set(self.readers(node)) <= set(region) or node.name in outputs
            if node is not end and outside:
                return False
        return True

    def tensors(self, region: Collection[Node], start: Node) -> frozenset[str]:
        """Tensors that a region alone reads, directly or through what is made of them."""
        own, waiting = set(region), [n for node in region for n in node.all_input_nodes]
        while waiting:
            node = waiting.pop()
            if node not in own and node is not start and set(self.readers(node)) <= own:
                own.add(node)
                waiting += node.all_input_nodes
        stored = self.program.tensors
        return frozenset(stored[node.name] for node in own if node.name in stored)

    def is_data(self, node: Node) -> bool:
        """Whether a value depends on an input."""
        return node.name in self.program.data

    def runs_in(self, node: Node, name: str) -> bool:
        """Whether an operation was traced in a module that has this name in the checkpoint."""
        stored, traced = self._prefixes
        path = f"{traced}{name.removeprefix(stored)}"
        return path in module_paths(node)

    @cached_property
    def _prefixes(self) -> tuple[str, str]:
        """What the checkpoint's names have before those of the modules, and the other way round."""
        for node in self.program.nodes:
            path = module_path(node)
            for used in node.all_input_nodes:
                name = self.program.tensors.get(used.name, "").rpartition(".")[0]
                if path and name and path.endswith(name):
                    return "", path.removesuffix(name)
                if path and name and name.endswith(path):
                    return name.removesuffix(path), ""
        return "", ""


def _branches(flow: _Flow) -> list[_Branch]:
    """Branches with tensors of their own; of those with one beginning the longest."""
    longest: dict[Node, _Branch] = {}
    for node in flow.program.nodes:
        if node in flow.live and _is_sum(node):
            branch = _branch(flow, node)
            if branch is not None:
                longest[branch.start] = branch
    return list(longest.values())


def _branch(flow: _Flow, end: Node) -> _Branch | None:
    """The shortest branch that ends at an addition."""
    terms = _terms_below(end)
    position = flow.program.position
    for start in sorted(terms, key=lambda n: position[n.name], reverse=True):
        if not flow.is_data(start) or _shape(start) != _shape(end):
            continue
        region = flow.between(start, end)
        if _skips(end, start, region) and flow.closed(region, end):
            tensors = flow.tensors(region, start)
            path = _common_module(tensors)
            return _Branch(start, end, region, path) if path else None
    return None


def _is_sum(node: Node) -> bool:
    plain = node.op == "call_function" and operator_name(node) == "add"
    return plain and len(node.all_input_nodes) == 2 and not node.kwargs


def _terms(node: Node) -> list[Node]:
    """What a value is the plain sum of; nothing where it is no sum."""
    same = node.op == "call_function" and operator_name(node) in _SAME
    return node.all_input_nodes[:1] if same else node.all_input_nodes if _is_sum(node) else []


def _terms_below(end: Node) -> set[Node]:
    """Terms of a sum, their terms, and so on."""
    waiting, terms = _terms(end), set[Node]()
    while waiting:
        node = waiting.pop()
        if node not in terms:
            terms.add(node)
            waiting += _terms(node)
    return terms


def _skips(end: Node, start: Node, region: Collection[Node]) -> bool:
    """Whether a sum has one value among its terms once, and all others are made of that."""
    waiting, times, others = [end], 0, 0
    while waiting:
        node = waiting.pop()
        if node is start:
            times += 1
        elif node not in region:
            return False
        elif terms := _terms(node):
            # A sum of what is not the skip is a term as a whole.
            waiting += terms if _reaches(node, start) else []
            others += not _reaches(node, start)
        else:
            others += 1
    return times == 1 and others > 0


def _reaches(node: Node, start: Node) -> bool:
    return start in _terms_below(node)


def _block_name(branch: _Branch, branches: Sequence[_Branch]) -> str:
    """Which module a branch is taken out with.

    Of the numbered modules around it the outermost that has a numbered sibling on the same stream:
    a layer of a transformer goes with attention and MLP, a stage of a network does not go.
    """
    stream = [b for b in branches if _shape(b.end) == _shape(branch.end)]
    numbered = _numbered(branch.path)
    for path in numbered:
        parent = path.rpartition(".")[0]
        others = {own for b in stream for own in _numbered(b.path) if own != path}
        if any(own.rpartition(".")[0] == parent for own in others):
            return path
    return numbered[-1] if numbered else branch.path


def _numbered(path: str) -> list[str]:
    """Paths of the numbered modules on the way to one, itself included, outermost first."""
    parts = path.split(".")
    return [".".join(parts[: at + 1]) for at, part in enumerate(parts) if part.isdecimal()]


def _block(flow: _Flow, name: str, branches: Sequence[_Branch]) -> ResidualBlock | None:
    """The block that a module is; None where it is more than its branches."""
    position = flow.program.position
    ordered = sorted(branches, key=lambda b: position[b.start.name])
    ends = [_with_rest(flow, branch.end, name) for branch in ordered]
    for (end, _), follower in zip(ends, ordered[1:], strict=False):
        if end is not follower.start:
            return None
    start, end = ordered[0].start, ends[-1][0]
    region = {node for branch in ordered for node in branch.region}
    region |= {node for _, rest in ends for node in rest}
    tensors = flow.tensors(region, start)
    read = {n for p, n in flow.program.tensors.items() if flow.readers(flow.program.node(p))}
    inside = {tensor for tensor in read if tensor.startswith(f"{name}.")}
    if not inside <= tensors or _shape(start) != _shape(end) or not flow.closed(region, end):
        return None
    names = frozenset(node.name for node in region)
    return ResidualBlock(name, start.name, end.name, names, tensors)


def _with_rest(flow: _Flow, end: Node, name: str) -> tuple[Node, list[Node]]:
    """The end of a branch with what its module still does to the sum, one after another."""
    rest = list[Node]()
    while len(readers := flow.readers(end)) == 1:
        after = readers[0]
        data = [node for node in after.all_input_nodes if flow.is_data(node)]
        if data != [end] or not _belongs(flow, after, name):
            break
        end = after
        rest.append(end)
    return end, rest


def _belongs(flow: _Flow, node: Node, name: str) -> bool:
    """Whether an operation is of a module: by the tensors it reads, or by where it was traced."""
    stored = flow.program.tensors
    read = [stored[n.name] for n in node.all_input_nodes if n.name in stored]
    if read:
        return all(tensor.startswith(f"{name}.") for tensor in read)
    return flow.runs_in(node, name)


def _common_module(tensors: Collection[str]) -> str:
    """The innermost module that holds all of some tensors; empty where there is none."""
    if not tensors:
        return ""
    paths = sorted(name.split(".")[:-1] for name in tensors)
    first, last = paths[0], paths[-1]
    common = 0
    while common < min(len(first), len(last)) and first[common] == last[common]:
        common += 1
    return ".".join(first[:common])


def _shape(node: Node) -> tuple[int, ...]:
    value = node.meta.get("val")
    return tuple(getattr(value, "shape", ()))


def same_work(program: Program, one: str, other: str) -> bool:
    """Whether two modules run the same operations, with the same settings, one after another."""
    flow = _Flow(program)
    return _work(flow, one) == _work(flow, other)


def _work(flow: _Flow, name: str) -> list[tuple[str, str]]:
    work: list[tuple[str, str]] = []
    for node in flow.program.nodes:
        if node.op == "call_function" and flow.is_data(node) and flow.runs_in(node, name):
            settings = [repr(arg) for arg in node.args if not isinstance(arg, Node)]
            work.append((operator_name(node), ", ".join(settings)))
    return work
