"""Every command-line option, once: its flags, panel and help, keyed by the request field it fills.

Imports neither torch nor numpy: this module decides how fast `--help` is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ..output_names import DEFAULT_SHARD
from ..requests.recipe import MATCHERS
from ..requests.requests import CHOICES, Recipe

PANELS = ("Pruning", "Fusion", "Matching", "Inputs", "Output", "Run")
PRUNING, FUSION, MATCHING, INPUTS, OUTPUT, RUN = PANELS


def _option(*flags: str, panel: str, text: str, default: object = None, **more: Any) -> Any:
    """A Typer option whose help ends with its default, the same way for all of them."""
    if default is not None:
        text += f" [default: {default}]"
    return typer.Option(*flags, help=text, rich_help_panel=panel, show_default=False, **more)


def _choice(name: str, *, panel: str, text: str, default: str | None = None) -> Any:
    """An option of the recipe with a closed set of values (`Recipe` refuses the others)."""
    values = CHOICES[name]
    return _option(
        f"--{name}",
        panel=panel,
        text=text,
        default=default or getattr(Recipe, name, values[0]),
        metavar="|".join(values),
        autocompletion=lambda: list(values),
    )


def _checkpoint(metavar: str, text: str) -> Any:
    return typer.Argument(metavar=metavar, help=text, show_default=False)


def _flag(*flags: str, panel: str, text: str, default: str | None = None, **more: Any) -> Any:
    """An option without a value."""
    return _option(*flags, panel=panel, text=text, default=default, metavar="", **more)


# Where a command has many options, `--help` shows these alone, and `--help-all` the others too.
COMMON = {
    *("amount", "criterion", "layer", "dense_weight", "keep_shape"),
    *("ot_costs", "graph", "max_cost", "plot", "spec", "steps", "batch"),
    *("align", "weights", "anchor", "blend"),
    *("arch", "samples", "synthetic", "num_samples", "key"),
    *("output", "overwrite", "json", "device", "verbose", "help", "help_all"),
}
# In the context's `meta`: everything was asked for.
SHOW_ALL = "otfuse.help-all"


def _show_all(context: typer.Context, asked: bool) -> None:
    if asked:
        from .render import show_text

        context.meta[SHOW_ALL] = True
        show_text(context.get_help() + "\n")
        raise typer.Exit


# In the order of the help: panels as they first appear, what most people need first.
OPTIONS: Mapping[str, Any] = {
    "checkpoints": Annotated[
        list[Path],
        _checkpoint(
            "CKPT", "Checkpoints; of a fusion the last one is the anchor, unless --anchor says so."
        ),
    ],
    "checkpoint": Annotated[Path, _checkpoint("CKPT", "A checkpoint of the network.")],
    "dense": Annotated[Path, _checkpoint("DENSE", "The unpruned checkpoint.")],
    "pruned": Annotated[Path, _checkpoint("PRUNED", "Its pruned version: the anchor.")],
    "ot_costs": Annotated[
        bool,
        _flag(
            "--ot-costs",
            panel=FUSION,
            text="OT cost of every space and layer, beside the cost of leaving units in place.",
        ),
    ],
    "graph": Annotated[
        bool,
        _flag(
            "--graph", panel=FUSION, text="Every space of the layer graph, and what stays in place."
        ),
    ],
    "max_cost": Annotated[
        float | None,
        _option(
            "--max-cost",
            panel=FUSION,
            metavar="X",
            text="Exit with 7 if a space costs more than X.",
        ),
    ],
    "ensemble": Annotated[
        bool,
        _flag(
            "--ensemble", panel=FUSION, text="Also measure the mean of the checkpoints' outputs."
        ),
    ],
    "average": Annotated[
        bool,
        _flag("--average", panel=FUSION, text="Also measure the plain average of the checkpoints."),
    ],
    "steps": Annotated[
        int,
        _option(
            "--steps",
            panel=FUSION,
            metavar="N",
            text="Points of the curve, both ends included.",
            default=11,
        ),
    ],
    "max_moved": Annotated[
        float | None,
        _option(
            "--max-moved",
            panel=FUSION,
            metavar="F",
            text="Exit with 7 if more than this fraction of a space's units moves, 0 to 1.",
        ),
    ],
    "align": Annotated[
        str | None,
        _choice(
            "align",
            panel=FUSION,
            text="Match units by their incoming weights, by what they do on the inputs, or not at "
            "all (the plain average).",
        ),
    ],
    "weights": Annotated[
        str | None,
        _option(
            "--weights",
            panel=FUSION,
            metavar="W,W...|FILE.yaml",
            text="A weight per checkpoint, made to sum to 1; a file gives weights by tensor.",
            default="equal",
        ),
    ],
    "dense_weight": Annotated[
        float | None,
        _option(
            "--dense-weight",
            panel=FUSION,
            metavar="W",
            text="Weight of DENSE; PRUNED has the rest.",
            default="0.7 if all units of PRUNED are DENSE's, else 0.5",
        ),
    ],
    "keep_shape": Annotated[
        bool,
        _flag(
            "--keep-shape",
            panel=FUSION,
            text="Where PRUNED is masked (weight_mask, rows of zeros): write its shape, pruned "
            "units zero, instead of a smaller network.",
        ),
    ],
    "amount": Annotated[
        float | None,
        _option(
            "--amount",
            panel=PRUNING,
            metavar="SHARE",
            text="Share of units to remove from every layer, more than 0 and less than 1.",
        ),
    ],
    "criterion": Annotated[
        str,
        _choice(
            "criterion",
            panel=PRUNING,
            text="Units to keep: of large incoming weights (l1, l2), random ones, those that the "
            "others can be merged into at least cost (ot, which merges them), or those that "
            "explain the others best on inputs, on which layers are then fitted (reconstruct).",
        ),
    ],
    "layer": Annotated[
        list[str] | None,
        _option(
            "--layer",
            panel=PRUNING,
            metavar="NAME=SHARE",
            text="A share of its own for the units of a module, tensor or space, 0 to keep them "
            "all; may be repeated.",
        ),
    ],
    "anchor": Annotated[
        str,
        _option(
            "--anchor",
            panel=FUSION,
            metavar="last|first|medoid|INDEX",
            text="The checkpoint that gives widths and file format, and that the others are "
            "aligned to; INDEX counts from 0, medoid is the one nearest to all others.",
            default="last",
        ),
    ],
    "skip": Annotated[
        list[str] | None,
        _option(
            "--skip",
            panel=FUSION,
            metavar="GLOB",
            text="Tensors to take from the anchor as they are, instead of averaging; repeatable.",
        ),
    ],
    "only": Annotated[
        list[str] | None,
        _option(
            "--only",
            panel=FUSION,
            metavar="GLOB",
            text="Average these tensors alone; the others are the anchor's; repeatable.",
        ),
    ],
    "paper": Annotated[
        bool,
        _flag(
            "--paper",
            panel=FUSION,
            text="Exactly the method of Singh & Jaggi (2020); options given beside it win.",
        ),
    ],
    "residual": Annotated[
        str | None,
        _choice(
            "residual",
            panel=FUSION,
            text="Residual streams: one shared map, the paper's averaged maps, left in place, or "
            "turned (orthogonal: pre-norm transformers, in merge).",
        ),
    ],
    "beta": Annotated[
        float | None,
        _option(
            "--beta",
            panel=FUSION,
            metavar="B",
            text="Share of the shortcut in --residual average, 0 to 1.",
            default=Recipe.beta,
        ),
    ],
    "scale": Annotated[
        str | None,
        _choice(
            "scale",
            panel=FUSION,
            text="Different widths: keep the function, and count a source by how many of its units "
            "stand for one (auto; not prune-fuse), or in full (preserve), or bring both models' "
            "rows to one length (balanced); or the paper's scaling by M/N.",
        ),
    ],
    "repair": Annotated[
        str | None,
        _choice(
            "repair",
            panel=FUSION,
            text="Undo the shrinking of imperfectly matched units, from the weights alone.",
        ),
    ],
    "refit": Annotated[
        bool | None,
        _flag(
            "--refit/--no-refit",
            panel=FUSION,
            text="Fit every layer of the average, in closed form, to what the parents compute on "
            "the inputs.",
            default="refit when there are inputs",
        ),
    ],
    "blend": Annotated[
        str | None,
        _option(
            "--blend",
            panel=FUSION,
            metavar="|".join(CHOICES["blend"]),
            text="With inputs: fit the average of matched units; keep the best units of all "
            "parents (joint); the anchor with another output layer (head) or with some units of "
            "the others (graft); auto: what agrees most with the parents.",
            default="auto with inputs",
            autocompletion=lambda: list(CHOICES["blend"]),
        ),
    ],
    "require_gain": Annotated[
        bool,
        _option(
            "--require-gain",
            panel=FUSION,
            text="Write nothing (exit 7) where the anchor alone is better on the inputs, by more "
            "than chance.",
        ),
    ],
    "ridge": Annotated[
        float,
        _option(
            "--ridge",
            panel=FUSION,
            metavar="R",
            text="How strongly a fit is pulled toward the average.",
            default=0.1,
        ),
    ],
    "calibrate": Annotated[
        str | None,
        _option(
            "--calibrate",
            panel=FUSION,
            metavar="|".join(CHOICES["calibrate"]),
            text="Bring BatchNorm statistics (bn) or every layer's mean and deviation (repair) to "
            "where they belong on the inputs; kept if agreement with the parents rises.",
            default="auto with inputs and without a refit",
            autocompletion=lambda: list(CHOICES["calibrate"]),
        ),
    ],
    "matcher": Annotated[
        str | None,
        _choice(
            "matcher",
            panel=MATCHING,
            text="How maps are found: "
            + ", ".join(f"{what} ({name})" for name, what in MATCHERS.items())
            + ", or the best of them (auto).",
        ),
    ],
    "passes": Annotated[
        int | None,
        _option(
            "--passes",
            panel=MATCHING,
            metavar="P",
            text="From the second pass on, align each source to the mean of the other models.",
            default=Recipe.passes,
        ),
    ],
    "effort": Annotated[
        float | None,
        _option(
            "--effort",
            panel=MATCHING,
            metavar="FLOP",
            text="Operations that auto may plan to spend on a source; above it, it tries less.",
            default=f"{Recipe.effort:g}",
        ),
    ],
    "metric": Annotated[
        str | None, _choice("metric", panel=MATCHING, text="Ground metric between units.")
    ],
    "unit_norm": Annotated[
        bool | None,
        _flag(
            "--unit-norm/--raw",
            panel=MATCHING,
            text="Compare rows at unit norm, or as they are (cost only).",
            default="unit-norm",
        ),
    ],
    "mass": Annotated[
        str | None,
        _choice(
            "mass",
            panel=MATCHING,
            text="Mass of a unit: equal, the norm of its row, or what it does on the inputs.",
        ),
    ],
    "solver": Annotated[
        str | None, _choice("solver", panel=MATCHING, text="Solver of each transport problem.")
    ],
    "epsilon": Annotated[
        float | None,
        _option(
            "--epsilon",
            panel=MATCHING,
            metavar="E",
            text="Regularisation of sinkhorn, in standard deviations of the cost.",
            default=Recipe.epsilon,
        ),
    ],
    "arch": Annotated[
        list[str] | None,
        _option(
            "--arch",
            panel=INPUTS,
            metavar="[INDEX=]SPEC",
            text="What the network looks like: auto (by names and shapes), a family, spec.yaml, or "
            "the network itself: file.py:factory (runs that code), graph.pt2, hf:DIR. INDEX=SPEC, "
            "repeatable, for one checkpoint, counted from 0.",
            default="auto",
        ),
    ],
    "samples": Annotated[
        str | None,
        _option(
            "--samples",
            panel=INPUTS,
            metavar="FILE",
            text="Inputs x, and labels y where something is measured: .npz, .npy, .safetensors, "
            ".pt, or file.py:loader (runs that code). --arch must name a network to run.",
        ),
    ],
    "synthetic": Annotated[
        bool,
        _flag(
            "--synthetic",
            panel=INPUTS,
            text="Make inputs up: images of overlapping shapes, rows of first layers, token ids.",
        ),
    ],
    "synthetic_kind": Annotated[
        str,
        _option(
            "--synthetic-kind",
            panel=INPUTS,
            metavar="auto|leaves|noise|rows|tokens|class",
            text="What is made up; several are joined by +.",
            default="auto",
        ),
    ],
    "input_shape": Annotated[
        str | None,
        _option(
            "--input-shape",
            panel=INPUTS,
            metavar="N,N...",
            text="Shape of one synthetic input: the image (1,28,28) that a vector was, say.",
        ),
    ],
    "num_samples": Annotated[
        int | None,
        _option(
            "--num-samples",
            panel=INPUTS,
            metavar="N",
            text="How many inputs are drawn, by seed.",
            default="400, 2000 synthetic ones, 900 of kind class, all to measure on",
        ),
    ],
    "post_activations": Annotated[
        bool | None,
        _flag(
            "--post-activations",
            panel=INPUTS,
            text="With --align acts: look at units after their activation function.",
        ),
    ],
    "force": Annotated[
        bool, _flag("--force", panel=INPUTS, text="Refit with fewer than 25 inputs too.")
    ],
    "max_memory": Annotated[
        float | None,
        _option(
            "--max-memory",
            panel=RUN,
            metavar="GIB",
            text="Refuse a merge whose matching needs more memory, before it begins.",
            default="no limit",
        ),
    ],
    "pass_memory": Annotated[
        float,
        _option(
            "--pass-memory",
            panel=RUN,
            metavar="GIB",
            text="With inputs: memory for what networks hold between two layers; above it they run "
            "again for every layer.",
            default=4.0,
        ),
    ],
    "spec": Annotated[
        str | None,
        _option(
            "--spec",
            panel=INPUTS,
            metavar="SPEC",
            text="Check this family or spec.yaml on the network instead of the traced graph.",
        ),
    ],
    "free_outputs": Annotated[
        bool,
        _flag(
            "--free-outputs",
            panel=INPUTS,
            text="Let the units of a traced network's outputs move: headless backbones.",
        ),
    ],
    "require_proof": Annotated[
        bool,
        _flag(
            "--require-proof",
            panel=RUN,
            text="Exit with 7, and write nothing, unless a network that --arch names was run and "
            "kept its function; names and shapes alone prove nothing.",
        ),
    ],
    "untie": Annotated[
        bool,
        _flag(
            "--untie",
            panel=INPUTS,
            text="Give an output layer that is tied to the embedding a weight of its own: a copy, "
            "which is then fused as an output layer.",
        ),
    ],
    "key": Annotated[
        list[str] | None,
        _option(
            "--key",
            panel=INPUTS,
            metavar="[INDEX=]NAME",
            text="The entry to take of checkpoints that hold several models, or of the one at "
            "INDEX (from 0); repeatable.",
        ),
    ],
    "strict": Annotated[
        bool,
        _flag(
            "--strict/--no-strict",
            panel=INPUTS,
            text="Refuse checkpoints that hold different tensors, or keep what the anchor alone "
            "has and drop what it lacks.",
            default="strict",
        ),
    ],
    "vocab": Annotated[
        str,
        _choice(
            "vocab",
            panel=INPUTS,
            text="Different vocabularies or classes: an error, average the rows that all have, or "
            "keep the anchor's.",
        ),
    ],
    "output": Annotated[
        Path | None,
        _option(
            "--output",
            "-o",
            panel=OUTPUT,
            metavar="OUT",
            text="Where the new checkpoint goes; the suffix decides the format, without one it "
            "is a folder.",
        ),
    ],
    "report": Annotated[
        Path | None,
        _option(
            "--report",
            panel=OUTPUT,
            metavar="PATH",
            text="Where the report goes; - for standard output, in place of text.",
            default="OUT with suffix .report.json; inspect: nowhere",
        ),
    ],
    "plot": Annotated[
        Path | None,
        _option(
            "--plot",
            panel=OUTPUT,
            metavar="FILE.png|svg|html",
            text="Draw what was found, costs with transport maps or curves; html needs no more.",
        ),
    ],
    "write_spec": Annotated[
        Path | None,
        _option(
            "--write-spec",
            panel=OUTPUT,
            metavar="FILE",
            text="Write the layer graph as a spec, for --arch.",
        ),
    ],
    "overwrite": Annotated[
        bool, _flag("--overwrite", panel=OUTPUT, text="Replace an output that exists.")
    ],
    "keep_extras": Annotated[
        bool,
        _flag(
            "--keep-extras",
            panel=OUTPUT,
            text="Carry over what lies beside the weights in the anchor's file (.pt only).",
        ),
    ],
    "shard_size": Annotated[
        str | None,
        _option(
            "--shard-size",
            panel=OUTPUT,
            metavar="SIZE",
            text="Most bytes in a file of an output folder: 500MB, 2GiB.",
            default=DEFAULT_SHARD,
        ),
    ],
    "dtype": Annotated[
        str, _choice("dtype", panel=OUTPUT, text="Stored dtype of floating tensors.")
    ],
    "json": Annotated[
        bool, _flag("--json", panel=OUTPUT, text="One JSON envelope on standard output.")
    ],
    "batch": Annotated[
        int,
        _option(
            "--batch",
            panel=RUN,
            metavar="N",
            text="Samples that the network takes at a time.",
            default=250,
        ),
    ],
    "device": Annotated[
        str,
        _option(
            "--device",
            panel=RUN,
            metavar="auto|cpu|cuda",
            text="Where numerics run; cuda:1 names a device.",
            default="auto",
        ),
    ],
    "seed": Annotated[
        int, _option("--seed", panel=RUN, metavar="N", text="Decides everything random.", default=0)
    ],
    "quiet": Annotated[bool, _flag("--quiet", "-q", panel=RUN, text="Print nothing but errors.")],
    "verbose": Annotated[
        bool, _flag("--verbose", "-v", panel=RUN, text="Print everything that the report holds.")
    ],
    "debug": Annotated[bool, _flag("--debug", panel=RUN, text="Show the traceback of an error.")],
    "help_all": Annotated[
        bool,
        _flag(
            "--help-all",
            panel=RUN,
            text="Show all options and exit.",
            is_eager=True,
            callback=_show_all,
        ),
    ],
}

# Options of one name that mean something else to one verb, by its request.
OWN: Mapping[str, Mapping[str, Any]] = {
    "InspectRequest": {
        "matcher": Annotated[
            str | None,
            _choice(
                "matcher",
                panel=MATCHING,
                text="How maps are found; a pre-flight is quick.",
                default="sweep",
            ),
        ],
    },
    "PruneRequest": {
        "only": Annotated[
            list[str] | None,
            _option(
                "--only",
                panel=PRUNING,
                metavar="GLOB",
                text="Apply --amount to these spaces, modules or tensors only; may be repeated.",
            ),
        ],
        "ridge": Annotated[
            float,
            _option(
                "--ridge",
                panel=PRUNING,
                metavar="R",
                text="With --criterion reconstruct: how strongly a fit is pulled toward what the "
                "kept units make of the others.",
                default=0.1,
            ),
        ],
    },
}
