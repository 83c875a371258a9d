"""Networks of different depth: what of one stands for what of the other, and their fusion."""

from __future__ import annotations

from itertools import combinations, combinations_with_replacement, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import nets
import otfuse_cli
from otfuse_cli.matching.depth import as_rows, covering, linear_cka, ordered_pairs, pooled

pytestmark = pytest.mark.usefixtures("kept_graphs")

IMAGES = (3, 8, 8)


class Block(nn.Module):
    """A basic residual block with BatchNorm; with another stride or width it has a shortcut."""

    def __init__(self, before, width, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != width:
            layers = nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            self.shortcut = nn.Sequential(*layers)

    def forward(self, x):
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (y + self.shortcut(x)).relu()


class ResNet(nn.Module):
    """A stage for each number of blocks, each but the first at half the size."""

    def __init__(self, blocks, width=6, classes=5, head="linear"):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        before, self.stages = width, len(blocks)
        for at, count in enumerate(blocks):
            layers = []
            for block in range(count):
                layers.append(Block(before, width << at, 2 if at and not block else 1))
                before = width << at
            self.add_module(f"layer{at + 1}", nn.Sequential(*layers))
        self.head = head
        self.add_module(head, nn.Linear(before, classes))

    def forward(self, x):
        x = self.bn1(self.conv1(x)).relu()
        for at in range(self.stages):
            x = getattr(self, f"layer{at + 1}")(x)
        return getattr(self, self.head)(x.mean((2, 3)))


class Chain(nn.Module):
    """Convolutions one after another, pooled after some, and linear layers behind them."""

    def __init__(self, widths, hidden=(), norm=False, name="features"):
        super().__init__()
        layers, before = [], 3
        for width in widths:
            if width == "pool":
                layers.append(nn.MaxPool2d(2))
                continue
            layers.append(nn.Conv2d(before, width, 3, padding=1))
            layers += [nn.BatchNorm2d(width)] if norm else []
            layers.append(nn.ReLU())
            before = width
        self.name = name
        self.add_module(name, nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten()))
        ends, before = [], before * 4
        for width in hidden:
            ends += [nn.Linear(before, width), nn.ReLU()]
            before = width
        self.classifier = nn.Sequential(*ends, nn.Linear(before, 5))

    def forward(self, x):
        return self.classifier(getattr(self, self.name)(x))


def factory(make, shape=IMAGES):
    def build():
        return make(), torch.randn(4, *shape)

    return build


def trained(module, seed):
    """Weights by seed, BatchNorms as if trained."""
    torch.manual_seed(seed)
    for part in module.modules():
        if isinstance(part, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(part.weight)
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.weight, 0.5, 1.5)
            nn.init.normal_(part.bias, std=0.3)
            part.running_mean.normal_(std=0.3)
            part.running_var.uniform_(0.5, 2)
    return module.eval()


def inputs(count=200, seed=3, shape=IMAGES):
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))


def fuse(source, anchor, shape=IMAGES, **options):
    """Joint fusion of two modules, each with a factory of its own: state dict and report."""
    made, states = {}, []
    for at, (make, module) in enumerate((source, anchor)):
        made[at] = factory(make, shape)
        states.append(module.state_dict())
    given = {"samples": {"x": inputs(shape=shape)}, "num_samples": 200, "blend": "joint"}
    return otfuse_cli.merge(*states, arch=made, **given, **options)


def pairs_of(report):
    (record,) = report.depth
    return [(pair.anchor_layer, pair.source_layer) for pair in record.pairs]


# Correspondence


def test_cka_is_what_its_definition_says():
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(50, n, generator=generator).double() + 2 for n in (7, 4))
    centring = torch.eye(50).double() - 1 / 50
    hsic = {}
    for a, b in (("x", "y"), ("x", "x"), ("y", "y")):
        k, m = ({"x": one, "y": other}[name] for name in (a, b))
        hsic[a, b] = torch.trace(k @ k.T @ centring @ m @ m.T @ centring)
    expected = hsic["x", "y"] / (hsic["x", "x"] * hsic["y", "y"]).sqrt()
    assert linear_cka(one, other) == pytest.approx(float(expected), abs=1e-12)


