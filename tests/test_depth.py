"""Networks of different depth: what of one stands for what of the other, and their fusion."""

from __future__ import annotations

import json
from itertools import combinations, combinations_with_replacement, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import nets
import otfuse_cli
from otfuse_cli.errors import IncompatibleModels, UsageError
from otfuse_cli.fusion.choose_by_readers import written
from otfuse_cli.fusion.lockstep import Parent
from otfuse_cli.graph.analysis.fit_targets import fits
from otfuse_cli.graph.trace.from_module import export, trace
from otfuse_cli.graph.trace.program import labelled_program
from otfuse_cli.matching.counterpart import counterpart
from otfuse_cli.matching.depth import as_rows, covering, linear_cka, ordered_pairs, pooled
from otfuse_cli.matching.stages import staged
from otfuse_cli.running.execute import Walk
from test_real_pairs import load_example

pytestmark = pytest.mark.usefixtures("kept_graphs")

IMAGES = (3, 8, 8)
Block = load_example("networks").Block


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


class Dense(nn.Module):
    """What a layer makes is put beside what it reads."""

    def __init__(self, layers=1):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Conv2d(4 * (at + 1), 4, 3, padding=1) for at in range(layers)
        )
        self.head = nn.Linear(4 * (layers + 1), 5)

    def forward(self, x):
        x = self.stem(x).relu()
        for layer in self.layers:
            x = torch.cat([x, layer(x).relu()], 1)
        return self.head(x.mean((2, 3)))


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
    assert linear_cka(one, other) == pytest.approx(float(expected), abs=1e-6)


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
    generator = torch.Generator().manual_seed(seed)
    similarity = torch.rand(anchors, sources, generator=generator).double()
    between = torch.rand(sources, sources, generator=generator).double() - 0.8
    for costs in (None, between):

        def worth(chosen, costs=costs):
            alike = sum(float(similarity[a, s]) for a, s in enumerate(chosen))
            return alike + sum(0.0 if costs is None else float(costs[p]) for p in pairwise(chosen))

        best, distinct = -float("inf"), min(anchors, sources)
        for chosen in combinations_with_replacement(range(sources), anchors):
            fits = chosen[-1] == sources - 1 and not (begin and chosen[0])
            if fits and len(set(chosen)) == distinct:
                best = max(best, worth(chosen))
        found = covering(similarity, begin=begin, between_SS=costs)
        assert worth(found) == pytest.approx(best)
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


# What of one network stands for what of the other


def staged_of(module, shape):
    """A network as it is compared, and a pass of it on 50 inputs."""
    x = inputs(50, shape=shape)
    graph = trace(module, (x,), source="net")
    network = staged(labelled_program(export(module, (x,)), batch=50, graph=graph), graph, "net")
    program = network.program
    walk = Walk(program, module.state_dict(), [x], keep=[node.name for node in program.nodes])
    walk.outputs()
    return network, walk


def stands_for(source, anchor, shape):
    """What of a source stands for what of an anchor, by CKA; both passes; program and graph."""
    (theirs, own), (ours, walk) = staged_of(source, shape), staged_of(anchor, shape)

    def similar(one, other):
        features = [w[name].flatten(2).mean(2) if w[name].dim() > 2 else w[name]
                    for w, name in ((walk, one), (own, other))]  # fmt: skip
        return linear_cka(*features)

    return counterpart(ours, theirs, similar, labels=("source", "anchor")), own, walk, ours


def with_identity_first(blocks):
    """A residual network, and the same with a block more at its beginning, which adds nothing."""
    small, deep = trained(ResNet(blocks), 1), trained(ResNet((blocks[0] + 1, *blocks[1:])), 2)
    state = {}
    for name, tensor in small.state_dict().items():
        first, _, rest = name.partition(".0.")
        state[f"layer1.1.{rest}" if first == "layer1" else name] = tensor
    for name, tensor in deep.state_dict().items():
        if name not in state:
            adds = name in ("layer1.0.bn2.weight", "layer1.0.bn2.bias")
            state[name] = torch.zeros_like(tensor) if adds else tensor
    deep.load_state_dict(state)
    return small, deep


