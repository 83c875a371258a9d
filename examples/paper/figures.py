"""The paper's figures from what was measured: 2 and S5, 3 and S7, S2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pruned
import transfer
from jobs import Job, Kept
from page import curves

Rows = Sequence[tuple[Job, Kept]]
COLOURS = {
    "ensemble": "tab:blue",
    "plain": "tab:gray",
    "--paper": "tab:orange",
    "--paper, activations": "tab:pink",
    "default": "tab:purple",
    "refit": "tab:green",
    "joint": "tab:red",
}


def draw(rows: Mapping[str, Rows], folder: Path) -> dict[str, str]:
    """Write what there are rows for; item to the name of its picture."""
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {}
    for item, (name, paint) in PICTURES.items():
        if rows.get(item):
            figure = paint(rows[item])
            figure.savefig(folder / name, dpi=80, metadata={"Software": None})
            matplotlib.pyplot.close(figure)
            drawn[item] = name
    return drawn


def _panels(count: int, across: int) -> tuple[Any, list[Any]]:
    from matplotlib import pyplot as plt

    down = -(-count // across)
    figure, panels = plt.subplots(
        down, across, figsize=(3.4 * across, 2.7 * down), sharex=True, sharey=True, squeeze=False
    )
    for panel in panels.flat[count:]:
        panel.remove()
    return figure, list(panels.flat[:count])


def _finish(figure: Any, panels: Sequence[Any], across: str) -> Any:
    labels: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            labels.setdefault(label, handle)
    inch = 1 / figure.get_figheight()  # as a share of the height
    most = 5
    below = (0.15 + 0.22 * -(-len(labels) // most)) * inch  # what the legend takes
    figure.supxlabel(across, fontsize=10, y=below)
    figure.supylabel("test accuracy, %", fontsize=10)
    figure.tight_layout(rect=(0, below + 0.1 * inch, 1, 1))
    figure.legend(labels.values(), labels.keys(), fontsize=8, ncols=most, loc="lower center")
    return figure


def _skill(rows: Rows) -> Any:
    """A panel for each setting: curves along w, mean and deviation; A and B as lines."""
    figure, panels = _panels(len(rows), len(transfer.STARTS))
    for panel, (job, kept) in zip(panels, rows, strict=False):
        for name, (places, heights) in curves(kept.values).items():
            means, spread = np.mean(heights, axis=1), np.std(heights, axis=1)
            panel.errorbar(places, means, spread, label=name, color=COLOURS[name], capsize=2)
        for name, style in (("A", ":"), ("B", "--")):
            height = float(np.mean(kept.values[name]))
            panel.axhline(height, linestyle=style, color="black", lw=0.8)
            panel.annotate(name, (0.5, height), fontsize=8)
        panel.set_title(job.row, fontsize=9)
        panel.set_ylim(75, 97)
    return _finish(figure, panels, "share of B")


def _pruned(rows: Rows) -> Any:
    """A panel for each layer: a line for each criterion and fusion."""
    layers = list(dict.fromkeys(str(job.recipe["layer"]) for job, _ in rows))
    figure, panels = _panels(len(layers), 2 if len(layers) < 5 else 3)
    styles = {"pruned": ":", "fused": "-", "refit": "--"}
    for panel, layer in zip(panels, layers, strict=False):
        for at, criterion in enumerate(pruned.CRITERIA):
            for job, kept in rows:
                if (job.recipe["layer"], job.recipe["criterion"]) != (layer, criterion):
                    continue
                for name, (places, heights) in curves(kept.values).items():
                    panel.plot(
                        [100 * p for p in places], np.mean(heights, axis=1), styles[name],
                        color=f"C{at}", marker=".", label=f"{criterion} {name}",
                    )  # fmt: skip
                panel.axhline(np.mean(kept.values["dense"]), color="0.7", lw=0.8)
        panel.set_title(layer, fontsize=9)
    return _finish(figure, panels, "units removed, %")


def _costs(rows: Rows) -> Any:
    from matplotlib import pyplot as plt

    figure, panel = plt.subplots(figsize=(8, 4))
    for job, kept in rows:
        layers = list(kept.values)
        panel.plot(range(len(layers)), [np.mean(kept.values[n]) for n in layers], label=job.row)
        panel.set_xticks(range(len(layers)), layers, rotation=90, fontsize=7)
    panel.set_ylabel("OT cost")
    panel.set_ylim(bottom=0)
    panel.legend(fontsize=8)
    figure.tight_layout()
    return figure


PICTURES = {
    "Fig. 2": ("paper-skill.png", _skill),
    pruned.ITEM: ("paper-pruning.png", _pruned),
    "Fig. S2": ("paper-costs.png", _costs),
}
