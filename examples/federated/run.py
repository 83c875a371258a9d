"""A federation of ten MNIST clients: FedAvg beside FedOT, accuracy after every round.

    python examples/federated/run.py [--rounds 10] [--images 30000] [--epochs 1] [--seed 0]
        [--splits equal,skewed] [--only NAME,...] [--out FOLDER]

Flower's simulation engine on Ray, two cores (flwr[simulation]); MNIST comes from the folder that
OTFUSE_SHARED names. Clients begin from one start, or each from its own; they have equal parts of
the images, or skewed ones; one width, or three at once. Writes results.json and a plot (matplotlib)
into --out (default: this folder).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
# Workers import this folder's modules too, and nobody is told that we run.
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import torch  # noqa: E402
from apps import client_app  # noqa: E402
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord  # noqa: E402
from flwr.serverapp import Grid, ServerApp  # noqa: E402
from flwr.serverapp.strategy import FedAvg, Strategy  # noqa: E402
from flwr.simulation import run_simulation  # noqa: E402
from task import CLIENTS, accuracy, evaluate, start  # noqa: E402

from otfuse_cli.flower import FedOT  # noqa: E402

# Data-free: the clients' networks say what they take, and images of overlapping shapes are made.
REFIT = {"synthetic": True, "input_shape": (1, 28, 28), "blend": "joint"}
NOBODY = -1


class InOrder(FedAvg):
    """FedAvg that adds replies up in the order of their nodes, as FedOT does."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The sum's rounding is then no difference between the two."""
        ordered = sorted(replies, key=lambda reply: reply.metadata.src_node_id)
        return super().aggregate_train(server_round, ordered)


@dataclass(frozen=True)
class Setting:
    """One run: who begins where, with which widths, fused how."""

    name: str
    start: str = "common"  # or "own"
    widths: str = "equal"  # or "three"
    fused: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    broken: int = NOBODY

    def strategy(self) -> Strategy:
        """FedAvg, or FedOT with what it is told of the clients."""
        common = {"fraction_evaluate": 0.0, "min_train_nodes": CLIENTS}
        if not self.fused:
            return InOrder(**common)
        first = "global" if self.widths == "equal" else "ask"
        first = "own" if self.start == "own" else first
        return FedOT(arch="mlp", first=first, **self.options, **common)


SETTINGS = (
    Setting("FedAvg, common start", fused=False),
    Setting("FedOT, common start"),
    Setting("FedOT, common start, three widths", widths="three"),
    Setting("FedOT, common start, one client sends NaN", broken=3),
    Setting("FedAvg, own starts", start="own", fused=False),
    Setting("FedOT, own starts", start="own"),
    Setting("FedOT, own starts, refit", start="own", options={"refit": REFIT}),
    Setting("FedOT, own starts, three widths", start="own", widths="three"),
    Setting(
        "FedOT, own starts, three widths, refit",
        start="own",
        widths="three",
        options={"refit": REFIT},
    ),
)


@dataclass
class Outcome:
    """What came of a run: percent of the test images after each round, and updates left out."""

    split: str
    setting: str
    accuracy: list[float]
    dropped: int
    seconds: float


def measure(setting: Setting, split: str, grid: Grid, given: argparse.Namespace) -> Outcome:
    """One run of all rounds."""
    began = time.perf_counter()
    found: list[float] = []

    def score(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        if number:
            found.append(round(accuracy(arrays.to_torch_state_dict()), 2))
        return None

    config = {
        "split": split,
        "images": given.images,
        "epochs": given.epochs,
        "seed": given.seed,
        "start": setting.start,
        "widths": setting.widths,
        "broken": setting.broken,
    }
    result = setting.strategy().start(
        grid=grid,
        initial_arrays=ArrayRecord(start(given.seed).state_dict()),
        num_rounds=given.rounds,
        train_config=ConfigRecord(config),
        evaluate_fn=score,
    )
    rounds = result.train_metrics_clientapp.values()
    dropped = sum(int(metrics.get("fedot-dropped", 0)) for metrics in rounds)
    return Outcome(split, setting.name, found, dropped, round(time.perf_counter() - began, 1))


def run_all(given: argparse.Namespace) -> list[Outcome]:
    """Every setting on every split, in one simulation."""
    outcomes: list[Outcome] = []
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Any) -> None:
        torch.set_num_threads(1)
        for split in given.splits.split(","):
            for setting in SETTINGS:
                if given.only and setting.name not in given.only.split(";"):
                    continue
                outcomes.append(measure(setting, split, grid, given))
                show(outcomes[-1])

    with tempfile.TemporaryDirectory(prefix="otfuse-federated-") as scratch:
        limits = {"num_cpus": given.cores, "object_store_memory": 200 * 2**20}
        ray = {**limits, "include_dashboard": False, "log_to_driver": False, "_temp_dir": scratch}
        run_simulation(
            server_app,
            client_app,
            num_supernodes=CLIENTS,
            backend_config={"init_args": ray, "client_resources": {"num_cpus": 1}},
        )
    return outcomes


