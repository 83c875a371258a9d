"""`prune`: units go with every axis that carries them, and nothing else changes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import nets
import otfuse_cli
from otfuse_cli import errors
from otfuse_cli.pruning.amounts import kept_count
from otfuse_cli.transport.semi_relaxed import bounded_plan, choose_support, nearest_plan

pytestmark = pytest.mark.usefixtures("kept_graphs")

SHARE = "the amount is a share of units to remove"


def mlp(**more):
    torch.manual_seed(0)
    return nets.Mlp(**more)


def by_hand(weights, amount):
    """Rows of largest L1 norm of every hidden layer, columns of the next: the paper's pruning."""
    out, kept = {}, None
    for at in range(1, 5):
        weight = weights[f"fc{at}.weight"]
        rows = weight if kept is None else weight[:, kept]
        bias = weights.get(f"fc{at}.bias")
        if at < 4:
            count = kept_count(len(weight), amount)
            kept = weight.abs().sum(1).topk(count).indices.sort().values
            rows, bias = rows[kept], None if bias is None else bias[kept]
        out[f"fc{at}.weight"] = rows
        if bias is not None:
            out[f"fc{at}.bias"] = bias
    return out


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("amount", [0.3, 0.5, 0.9])
def test_l1_on_an_mlp_is_rows_and_columns(bias, amount):
    weights = nets.state(mlp(bias=bias))
    pruned, report = otfuse_cli.prune(weights, amount=amount, arch="mlp")
    expected = by_hand(weights, amount)
    assert pruned.keys() == expected.keys()
    assert all(torch.equal(pruned[n], expected[n]) for n in expected)
    assert report.checks.function == "assumed"
    assert report.pruning.kept == sum(t.numel() for t in pruned.values())
    assert report.pruning.sparsity == pytest.approx(
        1 - report.pruning.kept / report.pruning.parameters, abs=1e-6
    )


def zeroed(net, spaces):
    """A state dict whose units (tensor, axis, index) are zero in and out."""
    weights = nets.state(net)
    for name, axis, index in spaces:
        view = weights[name].transpose(0, axis)
        view[index] = 0
    return weights


def test_units_that_were_zero_are_not_missed_by_an_mlp():
    net = mlp()
    gone = [1, 4, 6]
    weights = zeroed(net, [("fc2.weight", 0, gone), ("fc2.bias", 0, gone)])
    pruned, _ = otfuse_cli.prune(weights, layer={"fc2": 3 / 8})
    small = nets.Mlp((12, 9, 5, 7, 5))
    before, after = nets.run(net, weights, (4, 12)), nets.run(small, pruned, (4, 12))
    assert nets.distance(after, before) < 1e-6


def test_units_that_were_zero_are_not_missed_by_a_resnet_with_batch_norm():
    """A residual stream: every convolution and norm that makes it, every one that reads it."""
    net = nets.zoo()["resnet-basic-bn"][0]
    gone = [0, 4]
    names = [n for n in net.state_dict() if n.startswith("layer2") and ".conv1." not in n]
    makes = [n for n in names if "conv2" in n or "shortcut" in n or ".bn2." in n]
    makes = [n for n in makes if net.state_dict()[n].dim()]
    weights = zeroed(net, [(n, 0, gone) for n in makes if "running_var" not in n])
    pruned, report = otfuse_cli.prune(weights, layer={"layer2.0.conv2": 2 / 9})
    small = nets.ResNet((6, 6, 7, 12), cifar=True)
    assert {n: t.shape for n, t in pruned.items()} == {
        n: t.shape for n, t in small.state_dict().items()
    }
    before, after = (nets.run(n, w, nets.IMAGE) for n, w in ((net, weights), (small, pruned)))
    assert nets.distance(after, before) < 1e-5
    assert [s.id for s in report.pruning.spaces] == ["s2"]


