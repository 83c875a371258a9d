"""Buffers that follow from weights, in every parent: made anew for the fused weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import otfuse_cli
from computed_nets import NETS, drawn, make
from otfuse_cli.graph.trace.from_module import trace
from otfuse_cli.running.relabel import draw_maps, relabel_state

pytestmark = pytest.mark.usefixtures("kept_graphs")
State = dict[str, Tensor]


def state_of(net: nn.Module) -> State:
    return {n: t.detach().clone() for n, t in net.state_dict().items()}


def arch_of(name: str, folder: Path) -> str:
    path = folder / "net.py"
    path.write_text(f"from computed_nets import make\n\ndef net():\n    return make({name!r})\n")
    return f"{path}:net"


def refreshed(name: str, state: State) -> State:
    """The state with everything that follows from weights made by the network itself."""
    net = make(name)[0]
    net.load_state_dict(state)
    with torch.no_grad():
        net.refresh()
    return state_of(net)


def twin_of(name: str, state: State) -> State:
    """The same network with its units in another order."""
    # What runs on its cache shows the units of that alone; with the same tensors, this one all.
    net, inputs = make("gained" if name == "cached" else name)
    graph = trace(net, inputs)
    return refreshed(
        name, relabel_state(state, graph, draw_maps(graph, torch.Generator().manual_seed(3)))
    )


def close(found: State, wanted: State, *, tolerance: float = 1e-5) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        torch.testing.assert_close(found[name], values, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.quick_cases("codes-in-rows")
@pytest.mark.parametrize("name", NETS)
def test_what_follows_from_weights_is_made_anew(name, tmp_path):
    arch = arch_of(name, tmp_path)
    one, two = (state_of(drawn(name, seed)) for seed in (0, 1))
    fused, report = otfuse_cli.merge(one, two, arch=arch, matcher="sweep")
    close(fused, refreshed(name, fused))
    assert not any("kept" in w for w in report.warnings)
    ends, _ = otfuse_cli.merge(one, two, arch=arch, matcher="sweep", weights=(1, 0))
    close(ends, refreshed(name, ends))


@pytest.mark.quick_cases("norms")
@pytest.mark.parametrize("name", [*NETS, "momentum", "wrapped"])
def test_a_twin_is_the_model_with_all_that_lies_beside(name, tmp_path):
    arch = arch_of(name, tmp_path)
    own = state_of(drawn(name, 0))
    fused, _ = otfuse_cli.merge(twin_of(name, own), own, arch=arch, matcher="sweep")
    close(fused, own)
    again, _ = otfuse_cli.merge(own, own, arch=arch, matcher="sweep")
    assert all(torch.equal(again[n], own[n]) for n in own)


@pytest.mark.parametrize("name", ["ema", "momentum", "wrapped"])
def test_copies_that_lag_behind_move_with_their_weights(name, tmp_path):
    """They are no function of them, but their units are the same; so is what an average means."""
    arch = arch_of(name, tmp_path)
    one, two = (state_of(drawn(name, seed)) for seed in (0, 1))
    fused, report = otfuse_cli.merge(one, two, arch=arch, matcher="sweep", repair="none")
    pairs = {
        "ema": {"first.ema_weight": "first.weight"},
        "momentum": {n: n.replace("_k", "_q") for n in one if n.startswith("encoder_k")},
        "wrapped": {n: n.replace("ema.model", "net") for n in one if n.startswith("ema")},
    }[name]
    assert pairs
    for behind, weight in pairs.items():
        gap = (fused[behind] - fused[weight]).norm() / fused[weight].norm()
        assert gap < 0.1, behind
    assert not any("kept" in w for w in report.warnings)


@pytest.mark.slow
def test_what_nobody_can_tell_is_the_anchors(tmp_path):
    arch = arch_of("auxiliary", tmp_path)
    one, two = (state_of(drawn("auxiliary", seed)) for seed in (0, 1))
    fused, report = otfuse_cli.merge(one, two, arch=arch, matcher="sweep")
    for part in ("weight", "bias"):
        assert torch.equal(fused[f"aux.{part}"], two[f"aux.{part}"])
    (said,) = [w for w in report.warnings if "aux" in w]
    assert "aux.weight, aux.bias" in said
    assert "kept from" in said
    plain, report = otfuse_cli.merge(one, two, arch=arch, align="none")
    torch.testing.assert_close(plain["aux.weight"], (one["aux.weight"] + two["aux.weight"]) / 2)
    assert not any("aux" in w for w in report.warnings)
    alike = {n: two[n] if n.startswith("aux") else t for n, t in one.items()}
    _, report = otfuse_cli.merge(alike, two, arch=arch, matcher="sweep")
    assert not any("aux" in w for w in report.warnings)


@pytest.mark.parametrize("name", ["copy", "norms", "squares", "codes-in-rows", "ema", "momentum"])
def test_one_parent_that_disagrees_is_enough(name, tmp_path):
    """Then it is no function of the weights, but a tensor that nobody can tell about."""
    arch = arch_of(name, tmp_path)
    one, two = (state_of(drawn(name, seed)) for seed in (0, 1))
    odd = {
        "copy": "first.weight_copy", "norms": "first.row_norm", "squares": "last.length2",
        "codes-in-rows": "embed_avg", "ema": "first.ema_weight",
        "momentum": "encoder_k.first.weight",
    }[name]  # fmt: skip
    one[odd] = torch.randn(one[odd].shape, generator=torch.Generator().manual_seed(0))
    fused, report = otfuse_cli.merge(one, two, arch=arch, matcher="sweep")
    assert torch.equal(fused[odd], two[odd])
    assert any(odd in w and "kept from" in w for w in report.warnings)


@pytest.mark.parametrize("name", ["norms", "units", "copy"])
def test_names_and_shapes_do_too(name, tmp_path):
    """Without a network: what the layer's line covers, and is a function of its weight."""
    lines = {"norms": "first.row_norm: [h]", "units": "first.direction: [h, in]"}
    lines["copy"] = "first.weight_copy: [h, in]"
    (tmp_path / "net.yaml").write_text(
        f"act: relu\nlayers:\n  {lines[name]}\n  first: h <- in\n  last: out <- h\n"
    )
    one, two = (state_of(drawn(name, seed)) for seed in (0, 1))
    fused, _ = otfuse_cli.merge(one, two, arch=str(tmp_path / "net.yaml"), matcher="sweep")
    close(fused, refreshed(name, fused))
