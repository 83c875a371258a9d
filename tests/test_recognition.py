"""What recognition makes of files that hold more or less than a network, and how it says so."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import nets
from otfuse_cli.checkpoint.open import open_checkpoint
from otfuse_cli.errors import IncompatibleModels
from otfuse_cli.graph.spec import chain
from otfuse_cli.graph.spec.from_shapes import families, layer_graph
from otfuse_cli.graph.spec.stored_shapes import StoredShapes
from otfuse_cli.running.mlp import mlp_network
from otfuse_cli.session.find_architecture import shapes_of

Shapes = dict[str, tuple[int, ...]]

# Adapters


def _pairs(names: list[str], ends: tuple[str, str], rank: int = 4) -> Shapes:
    shapes: Shapes = {}
    for name in names:
        shapes[f"{name}{ends[0]}"] = (rank, 16)
        shapes[f"{name}{ends[1]}"] = (24, rank)
    return shapes


LAYERS = [f"model.layers.{at}.self_attn.{name}_proj" for at in range(2) for name in "qv"]
HADAMARD = {
    f"lora_unet_mid.{part}": shape
    for part, shape in {
        "hada_w1_a": (24, 4), "hada_w1_b": (4, 16), "hada_w2_a": (24, 4), "hada_w2_b": (4, 16),
    }.items()
}  # fmt: skip
KRONECKER = {"unet.mid.lokr_w1": (4, 4), "unet.mid.lokr_w2_a": (6, 2), "unet.mid.lokr_w2_b": (2, 4)}
ADAPTERS: dict[str, tuple[Shapes, tuple[str, ...]]] = {
    "PEFT": (
        _pairs([f"base_model.model.{n}" for n in LAYERS], (".lora_A.weight", ".lora_B.weight")),
        ("layers.0.self_attn.q_proj.lora_A.weight [4, 16]", "lora_B.weight [24, 4]"),
    ),
    "PEFT, named adapters": (
        _pairs(LAYERS, (".lora_A.default.weight", ".lora_B.default.weight")),
        ("q_proj.lora_A.default.weight", "q_proj.lora_B.default.weight"),
    ),
    "loralib, beside the base": (
        {"fc1.weight": (24, 16), "fc2.weight": (5, 24), **_pairs(["fc1"], (".lora_A", ".lora_B"))},
        ("fc1.lora_A [4, 16]", "fc1.lora_B [24, 4]"),
    ),
    "diffusers": (
        _pairs(["unet.attn.to_q"], (".lora.down.weight", ".lora.up.weight")),
        ("to_q.lora.down.weight", "to_q.lora.up.weight"),
    ),
    "diffusers, older": (
        _pairs(["unet.attn.processor.to_q"], ("_lora.down.weight", "_lora.up.weight")),
        ("to_q_lora.down.weight", "to_q_lora.up.weight"),
    ),
    "kohya": (
        {
            **_pairs(["lora_unet_mid_q"], (".lora_down.weight", ".lora_up.weight")),
            "lora_unet_mid_q.alpha": (),
        },
        ("lora_unet_mid_q.lora_down.weight", "lora_unet_mid_q.lora_up.weight"),
    ),
    "LoHa": (HADAMARD, ("hada_w1_a [24, 4]", "hada_w1_b [4, 16]")),
    "LoKr": (KRONECKER, ("lokr_w2_a [6, 2]", "lokr_w2_b [2, 4]")),
    "DoRA": (
        {
            **_pairs(["q"], (".lora_A.weight", ".lora_B.weight")),
            "q.lora_magnitude_vector.weight": (24,),
        },
        ("q.lora_A.weight", "q.lora_B.weight", "1 more"),
    ),
    "IA3": ({"layers.0.k.ia3_l": (16, 1), "layers.0.v.ia3_l": (16, 1)}, ("k.ia3_l [16, 1]",)),
    "OFT": ({"layers.0.k.oft_blocks": (4, 4, 4)}, ("k.oft_blocks",)),
    "VeRA": ({"layers.0.k.vera_lambda_b": (16,)}, ("k.vera_lambda_b",)),
}


@pytest.mark.parametrize("arch", ["auto", "mlp", "llama"])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_is_refused_and_to_be_merged_first(kind: str, arch: str) -> None:
    shapes, words = ADAPTERS[kind]
    with pytest.raises(IncompatibleModels, match="an adapter") as caught:
        layer_graph(arch, shapes)
    for word in (*words, "merge the adapter into its base first"):
        assert word in str(caught.value)
    assert "--arch mlp" not in str(caught.value)


def test_a_spec_may_say_what_the_factors_are(tmp_path) -> None:
    path = tmp_path / "net.yaml"
    path.write_text("layers:\n  q.lora_A: r <- in\n  q.lora_B: out <- r\n")
    shapes = _pairs(["q"], (".lora_A.weight", ".lora_B.weight"))
    assert layer_graph(str(path), shapes).spaces["r"].size == 4


@pytest.mark.parametrize("name", ["lorawan", "explora", "layer_a", "down", "floral_1", "A"])
def test_other_names_are_no_adapter(name: str) -> None:
    shapes = {f"{name}.weight": (8, 4), "last.weight": (3, 8)}
    assert len(list(layer_graph("mlp", shapes).free())) == 1


@pytest.mark.parametrize("arch", [[], ["--arch", "mlp"]])
def test_folders_of_adapters_are_not_merged(cli, tmp_path, arch) -> None:
    folders = [tmp_path / name for name in "ab"]
    for seed, folder in enumerate(folders):
        from safetensors.torch import save_file

        torch.manual_seed(seed)
        folder.mkdir()
        tensors = {n: torch.randn(s) for n, s in ADAPTERS["PEFT"][0].items()}
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "base_model_name_or_path": "x/y", "r": 4}
        (folder / "adapter_config.json").write_text(json.dumps(config))
    run = cli("merge", *folders, "-o", tmp_path / "out.safetensors", *arch)
    assert run.code == 4
    assert "merge the adapter into its base first" in " ".join(run.err.split())
    assert not (tmp_path / "out.safetensors").exists()


# Integers

MLP = {"net.0.weight": (9, 4), "net.0.bias": (9,), "net.2.weight": (3, 9), "net.2.bias": (3,)}


def _typed(shapes: Shapes, **dtypes: str) -> StoredShapes:
    kinds = {name.replace("__", "."): kind for name, kind in dtypes.items()}
    return StoredShapes(shapes, {name: kinds.get(name, "float32") for name in shapes})


INTEGERS: dict[str, tuple[Shapes, str]] = {
    "a table of positions": ({"steps": (7,), **MLP}, "int64"),
    "a mask of three axes": ({**MLP, "mask": (1, 4, 4)}, "bool"),
    "bytes in a module of their own": ({**MLP, "coder.table": (5, 2)}, "uint8"),
    "a counter with an axis": ({**MLP, "net.0.seen": (1,)}, "int32"),
    "a numbered module of integers": ({**MLP, "net.1.order": (9,)}, "int64"),
    "as many as units, first in the file": ({"net.0.index": (9, 4), **MLP}, "int16"),
}


@pytest.mark.parametrize("arch", ["auto", "mlp"])
@pytest.mark.parametrize("kind", INTEGERS)
def test_integers_never_block(kind: str, arch: str) -> None:
    shapes, dtype = INTEGERS[kind]
    (extra,) = shapes.keys() - MLP.keys()
    typed = _typed(shapes, **{extra.replace(".", "__"): dtype})
    graph = layer_graph(arch, typed)
    plain = layer_graph(arch, MLP)
    assert {s.id: s.size for s in graph.free()} == {s.id: s.size for s in plain.free()}
    mirrors = extra == "net.0.index"
    said = [w for w in graph.warnings if extra in w and "integers" in w]
    assert bool(said) is not mirrors
    network = mlp_network(graph, typed)
    assert network is not None
    assert network.module.state_dict().keys() == MLP.keys()


@pytest.mark.parametrize("name", ["scale", "net.1.table", "pos.embedding", "running", "queue"])
def test_numbers_that_no_line_is_for_are_named(name: str) -> None:
    with pytest.raises(IncompatibleModels, match="unknown architecture") as caught:
        layer_graph("auto", {**MLP, name: (5, 2)})
    assert f"{name} [5, 2]" in str(caught.value)


def test_a_merge_keeps_the_integers_of_the_anchor(cli, tmp_path) -> None:
    paths = [tmp_path / f"{n}.pt" for n in "ab"]
    for seed, path in enumerate(paths):
        torch.manual_seed(seed)
        net = nets.Mlp()
        net.register_buffer("order", torch.randperm(9))
        torch.save(net.state_dict(), path)
    run = cli("merge", *paths, "-o", tmp_path / "out.pt")
    assert run.code == 0, run.err
    assert "order" in run.err
    fused = torch.load(tmp_path / "out.pt", weights_only=True)
    anchor = torch.load(paths[1], weights_only=True)
    assert torch.equal(fused["order"], anchor["order"])
    assert not torch.equal(fused["fc1.weight"], anchor["fc1.weight"])


# The message


@pytest.mark.parametrize(
    ("arch", "shapes"),
    [
        ("auto", {"stem.weight": (4, 3, 3, 3), "head.weight": (5, 4)}),
        ("auto", {"layer1.0.conv2.weight": (4, 4, 3, 3)}),
        ("nonsense", MLP),
        ("net.txt", MLP),
        ("auto", {"a": (3,)}),
    ],
)
def test_what_is_unknown_names_the_surest_way_first(arch: str, shapes: Shapes) -> None:
    from otfuse_cli.errors import OtfuseError

    with pytest.raises(OtfuseError) as caught:
        layer_graph(arch, shapes)
    fix = caught.value.fix
    ways = ["--arch net.py:make_net", "hf:", "timm:", "torchvision:", "spec.yaml", "FAMILY", "mlp"]
    places = [fix.index(way) for way in ways]
    assert places == sorted(places)
    assert all(name in fix for name in families())


# Files of safetensors


def test_a_file_sorted_by_dtype_and_name_is_read_in_order(tmp_path) -> None:
    from safetensors.torch import save_file

    net = nets.Vgg(widths=(6, 6, 6, 6, 6))
    path = tmp_path / "net.safetensors"
    save_file(net.state_dict(), path)
    with open_checkpoint(path) as checkpoint:
        listed = list(checkpoint.infos)
        graph = layer_graph("auto", shapes_of(checkpoint))
    assert listed[0].endswith("num_batches_tracked")
    assert listed.index("features.12.weight") < listed.index("features.4.weight")
    convs = [op.name for op in graph.ops if op.kind == "conv"]
    assert convs == [n for n, m in net.named_modules() if isinstance(m, nn.Conv2d)]


def test_attributes_beside_integers_are_read_in_the_order_of_their_numbers(tmp_path) -> None:
    from safetensors.torch import save_file

    net = nets.Mlp(widths=tuple(range(30, 17, -1)))
    net.register_buffer("steps", torch.zeros((), dtype=torch.int64))
    path = tmp_path / "net.safetensors"
    save_file(net.state_dict(), path)
    with open_checkpoint(path) as checkpoint:
        graph = layer_graph("auto", shapes_of(checkpoint))
    layers = [op.name for op in graph.ops if op.kind == "linear"]
    assert layers == [f"fc{at}" for at in range(1, 13)]


# What speaks against families that hold no chain


def _bert(prefix: str = "bert.") -> Shapes:
    block = f"{prefix}encoder.layer.0."
    e, f = 8, 6
    return {
        f"{prefix}embeddings.word_embeddings.weight": (19, e),
        f"{prefix}embeddings.LayerNorm.weight": (e,),
        f"{prefix}embeddings.LayerNorm.bias": (e,),
        **{f"{block}attention.self.{n}.weight": (e, e) for n in ("query", "key", "value")},
        f"{block}attention.output.dense.weight": (e, e),
        f"{block}attention.output.LayerNorm.weight": (e,),
        f"{block}attention.output.LayerNorm.bias": (e,),
        f"{block}intermediate.dense.weight": (f, e),
        f"{block}output.dense.weight": (e, f),
        f"{block}output.LayerNorm.weight": (e,),
        f"{block}output.LayerNorm.bias": (e,),
    }


def _llama(blocks: tuple[int, ...] = (0, 1)) -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (19, 8)}
    for at in blocks:
        block = f"model.layers.{at}."
        shapes |= {f"{block}self_attn.{n}_proj.weight": (8, 8) for n in "qkvo"}
        shapes |= {f"{block}mlp.{n}_proj.weight": (6, 8) for n in ("gate", "up")}
        shapes[f"{block}mlp.down_proj.weight"] = (8, 6)
        shapes[f"{block}input_layernorm.weight"] = (8,)
        shapes[f"{block}post_attention_layernorm.weight"] = (8,)
    return {**shapes, "model.norm.weight": (8,), "lm_head.weight": (19, 8)}


def _resnet(*, first: str) -> Shapes:
    """Two blocks of one width; each module lists its convolutions first, or its norms."""

    def module(path: str, numbers: tuple[int, ...], inner: int) -> Shapes:
        kinds = ("conv", "bn") if first == "conv" else ("bn", "conv")
        shapes: Shapes = {}
        for number in numbers:
            for kind in kinds:
                name = f"{path}{kind}{number}"
                shapes[f"{name}.weight"] = (6,) if kind == "bn" else (6, inner, 3, 3)
                if kind == "bn":
                    shapes |= {f"{name}.{p}": (6,) for p in ("bias", "running_mean", "running_var")}
        return shapes

    stem = module("", (1,), 3)
    blocks = {**module("layer1.0.", (1, 2), 6), **module("layer1.1.", (1, 2), 6)}
    return {**stem, **blocks, "fc.weight": (3, 6)}


def _gpt2() -> Shapes:
    block = "transformer.h.0."
    return {
        "transformer.wte.weight": (19, 8), "transformer.wpe.weight": (9, 8),
        f"{block}ln_1.weight": (8,), f"{block}ln_1.bias": (8,),
        f"{block}attn.c_attn.weight": (8, 24), f"{block}attn.c_proj.weight": (8, 8),
        f"{block}ln_2.weight": (8,), f"{block}ln_2.bias": (8,),
        f"{block}mlp.c_fc.weight": (8, 6), f"{block}mlp.c_proj.weight": (6, 8),
        "transformer.ln_f.weight": (8,), "transformer.ln_f.bias": (8,), "score.weight": (3, 8),
    }  # fmt: skip


def _convnext() -> Shapes:
    block = "features.1.0."
    return {
        "features.0.0.weight": (4, 3, 2, 2),
        "features.0.1.weight": (4,), "features.0.1.bias": (4,),
        f"{block}layer_scale": (4, 1, 1), f"{block}block.0.weight": (4, 1, 7, 7),
        f"{block}block.2.weight": (4,), f"{block}block.2.bias": (4,),
        f"{block}block.3.weight": (9, 4), f"{block}block.5.weight": (4, 9),
        "classifier.0.weight": (4,), "classifier.2.weight": (3, 4),
    }  # fmt: skip


_STATISTICS = {f"features.1.0.block.2.running_{part}": (4,) for part in ("mean", "var")}
PLAIN = {
    "bert": {**_bert(), "classifier.weight": (3, 8)},
    "llama": _llama(),
    "resnet-basic": _resnet(first="conv"),
    "gpt2": _gpt2(),
    "convnext": _convnext(),
}
CONTRADICTED: dict[str, tuple[str, Shapes, tuple[str, ...]]] = {
    "two backbones": (
        "bert",
        {**PLAIN["bert"], **_bert("")},
        ("bert.embeddings.word_embeddings and embeddings.word_embeddings are both there",),
    ),
    "two heads of BERT": (
        "bert",
        {**PLAIN["bert"], "qa_outputs.weight": (2, 8)},
        ("classifier and qa_outputs are both there",),
    ),
    "two heads of GPT-2": (
        "gpt2", {**_gpt2(), "lm_head.weight": (19, 8)}, ("score and lm_head are both there",)
    ),
    "two heads of Llama": (
        "llama", {**_llama(), "score.weight": (3, 8)}, ("lm_head and score are both there",)
    ),
    "LayerNorm in Llama": (
        "llama", {**_llama(), "model.norm.bias": (8,)}, ("model.norm.bias", "RMSNorm")
    ),
    "a block of Llama is missing": (
        "llama", _llama((0, 1, 3)), ("layers.3.self_attn.q_proj follows", "missing")
    ),
    "BatchNorm in ConvNeXt": (
        "convnext", {**_convnext(), **_STATISTICS}, ("block.2.running_mean", "BatchNorm")
    ),
    "norms in front of their layers": (
        "resnet-basic", _resnet(first="bn"),
        ("bn1.weight is listed before conv1.weight", "in front of its layer"),
    ),
    "convolutions of two kinds": (
        "vgg",
        {"features.0.weight": (4, 3, 3), "features.3.weight": (5, 4, 3, 3),
         "classifier.weight": (3, 5)},
        ("features.0.weight", "features.3.weight", "different kinds"),
    ),
    "a flattened sequence": (
        "vgg",
        {"features.0.weight": (4, 3, 3), "classifier.weight": (3, 16)},
        ("classifier.weight", "4 times the 4", "a flattened feature map"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", PLAIN)
def test_what_is_not_contradicted_is_recognised(family: str) -> None:
    config = {"num_attention_heads": 2, "n_head": 2}
    assert layer_graph("auto", PLAIN[family], config=config).source == f"family {family}"


@pytest.mark.parametrize("kind", CONTRADICTED)
def test_what_contradicts_a_family_is_named(kind: str) -> None:
    family, shapes, words = CONTRADICTED[kind]
    with pytest.raises(IncompatibleModels) as caught:
        layer_graph("auto", shapes, config={"num_attention_heads": 2, "n_head": 2})
    for word in (f"family {family}", *words):
        assert word in str(caught.value)


NAMES = {"a_b": "a_b", "a-b.c": "a_b.c", "_x": "_x", "0.c": "layer_0.c", "in": "layer_in"}


@pytest.mark.parametrize("module", NAMES)
def test_a_module_gives_its_space_a_name_that_specs_take(module):
    assert chain._space(module) == NAMES[module]