@pytest.mark.slow
@pytest.mark.parametrize("criterion", ["l1", "l2", "random", "ot"])
@pytest.mark.parametrize("name", ["mlp", "vgg-bn", "resnet-basic-bn", "resnet-bottleneck"])
def test_every_criterion_makes_the_smaller_network(criterion, name):
    weights = nets.state(nets.zoo()[name][0])
    pruned, report = otfuse_cli.prune(weights, amount=0.5, criterion=criterion)
    sizes = {s.id: (s.units, s.kept) for s in report.pruning.spaces}
    assert all(kept == units - round(units / 2) for units, kept in sizes.values())
    assert sum(t.numel() for t in pruned.values()) < 0.5 * sum(t.numel() for t in weights.values())
    assert all(torch.isfinite(t).all() for t in pruned.values())
    assert pruned.keys() == weights.keys()
    again, _ = otfuse_cli.prune(weights, amount=0.5, criterion=criterion)
    assert all(torch.equal(pruned[n], again[n]) for n in pruned)


def test_random_follows_the_seed():
    weights = nets.state(mlp())
    draws = [
        otfuse_cli.prune(weights, amount=0.5, criterion="random", seed=seed)[0]["fc1.bias"]
        for seed in range(4)
    ]
    assert any(not torch.equal(draws[0], other) for other in draws[1:])


def duplicated(net):
    """Every second hidden unit of an MLP a copy of the one before, outgoing weights halved."""
    weights = nets.state(net)
    for at in (1, 2, 3):
        for part in ("weight", "bias"):
            rows = weights[f"fc{at}.{part}"]
            rows[1::2] = rows[: len(rows) - 1 : 2][: len(rows[1::2])]
        columns = weights[f"fc{at + 1}.weight"]
        columns[:, 1::2] = columns[:, : columns.shape[1] - 1 : 2][:, : columns[:, 1::2].shape[1]]
    return weights


def test_transport_merges_duplicates_without_a_change():
    net = nets.Mlp((12, 8, 10, 6, 5))
    weights = duplicated(net)
    pruned, _ = otfuse_cli.prune(weights, amount=0.5, criterion="ot")
    before = nets.run(net, weights, (4, 12))
    after = nets.run(nets.Mlp((12, 4, 5, 3, 5)), pruned, (4, 12))
    assert nets.distance(after, before) < 1e-5
    dropped, _ = otfuse_cli.prune(weights, amount=0.5, criterion="l1")
    assert nets.distance(nets.run(nets.Mlp((12, 4, 5, 3, 5)), dropped, (4, 12)), before) > 0.01


def test_uneven_amounts_only_and_layer():
    weights = nets.state(mlp(widths=(12, 10, 10, 10, 5)))
    pruned, report = otfuse_cli.prune(
        weights, amount=0.5, layer={"fc2": 0.2, "fc3.weight": 0}, arch="mlp"
    )
    assert [pruned[f"fc{at}.weight"].shape[0] for at in (1, 2, 3, 4)] == [5, 8, 10, 5]
    pruned, report = otfuse_cli.prune(weights, amount=0.5, only=("fc[13]",), arch="mlp")
    assert [pruned[f"fc{at}.weight"].shape[0] for at in (1, 2, 3, 4)] == [5, 10, 5, 5]
    assert report.recipe["only"] == ["fc[13]"]


def test_one_unit_is_always_left():
    pruned, _ = otfuse_cli.prune(nets.state(mlp()), amount=0.99)
    assert [pruned[f"fc{at}.weight"].shape[0] for at in (1, 2, 3, 4)] == [1, 1, 1, 5]