@given(st.integers(1, 6), st.integers(0, 1000))
def test_cka_takes_no_notice_of_rotation_scale_and_mean(units, seed):
    generator = torch.Generator().manual_seed(seed)
    one, other = (torch.randn(30, n, generator=generator).double() for n in (units, 5))
    turn, _ = torch.linalg.qr(torch.randn(units, units, generator=generator).double())
    assert linear_cka(3 * one @ turn - 7, other) == pytest.approx(linear_cka(one, other), abs=1e-9)
    assert linear_cka(one, -0.5 * one @ turn) == pytest.approx(1.0, abs=1e-9)
    assert linear_cka(torch.ones(30, 3), other) == 0.0


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 10_000))
def test_ordered_pairs_are_the_best_of_all(anchors, sources, seed):
    similarity = torch.rand(
        anchors, sources, generator=torch.Generator().manual_seed(seed)
    ).double()
    pairs = ordered_pairs(similarity)
    fewer, more = min(anchors, sources), max(anchors, sources)
    short = similarity if anchors <= sources else similarity.T
    best = 0.0
    for chosen in combinations(range(more), fewer):
        best = max(best, float(short[range(fewer), chosen].sum()))
    assert sum(float(similarity[a, s]) for a, s in pairs) == pytest.approx(best)
    assert len(pairs) == fewer
    assert all(a < b and s < t for (a, s), (b, t) in pairwise(pairs))


@given(st.integers(1, 4), st.integers(1, 4), st.booleans(), st.integers(0, 10_000))
def test_a_covering_is_the_best_of_all(anchors, sources, begin, seed):
    begin = begin and anchors > 1 and sources > 1
    similarity = torch.rand(
        anchors, sources, generator=torch.Generator().manual_seed(seed)
    ).double()
    best, distinct = -1.0, min(anchors, sources)
    for chosen in combinations_with_replacement(range(sources), anchors):
        fits = chosen[-1] == sources - 1 and not (begin and chosen[0])
        if fits and len(set(chosen)) == distinct:
            best = max(best, sum(float(similarity[a, s]) for a, s in enumerate(chosen)))
    found = covering(similarity, begin=begin)
    assert sum(float(similarity[a, s]) for a, s in enumerate(found)) == pytest.approx(best)
    assert list(found) == sorted(found)
    assert len(set(found)) == distinct
    assert found[-1] == sources - 1
    assert not (begin and found[0])


def test_of_equals_the_earliest_is_taken():
    assert ordered_pairs(torch.ones(2, 4)) == ((0, 0), (1, 1))
    assert ordered_pairs(torch.ones(4, 2)) == ((0, 0), (1, 1))
    assert covering(torch.ones(2, 4), begin=False) == (0, 3)
    assert covering(torch.ones(4, 2), begin=False) == (0, 0, 0, 1)
    assert ordered_pairs(torch.ones(0, 2)) == ()


@given(st.integers(2, 7), st.integers(0, 1000))
def test_a_network_is_matched_with_itself_in_place(layers, seed):
    generator = torch.Generator().manual_seed(seed)
    seen = [torch.randn(40, 6, generator=generator) for _ in range(layers)]
    similarity = torch.tensor([[linear_cka(a, b) for b in seen] for a in seen])
    assert ordered_pairs(similarity) == tuple((a, a) for a in range(layers))
    assert covering(similarity, begin=True) == tuple(range(layers))


