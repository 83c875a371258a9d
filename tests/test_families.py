"""Bundled families: each proven equal, axis for axis, to the traced graph of a real module."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from importlib import resources

import pytest
import torch
from safetensors import safe_open

from conftest import ROOT
from family_nets import CASES, HF, Case
from graph_difference import graph_difference
from otfuse_cli.errors import IncompatibleModels
from otfuse_cli.graph.axes import axis_units
from otfuse_cli.graph.model import LayerGraph, OpKind
from otfuse_cli.graph.spec import from_shapes
from otfuse_cli.graph.spec.bind import bind
from otfuse_cli.graph.spec.from_shapes import families, layer_graph
from otfuse_cli.graph.spec.grammar import parse_specs
from otfuse_cli.graph.trace.from_module import trace
from otfuse_cli.running.acid import acid_test

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

SLOW = {
    "mlp-nobias", "vgg", "densenet-first-files", "bert-pretraining", "llama-tied", "mistral",
    "llama-one-head", "resnet-basic", "resnet-basic-cifar", "resnet-bottleneck-same",
    "densenet-single", "mobilenet-v2-narrow", "convnext-single", "bert-gamma-beta", "bert-answers",
    "bert-masked-untied", "bert-backbone", "gpt2-untied", "gpt2-sequence", "llama-all-heads",
    "llama-sequence", "llama-backbone", "qwen2-tied", "vit-backbone", "vit-old-names-backbone",
}  # fmt: skip


def _cases(names: list[str]) -> list[object]:
    return [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in names]


@cache
def module_of(name: str):
    if name in HF:
        pytest.importorskip("transformers")
    case: Case = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module, args, kwargs = case.make()
    return module.eval(), args, kwargs


@cache
def traced(name: str) -> LayerGraph:
    module, args, kwargs = module_of(name)
    names = {}
    for key in module.state_dict():
        names[key] = key
        for old, new in CASES[name].rename:
            names[key] = names[key].replace(old, new)
    return trace(module, args, kwargs, name_map=names)


def shapes_of(graph: LayerGraph) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in graph.tensors.items()}


def aliases_of(graph: LayerGraph) -> dict[str, tuple[str, ...]]:
    return {name: tensor.aliases for name, tensor in graph.tensors.items()}


def recognised(name: str, **options) -> LayerGraph:
    graph = traced(name)
    return layer_graph("auto", shapes_of(graph), **{"config": CASES[name].config, **options})


# Proofs


@pytest.mark.slow
@pytest.mark.parametrize("name", _cases(list(CASES)))
def test_a_family_is_what_its_module_computes(name: str) -> None:
    from test_write_spec import require_family_returned

    graph = traced(name)
    for aliases in ({}, aliases_of(graph)):  # files that leave tied tensors out, and that hold them
        found = recognised(name, aliases=aliases)
        assert found.source == f"family {CASES[name].family}"
        assert graph_difference(found, graph) is None
        assert found.warnings == ()
    require_family_returned(name)


# Proven by what transformers loads (`test_hf_folders.py`): its module has other tensors.
ELSEWHERE = {"mixtral"}


def test_every_family_has_a_proof() -> None:
    assert families().keys() == {case.family for case in CASES.values()} - {"mlp"} | ELSEWHERE


QKV = "h{i} * q{i}@h{i} + h{i} * q{i} + h{i} * v{i}@h{i}"
NORM5 = "t{max i-1} + d{max i}.{1..}"
BROKEN = [
    ("densenet", "{1..j-1}", "{2..j}"),
    ("densenet", f"norm{{n}}: {NORM5}", "norm{n}: d{max i}.{1..} + t{max i-1}"),
    ("convnext", 'layer_scale: ["scale s{i}", 1, 1]', "layer_scale: [3, 1, 1]"),
    ("mobilenet-v2", "  - s{i-1} = s{i} if sizes agree", "  - s{i-1} = s{i} unless features.{i}"),
    ("gpt2", QKV, "h{i} * v{i}@h{i} + h{i} * q{i}@h{i} + h{i} * q{i}"),
    ("gpt2", "h{i} * v{i} -> e", "v{i} * h{i} -> e"),
    ("bert-sequence", "self.value: h{i} * v{i}@h{i}", "self.value: h{i} * q{i}@h{i}"),
    ("llama", "kv{i} * g{i}@kv{i} * d{i} <- e", "g{i} * kv{i} * d{i} <- e"),
    ("llama", "e <- kv{i} * g{i} * v{i}", "e <- g{i} * kv{i} * v{i}"),
    ("llama", "self_attn.v_proj: kv{i} * v{i}@kv{i}", "self_attn.v_proj: kv{i} * d{i}"),
    ("llama-tied", "tied:\n", "require: # "),
    ("vit", "q{i}@h{i}", "q{i}"),
    ("resnet-basic-bn", "m{i}.{b} <- s{i}\n", "m{i}.0 <- s{i}\n"),
]  # fmt: skip


# Of networks that the unit suite traces in any case.
QUICK = [broken for broken in BROKEN if broken[0] in ("vit", "resnet-basic-bn")]


@pytest.mark.slow_cases("vit-q{i}@h{i}-q{i}")
@pytest.mark.parametrize(
    ("name", "old", "new"),
    [b if b in QUICK else pytest.param(*b, marks=pytest.mark.slow) for b in BROKEN],
)
def test_a_broken_line_is_caught_and_named(name, old, new) -> None:
    """Negative control: the size check or the proof names a tensor of the line that is wrong."""
    family = CASES[name].family
    folder = resources.files(from_shapes.__package__) / "families"
    texts = [f.read_text() for f in folder.iterdir() if f.name.endswith(".yaml")]
    text = next(
        t for t in texts if any(s.name == family for s in parse_specs(t, where="", name=""))
    )
    assert old in text
    spec = next(
        s for s in parse_specs(text.replace(old, new), where="", name="") if s.name == family
    )
    graph = traced(name)
    try:
        found = bind(spec, shapes_of(graph), config=CASES[name].config, where="broken")
    except IncompatibleModels as error:
        difference: str | None = str(error)
    else:
        difference = graph_difference(found, graph)
    assert difference is not None
    assert any(tensor in difference for tensor in graph.tensors) or "is per" in difference


@pytest.mark.slow
def test_a_difference_in_roles_families_and_kinds_of_map_is_seen() -> None:
    graph = traced("vit")
    found = recognised("vit")
    q = next(s for s in found.free() if s.per is not None)
    for changed in (replace(q, per=None), replace(q, exact=frozenset({"gl"}))):
        if changed.exact <= {"perm", "orth"}:
            assert "per" in str(graph_difference(_with_space(found, changed), graph))
        else:
            assert "gl" in str(graph_difference(_with_space(found, changed), graph))
    assert "vector" in str(graph_difference(traced("mlp"), _with_role(traced("mlp"))))


def _with_space(graph: LayerGraph, space) -> LayerGraph:
    return replace(graph, spaces={**graph.spaces, space.id: space})


def _with_role(graph: LayerGraph) -> LayerGraph:
    tensor = graph.tensors["fc1.bias"]
    other = graph.tensors["fc1.weight"].axes[0].roles
    axes = tuple(replace(a, roles=other) for a in tensor.axes)
    return replace(graph, tensors={**graph.tensors, "fc1.bias": replace(tensor, axes=axes)})


# What names and shapes don't tell


@pytest.mark.quick_cases("vit")
@pytest.mark.parametrize("name", ["vit", "gpt2", "bert-sequence", "llama"])
def test_without_the_number_of_heads_attention_stays_in_place(name: str) -> None:
    found = recognised(name, config=None, aliases=aliases_of(traced(name)))
    full = recognised(name)
    assert len(found.warnings) == 1
    for text in ("config.json", "--arch hf:DIR", "sizes", CASES[name].family):
        assert text in found.warnings[0]
    free = {s.id for s in found.free()}
    assert {"e", "f0", "f1"} <= free <= {s.id for s in full.free()}
    module, args, kwargs = module_of(name)
    assert acid_test(module, args, kwargs, found, seed=0, draws=1).passed


def test_the_order_of_operations_does_not_depend_on_the_number_of_heads() -> None:
    names = [
        [op.name for op in recognised("vit", config=c).ops] for c in (None, CASES["vit"].config)
    ]
    assert names[0] == names[1]
    assert names[0].index("vit.layers.0.attention.q_proj") < names[0].index(
        "vit.layers.0.attention.o_proj"
    )


def test_heads_are_given_by_a_spec_of_two_lines(tmp_path) -> None:
    path = tmp_path / "net.yaml"
    path.write_text("family: vit\nsizes:\n  h{i}: 4\n")
    assert graph_difference(layer_graph(str(path), shapes_of(traced("vit"))), traced("vit")) is None
    path.write_text("family: vits\n")
    with pytest.raises(IncompatibleModels, match="no bundled family"):
        layer_graph(str(path), shapes_of(traced("vit")))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"num_attention_heads": 5}, ["num_attention_heads", "32"]),
        ({"num_attention_heads": "four"}, ["num_attention_heads", "positive"]),
        ({"num_attention_heads": 8, "hidden_size": 64}, ["hidden_size", "64", "32"]),
    ],
)
def test_a_config_that_does_not_fit_is_refused(config, named) -> None:
    with pytest.raises(IncompatibleModels) as caught:
        layer_graph("vit", shapes_of(traced("vit")), config=config)
    for text in named:
        assert text in str(caught.value)


@pytest.mark.slow
def test_the_number_of_query_heads_must_be_that_of_the_config() -> None:
    """Without `num_key_value_heads` all heads would be key heads: these shapes deny it."""
    config = {"num_attention_heads": 4}
    with pytest.raises(IncompatibleModels) as caught:
        layer_graph("llama", shapes_of(traced("llama")), config=config)
    assert "num_attention_heads" in str(caught.value)
    assert "8" in str(caught.value)


@pytest.mark.slow
def test_a_pooler_that_nothing_may_read_is_tied_to_the_stream() -> None:
    """Old files of token classifiers hold one; names and shapes don't say what the head reads."""
    shapes = shapes_of(traced("bert-sequence"))
    heads = {"num_attention_heads": 4}
    found = layer_graph("auto", shapes, config=heads)
    assert (
        found.tensors["classifier.weight"].axes[1].expr
        == found.tensors["bert.pooler.dense.weight"].axes[1].expr
    )
    module, args, kwargs = module_of("bert-sequence")
    assert acid_test(module, args, kwargs, found, seed=0, draws=1).passed
    told = layer_graph(
        "auto", shapes, config={**heads, "architectures": ["BertForTokenClassification"]}
    )
    assert told.tensors["classifier.weight"] == found.tensors["classifier.weight"]


