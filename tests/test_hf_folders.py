"""Folders as transformers saves them, with the module that it builds from them."""

from __future__ import annotations

import pytest
import torch

import otfuse_cli

transformers = pytest.importorskip("transformers")


@pytest.fixture
def saved(tmp_path):
    """A ViT: since transformers 5 its module has other names than its file."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 24, "image_size": 16, "patch_size": 4, "num_labels": 3}
    torch.manual_seed(0)
    net = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes)).eval()
    net.save_pretrained(tmp_path / "vit")
    return net, tmp_path / "vit"


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


def test_networks_run_on_inputs_under_the_names_of_the_file(saved):
    net, folder = saved
    images = torch.randn(40, 3, 16, 16)
    with torch.no_grad():
        labels = net(images).logits.argmax(1)
    samples = {"x": images, "y": labels}
    report = otfuse_cli.evaluate(folder, arch=f"hf:{folder}", samples=samples)
    assert list(report.evaluation["accuracy"].values()) == [100.0]
