"""Networks of libraries, known by the tensors of a checkpoint."""

from __future__ import annotations

import importlib.util
import json
import random

import pytest
import torch
from safetensors.torch import save_file

import libraries
import otfuse_cli
from otfuse_cli.errors import IncompatibleModels, UsageError
from otfuse_cli.running import automatic, known_networks, recognition
from otfuse_cli.running.known_networks import known_network, read_index, signature_of
from otfuse_cli.running.recognition import library_network
from otfuse_cli.running.user_code import find_callable

pytestmark = pytest.mark.usefixtures("kept_graphs")


def shapes_of(module):
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def timm_net(name, seed=0, **more):
    timm = libraries.timm()
    torch.manual_seed(seed)
    return timm.create_model(name, pretrained=False, **more).eval()


def stored(folder, name, *modules):
    folder.mkdir(exist_ok=True)
    paths = []
    for at, module in enumerate(modules):
        paths.append(folder / f"{name}-{at}.safetensors")
        save_file({n: t.contiguous() for n, t in module.state_dict().items()}, paths[-1])
    return paths


@pytest.fixture
def without(monkeypatch):
    """Makes packages look as if they weren't installed."""

    def hide(*packages):
        real = importlib.util.find_spec

        def find_spec(name, package=None):
            return None if name in packages else real(name, package)

        monkeypatch.setattr(recognition.importlib.util, "find_spec", find_spec)

    return hide


def check_entries(count):
    """Random entries of the index, against what the libraries build."""
    libraries.timm()
    libraries.torchvision_models()
    entries = [
        name for groups in read_index().networks.values() for group in groups for name in group
    ]
    for name in random.Random(count).sample(sorted(entries), count):
        if "torchvision:regnet" in name:
            continue  # its code needs values
        with torch.device("meta"):
            module = find_callable(name)()
        known = known_network(shapes_of(module))
        assert known is not None, name
        assert name in [one for group in known.names for one in group]


@pytest.mark.slow
def test_entries_are_what_the_libraries_build():
    check_entries(4)


@pytest.mark.slow
def test_twenty_entries_are_what_the_libraries_build():
    check_entries(20)


def test_every_entry_has_a_name_and_a_head():
    index = read_index()
    assert set(index.versions) == {"timm", "torchvision"}
    names = [n for groups in index.networks.values() for group in groups for n in group]
    assert len(names) > 1_400
    assert len(set(names)) == len(names)
    assert all(0 <= at < len(index.heads) for _, at in index.networks)


def test_a_signature_is_of_names_and_shapes_whatever_their_order():
    shapes = {"a.weight": (3, 2), "b.bias": (3,)}
    assert signature_of(shapes) == signature_of(dict(reversed(shapes.items())))
    assert signature_of(shapes) != signature_of({"a.weight": (2, 3), "b.bias": (3,)})
    assert signature_of(shapes) != signature_of({"a.bias": (3,), "b.weight": (3, 2)})
    assert signature_of(shapes) == signature_of({**shapes, "bn.num_batches_tracked": ()})


@pytest.mark.slow_cases("1000-timm:test_resnet")
@pytest.mark.parametrize(
    ("classes", "arch"),
    [
        (1000, "timm:test_resnet"),
        (7, "timm:test_resnet,num_classes=7"),
        (0, "timm:test_resnet,num_classes=0"),
    ],
)
def test_the_class_axis_is_the_users(classes, arch):
    known = library_network(shapes_of(timm_net("test_resnet", num_classes=classes)))
    assert known.arch == arch
    assert known.library == "timm"
    assert known.classes == (classes or None)


def test_an_output_layer_where_the_library_builds_none():
    assert read_index().heads[known_networks._HEADLESS].tensors == ()
    shapes = shapes_of(timm_net("eva02_tiny_patch14_224", num_classes=10))
    assert library_network(shapes).arch == "timm:eva02_tiny_patch14_224,num_classes=10"


