"""Pre-norm transformers of different depth: what stands for what, and their joint fusion."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import otfuse_cli
from otfuse_cli.errors import IncompatibleModels
from otfuse_cli.graph.analysis.streams import normed_stream
from otfuse_cli.graph.trace.from_module import export, trace
from otfuse_cli.graph.trace.program import labelled_program
from otfuse_cli.matching.stream_blocks import streamed
from otfuse_cli.matching.stream_counterpart import stream_counterpart
from otfuse_cli.running.execute import Walk
from test_examples import example
from test_real_pairs import images, pair

pytestmark = pytest.mark.usefixtures("kept_graphs")

POSITIONS, CHANNELS = 5, 6


class Attention(nn.Module):
    def __init__(self, width, heads, bias=True):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, 4 * heads, bias=bias) for _ in range(3))
        self.out = nn.Linear(4 * heads, width)

    def forward(self, x):
        parts = [
            layer(x).unflatten(-1, (self.heads, 4)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        ]
        return self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A block; `order` says which comes first."""

    def __init__(self, width, heads, units, bias=True, order="am"):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, bias)
        self.up, self.down = nn.Linear(width, units), nn.Linear(units, width)
        self.order = order

    def forward(self, x):
        for part in self.order:
            if part == "a":
                x = x + self.attention(self.norm1(x))
            else:
                x = x + self.down(self.up(self.norm2(x)).relu())
        return x


class Parallel(Layer):
    """Attention and MLP read the same stream."""

    def forward(self, x):
        return x + self.attention(self.norm1(x)) + self.down(self.up(self.norm2(x)).relu())


class Transformer(nn.Module):
    """Vectors at a few positions, and classes read off the mean of them, or off the first."""

    def __init__(self, blocks, width=12, heads=3, units=10, **options):
        super().__init__()
        make = options.pop("block", Layer)
        self.name, self.first = options.pop("name", "layers"), options.pop("first", True)
        classes = options.pop("classes", 4)
        self.embed = nn.Linear(CHANNELS, width)
        self.place = nn.Parameter(torch.randn(1, POSITIONS, width))
        layers = [make(width, heads, units, **options) for _ in range(blocks)]
        self.add_module(self.name, nn.ModuleList(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x):
        x = self.embed(x) + self.place
        for layer in getattr(self, self.name):
            x = layer(x)
        x = self.norm(x)
        return self.head(x[:, 0] if self.first else x.mean(1))


def drawn(module, seed):
    """Weights by seed, norms as if trained."""
    torch.manual_seed(seed)
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=1.2 * part.in_features**-0.5)
            if part.bias is not None:
                nn.init.normal_(part.bias, std=0.3)
        if isinstance(part, nn.LayerNorm):
            nn.init.uniform_(part.weight, 0.5, 1.5)
            nn.init.normal_(part.bias, std=0.3)
    return module.eval()


def inputs(count=200, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, POSITIONS, CHANNELS, generator=generator)


def factory(make):
    return lambda: (make(), torch.randn(4, POSITIONS, CHANNELS))


def fuse(source, anchor, **options):
    """Joint fusion of two modules, each given as (factory, module)."""
    arch = {at: factory(make) for at, (make, _) in enumerate((source, anchor))}
    states = [module.state_dict() for _, module in (source, anchor)]
    given = {"samples": {"x": inputs()}, "num_samples": 200, "blend": "joint"}
    return otfuse_cli.merge(*states, arch=arch, **given, **options)


def miss(fused, make, wanted, x):
    """How far a fused network is from what it should say, relative to that."""
    result = make().eval()
    result.load_state_dict(fused)
    with torch.no_grad():
        return float((result(x) - wanted).norm() / wanted.norm())


def with_silent_block(blocks, at, **sizes):
    """A transformer, and the same with a block more, which adds nothing."""
    small, deep = drawn(Transformer(blocks, **sizes), 1), drawn(Transformer(blocks + 1, **sizes), 2)
    state = deep.state_dict()
    for name, tensor in small.state_dict().items():
        if name.startswith("layers."):
            number, _, rest = name.removeprefix("layers.").partition(".")
            name = f"layers.{int(number) + (int(number) >= at)}.{rest}"
        state[name] = tensor.clone()
    for name in state:
        if name.startswith((f"layers.{at}.attention.out", f"layers.{at}.down")):
            state[name] = torch.zeros_like(state[name])
    deep.load_state_dict(state)
    return (lambda: Transformer(blocks, **sizes), small), (
        lambda: Transformer(blocks + 1, **sizes),
        deep,
    )


