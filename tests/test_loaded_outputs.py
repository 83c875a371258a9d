"""What joint fusion writes as a folder: the library's own class loads it, and computes the same.

"The same" is what the program computes that the fusion itself ran, on the tensors in the folder.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from otfuse_cli.checkpoint.open import open_checkpoint
from otfuse_cli.running.architecture import architecture
from otfuse_cli.running.execute import Walk, flat_inputs
from otfuse_cli.running.runnable import runnable
from otfuse_cli.running.samples import Samples
from test_joint_streams import inputs_for
from test_orthogonal import made

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("kept_graphs")
COUNT = 60
CLASSES = {
    "vit": "ViTForImageClassification",
    "llama": "LlamaForCausalLM",
    "gpt2-untied": "GPT2LMHeadModel",
}


@pytest.fixture
def parents(tmp_path):
    """Saves two parents of a kind, and inputs; gives their paths."""

    def save(name: str) -> tuple[list[Path], Path]:
        folders = [tmp_path / letter for letter in "ab"]
        for seed, folder in enumerate(folders):
            module, _ = made(name, seed)
            module.save_pretrained(folder)
        np.savez(tmp_path / "x.npz", x=inputs_for(name, COUNT).numpy())
        return folders, tmp_path / "x.npz"

    return save


def run_program(arch: Path, weights: Path, inputs: torch.Tensor) -> torch.Tensor:
    """The outputs of the program that fusions run, with the tensors in a folder."""
    with open_checkpoint(weights) as held:
        tensors = {name: held.read(name) for name in held.infos}
        shapes = {name: info.shape for name, info in held.infos.items()}
        known = architecture(f"hf:{arch}", shapes, aliases=held.aliases)
    assert known.network is not None
    by_name = dict.fromkeys(known.network.kwargs, inputs)
    samples = Samples((), by_name) if by_name else Samples((inputs,), {})
    program = runnable(known, samples, device="cpu")
    return Walk(program, tensors, flat_inputs(program, samples, "cpu")).outputs()[0]


def require_the_same_logits(name: str, arch: Path, out: Path) -> None:
    """The class loads the folder without a word, and its logits are the program's."""
    inputs = inputs_for(name, COUNT)
    net, info = getattr(transformers, CLASSES[name]).from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    with torch.no_grad():
        found = net.eval()(inputs).logits
    wanted = run_program(arch, out, inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def all_but(quick: str) -> list:
    """One network quickly, the others with the slow tests."""
    return [n if n == quick else pytest.param(n, marks=pytest.mark.slow) for n in CLASSES]


@pytest.mark.slow
@pytest.mark.parametrize("name", all_but("vit"))
def test_joint_fusion_is_loaded_by_the_librarys_own_class(name, parents, cli, tmp_path):
    (a, b), samples = parents(name)
    run = cli(
        *("merge", a, b, "-o", tmp_path / "out", "--arch", f"hf:{b}", "--samples", samples),
        *("--blend", "joint", "--matcher", "sweep", "--json"),
    )
    assert run.code == 0, run.err
    report = json.loads(run.out)["report"]
    assert [s["name"] for s in report["steps"]] == ["average", "joint"]
    require_the_same_logits(name, b, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("name", all_but("gpt2-untied"))
def test_so_is_the_better_of_joint_and_average(name, parents, cli, tmp_path):
    """Both ways are tried on held-out inputs, the report shows them, the better one is written."""
    (a, b), samples = parents(name)
    run = cli(
        *("merge", a, b, "-o", tmp_path / "out", "--arch", f"hf:{b}", "--samples", samples),
        *("--blend", "auto", "--matcher", "sweep", "--json"),
    )
    assert run.code == 0, run.err
    steps = {s["name"]: s for s in json.loads(run.out)["report"]["steps"]}
    tried = {name: s for name, s in steps.items() if name.endswith(", held out")}
    assert {"refit, held out", "joint, held out"} <= set(tried)
    (chosen,) = [name for name, step in tried.items() if step["kept"]]
    assert list(steps)[-1] == chosen.removesuffix(", held out")
    require_the_same_logits(name, b, tmp_path / "out")
