"""Fusion in a Flower server: `FedOT` takes the place of FedAvg in a ServerApp (docs/federated.md).

The only module that knows Flower (the extra `flower`); nothing else imports this one.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch

from .errors import OtfuseError, UsageError
from .federated.federation import Federation
from .federated.global_fit import GlobalFit
from .federated.updates import ModelTensors, Update
from .requests.python_values import options_of
from .requests.recipe import Recipe
from .runtime import Runtime, resolve_device

try:
    from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import FedAvg
except ImportError as error:
    raise UsageError(
        "Flower is not installed",
        where="otfuse_cli.flower",
        why=str(error),
        fix="pip install 'otfuse-cli[flower]'",
    ) from error

__all__ = ["FedOT"]

First = Literal["global", "own", "ask"]
_FIRST: tuple[First, ...] = ("global", "own", "ask")
# A server matches each client once: two more passes, in which each is matched to the mean of the
# others, cost little and are worth several points (docs/federated.md).
_PASSES = 3
# A client looks up shapes, which takes no work; one that is gone must not hold up the others.
_ANSWER_SECONDS = 600.0

# Flower's own logger: its lines and ours stand in one log.
_LOG = logging.getLogger("flwr")


class FedOT(FedAvg):
    """Federated averaging on matched neurons, for clients of equal or different widths.

    A client that begins where the server says is averaged as FedAvg does, number by number. One
    that begins elsewhere is matched by optimal transport first, and its plan is kept: from then on
    it is sent the global model at its own width and in its own order of units. An update that lacks
    a tensor, has one too many, or one of a wrong shape, or holds NaN or infinity, is left out.

    Counters of batches take the maximum, other whole numbers stay as they are. The metrics of a
    round also have `fedot-dropped` (updates left out) and `fedot-matched` (clients that got a new
    plan).
    """

    def __init__(
        self,
        *,
        arch: Any = "auto",
        first: First = "global",
        refit: Any = None,
        refit_always: bool = False,
        rematch: bool = True,
        matching: Mapping[str, Any] | None = None,
        device: str = "auto",
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Set the strategy up; nothing is computed yet.

        Args:
            arch: The network of the global model, as for `otfuse_cli.merge`: a module, a function
                that makes one, a name such as "mlp", a spec; by default names and shapes tell.
            first: What a client is sent that has not been heard of: the global model as it is
                (`global`: every client has its widths), no arrays (`own`: it begins with a model
                of its own), or a query for its shapes, and then the global model at these (`ask`).
            refit: What the global model is fitted on where clients were matched: "synthetic", an
                array or tensor of inputs, a data set of which the first field is one, or keywords
                of `otfuse_cli.merge` (`{"synthetic": True, "blend": "joint"}`). None: nothing.
            refit_always: GlobalFit in every round.
            rematch: Look in every round whether a client still has the order that it was sent.
            matching: Options of matching by name, as for `otfuse_cli.merge`; three passes.
            device: Where numerics run.
            seed: Of everything that is drawn.
            options: Those of `FedAvg`, which count examples and choose clients.

        Raises:
            UsageError: A value that can't be meant.
        """
        super().__init__(**options)
        if first not in _FIRST:
            raise UsageError(
                "no such first message",
                where=f"first={first!r}",
                fix=f"use one of: {', '.join(_FIRST)}",
            )
        self.first = first
        chosen = {"passes": _PASSES, "seed": seed, **(matching or {})}
        fit = None if refit is None else GlobalFit(_fit_options(refit), always=refit_always)
        if fit is not None:
            fit.request(({}, {}))  # options that can't be meant are told before any client trains
        self._federation = Federation(
            arch=arch,
            recipe=Recipe(**options_of(Recipe, chosen)),
            runtime=Runtime(resolve_device(device), seed),
            rematch=rematch,
            global_fit=fit,
        )
        self._global: ModelTensors | None = None
        self._sent: set[int] = set()

    def summary(self) -> None:
        """Log what FedAvg logs, and what unknown clients are sent."""
        super().summary()
        _LOG.info("\t└──> Fusion: first message '%s'", self.first)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send each client of the round the global model as it has it.

        Raises:
            OtfuseError: An architecture that nobody knows.
        """
        self._global = _tensors(arrays)
        self._federation.open(self._global)
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self._ask(messages, config, grid)
        sent: list[Message] = []
        self._sent = set()
        for message in messages:
            node = message.metadata.dst_node_id
            own = self._arrays_for(node, arrays)
            if own is None and self.first == "ask":
                continue  # its widths are not known: it could only be sent a wrong model
            if own is not None:
                self._sent.add(node)
            sent += self._addressed(message, own if own is not None else ArrayRecord(), config)
        return sent

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send each client of the round the global model as it has it; unknown widths are skipped.

        Raises:
            IncompatibleModels: A tensor that can't be carried to other widths.
        """
        self._global = _tensors(arrays)
        messages = list(super().configure_evaluate(server_round, arrays, config, grid))
        self._ask(messages, config, grid)
        sent: list[Message] = []
        for message in messages:
            own = self._arrays_for(message.metadata.dst_node_id, arrays)
            if own is not None:
                sent += self._addressed(message, own, config)
        if len(sent) < len(messages):
            unknown = len(messages) - len(sent)
            _LOG.info("configure_evaluate: %d clients of unknown widths are left out", unknown)
        return sent

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Fuse the updates; the global model stays where none can be used.

        Replies count in the order of their nodes' ids, whenever they come: sums, and which client
        gives the order of units, don't depend on that.

        Raises:
            OtfuseError: A problem that was not solved, a fit that failed.
        """
        if self._global is None:
            raise ValueError("configure_train comes first: it knows the global model")
        replies = sorted(replies, key=lambda reply: reply.metadata.src_node_id)
        valid, _ = self._check_and_log_replies(replies, is_train=True, validate=False)
        updates, contents, dropped = self._read(valid)
        fused = self._federation.fuse(self._global, updates)
        dropped |= fused.dropped
        for node, reason in sorted(dropped.items()):
            _LOG.warning("\t> Update of node %d is left out: %s", node, reason)
        for remark in dict.fromkeys(fused.remarks):
            _LOG.info("\t> %s", remark)
        metrics = MetricRecord()
        if fused.tensors is not None:
            used = [contents[node] for node in fused.used]
            metrics = self.train_metrics_aggr_fn(used, self.weighted_by_key)
        metrics["fedot-dropped"] = len(dropped)
        metrics["fedot-matched"] = len(fused.matched)
        return None if fused.tensors is None else _record(fused.tensors), metrics

    def _read(
        self, replies: Sequence[Message]
    ) -> tuple[list[Update], dict[int, RecordDict], dict[int, str]]:
        """Updates, the replies that they came in, and what is no update, by client."""
        dropped: dict[int, str] = {}
        read: list[tuple[Update, RecordDict]] = []
        for message in replies:
            node = message.metadata.src_node_id
            try:
                read.append((self._update(node, message.content), message.content))
            except (ValueError, TypeError, KeyError) as error:
                dropped[node] = str(error)
        # Metrics are averaged over all that count, so that all must have the same.
        names = Counter(_metric_names(content) for _, content in read)
        usual = names.most_common(1)[0][0] if names else frozenset()
        updates, contents = [], {}
        for update, content in read:
            if _metric_names(content) == usual:
                updates.append(update)
                contents[update.node] = content
            else:
                dropped[update.node] = "its metrics have other names than the others'"
        return updates, contents, dropped

    def _update(self, node: int, content: RecordDict) -> Update:
        if len(content.array_records) != 1 or len(content.metric_records) != 1:
            raise ValueError("a reply has one ArrayRecord and one MetricRecord")
        (arrays,), (metrics,) = content.array_records.values(), content.metric_records.values()
        weight = metrics.get(self.weighted_by_key)
        if isinstance(weight, list) or weight is None:
            raise ValueError(f"its metrics have no number {self.weighted_by_key}")
        return Update(node, _tensors(arrays), float(weight), node in self._sent)

    def _arrays_for(self, node: int, arrays: ArrayRecord) -> ArrayRecord | None:
        """The global model as a client has it; None where that can't be told."""
        assert self._global is not None
        if not self._federation.knows(node):
            return arrays if self.first == "global" else None
        if not self._federation.moves(node):
            return arrays
        return _record(self._federation.carry(node, self._global))

    def _addressed(
        self, message: Message, arrays: ArrayRecord, config: ConfigRecord
    ) -> Iterable[Message]:
        """The message with these arrays in place of its own."""
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        node, kind = message.metadata.dst_node_id, message.metadata.message_type
        return self._construct_messages(record, [node], kind)

    def _ask(self, messages: Sequence[Message], config: ConfigRecord, grid: Grid) -> None:
        """Ask clients that have not been heard of for the shapes of their models."""
        assert self._global is not None
        nodes = [message.metadata.dst_node_id for message in messages]
        unknown = [node for node in nodes if not self._federation.knows(node)]
        if self.first != "ask" or not unknown:
            return
        record = RecordDict({self.configrecord_key: config})
        queries = self._construct_messages(record, unknown, MessageType.QUERY)
        for reply in grid.send_and_receive(queries, timeout=_ANSWER_SECONDS):
            node = reply.metadata.src_node_id
            try:
                if reply.has_error():
                    raise ValueError(reply.error.reason)
                self._federation.meet(node, _shapes(reply.content), self._global)
            except (OtfuseError, ValueError, TypeError) as error:
                reason = str(error).replace("\n", "; ")
                _LOG.warning("\t> Node %d has no model to be sent one: %s", node, reason)