# What of one network stands for what of the other


def streamed_of(module):
    """A transformer as it is compared, and a pass of it on 20 inputs."""
    x = inputs(20)
    graph = trace(module, (x,), source="net")
    program = labelled_program(export(module, (x,)), batch=20, graph=graph)
    network = streamed(program, graph, normed_stream(graph), "net")
    walk = Walk(program, module.state_dict(), [x], keep=[node.name for node in program.nodes])
    walk.outputs()
    return network, walk


def by_place(*pairs):
    """Places of an anchor and of a source are alike where they are paired by number."""

    def similar(ours, theirs):
        def alike(one, other):
            numbers = (
                [p.seen for p in ours.places].index(one),
                [p.seen for p in theirs.places].index(other),
            )
            return float(numbers in pairs)

        return alike

    return similar


def alike(one, other):
    """All places of a stream are."""
    return 1.0


def test_a_transformer_is_read_as_blocks():
    network, _ = streamed_of(drawn(Transformer(3), 1))
    assert [len(block) for block in network.blocks] == [2, 2, 2]
    assert network.prelude.tensors == ("embed.weight", "embed.bias", "place")
    assert network.coda.tensors == ("norm.weight", "norm.bias", "head.weight", "head.bias")
    assert [place.layer for place in network.places] == [
        "embed", "layers.0.down", "layers.1.down", "layers.2.down",
    ]  # fmt: skip
    attention, mlp = network.blocks[1]
    assert [fit.name.removeprefix("layers.1.") for fit in attention.fits] == [
        "attention.q", "attention.k", "attention.v", "attention.out",
    ]  # fmt: skip
    assert mlp.before == attention.after
    assert set(mlp.tensors) == {
        f"layers.1.{name}.{part}" for name in ("norm2", "up", "down") for part in ("weight", "bias")
    }


def test_what_several_blocks_add_is_one_sum():
    """An attention layer stands for those of all blocks, and so does an MLP."""
    (theirs, own), (ours, _) = (streamed_of(drawn(Transformer(n), n)) for n in (4, 2))
    similar = by_place((1, 3))(ours, theirs)
    found = stream_counterpart(ours, theirs, similar, alike, labels=("source", "anchor"))
    assert [(pair.anchor.layer, pair.source.layer) for pair in found.pairs] == [
        ("embed", "embed"), ("layers.0.down", "layers.2.down"), ("layers.1.down", "layers.3.down"),
    ]  # fmt: skip
    first, second = ours.blocks
    begin, ends = theirs.places[0].seen, [block[-1].after for block in theirs.blocks]
    ((value, _),) = found.parts(first[1].after, own)
    assert torch.equal(value, own[ends[2]])
    added = [own[b[0].after] - own[b[0].before] for b in theirs.blocks[:3]]
    ((value, _),) = found.parts(first[0].after, own)
    torch.testing.assert_close(value, own[begin] + sum(added))
    # Heads and units are those of each block, apart.
    for fit, count in ((first[0].fits[0], 3), (first[1].fits[0], 3), (second[0].fits[0], 1)):
        assert len(found.parts(fit.target, own)) == count
    assert [a.heads for a in found.attentions[0]] == [b[0].spaces[0] for b in theirs.blocks[:3]]
    assert found.own_tensors("layers.0.up.weight") == tuple(
        f"layers.{n}.up.weight" for n in range(3)
    )
    # What the fused MLP would read is normalised as its norm does it.
    ((name, normed),) = [(n, v) for n, v in found.normed.items() if not isinstance(v, str)]
    assert name == first[1].fits[0].layer.input
    total = own[begin] + sum(added)
    torch.testing.assert_close(
        normed.value(own), F.layer_norm(total, total.shape[-1:]), rtol=1e-4, atol=1e-4
    )


