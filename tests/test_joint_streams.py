"""Joint fusion of transformers: basis, heads, units, positions (`--blend joint`)."""

from __future__ import annotations

import pytest
import torch

import otfuse_cli
from otfuse_cli.checkpoint.open import open_checkpoint
from otfuse_cli.errors import UsageError
from otfuse_cli.fusion.positions import Positions
from otfuse_cli.fusion.stream_choice import choose_heads, choose_units, read_from, turns
from otfuse_cli.graph.trace.from_module import export, trace
from otfuse_cli.graph.trace.program import labelled_program
from otfuse_cli.running.relabel import draw_maps, relabel_state
from otfuse_cli.running.samples import Samples
from otfuse_cli.session.parents import assemble
from test_orthogonal import MERGED, NETS, change, folder, known, made, tensors_of, twin

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("kept_graphs")
COUNT = 120


def inputs_for(name: str, count: int = COUNT) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    ((_, example),) = made(name)[1].items()
    if example.is_floating_point():
        return torch.randn(count, *example.shape[1:], generator=generator)
    return torch.randint(1, 19, (count, example.shape[1]), generator=generator)


def joint(name, tmp_path, *models, **options):
    return otfuse_cli.merge(
        *models,
        arch=folder(name, tmp_path),
        samples=inputs_for(name),
        blend="joint",
        **{"matcher": "sweep", **options},
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_a_net_with_itself_keeps_its_function(name, tmp_path):
    own = tensors_of(name)
    fused, _ = joint(name, tmp_path, own, own)
    assert change(name, own, fused) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", MERGED)
def test_turned_twins_keep_their_function(name, tmp_path):
    own = tensors_of(name)
    other = {n: t.float() for n, t in twin(name, 7).items()}
    fused, report = joint(name, tmp_path, other, own)
    assert change(name, own, fused) < 1e-4
    assert [s.name for s in report.steps] == ["average", "joint"]


@pytest.mark.slow
def test_the_order_of_the_parents_means_nothing(tmp_path):
    a, b = tensors_of("vit", 0), tensors_of("vit", 1)
    one, _ = joint("vit", tmp_path, a, b, anchor="first")
    two, _ = joint("vit", tmp_path, b, a, anchor="first")
    assert change("vit", one, two) < 1e-3


@pytest.mark.slow
def test_two_parents_fit_better_than_their_average(tmp_path):
    a, b = tensors_of("vit", 0), tensors_of("vit", 1)
    _, report = joint("vit", tmp_path, a, b)
    average, joined = report.steps
    assert joined.agreement > average.agreement


@pytest.fixture
def vit_program():
    module, inputs = made("vit")
    graph, _ = known("vit")
    exported = export(module, (), inputs)
    program = labelled_program(exported, batch=2, graph=graph)
    return program, dict(module.state_dict()), Samples((), inputs)


@pytest.mark.slow
def test_only_the_class_token_is_read_out(vit_program):
    program, tensors, samples = vit_program
    positions = Positions(program, tensors, samples, device="cpu")
    by_weight = {
        "mlp.fc2": "only", "o_proj": "only", "q_proj": "only", "k_proj": "all", "v_proj": "all",
    }  # fmt: skip
    from otfuse_cli.graph.analysis.fit_targets import fits

    for fit in fits(program)[0]:
        kind = next((k for k in by_weight if k in fit.layer.weight), None)
        if kind is None or "layers.1" not in fit.layer.weight:
            continue
        reached = positions.reached(fit.layer.node).tolist()
        wanted = [True] + [False] * (len(reached) - 1)
        assert reached == (wanted if by_weight[kind] == "only" else [True] * len(reached)), kind


def test_duplicated_units_are_chosen_once():
    torch.manual_seed(0)
    rows = torch.randn(300, 6, dtype=torch.float64)
    both = torch.cat([rows, rows[:, [3, 1, 0, 2, 5, 4]]], 1)
    covariance = both.T @ both / 300
    write = torch.randn(4, 12, dtype=torch.float64)
    chosen = choose_units(covariance, write, 6)
    origin = [*range(6), 3, 1, 0, 2, 5, 4]
    assert sorted(origin[i] for i in chosen.tolist()) == list(range(6))
    read = read_from(covariance, chosen)
    torch.testing.assert_close(both[:, chosen] @ read.T, both, rtol=1e-6, atol=1e-6)


def one_by_one(covariance, write, most, quotas):
    """Greedy choice as it is defined: whatever a chosen unit explains is taken off, everywhere."""
    left, wanted = covariance.clone(), covariance @ write.T
    ridge = 1e-5 * float(left.diagonal().mean())
    free = torch.ones(len(left), dtype=torch.bool)
    for allowed in turns(free, most, quotas):
        power = left.diagonal().clamp(min=0) + ridge
        best = int(torch.where(free & allowed, wanted.square().sum(1) / power, -1.0).argmax())
        free[best] = False
        column = left[:, best] / power[best]
        wanted = wanted - column[:, None] * wanted[best]
        left = left - column[:, None] * left[best]
    return (~free).nonzero().flatten()


@pytest.mark.parametrize("rows", [15, 400])
@pytest.mark.parametrize("outputs", [3, 90])
@pytest.mark.parametrize("share", [None, 0.25])
def test_units_are_chosen_as_if_one_by_one(rows, outputs, share):
    generator = torch.Generator().manual_seed(rows + outputs)
    units, mixed = (
        torch.randn(n, 40, generator=generator, dtype=torch.float64) for n in (rows, 40)
    )
    does = (units @ mixed).relu()
    write = torch.randn(outputs, 40, generator=generator, dtype=torch.float64)
    others = torch.arange(40) >= 25
    quotas = () if share is None else ((~others, 15), (others, 5))
    found = choose_units(does.T @ does / rows, write, 20, quotas)
    assert torch.equal(found, one_by_one(does.T @ does / rows, write, 20, quotas))


def test_heads_that_explain_most_are_chosen():
    """Three of four heads matter; with as many subsets as here all are tried."""
    torch.manual_seed(0)
    rows = torch.randn(500, 8, dtype=torch.float64)
    covariance = rows.T @ rows / 500
    write = torch.ones(3, 8, dtype=torch.float64)
    write[:, 2:4] = 0.01
    assert choose_heads(covariance, write, 4, 3) == (0, 2, 3)


@pytest.mark.slow
def test_narrow_and_wide_parents_fit_into_either(tmp_path):
    """Streams, head counts and units of different sizes; heads of one width."""
    import transformers

    def net(width, heads, inner):
        torch.manual_seed(width)
        config = transformers.ViTConfig(
            hidden_size=width, num_hidden_layers=2, num_attention_heads=heads,
            intermediate_size=inner, image_size=16, patch_size=4, num_labels=3,
            architectures=["ViTForImageClassification"],
        )  # fmt: skip
        module = transformers.ViTForImageClassification(config).eval()
        module.save_pretrained(tmp_path / str(width))
        return module

    wide, narrow = net(32, 4, 24), net(16, 2, 10)
    for anchor, module in ((0, wide), (1, narrow)):
        fused, report = otfuse_cli.merge(
            wide.state_dict(),
            narrow.state_dict(),
            arch=f"hf:{tmp_path / str(module.config.hidden_size)}",
            anchor=str(anchor),
            samples=inputs_for("vit"),
            blend="joint",
            matcher="sweep",
        )
        assert {n: t.shape for n, t in fused.items()} == {
            n: t.shape for n, t in module.state_dict().items()
        }
        module.load_state_dict(fused)
        assert [step.name for step in report.steps] == ["joint"]
        assert any("matched one to one: nothing was" in w for w in report.warnings)
        assert report.steps[-1].agreement > 0.7


def bert_twin(seed: int = 3) -> dict[str, torch.Tensor]:
    """The same function: units, heads and positions in the stream in another order."""
    module, inputs = made("bert-sequence")
    graph = trace(module, (), inputs, source="bert")
    return relabel_state(
        dict(module.state_dict()), graph, draw_maps(graph, torch.Generator().manual_seed(seed))
    )


@pytest.mark.slow
@pytest.mark.parametrize("twin", [False, True])
def test_a_post_norm_net_is_reduced_by_selection(twin, tmp_path):
    own = dict(made("bert-sequence")[0].state_dict())
    other = bert_twin() if twin else own
    fused, report = joint("bert-sequence", tmp_path, other, own)
    assert change("bert-sequence", own, fused) < 1e-4
    assert [s.name for s in report.steps] == ["average", "joint"]
    assert any("post-norm" in w and "units of the stream were chosen" in w for w in report.warnings)


@pytest.mark.slow
def test_two_post_norm_nets_fit_better_than_their_average(tmp_path):
    torch.manual_seed(2)
    a, b = (
        {
            n: t + 0.25 * torch.randn_like(t) if t.is_floating_point() else t
            for n, t in made("bert-sequence", seed)[0].state_dict().items()
        }
        for seed in (0, 1)
    )
    fused, report = joint("bert-sequence", tmp_path, a, b)
    average, joined = report.steps
    assert joined.agreement > average.agreement
    assert all(fused[n].shape == t.shape and fused[n].dtype == t.dtype for n, t in b.items())


@pytest.mark.slow
def test_narrow_and_wide_post_norm_nets(tmp_path):
    import transformers

    def net(width, heads, inner):
        torch.manual_seed(width)
        config = transformers.BertConfig(
            vocab_size=19, hidden_size=width, num_hidden_layers=2, num_attention_heads=heads,
            intermediate_size=inner, max_position_embeddings=32, pad_token_id=0,
            architectures=["BertForSequenceClassification"],
        )  # fmt: skip
        module = transformers.BertForSequenceClassification(config).eval()
        for tensor in module.parameters():
            tensor.data += 0.2 * torch.randn_like(tensor)
        module.save_pretrained(tmp_path / str(width))
        return module

    wide, narrow = net(32, 4, 24), net(16, 2, 10)
    for anchor, module in ((0, wide), (1, narrow)):
        fused, _ = otfuse_cli.merge(
            wide.state_dict(),
            narrow.state_dict(),
            arch=f"hf:{tmp_path / str(module.config.hidden_size)}",
            anchor=str(anchor),
            samples=inputs_for("bert-sequence"),
            blend="joint",
            matcher="sweep",
        )
        module.load_state_dict(fused)


@pytest.mark.slow
def test_a_tied_post_norm_net_is_refused(tmp_path):
    own = dict(made("bert-masked")[0].state_dict())
    with pytest.raises(UsageError, match="tied") as error:
        joint("bert-masked", tmp_path, own, own)
    assert "--untie" in error.value.fix


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "heads"), [pytest.param(24, 3, marks=pytest.mark.slow), (80, 10)]
)
def test_how_many_heads_there_are_is_read_off_the_network(width, heads, tmp_path):
    """Five heads of 8 in the anchor: 24 = 3 x 8 can't be five heads, 80 = 10 x 8 could."""
    transformers = pytest.importorskip("transformers")

    def net(width, heads):
        config = transformers.ViTConfig(
            hidden_size=width, num_hidden_layers=1, num_attention_heads=heads,
            intermediate_size=20, image_size=8, patch_size=4, num_labels=3,
        )  # fmt: skip
        return transformers.ViTForImageClassification(config)

    torch.manual_seed(0)
    source, anchor = net(width, heads), net(40, 5)
    anchor.save_pretrained(tmp_path / "anchor")
    states = [dict(module.state_dict()) for module in (source, anchor)]
    checkpoints = [open_checkpoint(state) for state in states]
    parents = assemble(checkpoints, 1, f"hf:{tmp_path / 'anchor'}", "cpu")
    own = parents.models[0].graph
    inside = {s.per for s in own.free()} - {None}
    assert {own.spaces[top].size for top in inside} == {heads}
    assert {s.size for s in own.free() if s.per is not None} == {8}
