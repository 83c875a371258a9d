"""Hard maps on tensors: axis by axis, families included, against positions written out."""

from __future__ import annotations

import torch

from otfuse_cli.graph.axes import Axis, Cat, Fixed, Prod, Unit
from otfuse_cli.graph.model import GraphTensor, LayerGraph, Role, Space, TensorAxis
from otfuse_cli.running.relabel import axis_index, draw_maps, relabel, relabel_state

SPACES = {
    "h": Space("h", 2),
    "d": Space("d", 3, per="h"),
    "c": Space("c", 4),
    "p": Space("p", 2, pinned="input"),
}
MAPS = {
    "h": torch.tensor([1, 0]),
    "d": torch.tensor([[1, 2, 0], [0, 2, 1]]),
    "c": torch.tensor([3, 0, 1, 2]),
}


def tensor(*axes: Axis) -> GraphTensor:
    return GraphTensor("w", (), tuple(TensorAxis(a, frozenset({Role.PRODUCE})) for a in axes))


def test_positions_of_every_kind_of_axis() -> None:
    cases: list[tuple[Axis, list[int]]] = [
        (Fixed(3), [0, 1, 2]),
        (Unit("c"), [3, 0, 1, 2]),
        (Unit("p"), [0, 1]),
        (Prod((Unit("c"), Fixed(2))), [6, 7, 0, 1, 2, 3, 4, 5]),
        (Cat((Fixed(1), Unit("c"), Unit("h"))), [0, 4, 1, 2, 3, 6, 5]),
        # new head 0 is old head 1, and its dimensions follow row 0 of the family's map
        (Prod((Unit("h"), Unit("d"))), [4, 5, 3, 0, 2, 1]),
        # the same with the index as the inner factor: position = d * 2 + h
        (Prod((Unit("d"), Unit("h"))), [3, 0, 5, 4, 1, 2]),
        (Prod((Unit("h"), Cat((Fixed(1), Unit("d"))))), [4, 6, 7, 5, 0, 1, 3, 2]),
        (
            Prod((Unit("h"), Fixed(2), Unit("d"))),
            [7, 8, 6, 10, 11, 9, 0, 2, 1, 3, 5, 4],
        ),
    ]
    for axis, expected in cases:
        assert axis_index(axis, MAPS, SPACES).tolist() == expected, str(axis)


def test_maps_that_drop_units_leave_the_other_parts_of_an_axis_where_they_are() -> None:
    """A pruned block before others: concatenated channels, fused queries, keys and values."""
    kept = {"c": torch.tensor([1, 3]), "h": torch.tensor([1])}
    assert axis_index(Cat((Unit("c"), Unit("c"), Fixed(2))), kept, SPACES).tolist() == [
        *(1, 3, 5, 7),
        *(8, 9),
    ]
    heads = Prod((Unit("h"), Unit("d")))
    assert axis_index(Cat((heads, Unit("p"), heads)), kept, SPACES).tolist() == [
        *(3, 4, 5),
        *(6, 7),
        *(11, 12, 13),
    ]


def test_a_family_indexed_by_another_axis() -> None:
    # a grouped convolution: rows h * 2, columns d of the row's group
    described = tensor(Prod((Unit("h"), Fixed(2))), Unit("d"))
    w = torch.arange(12).reshape(4, 3)
    moved = relabel(w, described, MAPS, SPACES)
    expected = torch.stack([w[2][[1, 2, 0]], w[3][[1, 2, 0]], w[0][[0, 2, 1]], w[1][[0, 2, 1]]])
    assert torch.equal(moved, expected)
    turned = tensor(Unit("d"), Prod((Unit("h"), Fixed(2))))
    assert torch.equal(relabel(w.T, turned, MAPS, SPACES), expected.T)


def test_what_has_no_map_stays_the_same_object() -> None:
    w = torch.zeros(2, 3)
    assert relabel(w, tensor(Unit("p"), Fixed(3)), MAPS, SPACES) is w


def test_tied_names_move_together() -> None:
    graph = LayerGraph(
        tensors={
            "a": GraphTensor("a", (4,), (TensorAxis(Unit("c"), frozenset({Role.VECTOR})),), ("b",))
        },
        spaces=SPACES,
    )
    state = {"a": torch.arange(4), "b": torch.arange(4), "other": torch.zeros(1)}
    moved = relabel_state(state, graph, MAPS)
    assert moved["a"].tolist() == [3, 0, 1, 2]
    assert moved["b"] is moved["a"]
    assert moved["other"] is state["other"]


def test_drawn_maps_leave_no_unit_in_place() -> None:
    graph = LayerGraph(tensors={}, spaces=SPACES)
    maps = draw_maps(graph, torch.Generator().manual_seed(0))
    assert {id: tuple(m.shape) for id, m in maps.items()} == {"h": (2,), "d": (2, 3), "c": (4,)}
    for m in maps.values():
        assert bool((m != torch.arange(m.shape[-1])).all())
