"""`prune-fuse`: survivors are found and stay themselves, whatever form the pruned network has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import prune as torch_prune

import nets
import otfuse_cli
from otfuse_cli import errors
from test_prune import llama, logits, save_llama

pytestmark = pytest.mark.usefixtures("kept_graphs")


def dense_mlp(**more):
    torch.manual_seed(0)
    return nets.Mlp((12, 10, 8, 6, 5), **more)


def found(report):
    return {s.id: (s.units, s.kept, s.survivors) for s in report.pruning.spaces}


@pytest.mark.parametrize("bias", [True, False])
def test_survivors_are_found_and_weight_zero_keeps_the_pruned_net(bias):
    weights = nets.state(dense_mlp(bias=bias))
    pruned, _ = otfuse_cli.prune(weights, amount=0.5)
    fused, report = otfuse_cli.prune_fuse(weights, pruned)
    assert found(report) == {"fc1": (10, 5, 5), "fc2": (8, 4, 4), "fc3": (6, 3, 3)}
    assert report.recipe["weights"] == [0.7, pytest.approx(0.3)]
    assert [c.name for c in report.candidates] == ["survivors"]
    assert {n: t.shape for n, t in fused.items()} == {n: t.shape for n, t in pruned.items()}
    same, _ = otfuse_cli.prune_fuse(weights, pruned, dense_weight=0)
    assert all(torch.equal(same[n], pruned[n]) for n in pruned)


def test_survivors_in_any_order_are_fixed_points():
    """A pruned net whose units were shuffled gives the same fused net, shuffled."""
    weights = nets.state(dense_mlp())
    pruned, _ = otfuse_cli.prune(weights, amount=0.5)
    order = torch.tensor([3, 0, 4, 1, 2])
    shuffled = dict(pruned)
    for name in ("fc1.weight", "fc1.bias"):
        shuffled[name] = pruned[name][order]
    shuffled["fc2.weight"] = pruned["fc2.weight"][:, order]
    fused, _ = otfuse_cli.prune_fuse(weights, pruned)
    other, report = otfuse_cli.prune_fuse(weights, shuffled)
    assert found(report)["fc1"] == (10, 5, 5)
    assert torch.allclose(other["fc1.weight"], fused["fc1.weight"][order], atol=1e-6)
    assert torch.allclose(other["fc3.weight"], fused["fc3.weight"], atol=1e-6)


def test_a_layer_that_was_not_pruned_stays_bit_for_bit():
    weights = nets.state(dense_mlp(bias=False))
    pruned, _ = otfuse_cli.prune(weights, layer={"fc2": 0.5})
    fused, report = otfuse_cli.prune_fuse(weights, pruned)
    assert torch.equal(fused["fc1.weight"], weights["fc1.weight"])
    assert found(report)["fc1"] == (10, 10, 10)


def test_duplicates_give_the_dense_network_back():
    """Dense units that equal a survivor are merged into it: at weight 1 nothing is lost."""
    net = dense_mlp(bias=False)
    weights = nets.state(net)
    for at in (1, 2, 3):
        rows, columns = weights[f"fc{at}.weight"], weights[f"fc{at + 1}.weight"]
        rows[1::2] = rows[::2]
        columns[:, 1::2] = columns[:, ::2]
    small = nets.Mlp((12, 5, 4, 3, 5), bias=False)
    pruned = {n: t.clone() for n, t in weights.items()}
    for at in (1, 2, 3):
        pruned[f"fc{at}.weight"] = pruned[f"fc{at}.weight"][::2]
        pruned[f"fc{at + 1}.weight"] = pruned[f"fc{at + 1}.weight"][:, ::2]
    fused, _ = otfuse_cli.prune_fuse(weights, pruned, dense_weight=1)
    one, other = nets.run(small, fused, (4, 12)), nets.run(net, weights, (4, 12))
    assert nets.distance(one, other) < 1e-5


@pytest.mark.slow
def test_units_that_were_trained_further_are_no_survivors():
    weights = nets.state(dense_mlp())
    pruned, _ = otfuse_cli.prune(weights, amount=0.5)
    tuned = {n: t + 0.01 for n, t in pruned.items()}
    _, report = otfuse_cli.prune_fuse(weights, tuned)
    assert {s[2] for s in found(report).values()} == {0}
    assert report.recipe["weights"] == [0.5, 0.5]
    assert any("no unit of the pruned network" in w for w in report.warnings)
    some = {**pruned, "fc1.weight": pruned["fc1.weight"].clone()}
    some["fc1.weight"][1] += 0.1
    fused, report = otfuse_cli.prune_fuse(weights, some)
    assert found(report)["fc1"] == (10, 5, 4)
    assert all(torch.isfinite(t).all() for t in fused.values())


@pytest.mark.slow
def test_options_that_ask_for_a_matcher_get_it():
    weights = nets.state(dense_mlp())
    pruned, _ = otfuse_cli.prune(weights, amount=0.5)
    for options in ({"matcher": "sweep"}, {"paper": True}, {"mass": "norm"}):
        _, report = otfuse_cli.prune_fuse(weights, pruned, **options)
        assert "survivors" not in [c.name for c in report.candidates]
        assert report.recipe["weights"] == [0.5, 0.5]


# -- masked networks


def masked_mlp():
    """torch.nn.utils.prune on every hidden layer, biases of pruned units zeroed too."""
    net = dense_mlp()
    weights = nets.state(net)
    for layer in list(net.children())[:-1]:
        torch_prune.ln_structured(layer, "weight", amount=0.5, n=1, dim=0)
        with torch.no_grad():
            layer.bias[layer.weight_mask[:, 0] == 0] = 0
    return net, weights, nets.state(net)


def test_masks_are_compacted_through_the_graph():
    net, weights, masked = masked_mlp()
    assert "fc1.weight_mask" in masked
    fused, report = otfuse_cli.prune_fuse(weights, masked)
    assert found(report) == {"fc1": (10, 5, 5), "fc2": (8, 4, 4), "fc3": (6, 3, 3)}
    assert any("taken out" in w for w in report.warnings)
    same, _ = otfuse_cli.prune_fuse(weights, masked, dense_weight=0)
    small = nets.Mlp((12, 5, 4, 3, 5))
    inputs = torch.randn(4, 12)
    small.load_state_dict(same)
    with torch.no_grad():
        assert nets.distance(small(inputs), net(inputs)) < 1e-6
    assert fused.keys() == same.keys()


def test_keep_shape_writes_masks_and_zeros(tmp_path, cli):
    net, weights, masked = masked_mlp()
    torch.save(weights, tmp_path / "dense.pt")
    torch.save(masked, tmp_path / "pruned.pt")
    done = cli("prune-fuse", tmp_path / "dense.pt", tmp_path / "pruned.pt", "--keep-shape")
    assert done.code == 0, done.err
    fused = torch.load(tmp_path / "pruned.fused.pt", weights_only=True)
    assert {n: t.shape for n, t in fused.items()} == {n: t.shape for n, t in masked.items()}
    assert torch.equal(fused["fc1.weight_mask"], masked["fc1.weight_mask"])
    gone = masked["fc1.weight_mask"][:, 0] == 0
    assert (fused["fc1.weight_orig"][gone] == 0).all()
    assert (fused["fc2.weight_orig"][:, gone] == 0).all()
    small, _ = otfuse_cli.prune_fuse(weights, masked)
    narrow = nets.Mlp((12, 5, 4, 3, 5))
    narrow.load_state_dict(small)
    net.load_state_dict(fused)
    inputs = torch.randn(4, 12)
    with torch.no_grad():
        assert nets.distance(net(inputs), narrow(inputs)) < 1e-5


def test_rows_of_zeros_are_masks_too():
    net = nets.zoo()["vgg-bn"][0]
    weights = nets.state(net)
    pruned, _ = otfuse_cli.prune(weights, amount=0.5)
    zeros = {n: t.clone() for n, t in weights.items()}
    for at, norm in ((0, 1), (4, 5), (8, 9)):
        left = pruned[f"features.{at}.bias"]
        gone = [b not in left for b in zeros[f"features.{at}.bias"]]
        for name in (f"features.{at}.weight", f"features.{at}.bias"):
            zeros[name][gone] = 0
        for part in ("weight", "bias", "running_mean"):
            zeros[f"features.{norm}.{part}"][gone] = 0
    left = pruned["classifier.0.bias"]
    gone = [b not in left for b in zeros["classifier.0.bias"]]
    zeros["classifier.0.weight"][gone] = zeros["classifier.0.bias"][gone] = 0
    fused, _ = otfuse_cli.prune_fuse(weights, zeros, dense_weight=0)
    assert all(torch.equal(fused[n], pruned[n]) for n in pruned)
    whole, _ = otfuse_cli.prune_fuse(weights, zeros, dense_weight=0, keep_shape=True)
    before, after = (nets.run(net, w, nets.IMAGE) for w in (zeros, whole))
    assert nets.distance(after, before) < 1e-5


def test_a_bias_that_goes_is_named():
    weights = nets.state(dense_mlp())
    zeros = {n: t.clone() for n, t in weights.items()}
    zeros["fc1.weight"][[2, 5]] = 0
    _, report = otfuse_cli.prune_fuse(weights, zeros)
    assert any("fc1.bias" in w for w in report.warnings)


def test_keep_shape_needs_something_pruned_in_place():
    weights = nets.state(dense_mlp())
    pruned, _ = otfuse_cli.prune(weights, amount=0.5)
    with pytest.raises(errors.UsageError, match="pruned in place"):
        otfuse_cli.prune_fuse(weights, pruned, keep_shape=True)


def test_a_layer_of_zeros_is_refused():
    weights = nets.state(dense_mlp())
    zeros = {**weights, "fc2.weight": torch.zeros_like(weights["fc2.weight"])}
    with pytest.raises(errors.IncompatibleModels, match="no unit left"):
        otfuse_cli.prune_fuse(weights, zeros)


# -- inputs


def images(count=60):
    return torch.randn(count, 12, generator=torch.Generator().manual_seed(1))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["small", "masked", "keep shape"])
def test_a_refit_comes_after_the_survivors(form):
    _, weights, masked = masked_mlp()
    pruned = masked if form != "small" else otfuse_cli.prune(weights, amount=0.5)[0]
    options = {"arch": "mlp", "keep_shape": form == "keep shape"}
    plain, _ = otfuse_cli.prune_fuse(weights, pruned, **options)
    fused, report = otfuse_cli.prune_fuse(weights, pruned, samples=images(), **options)
    assert [c.name for c in report.candidates] == ["survivors"]
    assert [s.name for s in report.steps] == ["average", "refit"]
    assert [f.layer for f in report.refits] == ["fc1", "fc2", "fc3", "fc4"]
    assert sum(f.after for f in report.refits) < sum(f.before for f in report.refits)
    assert {n: t.shape for n, t in fused.items()} == {n: t.shape for n, t in plain.items()}
    assert any(not torch.equal(fused[n], plain[n]) for n in plain)
    if form == "keep shape":
        gone = masked["fc1.weight_mask"][:, 0] == 0
        assert (fused["fc1.weight_orig"][gone] == 0).all()


@pytest.mark.slow
def test_a_pruned_net_is_run_at_its_own_widths(tmp_path):
    """The factory makes the dense network; both are run on the inputs all the same."""
    source = f"import sys; sys.path.insert(0, {str(nets.__file__.rpartition('/')[0])!r})\n"
    source += "import torch\nimport nets\n"
    source += "def make():\n    return nets.Mlp((12, 10, 8, 6, 5)), torch.randn(2, 12)\n"
    (tmp_path / "net.py").write_text(source)
    weights = nets.state(dense_mlp())
    pruned, _ = otfuse_cli.prune(weights, amount=0.5)
    arch = f"{tmp_path / 'net.py'}:make"
    same, report = otfuse_cli.prune_fuse(
        weights, pruned, dense_weight=0, refit=True, samples=images(), arch=arch
    )
    assert report.steps[0].agreement == 1.0
    assert all(torch.allclose(same[n], pruned[n], atol=1e-5) for n in pruned)


def test_different_classes_follow_the_policy():
    weights = nets.state(dense_mlp())
    pruned, _ = otfuse_cli.prune(weights, amount=0.5)
    wide = {**weights, "fc4.weight": torch.randn(7, 6), "fc4.bias": torch.randn(7)}
    with pytest.raises(errors.IncompatibleModels):
        otfuse_cli.prune_fuse(wide, pruned)
    fused, report = otfuse_cli.prune_fuse(wide, pruned, vocab="anchor")
    assert torch.equal(fused["fc4.bias"], pruned["fc4.bias"])
    assert any("--vocab anchor" in w for w in report.warnings)
    extra = {**weights, "scale": torch.ones(3)}
    fused, report = otfuse_cli.prune_fuse(extra, pruned, strict=False)
    assert fused.keys() == pruned.keys()
    assert any(w.startswith("dropped") for w in report.warnings)


# -- other architectures


@pytest.mark.slow
@pytest.mark.parametrize("criterion", ["l1", "ot"])
@pytest.mark.parametrize("name", ["vgg-bn", "resnet-basic-bn", "resnet-bottleneck-bn"])
def test_batch_norm_nets(name, criterion):
    weights = nets.state(nets.zoo()[name][0])
    pruned, _ = otfuse_cli.prune(weights, amount=0.5, criterion=criterion)
    fused, report = otfuse_cli.prune_fuse(weights, pruned)
    assert all(torch.isfinite(t).all() for t in fused.values())
    assert all((t > 0).all() for n, t in fused.items() if n.endswith("running_var"))
    if criterion == "l1":
        assert all(s.survivors == s.kept for s in report.pruning.spaces)


@pytest.mark.slow
def test_whole_groups_of_a_llama(tmp_path):
    net = llama()
    (tmp_path / "dense").mkdir()
    path = save_llama(net, tmp_path / "dense")
    pruned, _ = otfuse_cli.prune(path, amount=0.5, arch="llama")
    torch.save(pruned, tmp_path / "pruned.pt")
    fused, report = otfuse_cli.prune_fuse(path, tmp_path / "pruned.pt", arch="llama")
    assert found(report)["kv0"] == (4, 2, 2)
    assert found(report)["e"] == (32, 32, 32)
    small = llama(intermediate_size=24, num_attention_heads=4, num_key_value_heads=2)
    assert torch.isfinite(logits(small, fused)).all()
    same, _ = otfuse_cli.prune_fuse(path, tmp_path / "pruned.pt", dense_weight=0, arch="llama")
    assert all(torch.equal(same[n], pruned[n]) for n in pruned)
    assert all(torch.equal(fused[n], pruned[n]) for n in pruned if "_proj" in n and "q_" in n)


@pytest.mark.slow
def test_half_a_group_is_refused_with_the_reason(tmp_path):
    """Six query heads can't share four keys."""
    net = llama()
    path = save_llama(net, tmp_path)
    broken = {n: t.clone() for n, t in net.state_dict().items()}
    block = "model.layers.0.self_attn."
    broken[f"{block}q_proj.weight"] = broken[f"{block}q_proj.weight"][:48].clone()
    broken[f"{block}o_proj.weight"] = broken[f"{block}o_proj.weight"][:, :48].clone()
    with pytest.raises(errors.IncompatibleModels) as refused:
        otfuse_cli.prune_fuse(path, broken)
    assert "groups go whole" in str(refused.value)
    assert "layers.0.self_attn" in str(refused.value)