@pytest.mark.parametrize(
    ("options", "what", "where"),
    [
        ({}, "nothing says how much to prune", "--amount, --layer, --depth"),
        ({"only": ("fc1",)}, "nothing says how much to prune", "--amount, --layer, --depth"),
        ({"amount": 0.0}, f"{SHARE}: more than 0, less than 1", "--amount 0"),
        ({"amount": 1.0}, f"{SHARE}: more than 0, less than 1", "--amount 1"),
        ({"amount": 1.5}, f"{SHARE}: more than 0, less than 1", "--amount 1.5"),
        ({"amount": float("nan")}, f"{SHARE}: more than 0, less than 1", "--amount nan"),
        ({"layer": {"fc1": 1.0}}, f"{SHARE}: 0 or more, less than 1", "--layer fc1=1"),
        ({"layer": {"nobody": 0.5}}, "no such layer", "--layer nobody=..."),
        ({"layer": {"fc4": 0.5}}, "these units can't be pruned", "--layer fc4=..."),
        (
            {"layer": {"fc1.weight": 0.5, "fc1": 0.4}},
            "two amounts for the same units",
            "--layer fc1.weight=0.5 and fc1=0.4",
        ),
        (
            {"amount": 0.5, "only": ("nobody*",)},
            "the pattern fits nothing that can be pruned",
            "--only nobody*",
        ),
        ({"amount": 0.5, "criterion": "best"}, "unknown value 'best'", "--criterion"),
    ],
)
def test_wrong_options(options, what, where):
    with pytest.raises(errors.UsageError) as caught:
        otfuse_cli.prune(nets.state(mlp()), **options)
    assert (caught.value.what, caught.value.where) == (what, where)


def test_the_command_writes_a_smaller_file_and_a_report(cli, tmp_path):
    torch.save({"state_dict": nets.state(mlp())}, tmp_path / "a.pt")
    line = ("prune", tmp_path / "a.pt", "-o", tmp_path / "small.pt")
    done = cli(*line, "--amount", "0.5", "--layer", "fc1=0.75")
    assert done.code == 0, done.err
    assert "Sparsity" in done.out
    assert "fc1 9 -> 2" in done.out
    written = torch.load(tmp_path / "small.pt", weights_only=True)["state_dict"]
    assert written["fc1.weight"].shape == (2, 12)
    report = json.loads((tmp_path / "small.report.json").read_text())
    assert report["pruning"]["criterion"] == "l1"
    assert report["recipe"]["layer"] == {"fc1": 0.75}
    assert report["checks"]["function"] == "assumed"
    assert cli(*line, "--amount", "0.5").code == 6


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--amount", "0"], 2),
        (["--amount", "1"], 2),
        (["--amount", "1.5"], 2),
        (["--amount", "x"], 2),
        (["--layer", "fc1"], 2),
        (["--layer", "fc1=x"], 2),
        (["--layer", "nobody=0.5"], 2),
        (["--only", "fc1"], 2),
        (["--amount", "0.5", "--criterion", "best"], 2),
        (["--amount", "0.5", "--arch", "resnet-basic"], 4),
    ],
)
def test_wrong_command_lines_write_nothing(cli, tmp_path, options, code):
    torch.save(nets.state(mlp()), tmp_path / "a.pt")
    done = cli("prune", tmp_path / "a.pt", "-o", tmp_path / "small.pt", *options)
    assert done.code == code
    assert done.err.startswith("error: ")
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


def llama(**more):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 60,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "max_position_embeddings": 32,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **more})).eval()


def logits(net, weights):
    net.load_state_dict(weights)
    with torch.no_grad():
        return net(torch.arange(20).reshape(2, 10)).logits


def save_llama(net, folder):
    net.config.architectures = [type(net).__name__]
    net.config.save_pretrained(folder)
    torch.save(net.state_dict(), folder / "model.pt")
    return folder / "model.pt"


@pytest.mark.slow
@pytest.mark.parametrize("by_module", [False, True])
def test_whole_groups_of_a_llama_go(tmp_path, by_module):
    """The rest computes what it computed with those groups and hidden units at zero."""
    net = llama()
    path = save_llama(net, tmp_path)
    arch = f"hf:{tmp_path}" if by_module else "llama"
    pruned, report = otfuse_cli.prune(path, amount=0.5, arch=arch)
    small = llama(intermediate_size=24, num_attention_heads=4, num_key_value_heads=2)
    assert {n: t.shape for n, t in pruned.items()} == {
        n: t.shape for n, t in small.state_dict().items()
    }
    told = " ".join(report.pruning.advice)
    assert "num_key_value_heads from 4 to 2" in told
    assert "num_attention_heads from 8 to 4" in told
    assert "intermediate_size from 48 to 24" in told
    assert any("stays whole" in w for w in report.warnings)
    masked = {n: t.clone() for n, t in net.state_dict().items()}
    for at in range(2):
        block = f"model.layers.{at}."
        for name, size in (("q_proj", 16), ("k_proj", 8), ("v_proj", 8)):
            full = masked[f"{block}self_attn.{name}.weight"]
            left = pruned[f"{block}self_attn.{name}.weight"]
            for group in range(4):
                rows = full[group * size : (group + 1) * size]
                if not any(torch.equal(rows, r) for r in left.split(size)):
                    rows.zero_()
        gate = masked[f"{block}mlp.gate_proj.weight"]
        left = pruned[f"{block}mlp.gate_proj.weight"]
        gate[[not any(torch.equal(row, kept) for kept in left) for row in gate]] = 0
    assert (logits(small, pruned) - logits(net, masked)).abs().max() < 1e-5
    if by_module:
        assert report.checks.function == "kept"
    else:
        assert report.checks.function == "assumed"