def test_blocks_are_put_together_that_read_nearly_the_same():
    """Not those that change the stream for the next one, however alike the two networks are."""
    (theirs, _), (ours, _) = (streamed_of(drawn(Transformer(n), n)) for n in (4, 2))
    names = [place.seen for place in theirs.places]

    def within(one, other):
        """The first block changes everything, the others little."""
        return 0.3 if 0 in (names.index(one), names.index(other)) else 0.9

    similar = by_place((1, 3))(ours, theirs)
    found = stream_counterpart(ours, theirs, similar, within, labels=("source", "anchor"))
    # Blocks 2 and 3 behind the first cost 2 * (0.7 + 0.7), a place less alike costs 1.
    assert [pair.source.layer for pair in found.pairs] == [
        "embed",
        "layers.0.down",
        "layers.3.down",
    ]


def test_where_the_source_has_no_block_its_stream_stays():
    (theirs, own), (ours, _) = (streamed_of(drawn(Transformer(n), n)) for n in (1, 2))
    similar = by_place((1, 0))(ours, theirs)
    found = stream_counterpart(ours, theirs, similar, alike, labels=("source", "anchor"))
    extra = ours.blocks[0]
    for part in extra:
        ((value, _),) = found.parts(part.after, own)
        assert torch.equal(value, own[theirs.places[0].seen])
        assert [found.parts(fit.target, own) for fit in part.fits[:-1]] == [[]] * (
            len(part.fits) - 1
        )
    assert found.attentions == ((), found.attentions[1])
    assert found.sizes[extra[1].spaces[0]] == 0
    assert found.own_tensors("layers.0.up.weight") == ()
    assert found.own_tensors("layers.1.up.weight") == ("layers.0.up.weight",)


# Fusion


@pytest.mark.quick_cases("source-0-even", "anchor-2-uneven", "source-1-alone", "anchor-0-alone")
@pytest.mark.parametrize("weights", [None, (0.7, 0.3), (1, 0)], ids=["even", "uneven", "alone"])
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("deeper", ["source", "anchor"])
def test_a_block_that_adds_nothing_changes_nothing(deeper, at, weights):
    small, deep = with_silent_block(2, at)
    source, anchor = (deep, small) if deeper == "source" else (small, deep)
    if deeper == "anchor" and weights == (1, 0):
        with pytest.raises(IncompatibleModels, match="too few units for the anchor's shape"):
            fuse(source, anchor, weights=weights)
        return
    fused, report = fuse(source, anchor, weights=weights)
    x = inputs(50, seed=8)
    with torch.no_grad():
        assert miss(fused, anchor[0], small[1](x), x) < 1e-4
    (record,) = report.depth
    assert all(pair.cka > 1 - 1e-9 for pair in record.pairs)


def test_of_equal_depth_it_is_what_joint_fusion_gives():
    """A source under other names goes the way of another depth, with every block in its place."""
    sizes = {"width": 12, "heads": 3, "units": 10}
    one, other = (drawn(Transformer(2, **sizes), seed) for seed in (1, 2))
    make, make_renamed = (lambda n=n: Transformer(2, name=n, **sizes) for n in ("layers", "h"))
    renamed = {n.replace("layers.", "h."): t for n, t in one.state_dict().items()}
    samples = {"samples": {"x": inputs()}, "num_samples": 200, "blend": "joint"}
    expected, _ = otfuse_cli.merge(
        one.state_dict(), other.state_dict(), arch=factory(make), **samples
    )
    arch = {0: factory(make_renamed), 1: factory(make)}
    fused, _ = otfuse_cli.merge(renamed, other.state_dict(), arch=arch, **samples)
    for name, tensor in expected.items():
        assert torch.equal(fused[name], tensor), name