def _tensors(arrays: ArrayRecord) -> dict[str, torch.Tensor]:
    """Arrays as tensors of their own: what a message holds is read-only."""
    return {name: torch.tensor(array.numpy()) for name, array in arrays.items()}


def _record(tensors: Mapping[str, torch.Tensor]) -> ArrayRecord:
    return ArrayRecord(torch_state_dict=dict(tensors))


def _shapes(content: RecordDict) -> dict[str, tuple[int, ...]]:
    """Shapes from a reply: arrays that have them, or lists of whole numbers by name."""
    for arrays in content.array_records.values():
        return {name: tuple(array.shape) for name, array in arrays.items()}
    shapes = {}
    for config in content.config_records.values():
        for name, sizes in config.items():
            if not isinstance(sizes, list):
                raise ValueError(f"the shape of {name} is a list of whole numbers, not {sizes!r}")
            shapes[name] = tuple(int(size) for size in sizes)
    return shapes


def _metric_names(content: RecordDict) -> frozenset[str]:
    (metrics,) = content.metric_records.values()
    return frozenset(metrics)


def _fit_options(refit: Any) -> dict[str, Any]:
    """Keywords of `merge` that say what is meant."""
    if isinstance(refit, str):
        if refit != "synthetic":
            raise UsageError(
                "no such inputs",
                where=f"refit={refit!r}",
                fix='use "synthetic", an array or tensor of inputs, or {"samples": "inputs.npz"}',
            )
        return {"synthetic": True}
    if isinstance(refit, Mapping):
        return dict(refit)
    if hasattr(refit, "__getitem__") and hasattr(refit, "__len__") and not hasattr(refit, "shape"):
        return {"samples": {"x": _first_fields(refit)}}
    return {"samples": {"x": refit}}


# Inputs that are taken from a data set, evenly spread: what a fit needs (docs/methods/refit.md).
_FROM_DATA_SET = 2000


def _first_fields(items: Any) -> torch.Tensor:
    step = max(1, math.ceil(len(items) / _FROM_DATA_SET))
    chosen = (items[at] for at in range(0, len(items), step))
    return torch.stack(
        [torch.as_tensor(item[0] if isinstance(item, tuple | list) else item) for item in chosen]
    )