@pytest.mark.slow
@pytest.mark.parametrize("deeper", ["source", "anchor"])
def test_values_of_one_function_stand_for_themselves(deeper):
    """Wherever the anchor is fitted, the source's part is what the anchor itself has there."""
    small, deep = with_identity_first((1, 1))
    pair = (deep, small) if deeper == "source" else (small, deep)
    (found, _, _), own, walk, ours = stands_for(*pair, IMAGES)
    checked = 0
    for fit in fits(ours.program)[0]:
        value = found.value(fit.target, own)
        if value is None:
            assert fit.layer.weight == "layer1.0.conv1.weight"  # the source has no such block
            continue
        torch.testing.assert_close(value, walk[fit.target], rtol=1e-4, atol=1e-4)
        checked += 1
    assert checked >= 7
    assert (len(found.fresh) > 0) is (deeper == "source")  # two blocks in the place of one


@pytest.mark.slow
def test_several_blocks_are_one_branch():
    """From what goes into the first of them to the sum behind the last."""
    source, anchor = trained(ResNet((1, 3)), 1), trained(ResNet((1, 1)), 2)
    (found, _, _), own, _, ours = stands_for(source, anchor, IMAGES)
    first, _, last = staged_of(source, IMAGES)[0].stages[1].taps
    (tap,) = ours.stages[1].taps
    assert torch.equal(found.value(tap.made, own), own[last.made])
    assert torch.equal(found.value(tap.side, own), own[first.side])
    assert torch.equal(found.value(tap.added, own), own[last.made] - own[first.side])
    assert tap.shortcut.layer.weight in found.tensors
    assert found.fresh == {"layer2.0.conv2.weight"}


def test_units_go_through_layers_that_the_source_lacks():
    shallow, deep = trained(nets.Mlp((12, 9, 7, 5)), 1), nets.Mlp((12, 9, 9, 7, 5))
    state = shallow.state_dict()
    for at, place in ((1, 1), (2, 3), (3, 4)):
        for part in ("weight", "bias"):
            deep.state_dict()[f"fc{place}.{part}"].copy_(state[f"fc{at}.{part}"])
    deep.fc2.weight.data.copy_(torch.eye(9))
    deep.fc2.bias.data.zero_()
    (found, _, graph), own, walk, ours = stands_for(shallow, deep, (12,))
    first, second, third = (place.space for place in ours.places)
    assert found.carried == {second: first}
    assert found.read_as == {first: second}
    assert found.fresh == {"fc2.weight"}
    # What the source reads from its first layer, it reads from where that was let through.
    assert found.tensors["fc3.weight"] == "fc2.weight"
    assert graph.consumers(second) == ("fc2.weight",)
    assert [graph.spaces[space].size for space in (first, second, third)] == [9, 9, 7]
    middle = next(place for place in ours.places if place.space == second)
    torch.testing.assert_close(found.value(middle.made, own), walk[middle.seen])
    assert found.axes[middle.made] == ours.program.axes[middle.made]


class Tanh(nets.Mlp):
    """An activation that changes again what it has given."""

    def forward(self, x):
        layers = list(self.children())
        for layer in layers[:-1]:
            x = layer(x).tanh()
        return layers[-1](x)


def test_what_an_activation_would_change_again_is_not_let_through():
    pair = (trained(Tanh((12, 9, 5)), 1), trained(Tanh((12, 9, 8, 5)), 2))
    (found, _, graph), _, _, ours = stands_for(*pair, (12,))
    assert found.carried == found.read_as == {}
    assert len(found.pairs) == 1
    (missing,) = {place.space for place in ours.places} - {p.anchor.space for p in found.pairs}
    assert graph.spaces[missing].size == 0


def test_output_layers_of_one_parent_alone_count_by_its_share():
    source, anchor = trained(Tanh((12, 9, 5)), 1), trained(Tanh((12, 9, 8, 5)), 2)
    (theirs, _), (ours, _) = staged_of(source, (12,)), staged_of(anchor, (12,))
    first = ours.places[0]

    def similar(one, other):
        return float(one == first.seen)

    found, program, graph = counterpart(ours, theirs, similar, labels=("source", "anchor"))
    assert [pair.anchor for pair in found.pairs] == [first]
    parents = [
        Parent(ours.program, anchor.state_dict(), 0.7, ours.graph),
        Parent(program, source.state_dict(), 0.3, graph, counterpart=found),
    ]
    gram = torch.eye(18, dtype=torch.float64)
    write = written(parents, first.space, gram)
    assert write.shape == (8 + 5, 18)
    assert float(write[:, :9].square().sum()) == pytest.approx(0.7)
    assert float(write[:, 9:].square().sum()) == pytest.approx(0.3)


