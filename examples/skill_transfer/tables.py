"""Results of the skill transfer experiments as Markdown tables and plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

STARTS = {
    "same": "same start",
    "different": "different starts",
    "narrow": "A half as wide as B",
}
COLOURS = {
    "vanilla": "tab:gray",
    "paper": "tab:orange",
    "acts": "tab:pink",
    "default": "tab:purple",
    "refit": "tab:green",
    "joint": "tab:red",
}
NAMES = {
    "vanilla": "plain average",
    "paper": "--paper",
    "acts": "--paper --align acts, 400 inputs",
    "default": "default",
    "refit": "refit, 400 inputs",
    "joint": "joint, 400 inputs",
}
COLUMNS = {
    "ensemble": "ensemble of logits",
    "vanilla": "plain average",
    "paper": "`--paper`",
    "default": "default",
}


def best(entry: dict[str, Any], method: str) -> tuple[float, float]:
    """The highest mean over seeds along w_B, and where."""
    mean = np.mean(entry["curves"][method], axis=0)
    return float(mean.max()), round(0.1 * int(mean.argmax()), 1)


def pair_table(entries: Sequence[dict[str, Any]]) -> str:
    """Means over seeds: A, B, and the best along w_B for each method (in brackets: that w_B)."""
    lines = [
        "| digit, A's share of the rest | | A | B | plain average, best | `--paper`, best "
        "| `--paper --align acts`, best | default, best | refit, best | joint, best |",
        "|---" * 10 + "|",
    ]
    for entry in entries:
        cells = [f"{entry['digit']}, {entry['percent']} %", STARTS[entry["start"]]]
        cells += [f"{np.mean(entry[name]):.2f}" for name in ("A", "B")]
        for method in NAMES:
            if method in entry["curves"]:
                value, where = best(entry, method)
                cells.append(f"{value:.2f} ({where})")
            else:
                cells.append("-")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def four_table(entries: Sequence[dict[str, Any]]) -> str:
    """Means over seeds for each choice of proportions."""
    lines = [
        f"| A, B, C, D | parents | {' | '.join(COLUMNS.values())} |",
        "|---" * (2 + len(COLUMNS)) + "|",
    ]
    for entry in entries:
        parents = ", ".join(f"{a:.1f}" for a in np.mean(entry["parents"], axis=0))
        cells = [f"{np.mean(entry[c]):.2f} ± {np.std(entry[c]):.2f}" for c in COLUMNS]
        proportions = ", ".join(map(str, entry["proportions"]))
        lines.append(f"| {proportions} | {parents} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(results: dict[str, Any], folder: Path) -> None:
    """A PNG for each digit and share: a panel for each start, mean and standard deviation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    settings = {(e["digit"], e["percent"]) for e in results["settings"]}
    for digit, percent in sorted(settings):
        entries = [e for e in results["settings"] if (e["digit"], e["percent"]) == (digit, percent)]
        figure, panels = plt.subplots(
            1, len(entries), figsize=(4 * len(entries), 3.4), sharey=True, squeeze=False
        )
        for panel, entry in zip(panels[0], entries, strict=True):
            for method, curves in entry["curves"].items():
                mean, deviation = np.mean(curves, axis=0), np.std(curves, axis=0)
                panel.errorbar(
                    results["w_B"], mean, deviation, label=NAMES[method], color=COLOURS[method],
                    capsize=2,
                )  # fmt: skip
            for name, style in (("A", ":"), ("B", "--")):
                panel.axhline(np.mean(entry[name]), linestyle=style, color="black", lw=0.8)
                panel.annotate(name, (0.5, np.mean(entry[name])), fontsize=8)
            panel.set_title(STARTS[entry["start"]], fontsize=10)
            panel.set_xlabel("$w_B$")
            panel.set_ylim(70, 96)
        panels[0][0].set_ylabel("test accuracy, %")
        handles = {}
        for panel in panels[0]:
            for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        order = [label for label in NAMES.values() if label in handles]
        figure.legend(
            [handles[label] for label in order], order, fontsize=8, ncols=len(order),
            loc="lower center",
        )  # fmt: skip
        figure.suptitle(f"A alone knows digit {digit} and has {percent} % of the rest", fontsize=11)
        figure.tight_layout(rect=(0, 0.06, 1, 1))
        figure.savefig(folder / f"digit{digit}-{percent}.png", dpi=90, metadata={"Software": None})
        plt.close(figure)
