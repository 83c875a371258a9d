"""Canonical form, rotated streams and `--residual orthogonal`, on tiny transformers."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch

import otfuse_cli
from family_nets import CASES
from otfuse_cli.errors import UsageError
from otfuse_cli.graph.analysis.streams import PostNorm, Stream, normed_stream
from otfuse_cli.graph.model import LayerGraph
from otfuse_cli.graph.trace.from_module import trace
from otfuse_cli.matching.canonical import canonical
from otfuse_cli.matching.heads import HeadMoves
from otfuse_cli.matching.matchers.orthogonal import Moves, complement, match_rotated, move
from otfuse_cli.running.relabel import draw_maps, relabel_state

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("kept_graphs")
NETS = ("vit", "gpt2-untied", "llama", "qwen2")
# A norm with a mean and one without, rotary positions and biases, are all seen in these two.
MERGED = [n if n in ("vit", "qwen2") else pytest.param(n, marks=pytest.mark.slow) for n in NETS]


@cache
def made(name: str, seed: int = 0):
    """A net with gains, shifts and biases that are not what they start from; and its inputs."""
    torch.manual_seed(seed)
    module, _, kwargs = CASES[name].make()
    for tensor in module.parameters():
        tensor.data += (0.1 if tensor.dim() > 1 else 0.3) * torch.randn_like(tensor)
    inputs = {n: torch.randn_like(t) if t.is_floating_point() else t for n, t in kwargs.items()}
    return module.eval(), {n: t for n, t in inputs.items() if isinstance(t, torch.Tensor)}


@cache
def known(name: str) -> tuple[LayerGraph, Stream]:
    module, inputs = made(name)
    graph = trace(module, (), inputs, source=name)
    return graph, normed_stream(graph)


def tensors_of(name: str, seed: int = 0) -> dict[str, torch.Tensor]:
    graph, _ = known(name)
    return {n: t.clone() for n, t in made(name, seed)[0].state_dict().items() if n in graph.tensors}


def logits(name: str, tensors) -> torch.Tensor:
    module, inputs = made(name)
    before = {n: t.clone() for n, t in module.state_dict().items()}
    module.load_state_dict({n: t.to(before[n].dtype) for n, t in tensors.items()}, strict=False)
    with torch.no_grad():
        found = module(**inputs).logits
    module.load_state_dict(before)
    return found


def change(name: str, one, two) -> float:
    old, new = logits(name, one), logits(name, two)
    return float((old - new).abs().max() / old.abs().max())


def rotations(count: int, size: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(count, size, size, dtype=torch.float64))[0]


def some_moves(graph: LayerGraph, stream: Stream, seed: int = 0) -> Moves:
    """Moves that keep the function, drawn at random."""
    torch.manual_seed(seed)
    size = graph.spaces[stream.space].size
    turn = rotations(1, size)[0]
    if stream.centred:
        basis = complement(size)
        turn = basis @ rotations(1, size - 1)[0] @ basis.T + 1 / size
    heads = {}
    for attention in stream.attentions:
        count, groups = graph.spaces[attention.heads].size, 1
        sizes = [p.weight.sizes for p in attention.queries if len(p.weight.sizes) == 3]
        groups = sizes[0][1] if sizes else 1
        inside = attention.queries[0].weight.sizes[-1]
        still = torch.eye(inside, dtype=torch.float64).expand(count, inside, inside)
        heads[attention.heads] = HeadMoves(
            torch.randperm(count),
            torch.stack([torch.randperm(groups) for _ in range(count)]),
            rotations(count, inside) if attention.turns else still,
            rotations(count, attention.values.weight.sizes[-1]),
        )
    units = {s: torch.randperm(graph.spaces[s].size) for s in stream.units}
    return Moves(turn, heads, units)


def twin(name: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """The same function: stream and heads turned, heads and units in another order."""
    graph, stream = known(name)
    own = canonical(tensors_of(name), graph, stream)
    return move(own, graph, stream, some_moves(graph, stream, seed))


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_the_canonical_form_computes_the_same(name):
    graph, stream = known(name)
    before = tensors_of(name)
    after = canonical(before, graph, stream)
    assert change(name, before, after) < 1e-5
    assert all(bool((after[n.gain] == 1).all()) for n in stream.norms)
    assert all(after[n].shape == t.shape for n, t in before.items())
    if stream.centred:
        assert all(float(after[f.weight].mean(f.dim).abs().max()) < 1e-12 for f in stream.writers)


@pytest.mark.slow
def test_a_shift_stays_where_the_output_layer_has_no_bias():
    graph, stream = known("gpt2-untied")
    after = canonical(tensors_of("gpt2-untied"), graph, stream)
    kept = [bool(after[n.shift].any()) for n in stream.norms]
    assert kept == [False] * (len(kept) - 1) + [True]


@pytest.mark.slow
def test_key_and_value_biases_of_a_vit_are_gone():
    graph, stream = known("vit")
    after = canonical(tensors_of("vit"), graph, stream)
    for attention in stream.attentions:
        assert attention.key_bias is not None
        assert not after[attention.key_bias].any()
        assert not after[attention.values.bias.tensor].any()


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_moves_keep_the_function_and_are_found_again(name):
    graph, stream = known(name)
    own = canonical(tensors_of(name), graph, stream)
    turned = twin(name)
    assert change(name, own, turned) < 1e-4
    assert max(float((turned[n] - t).abs().max()) for n, t in own.items()) > 0.1
    back = move(turned, graph, stream, match_rotated(turned, own, graph, stream))
    assert max(float((back[n] - t).abs().max()) for n, t in own.items()) < 1e-9


def folder(name: str, tmp_path) -> str:
    module, _ = made(name)
    module.config.architectures = [type(module).__name__]
    module.save_pretrained(tmp_path / "net")
    return f"hf:{tmp_path / 'net'}"


@pytest.mark.quick_cases("vit")
@pytest.mark.parametrize("name", MERGED)
def test_a_turned_twin_merges_into_the_same_function(name, tmp_path):
    own = tensors_of(name)
    other = {n: t.float() for n, t in twin(name, 5).items()}
    fused, report = otfuse_cli.merge(
        other, own, arch=folder(name, tmp_path), residual="orthogonal", weights=(0.4, 0.6)
    )
    assert change(name, own, fused) < 1e-4
    assert report.checks.function == "kept"
    assert report.checks.max_error < 1e-4
    assert all(fused[n].shape == t.shape and fused[n].dtype == t.dtype for n, t in own.items())
    plain, _ = otfuse_cli.merge(other, own, align="none")
    assert change(name, own, plain) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", MERGED)
def test_a_net_with_itself(name, tmp_path):
    own = tensors_of(name)
    fused, _ = otfuse_cli.merge(own, own, arch=folder(name, tmp_path), residual="orthogonal")
    assert change(name, own, fused) < 1e-4


@pytest.mark.quick_cases("weights1")
@pytest.mark.parametrize("weights", [(1, 0), (0, 1)])
def test_the_ends_compute_what_the_models_compute(weights, tmp_path):
    models = [tensors_of("vit", 0), tensors_of("vit", 1)]
    fused, _ = otfuse_cli.merge(
        *models, arch=folder("vit", tmp_path), residual="orthogonal", weights=weights
    )
    assert change("vit", models[weights.index(1)], fused) < 1e-4


@pytest.mark.slow
def test_rotary_pairs_are_turned_together(tmp_path):
    """Queries and keys of a Llama turned by frequency, which permutations can't undo."""
    graph, stream = known("llama")
    own = canonical(tensors_of("llama"), graph, stream)
    turned = {n: t.clone() for n, t in own.items()}
    for attention in stream.attentions:
        for part in attention.queries:
            held = turned[part.weight.tensor].unflatten(0, (-1, part.weight.sizes[-1]))
            half = held.shape[1] // 2
            one, two = held[:, :half].clone(), held[:, half:].clone()
            held[:, :half], held[:, half:] = 0.6 * one - 0.8 * two, 0.8 * one + 0.6 * two
    assert change("llama", own, turned) < 1e-5
    other = {n: t.float() for n, t in turned.items()}
    arch = folder("llama", tmp_path)
    fused, _ = otfuse_cli.merge(other, tensors_of("llama"), arch=arch, residual="orthogonal")
    assert change("llama", own, fused) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", MERGED)