def test_a_layer_that_reads_in_another_way_is_no_beginning():
    """A dilated kernel reads other positions: its weights mean something else."""
    plain, dilated = Chain((6, 7)), Chain((6, 7))
    dilated.features[2].dilation = dilated.features[2].padding = (2, 2)
    (found, _, _), _, _, _ = stands_for(trained(dilated, 1), trained(plain, 2), IMAGES)
    assert found.fresh == {"features.2.weight"}


# Fusion


def mlp(widths):
    return lambda: nets.Mlp(widths)


@pytest.mark.slow_cases(
    "None-blocks0", "None-blocks2", "weights1-blocks0", "weights1-blocks1", "weights1-blocks2"
)
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


@pytest.mark.slow_cases("chain", "residual")
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


def copying():
    """An MLP, and the same with a layer that copies what it reads."""
    small, deep = trained(nets.Mlp((12, 9, 7, 5)), 1), nets.Mlp((12, 9, 9, 7, 5))
    state = small.state_dict()
    copied = {"fc2.weight": torch.eye(9), "fc2.bias": torch.zeros(9)}
    for at, place in ((1, 1), (2, 3), (3, 4)):
        for part in ("weight", "bias"):
            copied[f"fc{place}.{part}"] = state[f"fc{at}.{part}"]
    deep.load_state_dict(copied)
    return (mlp((12, 9, 7, 5)), small), (mlp((12, 9, 9, 7, 5)), deep)


@pytest.mark.parametrize("deeper", ["source", "anchor"])
@pytest.mark.parametrize("weights", [None, (1, 0)], ids=["both", "alone"])
def test_a_layer_that_copies_changes_nothing(deeper, weights):
    """With the whole weight on the source, its function in more or fewer layers is what is left."""
    small, deep = copying()
    source, anchor = (deep, small) if deeper == "source" else (small, deep)
    fused, report = fuse(source, anchor, shape=(12,), weights=weights)
    result = anchor[0]()
    result.load_state_dict(fused)
    x = inputs(50, seed=8, shape=(12,))
    with torch.no_grad():
        expected = small[1](x)
        missed = float((result(x) - expected).abs().max() / expected.abs().max())
    # What the pull toward no weights at all leaves of least squares, where a unit is chosen that
    # its parent has no layer for: of two equal units rounding decides which.
    assert missed < 0.02
    assert {own for _, own in pairs_of(report)} == (
        {"fc1", "fc3"} if deeper == "source" else {"fc1", "fc2"}
    )


def test_three_networks_of_three_depths():
    shapes = ((12, 9, 5), (12, 9, 8, 5), (12, 9, 8, 7, 5))
    modules = [trained(nets.Mlp(shape), seed) for seed, shape in enumerate(shapes)]
    made = {at: factory(mlp(shape), (12,)) for at, shape in enumerate(shapes)}
    fused, report = otfuse_cli.merge(
        *(module.state_dict() for module in modules),
        arch=made,
        samples={"x": inputs(shape=(12,))},
        num_samples=200,
        blend="joint",
    )
    assert {name: t.shape for name, t in fused.items()} == {
        name: t.shape for name, t in modules[-1].state_dict().items()
    }
    assert [record.source for record in report.depth] == [0, 1]
    assert [len(record.pairs) for record in report.depth] == [1, 2]
    assert all(0 <= pair.cka <= 1 for record in report.depth for pair in record.pairs)
    result = nets.Mlp(shapes[-1])
    result.load_state_dict(fused)
    x = inputs(400, seed=8, shape=(12,))
    with torch.no_grad():
        mean = sum(module(x) for module in modules) / 3
        miss = (result(x) - mean).norm() / mean.norm()
        alone = (modules[-1](x) - mean).norm() / mean.norm()
    assert miss < 0.7 * alone


@pytest.mark.quick_cases("shallower")
@pytest.mark.parametrize(
    ("source", "anchor"), [((3, 1), (1, 2)), ((1, 2), (3, 1))], ids=["deeper", "shallower"]
)
def test_residual_networks_come_nearer_to_their_mean(source, anchor):
    nets_ = [trained(ResNet(blocks), seed) for seed, blocks in enumerate((source, anchor))]
    fused, report = fuse((lambda: ResNet(source), nets_[0]), (lambda: ResNet(anchor), nets_[1]))
    result = ResNet(anchor)
    result.load_state_dict(fused)
    x = inputs(300, seed=8)
    with torch.no_grad():
        mean = sum(net(x) for net in nets_) / 2
        miss, alone = (float((net.eval()(x) - mean).norm()) for net in (result, nets_[1]))
    assert miss < 0.8 * alone
    assert all(refit.after <= refit.before + 1e-9 for refit in report.refits)
    taps = [own for place, own in pairs_of(report) if place == f"layer1.{anchor[0] - 1}.conv2"]
    assert taps == [f"layer1.{source[0] - 1}.conv2"]


