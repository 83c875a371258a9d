"""Inputs that are driven toward the parents' classes."""

from __future__ import annotations

import pytest
import torch

import otfuse_cli
from nets import from_factory as build
from otfuse_cli.errors import UsageError
from otfuse_cli.running.architecture import architecture
from otfuse_cli.running.class_driven import drive_to_classes
from otfuse_cli.running.dead_leaves import dead_leaves
from otfuse_cli.running.execute import Walk, flat_inputs
from otfuse_cli.running.runnable import runnable
from otfuse_cli.running.samples import Samples

pytestmark = pytest.mark.usefixtures("kept_graphs")

SORTER = """
import torch
from torch import nn

def net():
    # By colour: red, green, blue, or none of them, which is what most images are.
    layers = nn.Conv2d(3, 12, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4)
    return nn.Sequential(*layers), torch.randn(2, 3, 12, 12)

def dense():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 1)), torch.randn(2, 3, 9, 9)

def vectors():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(2, 6)
"""


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "net.py"
    path.write_text(SORTER)
    return path


def parents_of(arch):
    """Two that differ in the order of their units and in noise."""
    states = []
    for seed in (0, 1):
        state = build(arch, seed).state_dict()
        order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
        colour = torch.arange(12) % 3
        state["0.weight"] = torch.eye(3)[colour][order][..., None, None] + 0.1 * state["0.weight"]
        state["4.weight"] = torch.cat([torch.eye(3)[colour].T[:, order], torch.zeros(1, 12)])
        state["4.bias"] = torch.tensor([0.0, 0, 0, 3])
        states.append(state)
    return states


def runs_of(arch, states, samples):
    known = architecture(arch, {name: tensor.shape for name, tensor in states[0].items()})
    program = runnable(known, samples, device="cpu")
    return [(program, state) for state in states]


def choices(runs, samples):
    return [
        torch.cat(
            [
                Walk(program, tensors, flat_inputs(program, batch, "cpu")).outputs()[0][
                    : batch.count
                ]
                for batch in samples.batches(program.batch)
            ]
        ).argmax(1)
        for program, tensors in runs
    ]


@pytest.mark.slow
def test_parents_see_one_class_in_what_was_driven(source):
    arch = f"{source}:net"
    states = parents_of(arch)
    kept = [{name: tensor.clone() for name, tensor in state.items()} for state in states]
    leaves = Samples((torch.from_numpy(dead_leaves(130, 3, 12, 12, 0)),))
    runs = runs_of(arch, states, leaves)
    driven = drive_to_classes(leaves, runs, seed=0, device="cpu")
    before, after = (choices(runs, samples) for samples in (leaves, driven))
    assert (before[0] == 3).double().mean() > 0.7
    assert (after[0] == after[1]).double().mean() > 0.8
    assert after[0].bincount(minlength=4).min() > 15
    assert driven.args[0].shape == leaves.args[0].shape
    assert driven.args[0].abs().max() <= 2.1
    again = drive_to_classes(leaves, runs, seed=0, device="cpu")
    assert torch.equal(again.args[0], driven.args[0])
    other = drive_to_classes(leaves, runs, seed=1, device="cpu")
    assert not torch.equal(other.args[0], driven.args[0])
    for state, own in zip(states, kept, strict=True):
        assert all(torch.equal(state[name], own[name]) for name in own)


@pytest.mark.slow
def test_a_merge_is_fitted_on_them(source):
    arch = f"{source}:net"
    states = parents_of(arch)
    options = {"arch": arch, "synthetic": True, "num_samples": 60}
    fused, report = otfuse_cli.merge(*states, **options, synthetic_kind="class")
    plain, _ = otfuse_cli.merge(*states, **options)
    assert report.recipe["synthetic_kind"] == "class"
    assert report.refits
    assert any(not torch.equal(fused[name], plain[name]) for name in fused)


@pytest.mark.slow_cases("dense-class-its output has the shape")
@pytest.mark.parametrize(
    ("factory", "kind", "words"),
    [
        ("dense", "class", "its output has the shape"),
        ("vectors", "class", "leaves are images"),
        ("net", "class+leaves", "class stands alone"),
    ],
)
def test_networks_that_sort_no_images(source, factory, kind, words):
    arch = f"{source}:{factory}"
    states = [build(arch, seed).state_dict() for seed in (0, 1)]
    with pytest.raises(UsageError) as refused:
        otfuse_cli.merge(*states, arch=arch, synthetic=True, synthetic_kind=kind, num_samples=30)
    assert words in f"{refused.value.what} {refused.value.why}"


@pytest.mark.slow
def test_images_for_attention_are_driven_without_asking(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 24, "image_size": 16, "patch_size": 4, "num_labels": 3}
    config = transformers.ViTConfig(**sizes, architectures=["ViTForImageClassification"])
    config.save_pretrained(tmp_path)
    parents = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        parents.append(transformers.ViTForImageClassification(config).state_dict())
    arch = f"hf:{tmp_path}"
    _, report = otfuse_cli.merge(*parents, arch=arch, synthetic=True, num_samples=30)
    assert report.recipe["synthetic_kind"] == "class"
    assert report.refits
