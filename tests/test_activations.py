"""`--align acts`: what units do, where it is looked at, and what it is compared by."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import otfuse_cli
from nets import Mlp, ResNet, Vgg, randomise, state
from otfuse_cli.matching.activations import Observed, observe
from otfuse_cli.matching.features import Producer
from otfuse_cli.matching.match_space import ProducerRows, solve_rows
from otfuse_cli.requests.recipe import Recipe
from otfuse_cli.running.architecture import architecture
from otfuse_cli.running.runnable import runnable
from otfuse_cli.running.samples import Samples
from test_twins import permuted

pytestmark = pytest.mark.usefixtures("kept_graphs")
IMAGE = (3, 8, 8)


def mlp():
    return randomise(Mlp(), 1), torch.zeros(4, 12)


def conv_bn():
    return randomise(Vgg((5, 6)), 2), torch.zeros(4, *IMAGE)


def residual():
    """Two blocks to each of two streams; the stem is on the first one."""
    return randomise(ResNet((6, 6, 9)), 3), torch.zeros(4, *IMAGE)


NETS = {"mlp": mlp, "conv_bn": conv_bn, "residual": residual}


def arch(name):
    return f"{__name__}:{name}"


def draw(name, count, seed=5):
    shape = NETS[name]()[1].shape[1:]
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))


def watched(name, inputs, tensors=None, *, post=False, seed=0, batch=32) -> Observed:
    """Features by space of a net, or of other tensors of it."""
    tensors = state(NETS[name]()[0]) if tensors is None else tensors
    samples = Samples((inputs,))
    known = architecture(arch(name), {n: tuple(t.shape) for n, t in tensors.items()})
    program = runnable(known, samples, device="cpu", batch=batch)
    return observe(program, tensors, known.graph, samples, device="cpu", post=post, seed=seed)


def channels_first(value):
    """Units first, the rest in order: what `observe` makes of an output."""
    return (value.movedim(1, 0) if value.dim() > 2 else value.t()).flatten(1)


def outputs(net, inputs, *names):
    """What modules of a net return."""
    found = {}
    hooks = [
        net.get_submodule(name).register_forward_hook(
            lambda m, args, out, name=name: found.__setitem__(name, out.detach())
        )
        for name in names
    ]
    with torch.no_grad():
        net.eval()(inputs)
    for hook in hooks:
        hook.remove()
    return [found[name] for name in names]


@pytest.mark.quick_cases("mlp-sweep")
@pytest.mark.parametrize(
    ("name", "matcher"), [*((name, "sweep") for name in NETS), ("residual", "auto")]
)
def test_a_permuted_twin_is_recovered_exactly(name, matcher):
    original = state(NETS[name]()[0])
    fused, report = otfuse_cli.merge(
        permuted(original, seed=6), original, arch=arch(name), align="acts", matcher=matcher,
        samples={"x": draw(name, 30)},
    )  # fmt: skip
    for tensor, value in original.items():
        assert torch.equal(fused[tensor], value), tensor
    assert all(space.ot_cost < 1e-3 for space in report.spaces)
    assert all(space.moved_fraction > 0 for space in report.spaces)
    assert report.steps[-1].agreement == 1


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"metric": "correlation"}, {"post_activations": True}])
@pytest.mark.parametrize("name", NETS)
def test_other_looks_recover_the_twin_too(name, options):
    original = state(NETS[name]()[0])
    fused, _ = otfuse_cli.merge(
        permuted(original, seed=7), original, arch=arch(name), align="acts", matcher="sweep",
        samples={"x": draw(name, 60)}, **options,
    )  # fmt: skip
    for tensor, value in original.items():
        assert torch.equal(fused[tensor], value), tensor


@pytest.mark.slow
def test_a_stream_is_seen_after_each_addition():
    net, inputs = residual()[0], draw("residual", 10)
    after = watched("residual", inputs, post=True)
    before = watched("residual", inputs)
    blocks = [f"layer{stage}.{block}" for stage in (1, 2) for block in (0, 1)]
    found = dict(zip(blocks, outputs(net, inputs, *blocks), strict=True))
    streams = [space for space, taps in after.items() if len(taps) > 1]
    assert len(streams) == 2
    for space, stage in zip(streams, (1, 2), strict=True):
        # Each addition goes by the last layer that feeds it.
        assert [tap.layer.rpartition(".")[0] for tap in after[space]] == [
            f"layer{stage}.0" if stage == 1 else f"layer{stage}.0.downsample",
            f"layer{stage}.1",
        ]
        for block, (late, early) in enumerate(zip(after[space], before[space], strict=True)):
            # A block returns the sum after its ReLU.
            expected = channels_first(found[f"layer{stage}.{block}"])
            torch.testing.assert_close(late.features_NF, expected)
            torch.testing.assert_close(early.features_NF.relu(), expected)
            assert (early.features_NF < 0).any()


@pytest.mark.slow
def test_before_the_activation_and_after_it():
    net, inputs = mlp()[0], draw("mlp", 20)
    before, after = watched("mlp", inputs), watched("mlp", inputs, post=True)
    assert len(before) == 3
    for layer, value in zip(("fc1", "fc2", "fc3"), outputs(net, inputs, "fc1", "fc2", "fc3"),
                            strict=True):  # fmt: skip
        (mine,) = next(taps for taps in before.values() if taps[0].layer == layer)
        (late,) = next(taps for taps in after.values() if taps[0].layer == layer)
        torch.testing.assert_close(mine.features_NF, value.t())
        torch.testing.assert_close(late.features_NF, value.t().relu())


@pytest.mark.slow
def test_a_batch_norm_belongs_to_its_layer():
    net, inputs = conv_bn()[0], draw("conv_bn", 10)
    (normed,) = outputs(net, inputs, "features.1")
    (tap,) = next(
        t for t in watched("conv_bn", inputs).values() if t[0].weight == "features.0.weight"
    )
    torch.testing.assert_close(tap.features_NF, channels_first(normed))


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_batches_do_not_matter(name):
    inputs = draw(name, 21)
    whole = watched(name, inputs, batch=21)
    for batch in (1, 8):  # the last batch of 8 is filled up
        parts = watched(name, inputs, batch=batch)
        assert parts.keys() == whole.keys()
        for space, taps in whole.items():
            for one, other in zip(taps, parts[space], strict=True):
                torch.testing.assert_close(one.features_NF, other.features_NF, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_same_positions_count_in_every_model(monkeypatch):
    monkeypatch.setattr("otfuse_cli.matching.activations._MOST_COLUMNS", 200)
    inputs, original = draw("conv_bn", 20), state(conv_bn()[0])
    twin = permuted(original, seed=4)
    mine, theirs = (watched("conv_bn", inputs, tensors) for tensors in (twin, original))
    wide = [space for space, taps in theirs.items() if taps[0].weight.startswith("features")]
    assert len(wide) == 2
    for space in wide:
        one, other = mine[space][0].features_NF, theirs[space][0].features_NF
        assert one.shape == other.shape
        assert one.shape[1] == 200  # ten of 64 or 16 positions of each sample
        # Units are in another order; columns are the same ones in the same order.
        nearest = torch.cdist(other, one).argmin(1)
        assert nearest.sort().values.tolist() == list(range(len(one)))
        torch.testing.assert_close(one[nearest], other, rtol=1e-4, atol=1e-4)
    again = watched("conv_bn", inputs, original)
    elsewhere = watched("conv_bn", inputs, original, seed=1)
    for space in wide:
        assert torch.equal(again[space][0].features_NF, theirs[space][0].features_NF)
        assert not torch.equal(elsewhere[space][0].features_NF, theirs[space][0].features_NF)


@pytest.mark.slow
def test_other_widths():
    wide = {n: t.clone() for n, t in state(randomise(Mlp((12, 11, 9, 8, 5)), 9)).items()}
    narrow = state(mlp()[0])
    fused, report = otfuse_cli.merge(
        wide,
        narrow,
        arch=arch("mlp"),
        align="acts",
        blend="average",
        samples={"x": draw("mlp", 40)},
    )
    assert {n: t.shape for n, t in fused.items()} == {n: t.shape for n, t in narrow.items()}
    assert [space.sizes for space in report.spaces] == [(11, 9), (9, 8), (8, 7)]
    assert all(space.marginal_error < 1e-9 for space in report.spaces)


def rows(source, anchor):
    return ProducerRows(
        (Producer("layer", "layer.weight", 0),), (source,), (anchor,), observed=True
    )


features = st.tuples(st.integers(2, 9), st.integers(2, 9), st.integers(5, 40), st.integers(0, 999))


def pair(drawn):
    n, m, k, seed = drawn
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, k, generator=generator), torch.randn(m, k, generator=generator)


@pytest.mark.slow
@settings(max_examples=40)
@given(features)
def test_importance_is_a_mass_with_a_floor(drawn):
    """Mean |activation| times its deviation; the first units are dead."""
    sides = pair(drawn)
    for side in sides:
        side[0] = 0.0
        side[1:] += 0.5
    plan = solve_rows(rows(*sides), Recipe(align="acts", mass="importance")).plan.dense()
    for side, sums in zip(sides, (plan.sum(1), plan.sum(0)), strict=True):
        wanted = side.double().abs().mean(1) * side.double().std(1, correction=0)
        floor = 1e-3 * wanted.mean()
        expected = wanted.clamp(min=floor)
        expected = expected / expected.sum()
        assert float(sums.sum()) == pytest.approx(1, abs=1e-9)
        torch.testing.assert_close(sums.double(), expected, rtol=1e-4, atol=1e-9)
        assert float(sums[0]) > 0


@pytest.mark.slow
@settings(max_examples=40)
@given(features, st.integers(0, 999))
def test_correlation_does_not_see_scale_and_shift(drawn, seed):
    source, anchor = pair(drawn)
    generator = torch.Generator().manual_seed(seed)
    gain = 0.2 + 3 * torch.rand(len(source), 1, generator=generator)
    shift = 2 * torch.randn(len(source), 1, generator=generator)
    recipe = Recipe(align="acts", metric="correlation")
    one = solve_rows(rows(source, anchor), recipe)
    other = solve_rows(rows(gain * source + shift, anchor), recipe)
    assert other.ot_cost == pytest.approx(one.ot_cost, abs=1e-5)
    torch.testing.assert_close(other.plan.dense(), one.plan.dense(), rtol=1e-6, atol=1e-9)


def test_euclidean_does():
    source, anchor = pair((5, 5, 20, 0))
    one, other = (
        solve_rows(rows(s, anchor), Recipe(align="acts")) for s in (source, 2 * source + 1)
    )
    assert other.ot_cost > 1.1 * one.ot_cost
