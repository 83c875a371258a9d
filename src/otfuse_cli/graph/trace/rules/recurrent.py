"""Recurrent layers and cells as operators: gates are blocks of rows, the state ties both axes."""

from __future__ import annotations

from collections.abc import Sequence

from ...model import OpKind, Role
from ..atoms import Atom, Plus, Times
from ..call import Call, Label, Labels, Value, forms_of
from ..deferred import Deferred
from .table import rule

# Blocks of rows in the weights of a cell, one for each gate.
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(call: Call) -> object:
    """W_ih = (gates * h, in), W_hh = (gates * h, h); output h, or forward + backward."""
    x: Value = call.value("input")
    if "data" in call.arguments:
        raise ValueError("packed sequences have no axes to follow")
    parameters: list[Value] = list(call["params"])
    layers, both = int(call["num_layers"]), call.flag("bidirectional")
    biased = call.flag("has_biases")
    per_cell = len(parameters) // (layers * (2 if both else 1))
    call.pin(x.labels[0 if not call.flag("batch_first") else -2], "time steps")
    read = x.labels[-1]
    cells: list[tuple[Label, Label]] = []
    for start in range(0, len(parameters), per_cell):
        cell = parameters[start : start + per_cell]
        hidden, out = _cell(call, read, cell, biased=biased)
        cells.append((hidden, out))
        if both and len(cells) % 2:
            continue  # the next layer reads both directions, side by side
        tops = [label for _, label in cells[-2:]] if both else [out]
        read = Label(Plus(forms_of(tops))) if both else out
    _initial(call, x, cells)
    tensors = {value.sources[0].rpartition(".")[2]: value for value in parameters if value.plain}
    call.op(OpKind.OTHER, reads=[[x.labels[-1]]], writes=[read], tensors=tensors, detail=call.name)
    return _outputs(call, x, read, cells)


@rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def recurrent_cell(call: Call) -> object:
    """One step: W_ih = (gates * h, in), W_hh = (gates * h, h); every state is (..., h)."""
    x = call.value("input")
    parts = {name: call.optional(name) for name in ("w_ih", "w_hh", "b_ih", "b_hh")}
    weights = [value for value in parts.values() if value is not None]
    read = x.labels[-1]
    hidden, _ = _cell(call, read, weights, biased=True)
    given = call["hx"]
    states: list[Value] = [given] if isinstance(given, Value) else list(given)
    lead = list(x.labels[:-1])
    for state in states:
        call.unify(state.labels[-1], hidden)
        lead = [call.unify(a, b) for a, b in zip(lead, state.labels, strict=False)]
    tensors: dict[str, Value | None] = {}
    for value in weights:
        if value.plain:
            tensors[value.sources[0].rpartition(".")[2]] = value
    reads = [value.labels for value in (x, *states) if value.data]
    call.op(OpKind.OTHER, reads=reads, writes=[hidden], tensors=tensors, detail=call.name)
    out = [*lead, hidden]
    return out if len(call.shapes) == 1 else [out] * len(call.shapes)


def _cell(call: Call, read: Label, cell: Sequence[Value], *, biased: bool) -> tuple[Label, Label]:
    """Unify one direction of one layer; its hidden state, and what it shows to the next layer."""
    w_ih, w_hh = cell[0], cell[1]
    gates = GATES[call.name.removesuffix("_cell")]
    hidden = call.fresh(w_ih.shape[0] // gates)
    call.restrict(hidden)
    rows = Label(Times((call.pinned(gates, "gates").form, hidden.form)))
    call.unify(w_ih.labels[1], read)
    call.restrict(read)
    matrices = [w_ih, w_hh]
    biases = list(cell[2:4]) if biased else []
    # w_ih, w_hh, two biases where there are any, and the projection of an LSTM's output.
    projection = cell[-1] if len(cell) in (3, 5) else None
    shown = projection.labels[0] if projection is not None else hidden
    call.unify(w_hh.labels[1], shown)
    for value in (*matrices, *biases):
        call.unify(value.labels[0], rows)
    for value in matrices:
        call.role(value.labels[0], Role.PRODUCE)
        call.role(value.labels[1], Role.CONSUME)
    for value in biases:
        call.role(value.labels, Role.VECTOR)
    if projection is not None:
        call.unify(projection.labels[1], hidden)
        call.role(projection.labels[1], Role.CONSUME)
        call.role(projection.labels[0], Role.PRODUCE)
        call.joint([shown, hidden])
    call.joint([rows, read])
    call.joint([rows, shown])
    return Label(hidden.form), Label(shown.form)


def _initial(call: Call, x: Value, cells: Sequence[tuple[Label, Label]]) -> None:
    """States given from outside share the axes of all layers, unless they are uniform."""
    initial = call.get("hx")
    states: list[Value] = [initial] if isinstance(initial, Value) else list(initial)
    for which, state in enumerate(states):
        if state.uniform:
            continue
        call.pin(state.labels[0], "layers")
        if state.ndim == 3:
            call.unify(state.labels[1], x.labels[0 if call.flag("batch_first") else 1])
        for hidden, shown in cells:
            call.unify(state.labels[-1], hidden if which else shown)


def _outputs(
    call: Call, x: Value, read: Label, cells: Sequence[tuple[Label, Label]]
) -> list[Labels]:
    """The sequence, and the last state(s) stacked over layers and directions."""
    batch = x.labels[0 if call.flag("batch_first") else 1] if x.ndim == 3 else None
    middle = [batch] if batch is not None else []
    outs: list[Labels] = [[*x.labels[:-1], read]]
    for which in range(len(call.shapes) - 1):
        states = [hidden if which else shown for hidden, shown in cells]
        # every layer has a state of its own: `h_n[-1]` takes one and ties nothing
        layer, unit = Atom(len(cells), "layers"), Atom(states[0].size)
        Deferred(Plus(forms_of(states)), (layer, unit))
        outs.append([Label(layer), *middle, Label(unit)])
    return outs