def test_names_that_a_script_wrapped_are_known():
    shapes = shapes_of(timm_net("test_resnet"))
    for prefix in ("module.", "model.backbone."):
        wrapped = {f"{prefix}{name}": shape for name, shape in shapes.items()}
        assert library_network(wrapped).arch == "timm:test_resnet"
    assert library_network({f"mine.{name}": shape for name, shape in shapes.items()}) is None


def test_another_width_is_not_known():
    shapes = shapes_of(timm_net("test_resnet"))
    name = next(iter(shapes))
    assert library_network({**shapes, name: (shapes[name][0] + 1, *shapes[name][1:])}) is None
    assert library_network({}) is None


def test_a_library_that_is_installed_is_preferred(without):
    shapes = shapes_of(libraries.torchvision_models().resnet18())
    assert library_network(shapes).arch == "torchvision:resnet18"
    without("torchvision")
    assert library_network(shapes).arch == "timm:resnet18"
    without("torchvision", "timm")
    known = library_network(shapes)
    assert not known.installed
    assert known.hint == (
        "this is resnet18 of torchvision: pip install torchvision, and it will be traced and proven"
    )


@pytest.mark.parametrize(
    ("config", "arch", "library"),
    [
        ({"architecture": "test_vit", "num_classes": 5}, "timm:test_vit,num_classes=5", "timm"),
        ({"architecture": "test_vit"}, "timm:test_vit", "timm"),
        ({"model_type": "bert", "architectures": ["BertModel"]}, "hf:F", "transformers"),
        ({"_class_name": "AutoencoderKL"}, "diffusers:F", "diffusers"),
    ],
)
def test_a_config_decides(tmp_path, config, arch, library):
    known = library_network({"w": (2, 2)}, config, tmp_path)
    assert known.arch == arch.replace(":F", f":{tmp_path}")
    assert known.library == library
    assert library_network({"w": (2, 2)}, {"hidden_size": 3}, tmp_path) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["test_resnet", "test_vit", pytest.param("test_efficientnet", marks=pytest.mark.slow)]
)
def test_a_published_network_needs_no_flag(tmp_path, name):
    a, b = (timm_net(name, seed, num_classes=6) for seed in (0, 1))
    paths = stored(tmp_path, name, a, b)
    fused, report = otfuse_cli.merge(*paths, matcher="sweep")
    assert report.checks.function == "kept"
    assert report.graph.source == f"timm {name}, 6 classes, traced"
    assert report.graph.matched > 0.9
    timm_net(name, num_classes=6).load_state_dict(fused, strict=True)


@pytest.mark.slow
def test_a_permuted_twin_of_a_published_network_is_recovered():
    torch.manual_seed(0)
    model = timm_net("test_resnet")
    fused, report = otfuse_cli.merge(model, model, matcher="sweep")
    assert all(torch.equal(tensor, fused[name]) for name, tensor in model.state_dict().items())
    assert report.checks.function == "kept"


@pytest.mark.slow
def test_where_the_library_is_missing_names_are_used_and_it_is_said(without, tmp_path):
    models = libraries.torchvision_models()
    torch.manual_seed(0)
    a, b = models.resnet18(num_classes=4), models.resnet18(num_classes=4)
    without("torchvision", "timm")
    report = otfuse_cli.inspect(*stored(tmp_path, "r", a, b))
    assert report.checks.function == "assumed"
    assert report.graph.source == "family resnet-basic"
    assert any("pip install torchvision" in warning for warning in report.warnings)


def test_where_nothing_else_tells_it_the_library_is_what_to_install(without, tmp_path):
    without("torchvision", "timm")
    paths = stored(tmp_path, "e", timm_net("test_efficientnet"), timm_net("test_efficientnet", 1))
    with pytest.raises(IncompatibleModels) as caught:
        otfuse_cli.merge(*paths)
    assert caught.value.fix.startswith("this is test_efficientnet of timm: pip install timm")


