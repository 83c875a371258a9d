"""A server's side of federated fusion: plans, their way back, means, what is left out."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import nets
from nets import Mlp, distance, randomise, state
from otfuse_cli.checkpoint.open import open_checkpoint
from otfuse_cli.errors import IncompatibleModels
from otfuse_cli.federated.federation import Federation
from otfuse_cli.federated.global_fit import GlobalFit
from otfuse_cli.federated.updates import Update
from otfuse_cli.graph.model import LayerGraph, Space
from otfuse_cli.matching.alignment import Alignment
from otfuse_cli.matching.carry import carried, reversed_alignment, single_alignment
from otfuse_cli.matching.match import match
from otfuse_cli.matching.models import Model
from otfuse_cli.requests.recipe import Recipe
from otfuse_cli.runtime import Runtime
from otfuse_cli.transport.maps import Permutation
from otfuse_cli.transport.single_places import places_map, reversed_map, single_places
from test_depth_streams import Transformer
from test_twins import graph_of, permuted, widened

NETS = nets.zoo()
PAIR = [state(randomise(Mlp(), seed)) for seed in (1, 2)]


def federation(arch="auto", **options):
    fit = options.pop("fit", None)
    rematch = options.pop("rematch", True)
    recipe = Recipe(**{"passes": 3, **options})
    return Federation(arch=arch, recipe=recipe, runtime=Runtime(), rematch=rematch, global_fit=fit)


def shapes(tensors):
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def assert_close(found, wanted, limit=2e-6):
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert distance(found[name].double(), tensor.double()) < limit, name


def trained(tensors, seed, step=0.02):
    """What a client makes of a model: a small step."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: t + step * torch.randn(t.shape, generator=generator).abs() * t
        if t.is_floating_point()
        else t + seed
        for name, t in tensors.items()
    }


@pytest.mark.parametrize("name", ["mlp", "vgg-bn", "resnet-basic-bn"])
@pytest.mark.slow_cases("resnet-basic-bn")
def test_permuted_twins_come_back_as_the_one_model(name):
    net, shape = NETS[name]
    one = state(net)
    start = state(randomise(type(net)(), 9)) if name != "resnet-basic-bn" else trained(one, 5, 1.0)
    twins = [permuted(one, seed) for seed in (3, 4)]
    updates = [Update(node, t, 1.0, sent=False) for node, t in enumerate([twins[0], one, twins[1]])]
    server = federation()
    fused = server.fuse(start, updates)
    assert fused.matched == (0, 1, 2)
    assert_close(fused.tensors, twins[0])  # of equal weights the first gives the order
    for update in updates:
        assert_close(server.carry(update.node, fused.tensors), update.tensors)
    assert distance(nets.run(net, fused.tensors, shape), nets.run(net, one, shape)) < 1e-5


def test_the_heaviest_client_gives_the_order():
    one = PAIR[0]
    twin = permuted(one, 3)
    updates = [Update(0, one, 1.0, sent=False), Update(1, twin, 2.0, sent=False)]
    assert_close(federation().fuse(PAIR[1], updates).tensors, twin)


def test_a_widened_twin_is_equal_and_gets_its_width_back():
    one, wide = PAIR[0], widened(PAIR[0])
    server = federation()
    updates = [Update(0, one, 3.0, sent=False), Update(1, wide, 1.0, sent=False)]
    fused = server.fuse(PAIR[1], updates)
    assert_close(fused.tensors, one)
    sent = server.carry(1, fused.tensors)
    assert shapes(sent) == shapes(wide)
    assert_close(sent, wide)


@pytest.mark.parametrize("widths", [(12, 5, 8, 3, 5), (12, 20, 11, 8, 5), (12, 4, 17, 7, 5)])
def test_out_and_back_is_the_identity_at_any_width(widths):
    one = PAIR[0]
    server = federation()
    server.open(one)
    server.meet(7, shapes(state(Mlp(widths))), one)
    sent = server.carry(7, one)
    assert shapes(sent) == shapes(state(Mlp(widths)))
    fused = server.fuse(one, [Update(7, sent, 2.0)])
    assert fused.matched == ()
    assert_close(fused.tensors, one)


@pytest.mark.parametrize("name", ["vgg-bn", "resnet-basic-bn"])
def test_a_wider_client_computes_what_the_global_model_does(name):
    net, shape = NETS[name]
    wide = type(net)((8, 9, 11)) if name == "vgg-bn" else nets.ResNet((8, 8, 13, 15), 7, cifar=True)
    server = federation()
    one = state(net)
    server.open(one)
    server.meet(1, shapes(state(wide)), one)
    sent = server.carry(1, one)
    assert distance(nets.run(wide, sent, shape), nets.run(net, one, shape)) < 1e-5
    assert_close(server.fuse(one, [Update(1, sent, 1.0)]).tensors, one)