def test_positions_are_pooled_to_a_grid():
    features = torch.arange(2 * 3 * 4 * 4).view(2, 3, 4, 4).float()
    on_grid = pooled(features, (2, 2))
    assert torch.equal(on_grid[:, :, 0, 0], features[:, :, :2, :2].mean((2, 3)))
    assert pooled(features, (4, 4)) is features
    assert torch.equal(pooled(features, ()), features.mean((2, 3)))
    rows = as_rows(on_grid)
    assert rows.shape == (8, 3)
    assert torch.equal(rows[1], on_grid[0, :, 0, 1])
    assert as_rows(features[:, :, 0, 0]) is not None
    sequence = torch.randn(2, 3, 6)
    assert torch.allclose(pooled(sequence, (3,)), sequence.view(2, 3, 3, 2).mean(3))


# Fusion


def mlp(widths):
    return lambda: nets.Mlp(widths)


@pytest.mark.parametrize("blocks", [(2, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize("weights", [None, (0.7, 0.3)])
def test_an_identity_block_more_changes_nothing(blocks, weights):
    small = trained(ResNet((1, 1)), 1)
    deep = trained(ResNet(blocks), 2)
    state = deep.state_dict()
    for name in state:
        if name in small.state_dict():
            state[name] = small.state_dict()[name].clone()
        elif name.endswith(("bn2.weight", "bn2.bias")):
            state[name] = torch.zeros_like(state[name])
    deep.load_state_dict(state)
    x = inputs(50, seed=8)
    one, other = (lambda: ResNet((1, 1)), small), (lambda: ResNet(blocks), deep)
    for source, anchor in ((one, other), (other, one)):
        fused, report = fuse(source, anchor, weights=weights)
        result = anchor[0]().eval()
        result.load_state_dict(fused)
        with torch.no_grad():
            expected = small(x)
            assert float((result(x) - expected).abs().max()) < 1e-5 * float(expected.abs().max())
        matched = dict(pairs_of(report))
        assert matched["layer1.0.conv1"] == "layer1.0.conv1"
        assert matched["layer2.0.conv1"] == "layer2.0.conv1"


class Layers(nn.Sequential):
    """An MLP under other names."""

    def __init__(self, widths):
        layers = []
        for before, width in pairwise(widths):
            layers += [nn.Linear(before, width), nn.ReLU()]
        super().__init__(*layers[:-1])


# Networks under two sets of names, how the first are called in the second, and their inputs.
RENAMED = {
    "mlp": (mlp((12, 9, 8, 7, 5)), lambda: Layers((12, 9, 8, 7, 5)), (12,)),
    "chain": (
        lambda: Chain((6, "pool", 7, 8), (9,), norm=True),
        lambda: Chain((6, "pool", 7, 8), (9,), norm=True, name="body"),
        IMAGES,
    ),
    "residual": (lambda: ResNet((1, 2)), lambda: ResNet((1, 2), head="fc"), IMAGES),
}


@pytest.mark.parametrize("kind", RENAMED)
def test_of_equal_depth_it_is_what_joint_fusion_gives(kind):
    """A source under other names goes the way of another depth, with every layer in its place."""
    make, make_renamed, shape = RENAMED[kind]
    one, other = trained(make(), 1), trained(make(), 2)
    names = dict(zip(one.state_dict(), make_renamed().state_dict(), strict=True))
    renamed = {names[name]: tensor for name, tensor in one.state_dict().items()}
    samples = {"samples": {"x": inputs(shape=shape)}, "num_samples": 200, "blend": "joint"}
    expected, _ = otfuse_cli.merge(
        one.state_dict(), other.state_dict(), arch=factory(make, shape), **samples
    )
    arch = {0: factory(make_renamed, shape), 1: factory(make, shape)}
    fused, report = otfuse_cli.merge(renamed, other.state_dict(), arch=arch, **samples)
    matched = {f"{anchor}.weight": f"{own}.weight" for anchor, own in pairs_of(report)}
    assert matched == {name: names[name] for name in matched}
    for name, tensor in expected.items():
        assert torch.equal(fused[name], tensor), name
