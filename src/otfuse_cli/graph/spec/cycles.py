"""Cycles of a directed graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

Vertex = TypeVar("Vertex", bound=Hashable)


def strong_components(
    roots: Iterable[Vertex], successors: Callable[[Vertex], Iterable[Vertex]]
) -> dict[Vertex, int]:
    """Strongly connected components of all that `roots` lead to: vertex to component number.

    Tarjan's algorithm, without recursion, which a deep network would exhaust.
    """
    index: dict[Vertex, int] = {}
    low: dict[Vertex, int] = {}
    component: dict[Vertex, int] = {}
    stack: list[Vertex] = []
    for root in roots:
        if root in index:
            continue
        work = [(root, iter(successors(root)))]
        index[root] = low[root] = len(index)
        stack.append(root)
        while work:
            vertex, rest = work[-1]
            for child in rest:
                if child not in index:
                    index[child] = low[child] = len(index)
                    stack.append(child)
                    work.append((child, iter(successors(child))))
                    break
                # A child whose component is closed leads nowhere back to here.
                if child not in component:
                    low[vertex] = min(low[vertex], index[child])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[vertex])
                # Nothing behind it leads to anything before it: its component is complete.
                if low[vertex] == index[vertex]:
                    _close(vertex, stack, component, index[vertex])
    return component


def _close(root: Vertex, stack: list[Vertex], component: dict[Vertex, int], number: int) -> None:
    """Take the component that ends at `root` from the stack."""
    while component.get(root) is None:
        component[stack.pop()] = number