def test_a_narrower_client_has_the_strongest_units():
    one = {name: tensor.clone() for name, tensor in PAIR[0].items()}
    for name in ("fc1.weight", "fc1.bias"):
        one[name][[1, 4]] *= 0.01
    one["fc2.weight"][:, [1, 4]] *= 0.01
    server = federation()
    server.open(one)
    server.meet(1, shapes(state(Mlp((12, 7, 8, 7, 5)))), one)
    kept = [0, 2, 3, 5, 6, 7, 8]
    sent = server.carry(1, one)
    assert torch.equal(sent["fc1.weight"], one["fc1.weight"][kept])
    assert torch.equal(sent["fc2.weight"], one["fc2.weight"][:, kept])


def test_units_that_a_client_lacks_are_the_others_alone():
    one, small = PAIR[0], shapes(state(Mlp((12, 5, 8, 7, 5))))
    server = federation(rematch=False)
    server.open(one)
    server.meet(1, small, one)
    sent = server.carry(1, one)
    lowered = {name: tensor - 1 for name, tensor in sent.items()}
    raised = {name: tensor + 1 for name, tensor in one.items()}
    fused = server.fuse(one, [Update(0, raised, 1.0), Update(1, lowered, 3.0)]).tensors
    has = torch.tensor([bool((sent["fc1.bias"] == bias).any()) for bias in one["fc1.bias"]])
    assert has.sum() == 5
    change = fused["fc1.bias"] - one["fc1.bias"]
    assert torch.allclose(change, torch.where(has, -0.5, 1.0), atol=1e-6)
    columns = fused["fc2.weight"] - one["fc2.weight"]
    assert torch.allclose(columns, torch.where(has, -0.5, 1.0).expand(8, 9), atol=1e-6)
    assert torch.allclose(fused["fc4.bias"], one["fc4.bias"] - 0.5, atol=1e-6)


def test_clients_that_stay_in_order_are_averaged_plainly():
    one = state(NETS["vgg-bn"][0])
    updates = [Update(node, trained(one, node + 1), w) for node, w in enumerate((3.0, 1.0, 2.0))]
    fused = federation().fuse(one, updates)
    assert fused.matched == ()
    for name, tensor in fused.tensors.items():
        if tensor.is_floating_point():
            parts = [u.tensors[name] * (u.weight / 6) for u in updates]
            assert torch.equal(tensor, parts[0] + parts[1] + parts[2]), name
        else:
            assert tensor == one[name] + 3  # of counters the largest
            assert tensor.dtype == torch.int64


def test_a_client_that_changed_its_order_is_matched_to_the_others():
    one = PAIR[0]
    server = federation()
    updates = [Update(0, one, 1.0), Update(1, permuted(one, 5), 5.0), Update(2, one, 1.0)]
    fused = server.fuse(one, updates)
    assert fused.matched == (1,)
    assert_close(fused.tensors, one)
    assert not server.moves(0)
    assert server.moves(1)
    assert_close(server.carry(1, one), updates[1].tensors)
    # From now on that is its order, and it is no stranger any more.
    later = [Update(u.node, trained(u.tensors, 1, 0.001), u.weight) for u in updates]
    assert server.fuse(one, later).matched == ()


def test_those_who_are_away_keep_their_order():
    """New clients alone in a round take the global model's order, not one of their own."""
    one, server = PAIR[0], federation()
    twins = {node: permuted(one, node) for node in (2, 3, 4)}
    first = [Update(1, one, 2.0, sent=False), Update(2, twins[2], 1.0, sent=False)]
    fused = server.fuse(PAIR[1], first).tensors
    later = [Update(node, twins[node], 5.0, sent=False) for node in (3, 4)]
    result = server.fuse(fused, later)
    assert result.matched == (3, 4)
    assert_close(result.tensors, one)
    for node, twin in twins.items():
        assert_close(server.carry(node, result.tensors), twin)


def test_without_rematching_an_order_is_believed():
    one = PAIR[0]
    server = federation(rematch=False)
    twin = permuted(one, 5)
    fused = server.fuse(one, [Update(0, twin, 1.0)])
    assert fused.matched == ()
    assert torch.equal(fused.tensors["fc1.weight"], twin["fc1.weight"])


