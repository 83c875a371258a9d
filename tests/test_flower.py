"""`FedOT` as a Flower strategy: made messages in, messages and records out. No simulation."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'otfuse-cli[flower]'")

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

from nets import Mlp, Vgg, distance, randomise, state
from otfuse_cli.errors import IncompatibleModels, UsageError
from otfuse_cli.flower import FedOT
from test_twins import permuted, widened

MODEL = state(randomise(Mlp(), 1))


@pytest.fixture(autouse=True)
def in_a_run(monkeypatch):
    """Messages are made inside a run, which a server would be."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Nodes:
    """A grid of nodes; `answer` replies to what they are asked."""

    def __init__(self, *nodes, answer=None):
        self.nodes, self.answer, self.asked = nodes, answer, []

    def get_node_ids(self):
        return list(self.nodes)

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        self.asked += [m.metadata.dst_node_id for m in messages]
        assert {m.metadata.message_type for m in messages} == {"query"}
        assert all(m.content["config"]["lr"] == 0.1 for m in messages)
        return [self.answer(m) for m in messages]


def record(tensors):
    return ArrayRecord(torch_state_dict=dict(tensors))


def sent_to(strategy, nodes, tensors, server_round=1, step="configure_train"):
    """Messages of a round by node; those that a client would get."""
    config = ConfigRecord({"lr": 0.1})
    messages = getattr(strategy, step)(server_round, record(tensors), config, nodes)
    for message in messages:
        assert message.content["config"]["server-round"] == server_round
        assert message.content["config"]["lr"] == 0.1
    return {m.metadata.dst_node_id: m for m in messages}


def arrays_of(message):
    return message.content["arrays"].to_torch_state_dict()


def reply(message, tensors, examples=10, **metrics):
    content = {"arrays": record(tensors)}
    content["metrics"] = MetricRecord({"num-examples": examples, **metrics})
    return Message(RecordDict(content), reply_to=message)


def trained(tensors, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        n: t + 0.02 * torch.randn(t.shape, generator=generator)
        if t.is_floating_point()
        else t + seed
        for n, t in tensors.items()
    }


@pytest.mark.parametrize("net", [Mlp, Vgg])
def test_clients_of_one_start_give_the_numbers_of_fedavg(net):
    model = state(randomise(net(), 1))
    nodes = Nodes(11, 12, 13)
    results = []
    for strategy in (FedOT(), FedAvg()):
        messages = sent_to(strategy, nodes, model)
        assert all(
            torch.equal(tensor, model[name])
            for message in messages.values()
            for name, tensor in arrays_of(message).items()
        )
        replies = [
            reply(messages[n], trained(model, n), examples, loss=0.1 * n)
            for n, examples in ((11, 7), (12, 100), (13, 41))
        ]
        results.append(strategy.aggregate_train(1, replies))
    (arrays, metrics), (plain_arrays, plain_metrics) = results
    fused, plain = arrays.to_torch_state_dict(), plain_arrays.to_torch_state_dict()
    assert fused.keys() == plain.keys()
    for name, tensor in fused.items():
        if model[name].is_floating_point():
            assert torch.equal(tensor, plain[name]), name
        else:
            assert tensor == model[name] + 13
            assert tensor.dtype == torch.int64
    assert metrics.pop("fedot-dropped") == 0
    assert metrics.pop("fedot-matched") == 0
    assert dict(metrics) == dict(plain_metrics)


def test_permuted_clients_are_one_model_and_keep_their_order():
    nodes, strategy = Nodes(1, 2), FedOT(first="own")
    messages = sent_to(strategy, nodes, MODEL)
    assert all(not message.content["arrays"] for message in messages.values())
    one = state(randomise(Mlp(), 5))
    twins = {1: one, 2: permuted(one, 3)}
    replies = [reply(messages[n], twins[n], 9 - n) for n in (1, 2)]
    arrays, metrics = strategy.aggregate_train(1, replies)
    assert metrics["fedot-matched"] == 2
    fused = arrays.to_torch_state_dict()
    assert all(torch.allclose(fused[n], t, atol=1e-6) for n, t in one.items())
    for step in ("configure_train", "configure_evaluate"):
        for node, message in sent_to(strategy, nodes, fused, 2, step).items():
            got = arrays_of(message)
            assert all(torch.allclose(got[n], t, atol=1e-6) for n, t in twins[node].items())


def test_a_wide_client_gets_the_global_model_at_its_width():
    nodes, strategy = Nodes(1, 2), FedOT(first="own")
    messages = sent_to(strategy, nodes, MODEL)
    # Nobody is sent to be evaluated whose widths nobody knows.
    assert sent_to(strategy, nodes, MODEL, step="configure_evaluate") == {}
    one = state(randomise(Mlp(), 5))
    wide = widened(one)
    replies = [reply(messages[1], one, 3), reply(messages[2], wide, 2)]
    arrays, _ = strategy.aggregate_train(1, replies)
    fused = arrays.to_torch_state_dict()
    assert all(distance(fused[n], t) < 1e-5 for n, t in one.items())
    got = arrays_of(sent_to(strategy, nodes, fused, 2)[2])
    assert all(distance(got[n], t) < 1e-5 for n, t in wide.items())


