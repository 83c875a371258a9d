"""On a GPU: what the CPU gives, but for rounding. `make cuda`; skipped where there is none.

Mixtures of devices are found without a GPU as well (`test_other_device.py`). What only a GPU can
show is that its own kernels are there, and how far their rounding carries.
"""

from __future__ import annotations

from importlib import resources

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import nets
import otfuse_cli
import test_joint
from nets import from_factory as build
from test_matchers import EVERY
from test_twins import permuted

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]
# Sums of float32 in another order; the fits solve systems of them, with a ridge of 0.1.
MOVED = {"rtol": 1e-5, "atol": 1e-6}
FITTED = {"rtol": 1e-3, "atol": 1e-4}


def on_both(verb, *models, tolerance=MOVED, **options):
    """What a verb gives on the CPU and on the GPU is one within the tolerance."""
    here, _ = verb(*models, device="cpu", **options)
    there, _ = verb(*models, device="cuda", **options)
    assert here.keys() == there.keys()
    for name, tensor in here.items():
        torch.testing.assert_close(there[name], tensor, **tolerance)
    return there


@pytest.fixture
def factory(tmp_path):
    path = tmp_path / "net.py"
    path.write_text(test_joint.NET.format(stream=8, inner=6))
    return f"{path}:net"


@pytest.fixture
def parents(factory):
    return [dict(build(factory, seed).state_dict()) for seed in (0, 1)]


@pytest.fixture
def demo():
    """The bundled pair, and its held-out digits."""
    folder = resources.files("otfuse_cli") / "demo_pair"
    with np.load(str(folder / "digits.npz")) as data:
        digits = torch.from_numpy(data["x"].astype(np.float32) / 16)
    return [load_file(str(folder / f"{name}.safetensors")) for name in "ab"], digits


@pytest.mark.parametrize("matcher", EVERY)
def test_a_permuted_twin_comes_back(matcher):
    own = nets.state(nets.randomise(nets.ResNet((12, 12, 16, 20)), 0))
    fused = on_both(otfuse_cli.merge, permuted(own, 3), own, matcher=matcher)
    for name, tensor in own.items():
        torch.testing.assert_close(fused[name], tensor)


@pytest.mark.parametrize("matcher", EVERY)
def test_the_bundled_pair(demo, matcher):
    on_both(otfuse_cli.merge, *demo[0], matcher=matcher)


def test_soft_maps_and_other_solvers(demo):
    on_both(otfuse_cli.merge, *demo[0], matcher="descent", mass="norm")
    on_both(otfuse_cli.merge, *demo[0], matcher="sweep", solver="sinkhorn", tolerance=FITTED)


@pytest.mark.parametrize("blend", ["average", "joint"])
def test_the_bundled_pair_with_inputs(demo, blend):
    (a, b), digits = demo
    options = {"arch": "mlp", "samples": digits, "blend": blend, "matcher": "sweep"}
    on_both(otfuse_cli.merge, a, b, tolerance=FITTED, **options)


@pytest.mark.parametrize("blend", ["average", "joint"])
def test_convolutions_and_norms_with_inputs(factory, parents, blend):
    options = {"arch": factory, "samples": test_joint.inputs(), "blend": blend}
    on_both(otfuse_cli.merge, *parents, tolerance=FITTED, matcher="sweep", **options)


@pytest.mark.parametrize("kind", ["statistics", "class"])
def test_inputs_made_up_on_the_gpu(factory, parents, kind):
    """Twenty steps of Adam on either device: a fused net that agrees with its parents as often."""
    agreements = []
    for device in ("cpu", "cuda"):
        options = {"synthetic": True, "synthetic_kind": kind, "num_samples": 100}
        _, report = otfuse_cli.merge(*parents, arch=factory, device=device, **options)
        agreements.append(report.steps[-1].agreement)
    assert agreements[1] == pytest.approx(agreements[0], abs=0.1)


def test_pruning_and_fusing_back():
    weights = nets.state(nets.Mlp((12, 10, 8, 6, 5)))
    x = torch.randn(200, 12, generator=torch.Generator().manual_seed(0))
    inputs = {"samples": x, "arch": "mlp", "tolerance": FITTED}
    on_both(otfuse_cli.prune, weights, amount=0.5, criterion="reconstruct", **inputs)
    pruned, _ = otfuse_cli.prune(weights, amount=0.5, device="cpu")
    on_both(otfuse_cli.prune_fuse, weights, pruned)
    on_both(otfuse_cli.prune_fuse, weights, pruned, **inputs)


def test_measuring(factory, parents, tmp_path):
    paths = []
    for at, tensors in enumerate(parents):
        paths.append(tmp_path / f"{at}.safetensors")
        save_file(tensors, paths[-1])
    np.savez(tmp_path / "s.npz", x=test_joint.inputs(60).numpy(), y=np.arange(60) % 5)
    given = {"arch": factory, "samples": tmp_path / "s.npz"}
    scores = []
    for device in ("cpu", "cuda"):
        scores.append(otfuse_cli.evaluate(*paths, device=device, **given).evaluation["accuracy"])
    assert scores[1] == pytest.approx(scores[0], abs=2)  # percent: one input of sixty


@pytest.mark.parametrize("name", ["vit", "llama"])
def test_transformers(name, tmp_path):
    pytest.importorskip("transformers")
    from test_joint_streams import inputs_for
    from test_orthogonal import folder, tensors_of

    own = [tensors_of(name, seed) for seed in (0, 1)]
    arch = folder(name, tmp_path)
    on_both(otfuse_cli.merge, *own, arch=arch, residual="orthogonal", tolerance=FITTED)
    for blend in ("average", "joint"):
        options = {"arch": arch, "samples": inputs_for(name), "blend": blend}
        loose = {"rtol": 1e-2, "atol": 1e-2}
        on_both(otfuse_cli.merge, *own, tolerance=loose, matcher="sweep", **options)