@pytest.mark.parametrize("widths", [(12, 14, 8, 7, 5), (12, 6, 10, 4, 5)])
def test_a_global_model_of_widths_that_no_client_has(widths):
    """The heaviest client is carried to its widths; twins of it are still one model."""
    start = state(randomise(Mlp(widths), 3))
    one = PAIR[0]
    server = federation()
    twins = [one, permuted(one, 4)]
    fused = server.fuse(start, [Update(n, t, 1.0, sent=False) for n, t in enumerate(twins)])
    assert shapes(fused.tensors) == shapes(start)
    first, second = (server.carry(n, fused.tensors) for n in (0, 1))
    assert shapes(first) == shapes(one)
    assert_close(permuted(first, 4), second)


def test_repair_restores_what_averaging_strangers_takes():
    net, _ = NETS["vgg-bn"]
    states = [state(randomise(type(net)(), seed)) for seed in (1, 2, 3)]
    updates = [Update(n, s, 1.0, sent=False) for n, s in enumerate(states)]
    plain = federation(repair="none").fuse(states[0], updates).tensors
    fused = federation().fuse(states[0], updates).tensors
    # Unlike units average to less variance than the running variances' mean says.
    assert (fused["features.1.running_var"] < plain["features.1.running_var"]).all()
    assert torch.allclose(fused["features.1.running_mean"], plain["features.1.running_mean"])


def broken(case):
    tensors = {name: tensor.clone() for name, tensor in PAIR[0].items()}
    if case == "missing":
        del tensors["fc2.bias"]
    elif case == "extra":
        tensors["fc9.bias"] = torch.zeros(3)
    elif case == "rank":
        tensors["fc2.bias"] = torch.zeros(8, 1)
    elif case == "width":
        tensors["fc2.bias"] = torch.zeros(9)
    elif case == "classes":
        tensors |= {"fc4.weight": torch.ones(6, 7), "fc4.bias": torch.ones(6)}
    elif case == "integers":
        tensors["fc2.bias"] = tensors["fc2.bias"].long()
    elif case in ("nan", "inf"):
        tensors["fc3.weight"][2, 1] = float(case)
    return tensors


FAULTS = {
    "missing": "it lacks fc2.bias",
    "extra": "the global model has no fc9.bias",
    "rank": r"fc2.bias is \[8, 1\], \[8\] in the global model",
    "width": "differ in more than widths; fc2",
    "classes": "different vocabularies or classes; fc4",
    "integers": "fc2.bias is int64, float32 in the global model",
    "nan": "fc3.weight holds NaN or infinity",
    "inf": "fc3.weight holds NaN or infinity",
}


@pytest.mark.parametrize(("case", "said"), FAULTS.items())
def test_a_broken_update_is_left_out_and_named(case, said):
    one, server = PAIR[0], federation()
    good = trained(one, 1)
    fused = server.fuse(one, [Update(0, good, 1.0), Update(5, broken(case), 1.0)])
    assert fused.used == (0,)
    assert fused.dropped.keys() == {5}
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(fused.dropped[5])
    assert_close(fused.tensors, good)
    assert not server.knows(5)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_an_update_without_a_weight_is_left_out(weight):
    fused = federation().fuse(PAIR[0], [Update(4, PAIR[0], weight)])
    assert fused.tensors is None
    assert "its weight is" in fused.dropped[4]


def test_a_client_keeps_its_widths():
    server = federation()
    server.fuse(PAIR[0], [Update(1, PAIR[0], 1.0)])
    fused = server.fuse(PAIR[0], [Update(1, widened(PAIR[0]), 1.0)])
    assert "was [9, 12] before" in fused.dropped[1]


def test_shapes_of_another_network_are_refused():
    server = federation()
    server.open(PAIR[0])
    with pytest.raises(IncompatibleModels, match="another network"):
        server.meet(3, {"fc1.weight": (9, 12)}, PAIR[0])
    with pytest.raises(IncompatibleModels, match="client 3"):
        server.meet(3, shapes(broken("classes")), PAIR[0])
    assert not server.knows(3)


def test_an_unknown_architecture_is_told_before_any_round():
    unknown = {"a": torch.ones(3, 3), "b": torch.ones(3, 3)}
    with pytest.raises(IncompatibleModels, match="unknown architecture"):
        federation().open(unknown)
    with pytest.raises(IncompatibleModels, match="unknown architecture"):
        federation().fuse(unknown, [Update(1, unknown, 1.0)])