def test_clients_are_asked_for_their_shapes_once():
    """By lists of numbers or by arrays; one that has no answer is sent nothing."""
    narrow = state(Mlp((12, 5, 8, 3, 5)))

    def answer(message):
        node = message.metadata.dst_node_id
        if node == 3:
            return Message(Error(code=0, reason="No query function"), reply_to=message)
        if node == 4:
            shapes = ConfigRecord({"fc1.weight": [5, 12]})
            return Message(RecordDict({"shapes": shapes}), reply_to=message)
        if node == 2:
            return Message(RecordDict({"arrays": record(narrow)}), reply_to=message)
        shapes = ConfigRecord({n: list(t.shape) for n, t in MODEL.items()})
        return Message(RecordDict({"shapes": shapes}), reply_to=message)

    nodes, strategy = Nodes(1, 2, 3, 4, answer=answer), FedOT(first="ask")
    messages = sent_to(strategy, nodes, MODEL)
    assert sorted(messages) == [1, 2]
    assert sorted(nodes.asked) == [1, 2, 3, 4]
    assert all(torch.equal(arrays_of(messages[1])[n], t) for n, t in MODEL.items())
    got = arrays_of(messages[2])
    assert {n: t.shape for n, t in got.items()} == {n: t.shape for n, t in narrow.items()}
    replies = [reply(messages[n], arrays_of(messages[n])) for n in (1, 2)]
    arrays, metrics = strategy.aggregate_train(1, replies)
    assert metrics["fedot-matched"] == 0
    fused = arrays.to_torch_state_dict()
    assert all(torch.allclose(fused[n], t, atol=1e-6) for n, t in MODEL.items())
    nodes.asked.clear()
    assert sorted(sent_to(strategy, nodes, fused, 2, "configure_evaluate")) == [1, 2]
    assert sorted(nodes.asked) == [3, 4]  # those that have not been heard of


def test_results_do_not_depend_on_when_replies_come():
    states = {node: state(randomise(Mlp(), node)) for node in (1, 2, 3)}
    results = []
    for order in ((1, 2, 3), (3, 1, 2)):
        strategy = FedOT(first="own")
        messages = sent_to(strategy, Nodes(1, 2, 3), MODEL)
        replies = [reply(messages[node], states[node], loss=0.1 * node) for node in order]
        arrays, metrics = strategy.aggregate_train(1, replies)
        results.append((arrays.to_torch_state_dict(), dict(metrics)))
    (one, metrics), (other, others) = results
    assert all(torch.equal(other[name], tensor) for name, tensor in one.items())
    assert metrics == others


def broken_replies(messages):
    """One reply of every kind that is no update, by node; node 1 is sound."""
    nan = {**MODEL, "fc2.bias": torch.full((8,), float("nan"))}
    missing = {n: t for n, t in MODEL.items() if n != "fc1.bias"}
    no_arrays = RecordDict({"metrics": MetricRecord({"num-examples": 3, "loss": 1.0})})
    made = {
        1: reply(messages[1], trained(MODEL, 1), loss=1.0),
        2: reply(messages[2], nan, loss=7.0),
        3: reply(messages[3], missing, loss=7.0),
        4: reply(messages[4], {**MODEL, "fc1.bias": torch.ones(4)}, loss=7.0),
        5: reply(messages[5], MODEL, examples=0, loss=7.0),
        6: Message(no_arrays, reply_to=messages[6]),
        7: reply(messages[7], trained(MODEL, 2), loss=3.0),
        8: reply(messages[8], MODEL, accuracy=0.5),
        9: Message(Error(code=0, reason="out of memory"), reply_to=messages[9]),
    }
    no_weight = {"arrays": record(MODEL), "metrics": MetricRecord({"loss": 2.0})}
    made[10] = Message(RecordDict(no_weight), reply_to=messages[10])
    return made


def test_broken_updates_are_left_out_and_counted(monkeypatch):
    said = []
    monkeypatch.setattr("otfuse_cli.flower._LOG.warning", lambda line, *a: said.append(line % a))
    strategy = FedOT()
    messages = sent_to(strategy, Nodes(*range(1, 11)), MODEL)
    replies = broken_replies(messages)
    arrays, metrics = strategy.aggregate_train(1, replies.values())
    assert metrics == {"loss": 2.0, "fedot-dropped": 7, "fedot-matched": 0}
    wanted = [(trained(MODEL, seed)["fc1.bias"] * 0.5) for seed in (1, 2)]
    assert torch.equal(arrays.to_torch_state_dict()["fc1.bias"], wanted[0] + wanted[1])
    for node, why in {
        2: "fc2.bias holds NaN or infinity",
        3: "it lacks fc1.bias",
        4: "the models differ in more than widths",
        5: "its weight is 0",
        6: "a reply has one ArrayRecord and one MetricRecord",
        8: "its metrics have other names",
        10: "its metrics have no number num-examples",
    }.items():
        line = f"Update of node {node} is left out: {why}"
        assert any(line in one for one in said), line
    assert len(said) == 7