@pytest.mark.quick_cases("shallower")
@pytest.mark.parametrize(
    ("source", "anchor"),
    [
        (lambda: Chain((6, "pool", 7, 7), (9, 9), norm=True), lambda: Chain((6, "pool", 7), (9,))),
        (lambda: Chain((6, "pool", 7)), lambda: Chain((6, 6, "pool", 5, 8))),
        (lambda: Dense(3), lambda: Dense(2)),
    ],
    ids=["deeper", "shallower", "concatenated"],
)
def test_chains_of_convolutions_come_nearer_to_their_mean(source, anchor):
    modules = [trained(make(), seed) for seed, make in enumerate((source, anchor))]
    fused, _ = fuse((source, modules[0]), (anchor, modules[1]))
    result = anchor().eval()
    result.load_state_dict(fused)
    x = inputs(300, seed=8)
    with torch.no_grad():
        mean = sum(net(x) for net in modules) / 2
        miss, alone = (float((net(x) - mean).norm()) for net in (result, modules[1]))
    assert miss < 0.9 * alone


class Grouped(nn.Module):
    """A convolution in groups: its units move as wholes."""

    def __init__(self, layers=2):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        inner = []
        for _ in range(layers):
            inner += [nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=2)]
        self.inner = nn.Sequential(*inner)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.inner(self.stem(x)).relu().mean((2, 3)))


REFUSED = {
    "a stage more": (
        lambda: ResNet((1, 1, 1)), lambda: ResNet((1, 1)), IMAGES,
        "a residual stream at 2 x 2 positions in state dict 0 only",
    ),
    "other downsampling": (
        lambda: Chain((6, "pool", 7, "pool", 8)), lambda: Chain((6, 7, "pool", 8)), IMAGES,
        "layers one after another at 2 x 2 positions in state dict 0 only",
    ),
    "other classes": (
        lambda: ResNet((2, 1), classes=4), lambda: ResNet((1, 1)), IMAGES,
        "outputs [[4]] in state dict 0, [[5]] in state dict 1",
    ),
    "groups": (lambda: Grouped(3), lambda: Grouped(2), IMAGES, "heads or groups"),
    "a norm of another kind": (
        lambda: nn.Sequential(nn.Linear(12, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 5)),
        lambda: nets.Mlp((12, 9, 8, 5)), (12,), "1.weight belongs to no layer that is fitted",
    ),
}  # fmt: skip


@pytest.mark.slow_cases("other classes", "other downsampling", "groups")
@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_correspond_is_refused(case, tmp_path):
    source, anchor, shape, why = REFUSED[case]
    pair = (source, trained(source(), 1)), (anchor, trained(anchor(), 2))
    out = tmp_path / "out.safetensors"
    with pytest.raises(IncompatibleModels) as caught:
        fuse(*pair, shape=shape, output=out)
    assert why in caught.value.why
    assert list(tmp_path.iterdir()) == []


def test_an_anchor_without_a_share_needs_partners_for_all_its_spaces():
    shapes = ((12, 7, 5), (12, 9, 8, 5))
    pair = [(mlp(shape), trained(nets.Mlp(shape), seed)) for seed, shape in enumerate(shapes)]
    with pytest.raises(IncompatibleModels, match="too few units for the anchor's shape"):
        fuse(*pair, shape=(12,), weights=(1, 0))