def test_a_fit_on_made_up_inputs_comes_nearer_to_the_clients():
    states = [state(randomise(Mlp((6, 9, 8, 5)), seed)) for seed in (1, 2, 3)]
    updates = [Update(n, s, 1.0, sent=False) for n, s in enumerate(states)]
    net = Mlp((6, 9, 8, 5))
    x = torch.randn(400, 6, generator=torch.Generator().manual_seed(0))

    def logits(tensors):
        return torch.func.functional_call(net, tensors, (x,))

    wanted = sum(logits(s) for s in states) / 3
    fit = GlobalFit({"samples": {"x": x.numpy()}, "blend": "average"})
    plain = federation("mlp").fuse(states[0], updates).tensors
    fitted = federation("mlp", fit=fit).fuse(states[0], updates).tensors
    assert list(fitted) == list(plain)
    assert (logits(fitted) - wanted).norm() < 0.7 * (logits(plain) - wanted).norm()


def test_a_fit_is_for_rounds_in_which_clients_were_matched_unless_always():
    one = PAIR[0]
    fit = {"samples": {"x": torch.randn(60, 12).numpy()}, "blend": "average"}
    update = [Update(n, trained(one, n, 0.3), 1.0) for n in (1, 2)]
    plain = federation("mlp").fuse(one, update).tensors
    seldom = federation("mlp", fit=GlobalFit(fit)).fuse(one, update).tensors
    always = federation("mlp", fit=GlobalFit(fit, always=True)).fuse(one, update).tensors
    assert torch.equal(seldom["fc2.weight"], plain["fc2.weight"])
    assert not torch.equal(always["fc2.weight"], plain["fc2.weight"])


def test_clients_of_a_traced_module_may_have_other_widths(kept_graphs):
    net, narrow = randomise(nets.Vgg((6, 8, 7)), 1), randomise(nets.Vgg((5, 8, 6)), 2)

    def factory():
        return net, torch.zeros(nets.IMAGE)

    one = state(net)
    server = federation(factory)
    updates = [Update(1, one, 2.0, sent=False), Update(2, state(narrow), 1.0, sent=False)]
    fused = server.fuse(one, updates)
    assert fused.matched == (1, 2)
    assert shapes(fused.tensors) == shapes(one)
    assert shapes(server.carry(2, fused.tensors)) == shapes(updates[1].tensors)
    again = [Update(n, server.carry(n, fused.tensors), 1.0) for n in (1, 2)]
    assert_close(server.fuse(fused.tensors, again).tensors, fused.tensors)
    server.meet(3, shapes(state(nets.Vgg((9, 9, 9)))), fused.tensors)
    assert server.moves(3)