@pytest.mark.slow
def test_buffers_of_old_files_stay_in_place() -> None:
    extra = {
        "gpt2": {"transformer.h.0.attn.bias": (1, 1, 32, 32),
                 "transformer.h.0.attn.masked_bias": ()},
        "llama": {"model.layers.0.self_attn.rotary_emb.inv_freq": (4,)},
        "bert-sequence": {"bert.embeddings.position_ids": (1, 32)},
    }  # fmt: skip
    for name, more in extra.items():
        plain = recognised(name)
        found = layer_graph("auto", {**shapes_of(plain), **more}, config=CASES[name].config)
        free = {s.id for s in found.free()}
        assert free == {s.id for s in plain.free()}
        for tensor in more:
            for axis in found.tensors[tensor].axes:
                assert free.isdisjoint(axis_units(axis.expr))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("llama", "model.layers.0.self_attn.q_norm.weight"),
        ("bert-sequence", "bert.encoder.layer.0.attention.self.distance_embedding.weight"),
        ("vit", "vit.embeddings.distillation_token"),
    ],
)
def test_a_relative_with_one_more_tensor_is_refused(name: str, extra: str) -> None:
    shapes = {**shapes_of(traced(name)), extra: (1, 1, 32) if "token" in extra else (8,)}
    with pytest.raises(IncompatibleModels, match="unknown architecture") as caught:
        layer_graph("auto", shapes, config=CASES[name].config)
    assert extra in str(caught.value)


