"""The two sides of the federation, as Flower has them: a ClientApp, and what a server runs."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from task import hidden_of, parts, start, train

client_app = ClientApp()


@client_app.query()
def shapes(message: Message, context: Context) -> Message:
    """Of this client's model: asked for once, before it is sent one."""
    net = start(0, hidden_of(_client(context), message.content["config"]["widths"]))
    sizes = ConfigRecord({name: list(t.shape) for name, t in net.state_dict().items()})
    return Message(RecordDict({"shapes": sizes}), reply_to=message)


@client_app.train()
def fit(message: Message, context: Context) -> Message:
    """Train what the server sent, or in the first round a start of one's own."""
    torch.set_num_threads(1)
    arrays, config = message.content["arrays"], message.content["config"]
    client, number, seed = _client(context), config["server-round"], config["seed"]
    own = config["start"] == "own" and number == 1
    net = start(100 * seed + client + 1, hidden_of(client, config["widths"]))
    if not own:
        net.load_state_dict(arrays.to_torch_state_dict())
    part = parts(config["split"], config["images"], seed)[client]
    loss = train(net, part, config["epochs"], seed=1000 * number + client)
    tensors = net.state_dict()
    if client == config["broken"]:
        tensors["fc2.weight"][0, 0] = float("nan")
    metrics = MetricRecord({"num-examples": len(part), "loss": loss})
    content = RecordDict({"arrays": ArrayRecord(tensors), "metrics": metrics})
    return Message(content, reply_to=message)


def _client(context: Context) -> int:
    return int(context.node_config["partition-id"])