class TiedNet(nn.Module):
    """An output layer that shares its weight with the embedding, and hidden units in between."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.up, self.down = nn.Linear(6, 11), nn.Linear(11, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.down(self.up(self.embed(tokens)).relu()))


def test_tied_tensors_are_one_under_all_their_names(kept_graphs):
    net = TiedNet()

    def factory():
        return net, torch.zeros(2, 5, dtype=torch.int64)

    one = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    places = torch.randperm(11, generator=torch.Generator().manual_seed(1))
    other = dict(one)
    for name, dim in (("up.weight", 0), ("up.bias", 0), ("down.weight", 1)):
        other[name] = one[name].index_select(dim, places)
    server = federation(factory)
    moved = {n: t + 0.25 for n, t in one.items()}
    fused = server.fuse(one, [Update(1, moved, 1.0)]).tensors
    assert_close(fused, moved)
    fused = server.fuse(one, [Update(1, one, 1.0), Update(2, other, 1.0, sent=False)])
    assert fused.matched == (2,)
    assert_close(fused.tensors, one)
    assert_close(server.carry(2, one), other)


@pytest.mark.slow
def test_heads_come_back_with_what_is_inside_them(kept_graphs):
    net = randomise(Transformer(2), 1)
    one, generator = state(net), torch.Generator().manual_seed(3)
    server = federation(net)
    server.open(one)
    graph = server._graph
    plans = Alignment(
        {
            s.id: Permutation(torch.randperm(s.size, generator=generator))
            for s in graph.free()
            if s.per is None
        },
        {
            s.id: tuple(
                Permutation(torch.randperm(s.size, generator=generator))
                for _ in range(graph.spaces[s.per].size)
            )
            for s in graph.free()
            if s.per is not None
        },
    )
    assert plans.families
    moved = carried(one, graph, plans)
    assert not torch.equal(next(iter(moved.values())), next(iter(one.values())))
    assert_close(carried(moved, graph, reversed_alignment(plans, graph)), one, limit=1e-9)


def test_the_way_back_of_heads_by_hand():
    generator = torch.Generator().manual_seed(0)

    def drawn(size):
        return Permutation(torch.randperm(size, generator=generator))

    spaces = {"h": Space("h", 3), "v": Space("v", 4, per="h")}
    plan = Alignment({"h": drawn(3)}, {"v": tuple(drawn(4) for _ in range(3))})
    back = reversed_alignment(plan, LayerGraph({}, spaces, ()))
    heads = torch.randn(3, 4, generator=generator)

    def move(tensor, alignment):
        tensor = alignment.maps["h"].produce(tensor, 0)
        inner = zip(alignment.families["v"], tensor, strict=True)
        return torch.stack([map.produce(row, 0) for map, row in inner])

    assert not torch.equal(move(heads, plan), heads)
    assert torch.equal(move(move(heads, plan), back), heads)


def best_by_hand(benefit, allowed):
    n, m = benefit.shape
    every = itertools.product(range(m), repeat=n)
    values = [
        sum(float(benefit[i, place]) for i, place in enumerate(places))
        for places in every
        if allowed([places.count(at) for at in range(m)])
    ]
    return max(values)


@pytest.mark.parametrize(("n", "m"), [(3, 3), (2, 5), (5, 2), (6, 4), (6, 3), (1, 4), (4, 1)])
def test_places_are_the_best_that_there_are(n, m):
    benefit = torch.randn(n, m, generator=torch.Generator().manual_seed(n * 10 + m))
    benefit[:, 0] -= 5.0  # nobody's favourite, and still to be taken as often as others
    place = single_places(benefit)
    counts = torch.bincount(place, minlength=m).tolist()
    low, high = n // m, -(-n // m)

    def even(counts):
        return min(counts) >= low and max(counts) <= high

    assert even(counts)
    value = float(benefit[torch.arange(n), place].sum())
    assert value == pytest.approx(best_by_hand(benefit, even))


def test_places_as_maps_and_back():
    place = torch.tensor([1, 3, 1])
    there = places_map(place, 4)
    back = reversed_map(there)
    rows = torch.tensor([[1.0], [2.0], [5.0]])
    assert torch.allclose(there.produce(rows, 0, torch.full((4, 1), 9.0)).flatten(),
                          torch.tensor([9.0, 3.0, 9.0, 2.0]))  # fmt: skip
    assert torch.allclose(there.consume(rows, 0, torch.zeros(4, 1)).flatten(),
                          torch.tensor([0.0, 6.0, 0.0, 2.0]))  # fmt: skip
    units = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    assert torch.allclose(back.produce(units, 0).flatten(), torch.tensor([2.0, 4.0, 2.0]))
    assert torch.allclose(back.consume(units, 0).flatten(), torch.tensor([1.0, 4.0, 1.0]))
    assert places_map(torch.tensor([2, 0, 1]), 3).hard


def test_single_places_keep_what_maps_that_split_say():
    one, wide = PAIR[0], widened(PAIR[0])
    graphs = [graph_of(wide), graph_of(one)]
    source, anchor = (
        Model(at, open_checkpoint(t), g)
        for at, (t, g) in enumerate(zip((wide, one), graphs, strict=True))
    )
    found = match(source, anchor, Recipe(), Runtime()).alignment
    single = single_alignment(source, anchor, found)
    for space, map in single.maps.items():
        units = torch.arange(map.sizes[0]) // 2
        rows, cols, _ = map.plan.entries()
        assert torch.equal(cols, units[rows]), space


def test_other_numbers_of_heads_are_refused():
    spaces = {"h": Space("h", 3), "v": Space("v", 4, per="h")}
    fewer = {"h": Space("h", 2), "v": Space("v", 4, per="h")}
    one = Model(0, open_checkpoint({"x": torch.ones(2)}), LayerGraph({}, fewer, ()))
    other = Model(1, open_checkpoint({"x": torch.ones(2)}), LayerGraph({}, spaces, ()))
    with pytest.raises(IncompatibleModels, match="heads of other number"):
        single_alignment(one, other, Alignment({}))


def test_batch_norm_of_one_client_alone_is_kept_whole():
    one = state(NETS["vgg-bn"][0])
    fused = federation().fuse(state(randomise(nets.Vgg(), 5)), [Update(1, one, 2.0, sent=False)])
    for name, tensor in one.items():
        assert torch.equal(fused.tensors[name], tensor), name