def show(outcome: Outcome) -> None:
    """One line as soon as it is known."""
    line = " ".join(f"{value:5.2f}" for value in outcome.accuracy)
    left = f"  ({outcome.dropped} updates left out)" if outcome.dropped else ""
    print(f"{outcome.split:6}  {outcome.setting:42} {line}{left}", flush=True)


def draw(outcomes: list[Outcome], path: Path) -> None:
    """Accuracy by round, a panel for each split and start."""
    from matplotlib.figure import Figure

    splits = list(dict.fromkeys(outcome.split for outcome in outcomes))
    figure = Figure(figsize=(10, 4 * len(splits)), layout="constrained")
    panels = figure.subplots(len(splits), 2, squeeze=False)
    for row, split in zip(panels, splits, strict=True):
        for panel, begins in zip(row, ("common start", "own starts"), strict=True):
            for outcome in outcomes:
                if outcome.split == split and begins in outcome.setting:
                    label = outcome.setting.replace(f", {begins}", "")
                    rounds = range(1, len(outcome.accuracy) + 1)
                    style = "--" if "NaN" in label else "-"
                    # FedAvg and FedOT may be one line: the first is the broader.
                    wide = 4 if label == "FedAvg" else 1.5
                    panel.plot(rounds, outcome.accuracy, style, linewidth=wide, label=label)
            panel.set(title=f"{split} parts, {begins}", xlabel="round", ylabel="test accuracy, %")
            panel.grid(alpha=0.3)
            panel.legend()
    figure.savefig(path, dpi=100)


def refuse(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Say what is wrong before anything is started."""
    names = [setting.name for setting in SETTINGS]
    unknown = [name for name in (given.only or names[0]).split(";") if name not in names]
    if unknown:
        parser.error(f"--only: no setting {unknown[0]!r}; there are {'; '.join(names)}")
    if not set(given.splits.split(",")) <= {"equal", "skewed"}:
        parser.error(f"--splits {given.splits}: equal, skewed, or both with a comma")
    data = evaluate.SHARED / "data" / "mnist.npz"
    if not data.exists():
        parser.error(f"no {data} (x_train, y_train, x_test, y_test): set OTFUSE_SHARED")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--images", type=int, default=30_000, help="of the training set, in all")
    parser.add_argument("--epochs", type=int, default=1, help="of a client in a round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--splits", default="equal,skewed")
    parser.add_argument("--only", help="names of settings, separated by semicolons")
    parser.add_argument("--cores", type=int, default=2, help="that Ray may use (default 2)")
    parser.add_argument("--out", type=Path, default=HERE)
    given = parser.parse_args()
    refuse(parser, given)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    began = time.perf_counter()
    outcomes = run_all(given)
    given.out.mkdir(parents=True, exist_ok=True)
    found = {"seconds": round(time.perf_counter() - began), "runs": [asdict(o) for o in outcomes]}
    chosen = {name: getattr(given, name) for name in ("rounds", "images", "epochs", "seed")}
    (given.out / "results.json").write_text(json.dumps({**chosen, **found}, indent=1) + "\n")
    draw(outcomes, given.out / "accuracy.png")
    print(f"{found['seconds']} s; {given.out / 'results.json'}, {given.out / 'accuracy.png'}")


if __name__ == "__main__":
    main()