def test_the_librarys_own_class_loads_what_is_written(name, tmp_path):
    import transformers

    arch = folder(name, tmp_path)
    module, inputs = made(name)
    models = [{n: t for n, t in tensors_of(name, seed).items()} for seed in (0, 1)]
    for at, tensors in enumerate(models):
        (tmp_path / str(at)).mkdir()
        module.config.save_pretrained(tmp_path / str(at))
        from safetensors.torch import save_file

        save_file(tensors, tmp_path / str(at) / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "fused"
    fused, _ = otfuse_cli.merge(
        tmp_path / "0", tmp_path / "1", arch=arch, residual="orthogonal", output=out
    )
    loaded = getattr(transformers, type(module).__name__).from_pretrained(out).eval()
    with torch.no_grad():
        found = loaded(**inputs).logits
    torch.testing.assert_close(found, logits(name, fused), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert-sequence", "bert-masked"])
def test_a_post_norm_net_falls_back_to_permutations(name, cli, tmp_path):
    """Tied or not; the report and the standard error say so."""
    module, inputs = made(name)
    graph = trace(module, (), inputs, source="bert")
    with pytest.raises(PostNorm):
        normed_stream(graph)
    own = dict(module.state_dict())
    torch.save(own, tmp_path / "own.pt")
    other = relabel_state(own, graph, draw_maps(graph, torch.Generator().manual_seed(3)))
    torch.save(other, tmp_path / "twin.pt")
    arch, out = folder(name, tmp_path), tmp_path / "fused.pt"
    run = cli(
        *("merge", tmp_path / "twin.pt", tmp_path / "own.pt", "-o", out, "--arch", arch),
        *("--residual", "orthogonal"),
    )
    assert run.code == 0, run.err
    assert "post-norm" in run.err
    assert "units were permuted" in " ".join(run.err.split())
    said = json.loads((tmp_path / "fused.report.json").read_text())["warnings"]
    assert any("post-norm" in w and "units were permuted" in w for w in said)
    assert change(name, own, torch.load(out)) < 1e-4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"align": "none"}, "--align none can't be combined"),
        ({"matcher": "sweep"}, "--matcher sweep can't be combined"),
        ({"passes": 2}, "--passes 2 can't be combined"),
        ({"arch": "auto"}, "needs a network to run"),
    ],
)
def test_options_that_ask_for_another_matching(options, said, tmp_path):
    own = tensors_of("vit")
    given = {"arch": folder("vit", tmp_path), "residual": "orthogonal", **options}
    with pytest.raises(UsageError, match=said):
        otfuse_cli.merge(own, own, **given)


def test_only_merge_turns_streams(tmp_path):
    own = tensors_of("vit")
    with pytest.raises(UsageError, match="only merge turns"):
        otfuse_cli.inspect(
            own, own, arch=folder("vit", tmp_path), residual="orthogonal", ot_costs=True
        )
    with pytest.raises(UsageError, match="only merge turns"):
        otfuse_cli.prune_fuse(own, own, arch=folder("vit", tmp_path), residual="orthogonal")