def test_a_library_that_can_t_be_imported_is_named(monkeypatch, tmp_path):
    def broken(name):
        raise RuntimeError("operator torchvision::nms does not exist")

    paths = stored(tmp_path, "e", timm_net("test_efficientnet"), timm_net("test_efficientnet", 1))
    monkeypatch.setattr("otfuse_cli.running.user_code.importlib.import_module", broken)
    with pytest.raises(UsageError, match="timm can't be imported") as caught:
        otfuse_cli.merge(*paths)
    assert "nms does not exist" in caught.value.why


def test_a_plain_average_needs_no_library(without, monkeypatch):
    monkeypatch.setattr(automatic, "library_network", lambda *_: pytest.fail("it was looked for"))
    model = timm_net("test_efficientnet")
    otfuse_cli.merge(model, model, align="none")


@pytest.mark.slow
def test_rivals_with_another_graph_are_refused_and_those_with_the_same_told(monkeypatch):
    """Norms over groups of channels and over all of them have the same tensors."""
    shapes = shapes_of(timm_net("test_efficientnet_gn"))
    with pytest.raises(IncompatibleModels, match="ambiguous architecture") as caught:
        automatic.automatic(shapes)
    assert "timm:test_efficientnet_ln have these tensors" in caught.value.why
    assert "--arch timm:test_efficientnet_gn" in caught.value.fix
    monkeypatch.setattr(automatic, "graphs_differ", lambda *_: False)
    found = automatic.automatic(shapes)
    assert found.graph.source == "timm test_efficientnet_gn, 1000 classes, traced"
    (remark,) = found.remarks
    assert "timm:test_efficientnet_ln has the same tensors" in remark


@pytest.mark.slow
def test_another_padding_is_another_network_of_the_same_graph():
    found = automatic.automatic(shapes_of(timm_net("mobilenetv3_small_075")))
    assert found.graph.source == "timm mobilenetv3_small_075, 1000 classes, traced"
    (remark,) = found.remarks
    assert "timm:tf_mobilenetv3_small_075" in remark


@pytest.mark.slow
def test_a_pruned_network_is_traced_as_the_one_that_it_came_from(tmp_path):
    model = timm_net("test_resnet")
    small, _ = otfuse_cli.prune(model, amount=0.25)
    assert library_network({name: tuple(t.shape) for name, t in small.items()}) is None
    fused, report = otfuse_cli.merge(model, small, matcher="sweep")
    assert report.graph.source.startswith("traced timm:test_resnet")
    assert {n: t.shape for n, t in fused.items()} == {n: t.shape for n, t in small.items()}
    _, report = otfuse_cli.prune_fuse(model, small, matcher="sweep")
    assert report.graph.source.startswith("timm test_resnet")


@pytest.mark.slow
def test_options_of_a_network(tmp_path):
    a, b = (timm_net("test_resnet", seed, num_classes=3, in_chans=1) for seed in (0, 1))
    paths = stored(tmp_path, "r", a, b)
    arch = "timm:test_resnet,num_classes=3,in_chans=1"
    _, report = otfuse_cli.merge(*paths, arch=arch, matcher="sweep")
    assert report.checks.function == "kept"
    with pytest.raises(UsageError, match="not an option of a network"):
        otfuse_cli.merge(*paths, arch="timm:test_resnet,3")


def test_code_in_a_model_folder_is_not_run(tmp_path):
    pytest.importorskip("transformers")
    marker = tmp_path / "ran"
    (tmp_path / "code.py").write_text(f"open({str(marker)!r}, 'w')\n")
    config = {"model_type": "mine", "auto_map": {"AutoModel": "code.Mine"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"w": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="code lies in the model folder") as caught:
        otfuse_cli.merge(tmp_path, tmp_path)
    assert "never run" in caught.value.why
    assert not marker.exists()


def test_the_index_is_read_once():
    assert known_networks.read_index() is known_networks.read_index()