# The shared pair


def test_the_vit_pair_is_found_by_names_and_shapes(shared) -> None:
    path = shared / "checkpoints" / "cifar10-vit-0.safetensors"
    with safe_open(path, "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in list(file.keys())}
    found = layer_graph("auto", shapes)
    assert {s.id: s.size for s in found.free()} == {"e": 160} | {f"f{i}": 320 for i in range(6)}
    assert "num_attention_heads" in found.warnings[0]
    heads = layer_graph("auto", shapes, config={"num_attention_heads": 5})
    assert heads.spaces["h3"].size == 5
    assert heads.spaces["q3"].per == heads.spaces["v3"].per == "h3"
    assert found.tensors != heads.tensors


# Operations


@pytest.mark.slow
def test_operations_of_families_are_those_that_run() -> None:
    """Layers and norms in the traced order; sums where the network adds, and nowhere else."""
    for name in ("vit", "llama", "densenet", "mobilenet-v2", "resnet-basic-bn"):
        kinds = (OpKind.LINEAR, OpKind.CONV, OpKind.NORM)
        graph, found = traced(name), recognised(name)
        mine = {op.name: op.kind for op in found.ops if op.kind in kinds}
        theirs = {op.name: op.kind for op in graph.ops if op.kind in kinds}
        assert mine == theirs, name
        stream = [op for op in found.ops if op.kind is OpKind.ADD]
        adds = [op for op in graph.ops if op.kind is OpKind.ADD and "attn" not in op.name]
        if name != "vit":  # whose position table is added by an operation that has a tensor
            assert len(stream) == len(adds), name


def test_a_norm_of_llama_is_an_rms_norm() -> None:
    details = {op.detail for op in recognised("llama").ops if op.kind is OpKind.NORM}
    assert details == {"rms"}


def test_config_files_are_json(tmp_path) -> None:
    from otfuse_cli.checkpoint.config import read_config

    (tmp_path / "config.json").write_text(json.dumps({"n_head": 4}))
    assert read_config(tmp_path / "model.safetensors") == {"n_head": 4}
    assert read_config(tmp_path) == {"n_head": 4}
    assert read_config(tmp_path / "deep" / "model.safetensors") is None
    assert read_config(None) is None
    (tmp_path / "config.json").write_text("[1")
    assert read_config(tmp_path) is None


# The worked examples of the documentation


def _documented() -> list[str]:
    text = (ROOT / "docs" / "spec.md").read_text(encoding="utf-8")
    examples = text.split("## Worked examples")[1].split("```yaml\n")[1:]
    return [example.split("```")[0] for example in examples]


EXAMPLES = [
    {"stem.weight": (4, 3, 3, 3), "block.1.norm.weight": (4,), "block.1.conv.weight": (2, 4, 3, 3),
     "block.2.norm.weight": (6,), "block.2.conv.weight": (2, 6, 3, 3), "head.weight": (5, 8)},
    {"wte.weight": (9, 24), "h.0.ln_1.weight": (24,), "h.0.attn.c_attn.weight": (24, 72),
     "h.0.attn.c_proj.weight": (24, 24), "h.0.mlp.c_fc.weight": (24, 7),
     "h.0.mlp.c_proj.weight": (7, 24), "head.weight": (2, 24)},
    {"stem.weight": (4, 3, 4, 4), "block.0.dwconv.weight": (4, 1, 7, 7),
     "block.0.norm.weight": (4,), "block.0.up.weight": (9, 4), "block.0.down.weight": (4, 9),
     "block.0.gamma": (4, 1, 1), "head.weight": (5, 4)},
    {"conv.weight": (4, 3, 3, 3), "se.down.weight": (2, 4, 1, 1), "se.up.weight": (4, 2, 1, 1),
     "se.up.bias": (4,), "head.weight": (5, 4)},
]  # fmt: skip


@pytest.mark.parametrize("at", range(len(EXAMPLES)))
def test_worked_examples_bind_without_a_warning(at: int) -> None:
    assert len(_documented()) == len(EXAMPLES)
    (spec,) = parse_specs(_documented()[at], where="docs/spec.md", name="example")
    graph = bind(spec, EXAMPLES[at], where="docs/spec.md")
    assert graph.warnings == ()
    assert list(graph.free())
    assert any(op.kind is OpKind.ADD for op in graph.ops) == (at in (1, 2))