@pytest.mark.quick_cases("3-2", "1-3")
@pytest.mark.parametrize(("source", "anchor"), [(3, 2), (2, 3), (1, 3), (4, 1)])
def test_transformers_come_nearer_to_their_mean(source, anchor):
    makes = (lambda: Transformer(source, width=14, heads=4), lambda: Transformer(anchor))
    modules = [drawn(make(), seed) for seed, make in enumerate(makes)]
    fused, report = fuse(*zip(makes, modules, strict=True))
    x = inputs(300, seed=8)
    with torch.no_grad():
        mean = sum(module(x) for module in modules) / 2
        alone = float((modules[1](x) - mean).norm() / mean.norm())
    assert miss(fused, makes[1], mean, x) < 0.6 * alone
    assert all(refit.after <= refit.before + 1e-9 for refit in report.refits)


def test_three_transformers_of_three_depths():
    makes = [lambda n=n: Transformer(n) for n in (1, 3, 2)]
    modules = [drawn(make(), seed) for seed, make in enumerate(makes)]
    fused, report = otfuse_cli.merge(
        *(module.state_dict() for module in modules),
        arch={at: factory(make) for at, make in enumerate(makes)},
        samples={"x": inputs()},
        num_samples=200,
        blend="joint",
    )
    assert [(record.source, len(record.pairs)) for record in report.depth] == [(0, 3), (1, 3)]
    x = inputs(300, seed=8)
    with torch.no_grad():
        mean = sum(module(x) for module in modules) / 3
        alone = float((modules[2](x) - mean).norm() / mean.norm())
    assert miss(fused, makes[2], mean, x) < 0.6 * alone


def test_inspect_shows_how_alike_blocks_are():
    makes = [lambda n=n: Transformer(n) for n in (3, 2)]
    states = [drawn(make(), seed).state_dict() for seed, make in enumerate(makes)]
    report = otfuse_cli.inspect(
        *states,
        arch={at: factory(make) for at, make in enumerate(makes)},
        samples={"x": inputs()},
        num_samples=100,
        depth=True,
    )
    (record,) = report.depth
    assert record.anchor_layers == ("embed", "layers.0.down", "layers.1.down")
    assert record.source_layers == (*record.anchor_layers, "layers.2.down")
    assert (len(record.matrix), len(record.matrix[0])) == (3, 4)
    assert (record.pairs[0].source_layer, record.pairs[2].source_layer) == (
        "embed",
        "layers.2.down",
    )


REFUSED = {
    "the order in a block": (
        lambda: Transformer(3, order="ma"),
        "a block is built otherwise: layers.0.up.weight in state dict 0, layers.0.attention.q",
    ),
    "a bias less": (
        lambda: Transformer(3, bias=False),
        "a block is built otherwise: layers.0.attention.k.weight in state dict 0",
    ),
    "other classes": (
        lambda: Transformer(3, classes=3),
        "what reads the stream at its end is built otherwise: head.weight",
    ),
    "both at once": (
        lambda: Transformer(3, block=Parallel),
        "several blocks read the same stream: layers.0.attention.out and layers.0.down",
    ),
    "no transformer": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(30, 8), nn.ReLU(), nn.Linear(8, 4)),
        "is a transformer, the other one is not",
    ),
}


@pytest.mark.quick_cases("both at once", "a bias less")
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_built_otherwise_is_refused(case, tmp_path):
    make, why = REFUSED[case]
    pair = (make, drawn(make(), 1)), (lambda: Transformer(2), drawn(Transformer(2), 2))
    with pytest.raises(IncompatibleModels) as caught:
        fuse(*pair, output=tmp_path / "out.safetensors")
    assert why in str(caught.value.why), caught.value.why
    assert caught.value.exit_code == 4
    assert list(tmp_path.iterdir()) == []


# Networks of transformers


def hf_network(kind, layers):
    """A small one, with the weights that it is built with, made ten times larger."""
    transformers = pytest.importorskip("transformers")
    if kind == "vit":
        config = transformers.ViTConfig(
            hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=48,
            image_size=8, patch_size=4, num_labels=5,
        )  # fmt: skip
        net = transformers.ViTForImageClassification(config)
    elif kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=19, n_embd=32, n_layer=layers, n_head=4, n_positions=8,
            tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        net = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            vocab_size=19, hidden_size=32, intermediate_size=40, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8,
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        net = transformers.LlamaForCausalLM(config)
    net.config.use_cache = False
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10)
    return net.eval()