@pytest.mark.parametrize("weight", ["-0.1", "1.5", "nan"])
def test_wrong_dense_weight(cli, tmp_path, weight):
    done = cli("prune-fuse", "a.pt", "b.pt", "--dense-weight", weight)
    assert done.code == 2
    assert "dense weight" in done.err


def test_the_report_names_survivors(cli, tmp_path):
    weights = nets.state(dense_mlp())
    torch.save(weights, tmp_path / "dense.pt")
    arguments = ("prune", tmp_path / "dense.pt", "-o", tmp_path / "small.pt", "--amount", "0.5")
    assert cli(*arguments).code == 0
    done = cli("prune-fuse", tmp_path / "dense.pt", tmp_path / "small.pt")
    assert done.code == 0
    assert "survivors" in done.out
    report = json.loads((tmp_path / "small.fused.report.json").read_text())
    assert report["pruning"]["spaces"][0] == {"id": "fc1", "units": 10, "kept": 5, "survivors": 5}
    assert report["pruning"]["criterion"] is None


class Grouped(nn.Module):
    """Two groups of channels that go as wholes."""

    def __init__(self, groups: int = 4) -> None:
        super().__init__()
        self.groups = groups
        self.conv1 = nn.Conv2d(3, 3 * groups, 3, padding=1)
        self.conv2 = nn.Conv2d(3 * groups, 2 * groups, 3, padding=1, groups=groups)
        self.head = nn.Linear(2 * groups, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv2(self.conv1(x).relu()).relu()
        return self.head(x.mean((2, 3)))


@pytest.mark.slow
def test_channel_groups_go_whole(tmp_path):
    source = f"import sys; sys.path.insert(0, {str(nets.__file__.rpartition('/')[0])!r})\n"
    source += "import torch\nfrom test_prune_fuse import Grouped\n"
    source += "def make():\n    return Grouped(), torch.randn(2, 3, 8, 8)\n"
    (tmp_path / "net.py").write_text(source)
    torch.manual_seed(0)
    weights = nets.state(Grouped())
    arch = f"{tmp_path / 'net.py'}:make"
    pruned, report = otfuse_cli.prune(weights, amount=0.5, arch=arch)
    assert {n: t.shape for n, t in pruned.items()} == {
        n: t.shape for n, t in Grouped(2).state_dict().items()
    }
    fused, report = otfuse_cli.prune_fuse(weights, pruned, arch=arch)
    assert all(s.survivors == s.kept for s in report.pruning.spaces)
    nets.run(Grouped(2), fused, (2, 3, 8, 8))


# -- floors on a real network (pruned alone: 96.58, 89.03, 82.76, 62.48, 29.67)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("amount", "floor"), [(0.3, 97.0), (0.5, 95.8), (0.7, 92.4), (0.8, 84), (0.9, 63)]
)
def test_mnist_without_data(shared, amount, floor):
    """Measured: 97.38, 96.28, 93.08, 84.84, 65.60."""
    from test_real_pairs import score

    path = shared / "checkpoints" / "mnist-mlpnet-0.checkpoint"
    pruned, _ = otfuse_cli.prune(path, amount=amount)
    fused, _ = otfuse_cli.prune_fuse(path, pruned)
    assert score(fused) >= floor