def test_a_round_without_updates_leaves_the_global_model():
    strategy = FedOT()
    messages = sent_to(strategy, Nodes(1, 2), MODEL)
    nan = {**MODEL, "fc2.bias": torch.full((8,), float("nan"))}
    arrays, metrics = strategy.aggregate_train(1, [reply(messages[1], nan)])
    assert arrays is None
    assert metrics == {"fedot-dropped": 1, "fedot-matched": 0}
    assert strategy.aggregate_train(1, []) == (None, {"fedot-dropped": 0, "fedot-matched": 0})


def test_names_of_records_and_weights_are_those_of_fedavg():
    strategy = FedOT(weighted_by_key="size", arrayrecord_key="model", min_train_nodes=1)
    nodes = Nodes(1, 2)
    (first, second) = strategy.configure_train(1, record(MODEL), ConfigRecord(), nodes)
    assert list(first.content) == ["model", "config"]
    replies = []
    for message, size, change in ((first, 1, 0.0), (second, 3, 1.0)):
        tensors = {n: t + change for n, t in MODEL.items()}
        content = {"any": record(tensors), "numbers": MetricRecord({"size": size})}
        replies.append(Message(RecordDict(content), reply_to=message))
    arrays, _ = strategy.aggregate_train(1, replies)
    fused = arrays.to_torch_state_dict()
    assert torch.allclose(fused["fc1.bias"], MODEL["fc1.bias"] + 0.75, atol=1e-6)


def test_an_unknown_architecture_stops_before_any_client_trains():
    model = {"a": torch.ones(3, 3), "b": torch.ones(3, 3)}
    with pytest.raises(IncompatibleModels, match="unknown architecture"):
        sent_to(FedOT(), Nodes(1, 2), model)


def test_a_module_is_an_architecture(kept_graphs):
    net = randomise(Mlp((12, 8, 8, 5)), 1)  # names and shapes leave open whether there is a skip
    nodes, strategy = Nodes(1, 2), FedOT(arch=net, first="own")
    messages = sent_to(strategy, nodes, state(net))
    with pytest.raises(IncompatibleModels, match="unknown architecture"):
        sent_to(FedOT(), nodes, state(net))
    one = state(net)
    twin = permuted(one, 3, "mlp")
    replies = [reply(messages[1], one), reply(messages[2], twin)]
    arrays, _ = strategy.aggregate_train(1, replies)
    fused = arrays.to_torch_state_dict()
    assert all(torch.allclose(fused[n], t, atol=1e-6) for n, t in one.items())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"first": "mine"}, "no such first message"),
        ({"refit": "noise"}, "no such inputs"),
        ({"refit": {"synthetics": True}}, "did you mean synthetic"),
        ({"matching": {"pases": 2}}, "did you mean passes"),
        ({"matching": {"metric": "manhattan"}}, "manhattan"),
        ({"device": "tpu"}, "tpu"),
    ],
)
def test_options_that_cannot_be_meant_are_told_at_once(options, said):
    with pytest.raises(UsageError, match=said):
        FedOT(**options)


class Pairs(torch.utils.data.Dataset):
    """Inputs with labels."""

    def __len__(self):
        return 80

    def __getitem__(self, at):
        if at >= 80:
            raise IndexError
        return torch.randn(12, generator=torch.Generator().manual_seed(at)), at % 5


@pytest.mark.parametrize("kind", ["tensor", "array", "data set", "options"])
def test_a_refit_takes_what_servers_have(kind):
    x = torch.stack([Pairs()[at][0] for at in range(80)])
    inputs = {
        "tensor": x,
        "array": x.numpy(),
        "data set": Pairs(),
        "options": {"samples": {"x": x.numpy()}, "blend": "average"},
    }[kind]
    results = []
    for refit in (inputs, None):
        strategy = FedOT(arch="mlp", first="own", refit=refit)
        messages = sent_to(strategy, Nodes(1, 2), MODEL)
        replies = [reply(messages[n], state(randomise(Mlp(), n))) for n in (1, 2)]
        arrays, _ = strategy.aggregate_train(1, replies)
        results.append(arrays.to_torch_state_dict())
    fitted, plain = results
    assert fitted.keys() == plain.keys()
    assert any(not torch.equal(fitted[n], t) for n, t in plain.items())


def test_without_flower_one_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr.app", None)
    monkeypatch.delitem(sys.modules, "otfuse_cli.flower")
    with pytest.raises(UsageError, match=r"pip install 'otfuse-cli\[flower\]'"):
        importlib.import_module("otfuse_cli.flower")
