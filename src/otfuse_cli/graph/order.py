"""Execution order from names and data flow, for graphs that no trace ordered.

A state dict lists modules in the order in which they were defined, a safetensors file by name.
Either is a starting order; here it is corrected so that a layer runs after what it reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key that puts `features.10` behind `features.9`."""
    pieces = re.split(r"(\d+)", name)
    return tuple((0, int(p), "") if p.isdigit() else (1, 0, p) for p in pieces if p)


def base_order(names: Sequence[str]) -> list[str]:
    """The order of the file, or the natural order where the file is merely sorted by name."""
    listed = list(names)
    return sorted(listed, key=natural_key) if listed == sorted(listed) else listed


def execution_order(
    nodes: Sequence[str], reads: Mapping[str, set[str]], writes: Mapping[str, set[str]]
) -> list[str]:
    """Order `nodes` so that each runs after everything it depends on.

    `reads` and `writes` give the spaces of each node. A residual stream makes a cycle (each block
    reads and writes it): inside one, the given order stands, but a node waits until each space
    that it reads has been written at least once.
    """
    writers: dict[str, list[str]] = {}
    for node in nodes:
        for space in writes[node]:
            writers.setdefault(space, []).append(node)
    before = {n: {w for s in reads[n] for w in writers.get(s, ()) if w != n} for n in nodes}
    component = _components(nodes, before)
    outside = {n: {p for p in before[n] if component[p] != component[n]} for n in nodes}
    done: set[str] = set()
    written: set[str] = set()
    order: list[str] = []
    waiting = list(nodes)
    while waiting:
        ready = [n for n in waiting if outside[n] <= done]
        started = (n for n in ready if all(s in written or s not in writers for s in reads[n]))
        # A cycle that nothing outside feeds has no natural first node: take the given order's.
        node = next(started, ready[0])
        order.append(node)
        done.add(node)
        written |= writes[node]
        waiting.remove(node)
    return order


def _components(nodes: Sequence[str], before: Mapping[str, set[str]]) -> dict[str, int]:
    """Strongly connected components (Tarjan, without recursion): node to component number."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    component: dict[str, int] = {}
    stack: list[str] = []
    for root in nodes:
        if root in index:
            continue
        work = [(root, iter(sorted(before[root])))]
        index[root] = low[root] = len(index)
        stack.append(root)
        while work:
            node, rest = work[-1]
            for child in rest:
                if child not in index:
                    index[child] = low[child] = len(index)
                    stack.append(child)
                    work.append((child, iter(sorted(before[child]))))
                    break
                if child not in component:
                    low[node] = min(low[node], index[child])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    while True:
                        member = stack.pop()
                        component[member] = index[node]
                        if member == node:
                            break
    return component