def gpt2():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ends))


def folder_of(net, folder):
    net.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("make", "options"), [(llama, {}), (gpt2, {"only": ["*.c_fc"]})])
def test_a_pruned_folder_loads_in_its_class(tmp_path, make, options):
    net, out = make(), tmp_path / "out"
    path = folder_of(net, tmp_path / "whole")
    _, report = otfuse_cli.prune(path, output=out, amount=0.5, **options)
    assert any("config.json of the output says" in w for w in report.warnings)
    small, info = type(net).from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    assert small.num_parameters() < net.num_parameters()


@pytest.mark.slow
def test_a_compacted_folder_loads_in_its_class(tmp_path):
    net, out = llama(), tmp_path / "out"
    dense = folder_of(net, tmp_path / "dense")
    with torch.no_grad():
        for layer in net.model.layers:
            layer.mlp.gate_proj.weight[24:] = 0
            layer.mlp.up_proj.weight[24:] = 0
    masked = folder_of(net, tmp_path / "masked")
    _, report = otfuse_cli.prune_fuse(dense, masked, output=out, dense_weight=0)
    assert any("config.json of the output says" in w for w in report.warnings)
    small, info = type(net).from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    tokens = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        torch.testing.assert_close(small(tokens).logits, net(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_compacted_folder_whose_layers_differ_is_warned_about(tmp_path):
    net, out = llama(), tmp_path / "out"
    dense = folder_of(net, tmp_path / "dense")
    with torch.no_grad():
        net.model.layers[0].mlp.gate_proj.weight[24:] = 0
        net.model.layers[0].mlp.up_proj.weight[24:] = 0
    masked = folder_of(net, tmp_path / "masked")
    _, report = otfuse_cli.prune_fuse(dense, masked, output=out, dense_weight=0)
    assert any("copied as it is" in w for w in report.warnings)


@pytest.mark.slow
@pytest.mark.parametrize("only", ["*.c_attn", "transformer.wte"])
def test_a_config_that_can_not_say_it_is_copied_with_a_warning(tmp_path, only):
    """Heads of GPT-2 are n_embd / n_head wide: neither goes alone."""
    path = folder_of(gpt2(), tmp_path / "whole")
    _, report = otfuse_cli.prune(path, output=tmp_path / "out", amount=0.5, only=[only])
    assert any("copied as it is" in w for w in report.warnings)
    assert any("head_dim" in told for told in report.pruning.advice)
    written = (tmp_path / "out" / "config.json").read_text()
    assert written == (path / "config.json").read_text()


@pytest.mark.slow
def test_a_normalised_stream_is_pruned_by_name_only(tmp_path):
    path = save_llama(llama(), tmp_path)
    pruned, report = otfuse_cli.prune(path, layer={"model.embed_tokens": 0.25})
    assert pruned["model.norm.weight"].shape == (24,)
    assert any("takes its statistics" in w for w in report.warnings)


def test_the_factory_is_told_about(tmp_path):
    source = """
import torch
from torch import nn
def make(hidden=24, classes=5):
    net = nn.Sequential(nn.Linear(12, hidden), nn.ReLU(), nn.Linear(hidden, classes))
    return net, torch.randn(2, 12)
"""
    (tmp_path / "net.py").write_text(source)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.ReLU(), torch.nn.Linear(24, 5))
    _, report = otfuse_cli.prune(net.state_dict(), amount=0.5, arch=f"{tmp_path / 'net.py'}:make")
    assert report.checks.function == "kept"
    assert report.pruning.advice[0] == "the factory's argument hidden: 24 -> 12"


# -- semi-relaxed transport


def test_nearest_plan_has_the_given_rows_and_fixed_points():
    cost = torch.tensor([[0.0, 3.0], [3.0, 0.0], [1.0, 2.0], [0.0, 0.0]])
    mass = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    plan = nearest_plan(cost, mass, torch.tensor([0, 3])).dense()
    expected = torch.zeros(4, 2, dtype=torch.float64)
    for row, column in ((0, 0), (1, 1), (2, 0), (3, 1)):
        expected[row, column] = mass[row]
    assert torch.equal(plan, expected)


@pytest.mark.parametrize("bound", [1, 1.25, 3])
def test_bounded_plan_is_the_linear_program(bound):
    """Against scipy's solver: rows given, columns at most their bound."""
    scipy_optimize = pytest.importorskip("scipy.optimize")
    generator = torch.Generator().manual_seed(0)
    cost = torch.rand(9, 3, generator=generator, dtype=torch.float64)
    mass = torch.rand(9, generator=generator, dtype=torch.float64) + 0.1
    mass, kept = mass / mass.sum(), torch.tensor([4, 0, 7])
    plan = bounded_plan(cost, mass, kept, bound)
    dense = plan.dense()
    assert torch.allclose(plan.mass_N, mass)
    assert torch.equal(dense[kept], torch.diag(mass[kept]))
    rest = [u for u in range(9) if u not in kept.tolist()]
    shares = dense[rest] / mass[rest, None]
    assert float(shares.sum(0).max()) <= bound * 6 / 3 + 1e-9
    best = scipy_optimize.linprog(
        cost[rest].flatten().numpy(),
        A_ub=np.tile(np.eye(3), 6),
        b_ub=np.full(3, bound * 6 / 3),
        A_eq=np.kron(np.eye(6), np.ones((1, 3))),
        b_eq=np.ones(6),
    )
    assert float((shares * cost[rest]).sum()) == pytest.approx(best.fun, abs=1e-9)


def test_greedy_support_is_the_slow_greedy():
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(30, 3, generator=generator, dtype=torch.float64)
    cost = torch.cdist(points, points)
    mass = torch.rand(30, generator=generator, dtype=torch.float64)
    mass = mass / mass.sum()
    nearest, chosen = torch.full((30,), float(cost.max()), dtype=torch.float64), []
    for _ in range(7):
        gains = [float((nearest - cost[:, u]).clamp(min=0) @ mass) for u in range(30)]
        chosen.append(max(range(30), key=lambda u: (gains[u], -u)))
        nearest = torch.minimum(nearest, cost[:, chosen[-1]])
    assert choose_support(cost, mass, 7).tolist() == sorted(chosen)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("amount", "accuracy"), [(0.3, 96.6), (0.5, 89.0), (0.7, 82.8), (0.8, 62.5), (0.9, 29.7)]
)
def test_mnist_pruned_by_l1(shared, amount, accuracy):
    from test_real_pairs import score

    path = shared / "checkpoints" / "mnist-mlpnet-0.checkpoint"
    pruned, _ = otfuse_cli.prune(path, amount=amount)
    assert score(pruned) == pytest.approx(accuracy, abs=0.06)


@pytest.mark.slow
@pytest.mark.parametrize(("amount", "floor"), [(0.5, 95), (0.7, 91.5), (0.8, 84), (0.9, 70)])
def test_mnist_merged_by_transport(shared, amount, floor):
    """Measured: 95.79, 92.54, 86.13, 74.24."""
    from test_real_pairs import score

    path = shared / "checkpoints" / "mnist-mlpnet-0.checkpoint"
    pruned, _ = otfuse_cli.prune(path, amount=amount, criterion="ot")
    assert score(pruned) >= floor
