"""Inputs on the command line: what is refused, with one message, its exit code and no output."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from nets import ResNet, randomise, state
from otfuse_cli.running import inputs

pytestmark = pytest.mark.usefixtures("kept_graphs")


def digits(count=40, width=64, **changes):
    values = np.random.default_rng(0).random((count, width), np.float32)
    for at, value in changes.get("at", {}).items():
        values[at] = value
    return values.astype(changes.get("dtype", np.float32))


def refused(cli, code, *arguments):
    """Run `merge`; its one message, after checking that nothing was written."""
    folder = arguments[0].parent
    before = {path.name for path in folder.iterdir()}
    run = cli("merge", *arguments, "-o", folder / "fused.safetensors")
    assert run.code == code, run.err
    assert run.out == ""
    assert run.err.count("error: ") == 1
    assert "Traceback" not in run.err
    assert {path.name for path in folder.iterdir()} == before
    return run.err


def saved(folder, **arrays):
    path = folder / "inputs.npz"
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(
    ("arrays", "code", "words"),
    [
        ({"x": digits(width=63)}, 2, ("wrong shape", "[40, 63]", "[n, 64]")),
        ({"x": digits(at={(7, 3): np.nan})}, 3, ("NaN or infinity", "sample 7", "1 of 40")),
        ({"x": digits(at={(0, 0): np.inf})}, 3, ("NaN or infinity", "sample 0")),
        ({"x": digits(dtype=np.uint8)}, 2, ("raw pixels", "normalise")),
        ({"x": digits(24)}, 2, ("too few inputs", "24 samples", "--no-refit", "--force")),
        ({"x": digits(0)}, 2, ("no samples",)),
        ({"pixels": digits()}, 2, ("no inputs for", "pixels", "store them as x")),
        ({"x": digits(), "y": np.zeros(39, int)}, 2, ("different length", "[39]")),
    ],
    ids=["shape", "NaN", "infinity", "dtype", "too few", "none", "name", "labels"],
)
def test_samples_that_do_not_fit(cli, demo_pair, arrays, code, words):
    path = saved(demo_pair[0].parent, **arrays)
    message = refused(cli, code, *demo_pair, "--arch", "mlp", "--samples", path)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--samples", "X", "--synthetic"), ("--samples and --synthetic", "one of them")),
        (("--align", "acts"), ("--align acts needs inputs", "--synthetic")),
        (("--refit",), ("--refit needs inputs",)),
        (("--calibrate", "bn"), ("--calibrate bn needs inputs",)),
        (("--mass", "importance"), ("--mass importance needs inputs",)),
        (("--samples", "X", "--num-samples", "10"), ("too few inputs", "10 samples")),
        (("--synthetic", "--synthetic-kind", "leaves"), ("leaves", "--input-shape")),
        (("--synthetic", "--input-shape", "1,9,9"), ("wrong shape", "--input-shape")),
        (("--synthetic", "--synthetic-kind", "rain"), ("rain", "leaves")),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith("--") else "",
)
def test_options_that_do_not_go_together(cli, demo_pair, options, words):
    path = saved(demo_pair[0].parent, x=digits())
    given = [path if option == "X" else option for option in options]
    message = refused(cli, 2, *demo_pair, "--arch", "mlp", *given)
    for word in words:
        assert word in message


@pytest.mark.parametrize("given", ["--samples", "--synthetic"])
def test_names_and_shapes_are_no_network_to_run(cli, tmp_path, given):
    paths = [tmp_path / f"{seed}.safetensors" for seed in (0, 1)]
    for seed, path in enumerate(paths):
        save_file(state(randomise(ResNet(), seed)), path)
    np.savez(tmp_path / "inputs.npz", x=np.zeros((40, 3, 8, 8), np.float32))
    inputs = ("--samples", tmp_path / "inputs.npz") if given == "--samples" else ("--synthetic",)
    message = refused(cli, 2, *paths, *inputs)
    assert f"{given} needs a network to run" in message
    assert "file.py:factory" in message


@pytest.mark.slow
def test_force_goes_on_with_few_inputs(cli, demo_pair):
    path = saved(demo_pair[0].parent, x=digits(10))
    out = demo_pair[0].with_name("fused.safetensors")
    for options, refits in ((("--force",), 3), (("--no-refit",), 0)):
        run = cli(
            "merge", *demo_pair, "--arch", "mlp", "--samples", path, *options, "--json",
            "--overwrite", "-o", out, "--blend", "average",
        )  # fmt: skip
        assert run.code == 0, run.err
        assert len(json.loads(run.out)["report"]["refits"]) == refits
    assert out.exists()


def test_a_number_is_no_batch():
    assert inputs._is_batch(torch.ones(3))
    assert not inputs._is_batch(torch.tensor(0.5))
    assert not inputs._is_batch(3)