@pytest.mark.slow
@pytest.mark.parametrize(
    ("amount", "floor"), [(0.3, 97.2), (0.5, 96.9), (0.7, 95.7), (0.8, 94), (0.9, 81.5)]
)
def test_mnist_refit_with_400_inputs(shared, amount, floor):
    """Measured: 97.38, 97.19, 96.04, 94.90, 88.22."""
    from test_real_pairs import score, training_inputs

    path = shared / "checkpoints" / "mnist-mlpnet-0.checkpoint"
    pruned, _ = otfuse_cli.prune(path, amount=amount)
    fused, report = otfuse_cli.prune_fuse(
        path, pruned, arch="mlp", samples=training_inputs("mnist-mlpnet"), num_samples=400
    )
    assert score(fused) >= floor
    assert report.steps[-1].name == "refit"


@pytest.mark.slow
def test_resnet_with_batch_norm(shared):
    """Half of what is inside the blocks; the compact net is the masked one."""
    from test_real_pairs import score

    path = shared / "checkpoints" / "cifar10-resnet18w16-0.safetensors"
    network = Path(__file__).parents[1] / "examples" / "networks.py"
    options = {"amount": 0.3, "only": ("layer*.conv1",), "arch": f"{network}:resnet18w16"}
    pruned, report = otfuse_cli.prune(path, **options)
    assert report.checks.function == "kept"
    fused, _ = otfuse_cli.prune_fuse(path, pruned)
    assert score(fused, 2_000) > score(pruned, 2_000) + 2
