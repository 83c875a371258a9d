"""Folders as transformers saves them, with the module that it builds from them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import otfuse_cli
from otfuse_cli.graph.spec.from_shapes import layer_graph
from otfuse_cli.running.relabel import draw_maps, relabel

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("kept_graphs")


@pytest.fixture
def saved(tmp_path):
    """A ViT: since transformers 5 its module has other names than its file."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 24, "image_size": 16, "patch_size": 4, "num_labels": 3}
    torch.manual_seed(0)
    net = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes)).eval()
    net.save_pretrained(tmp_path / "vit")
    return net, tmp_path / "vit"


@pytest.mark.slow
def test_names_of_the_file_are_found_in_the_module(saved, tmp_path):
    net, folder = saved
    out = tmp_path / "fused"
    fused, report = otfuse_cli.merge(folder, folder, output=out, arch=f"hf:{folder}")
    assert set(fused) != set(net.state_dict())
    assert report.checks.function == "kept"
    loaded, info = transformers.ViTForImageClassification.from_pretrained(
        out, output_loading_info=True
    )
    assert not any(info.values())
    images = torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(images).logits, net(images).logits)


@pytest.mark.slow
def test_networks_run_on_inputs_under_the_names_of_the_file(saved):
    net, folder = saved
    images = torch.randn(40, 3, 16, 16)
    with torch.no_grad():
        labels = net(images).logits.argmax(1)
    samples = {"x": images, "y": labels}
    report = otfuse_cli.evaluate(folder, arch=f"hf:{folder}", samples=samples)
    assert list(report.evaluation["accuracy"].values()) == [100.0]


# Sizes of small networks of every kind.
_SMALL = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48,
    "vocab_size": 99,
}  # fmt: skip
_GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
_T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
_WHISPER = {
    "vocab_size": 99, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "num_mel_bins": 16, "max_source_positions": 32,
    "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip


def made(name, config, seed, **more):
    torch.manual_seed(seed)
    kind = getattr(transformers, name)
    return kind(getattr(transformers, config)(**more, decoder_start_token_id=0)).eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config", "more"),
    [
        ("T5ForConditionalGeneration", "T5Config", _T5),
        ("WhisperForConditionalGeneration", "WhisperConfig", _WHISPER),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("RobertaForSequenceClassification", "RobertaConfig", _SMALL),
                ("Qwen3ForCausalLM", "Qwen3Config", {**_SMALL, **_GROUPED}),
            )
        ),
    ],
)
def test_a_folder_needs_no_flag(tmp_path, name, config, more):
    folders = [tmp_path / "0", tmp_path / "1"]
    for seed, folder in enumerate(folders):
        made(name, config, seed, **more).save_pretrained(folder)
    _, report = otfuse_cli.merge(*folders, output=tmp_path / "fused", matcher="sweep")
    assert report.checks.function == "kept"
    assert report.graph.source == f"transformers {name}, traced"
    assert report.graph.matched > 0.9
    _, info = getattr(transformers, name).from_pretrained(
        tmp_path / "fused", output_loading_info=True
    )
    assert not any(info.values())


@pytest.mark.slow
def test_experts_are_known_by_their_names(tmp_path):
    """Since transformers 5 the module holds all experts in one tensor, the file each in its own."""
    more = {**_SMALL, "num_key_value_heads": 2, "num_local_experts": 3}
    net = made("MixtralForCausalLM", "MixtralConfig", 0, **more)
    net.save_pretrained(tmp_path / "a")
    _, report = otfuse_cli.merge(tmp_path / "a", tmp_path / "a", output=tmp_path / "same")
    assert report.graph.source == "family mixtral"
    assert any("MixtralForCausalLM of transformers" in warning for warning in report.warnings)
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    graph = layer_graph("mixtral", {n: tuple(t.shape) for n, t in tensors.items()}, config=config)
    maps = draw_maps(graph, torch.Generator().manual_seed(3))
    moved = {n: relabel(t, graph.tensors[n], maps, graph.spaces) for n, t in tensors.items()}
    moved = {name: tensor.contiguous() for name, tensor in moved.items()}
    save_file(moved, tmp_path / "same" / "model.safetensors", metadata={"format": "pt"})
    twin = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "same").eval()
    assert not torch.equal(
        twin.model.layers[0].mlp.gate.weight, net.model.layers[0].mlp.gate.weight
    )
    tokens = torch.arange(14).reshape(2, 7)
    with torch.no_grad():
        torch.testing.assert_close(twin(tokens).logits, net(tokens).logits, rtol=1e-4, atol=1e-5)