def hf_inputs(kind, count, seed=3):
    generator = torch.Generator().manual_seed(seed)
    if kind == "vit":
        return {"pixel_values": torch.randn(count, 3, 8, 8, generator=generator)}
    return {"input_ids": torch.randint(0, 19, (count, 8), generator=generator)}


@pytest.mark.slow
@pytest.mark.parametrize("deeper", ["source", "anchor"])
@pytest.mark.parametrize("kind", ["vit", "gpt2", "llama"])
def test_a_silent_block_in_networks_of_transformers(kind, deeper):
    """Fused queries, rotary positions, grouped heads, biases or none; the first block is silent."""
    torch.manual_seed(0)
    small, deep = hf_network(kind, 2), hf_network(kind, 3)
    prefix = {"vit": "vit.layers.", "gpt2": "transformer.h.", "llama": "model.layers."}[kind]
    state = deep.state_dict()
    for name, tensor in small.state_dict().items():
        number, _, rest = name.removeprefix(prefix).partition(".")
        state[f"{prefix}{int(number) + 1}.{rest}" if name.startswith(prefix) else name] = tensor
    for name in state:
        if name.startswith(f"{prefix}0.") and any(
            part in name for part in ("o_proj", "fc2", "c_proj", "down_proj")
        ):
            state[name] = torch.zeros_like(state[name])
    deep.load_state_dict(state)
    order = ((3, deep), (2, small)) if deeper == "source" else ((2, small), (3, deep))
    fused, _ = otfuse_cli.merge(
        *(net.state_dict() for _, net in order),
        arch={
            at: lambda n=n: (hf_network(kind, n), hf_inputs(kind, 4))
            for at, (n, _) in enumerate(order)
        },
        samples=hf_inputs(kind, 150),
        num_samples=150,
        blend="joint",
    )
    result, x = hf_network(kind, order[1][0]), hf_inputs(kind, 40, seed=8)
    result.load_state_dict(fused)
    with torch.no_grad():
        said, wanted = result(**x).logits, small(**x).logits
    assert float((said - wanted).norm() / wanted.norm()) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_language_models_of_two_and_four_layers(kind, tmp_path):
    """Into four layers nearly as good as the better one; into two better than layers dropped."""
    pytest.importorskip("transformers")
    language, depth = example("language"), example("depth")
    tokens = language.text()
    cut = len(tokens) * 9 // 10
    found = depth.language_figures(kind, language, tokens, cut, steps=150, cache=tmp_path)
    assert found["into deeper"] < 1.05 * max(found["parents"]), found
    assert found["into shallower"] < found["dropped"], found
    assert found["alone"] < found["dropped"], found


@pytest.mark.slow
def test_a_vit_into_fewer_blocks(shared):
    """Better than the same blocks alone, the others dropped. Back into six: near the pair."""
    pytest.importorskip("transformers")
    networks, depth, evaluate = (example(n) for n in ("networks", "depth", "evaluate"))
    first, second = pair(shared, "cifar10-vit")
    drop = list(depth.without_layers(evaluate.load(first), "vit.layers.", 4))
    x, y = images("cifar")
    chosen = evaluate.draw(y, 2_000)
    test = x[chosen], y[chosen]
    samples = {"samples": {"x": images("cifar", "train")[0]}, "num_samples": 400, "blend": "joint"}
    few, report = otfuse_cli.merge(
        first, drop[0], arch={0: networks.vit, 1: networks.vit4}, weights=(1, 0), **samples
    )
    # The blocks that stand alone for one of the anchor's, and the last of several.
    kept = tuple(int(p.source_layer.split(".")[2]) for p in report.depth[0].pairs[1:])
    plain = next(depth.without_layers(evaluate.load(first), "vit.layers.", 4, only=kept))
    scores = [depth.right(depth.logits(networks.vit4, s, test[0]), test) for s in (few, plain)]
    assert scores[0] > max(67, scores[1] + 4), scores
    back, _ = otfuse_cli.merge(few, second, arch={0: networks.vit4, 1: networks.vit}, **samples)
    assert depth.right(depth.logits(networks.vit, back, test[0]), test) > 72