OTHERS = {
    "no inputs": {},
    "average": {"samples": {"x": inputs(shape=(12,))}, "blend": "average"},
    "every way": {"samples": {"x": inputs(shape=(12,))}},
    "--width": {"samples": {"x": inputs(shape=(12,))}, "blend": "joint", "width": 1.5},
    "--skip": {"samples": {"x": inputs(shape=(12,))}, "blend": "joint", "skip": ("fc1.weight",)},
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_without_joint_fusion_the_message_says_what_works(options):
    states = [trained(nets.Mlp(shape), 1).state_dict() for shape in ((12, 9, 5), (12, 9, 8, 5))]
    with pytest.raises(IncompatibleModels) as caught:
        otfuse_cli.merge(*states, arch="mlp", **options)
    assert caught.value.exit_code == 4
    assert "networks of different depth take --blend joint and inputs" in caught.value.fix


def test_names_and_shapes_alone_are_no_network_to_run():
    chain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    states = [chain.state_dict(), trained(nets.Mlp((12, 9, 5)), 1).state_dict()]
    samples = {"x": inputs(shape=(12,))}
    with pytest.raises((IncompatibleModels, UsageError)):
        otfuse_cli.merge(*states, samples=samples, blend="joint")


# The command line


@pytest.fixture
def files(tmp_path):
    shapes = ((12, 9, 8, 5), (12, 9, 5))
    paths = [tmp_path / f"{len(shape)}.safetensors" for shape in shapes]
    for seed, (path, shape) in enumerate(zip(paths, shapes, strict=True)):
        save_file(trained(nets.Mlp(shape), seed).state_dict(), path)
    np.savez(tmp_path / "x.npz", x=inputs(shape=(12,)).numpy())
    return [str(path) for path in paths], str(tmp_path / "x.npz")


def test_merge_on_the_command_line(cli, files, tmp_path):
    paths, samples = files
    out = tmp_path / "out.safetensors"
    done = cli("merge", *paths, "-o", str(out), "--blend", "joint", "--samples", samples)
    assert done.code == 0, done.err
    assert "Layers of checkpoint 0 stand for the anchor's, by linear CKA" in done.out
    report = json.loads((tmp_path / "out.report.json").read_text())
    assert [sorted(pair) for pair in report["depth"][0]["pairs"]] == [
        ["anchor_layer", "cka", "source_layer"]
    ]
    assert {n: t.shape for n, t in load_file(out).items()} == {
        n: t.shape for n, t in load_file(paths[1]).items()
    }
    before = out.read_bytes()
    again = ("-o", str(out), "--overwrite", "--blend", "joint", "--samples", samples)
    assert cli("merge", *paths, *again).code == 0
    assert out.read_bytes() == before


def test_synthetic_inputs_do(cli, files, tmp_path):
    paths, _ = files
    out = str(tmp_path / "out.safetensors")
    done = cli(
        "merge", *paths, "-o", out, "--blend", "joint", "--synthetic", "--synthetic-kind", "noise",
        "--num-samples", "100",
    )  # fmt: skip
    assert done.code == 0, done.err


def test_inspect_shows_how_alike_layers_are(cli, files, tmp_path):
    paths, samples = files
    plot = tmp_path / "depth.html"
    done = cli("inspect", *paths, "--depth", "--samples", samples, "--plot", str(plot))
    assert done.code == 0, done.err
    rows = [line.split() for line in done.out.splitlines() if line.startswith("fc1")]
    assert len(rows) == 1
    values = [float(cell.rstrip("*")) for cell in rows[0][1:]]
    assert len(values) == 2
    assert sum(cell.endswith("*") for cell in rows[0][1:]) == 1
    assert rows[0][1:][values.index(max(values))].endswith("*")
    assert "Linear CKA" in plot.read_text()
    itself = cli("inspect", paths[0], paths[0], "--depth", "--samples", samples, "--json")
    (record,) = json.loads(itself.out)["report"]["depth"]
    assert [pair["cka"] for pair in record["pairs"]] == pytest.approx([1, 1])
    assert [record["matrix"][at][at] for at in range(2)] == pytest.approx([1, 1])


@pytest.mark.parametrize(
    ("options", "code"), [((), 2), (("--ot-costs", "--samples"), 2)], ids=["no inputs", "costs"]
)
def test_what_inspect_refuses(cli, files, options, code):
    paths, samples = files
    given = [*options, *([samples] if options else [])]
    assert cli("inspect", *paths, "--depth", *given).code == code


def test_a_counter_more_is_no_other_depth():
    """Networks that differ in a buffer are refused as ever, not run each as its own."""
    make, _, shape = RENAMED["chain"]
    one, other = (dict(trained(make(), seed).state_dict()) for seed in (1, 2))
    counter = next(name for name in one if name.endswith("num_batches_tracked"))
    del one[counter]
    with pytest.raises(IncompatibleModels, match="hold different tensors") as caught:
        otfuse_cli.merge(
            one, other, arch=factory(make, shape), blend="joint", samples={"x": inputs(shape=shape)}
        )
    assert counter in caught.value.why
