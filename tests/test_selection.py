"""Which tensors are averaged: --skip, --only, weights by tensor; models that differ in more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import otfuse_cli
from nets import Mlp, Vgg, randomise, state
from otfuse_cli.errors import IncompatibleModels, UsageError
from test_twins import permuted

PLAIN = {"align": "none"}
TEXT_SPEC = """
layers:
  embed: in -> e
  fc: h <- e
  head: out <- h
"""


def mlp(seed: int) -> dict[str, torch.Tensor]:
    return state(randomise(Mlp(), seed))


def text(seed: int, words: int = 20, classes: int = 5, h: int = 6) -> dict[str, torch.Tensor]:
    """An embedding, a layer and a head."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "embed.weight": (words, 4),
        "fc.weight": (h, 4),
        "fc.bias": (h,),
        "head.weight": (classes, h),
        "head.bias": (classes,),
    }
    return {n: torch.randn(s, generator=generator) for n, s in shapes.items()}


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "text.yaml").write_text(TEXT_SPEC)
    return str(tmp_path / "text.yaml")


def mean(a: torch.Tensor, b: torch.Tensor, weight: float = 0.5) -> torch.Tensor:
    return b + weight * (a - b)


# -- --skip, --only


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"skip": ("fc4.*",)}, {"fc4.weight", "fc4.bias"}),
        ({"skip": ("fc1.weight", "*.bias")}, {"fc1.weight", *(f"fc{n}.bias" for n in "1234")}),
        ({"only": ("fc[12].*",)}, {"fc3.weight", "fc3.bias", "fc4.weight", "fc4.bias"}),
        (
            {"only": ("fc1.*",), "skip": ("*.bias",)},
            {"fc1.bias", *(f"fc{n}.{p}" for n in "234" for p in ("weight", "bias"))},
        ),
    ],
)
def test_what_is_skipped_is_the_anchors(options, kept):
    a, b = mlp(0), mlp(1)
    fused, report = otfuse_cli.merge(a, b, **PLAIN, **options)
    for name, tensor in b.items():
        if name in kept:
            assert torch.equal(fused[name], tensor), name
        else:
            torch.testing.assert_close(fused[name], mean(a[name], tensor))
    (warning,) = (w for w in report.warnings if "--skip" in w)
    assert sorted(kept)[0].split(".")[0] in warning
    assert report.recipe["skip"] == list(options.get("skip", ()))
    assert report.recipe["only"] == list(options.get("only", ()))


def test_matching_sees_what_the_average_skips():
    """The source is aligned as a whole: all but the skipped tensor is as without --skip."""
    anchor = mlp(1)
    twin = permuted(mlp(0), seed=3)
    whole, _ = otfuse_cli.merge(twin, anchor, repair="none")
    part, report = otfuse_cli.merge(twin, anchor, repair="none", skip=("fc2.weight",))
    assert torch.equal(part["fc2.weight"], anchor["fc2.weight"])
    assert not torch.equal(whole["fc2.weight"], anchor["fc2.weight"])
    assert all(torch.equal(part[n], whole[n]) for n in anchor if n != "fc2.weight")
    assert report.spaces


def test_a_skipped_tensor_is_the_anchors_at_weight_one_and_is_not_repaired():
    a, b = mlp(0), mlp(1)
    fused, _ = otfuse_cli.merge(a, b, weights=(1, 0), skip=("fc1.*",))
    assert torch.equal(fused["fc1.weight"], b["fc1.weight"])
    assert not torch.equal(fused["fc2.weight"], b["fc2.weight"])
    fused, _ = otfuse_cli.merge(a, b, skip=("fc1.*",))
    assert torch.equal(fused["fc1.weight"], b["fc1.weight"])


def test_running_variance_follows_the_layer_that_feeds_it():
    """The convolution is the anchor's, so that its norm sees what it saw in the anchor."""
    a, b = (state(randomise(Vgg(), seed)) for seed in (0, 1))
    fused, _ = otfuse_cli.merge(a, b, skip=("features.0.weight",))
    torch.testing.assert_close(
        fused["features.1.running_var"], b["features.1.running_var"], rtol=1e-5, atol=1e-6
    )
    assert not torch.equal(fused["features.5.running_var"], b["features.5.running_var"])


@pytest.mark.parametrize("option", ["skip", "only"])
def test_a_pattern_that_means_nothing_is_refused(option):
    with pytest.raises(UsageError, match="matches no tensor") as caught:
        otfuse_cli.merge(mlp(0), mlp(1), **{option: ("fc9.*",)})
    assert caught.value.where == f"--{option} fc9.*"
    with pytest.raises(UsageError, match="matches no tensor"):
        otfuse_cli.merge(mlp(0), mlp(1), weights={"fc9.*": (1, 1)})


# -- weights by tensor


def test_weights_by_tensor_from_a_file(cli, tmp_path):
    a, b = mlp(0), mlp(1)
    save_file(a, tmp_path / "a.safetensors")
    save_file(b, tmp_path / "b.safetensors")
    (tmp_path / "w.yaml").write_text(
        '"fc1.*": [3, 1]\n"fc[12].weight": [0, 1]\n"fc2.bias": [1, 0]\n"*": [0.2, 0.8]\n'
    )
    out = tmp_path / "out.safetensors"
    line = ["merge", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "-o", out]
    done = cli(*line, "--align", "none", "--weights", tmp_path / "w.yaml")
    assert done.code == 0, done.err
    fused = load_file(out)
    wanted = {"fc1.weight": 0.75, "fc1.bias": 0.75, "fc2.weight": 0.0, "fc2.bias": 1.0}
    for name, tensor in b.items():
        expected = mean(a[name], tensor, wanted.get(name, 0.2))
        torch.testing.assert_close(fused[name], expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(fused["fc2.weight"], b["fc2.weight"])
    assert torch.equal(fused["fc2.bias"], a["fc2.bias"])
    recipe = json.loads(out.with_suffix(".report.json").read_text())["recipe"]
    assert recipe["weights"] == [0.2, 0.8]
    assert recipe["weight_rules"][0] == {"pattern": "fc1.*", "weights": [0.75, 0.25]}


def test_what_no_pattern_means_has_equal_weights():
    a, b = mlp(0), mlp(1)
    fused, _ = otfuse_cli.merge(a, b, weights={"fc1.*": (1, 0)}, **PLAIN)
    assert torch.equal(fused["fc1.weight"], a["fc1.weight"])
    torch.testing.assert_close(fused["fc2.weight"], mean(a["fc2.weight"], b["fc2.weight"]))


def test_a_source_that_counts_somewhere_is_read_and_matched():
    anchor = mlp(1)
    twin = permuted(anchor, seed=2)
    fused, report = otfuse_cli.merge(twin, anchor, weights={"fc1.*": (1, 0), "*": (0, 1)})
    assert {s.source for s in report.spaces} == {0}
    assert all(torch.equal(fused[n], t) for n, t in anchor.items())
    twin["fc3.weight"][0, 0] = float("nan")
    with pytest.raises(otfuse_cli.OtfuseError, match="NaN"):
        otfuse_cli.merge(twin, anchor, weights={"fc1.*": (1, 0), "*": (0, 1)})


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        ('"fc1.*": [1]', 2, "1 weights for 2"),
        ('"fc1.*": [1, -1]', 2, "not negative"),
        ('"fc1.*": 0.5', 2, "a list for each pattern"),
        ("[1, 2]", 2, "a list for each pattern"),
        ('"fc1.*": [true, 1]', 2, "a list for each pattern"),
        ('"fc1.*": [', 3, "not a YAML file"),
        (None, 3, "can't read the weights"),
    ],
)
def test_weight_files_that_say_nothing(cli, tmp_path, content, code, words):
    save_file(mlp(0), tmp_path / "a.safetensors")
    if content is not None:
        (tmp_path / "w.yaml").write_text(content)
    a, out = tmp_path / "a.safetensors", tmp_path / "out.pt"
    done = cli("merge", a, a, "-o", out, "--weights", tmp_path / "w.yaml")
    assert done.code == code
    assert words in done.err
    assert not out.exists()


# -- different tensors


def test_different_tensors_are_an_error_that_names_the_way_out():
    a, b = mlp(0), mlp(1)
    a["extra.weight"] = torch.rand(3)
    del a["fc2.bias"]
    with pytest.raises(IncompatibleModels, match="different tensors") as caught:
        otfuse_cli.merge(a, b)
    assert "fc2.bias" in str(caught.value.why)
    assert "extra.weight" in str(caught.value.why)
    assert "--no-strict" in str(caught.value.fix)


def test_not_strict_keeps_and_drops_and_says_so():
    a, b = mlp(0), mlp(1)
    a["extra.weight"] = torch.rand(3)
    del a["fc2.bias"]
    fused, report = otfuse_cli.merge(a, b, strict=False, **PLAIN)
    assert list(fused) == list(b)
    assert torch.equal(fused["fc2.bias"], b["fc2.bias"])
    torch.testing.assert_close(fused["fc2.weight"], mean(a["fc2.weight"], b["fc2.weight"]))
    text = " ".join(report.warnings)
    assert "kept from state dict 1: fc2.bias" in text
    assert "dropped: extra.weight" in text
    assert report.recipe["strict"] is False


def test_not_strict_still_aligns_what_is_left():
    anchor = mlp(1)
    twin = permuted(anchor, seed=5)
    del twin["fc2.bias"]
    fused, _ = otfuse_cli.merge(twin, anchor, strict=False)
    assert all(torch.equal(fused[n], t) for n, t in anchor.items())


def test_a_layer_that_one_model_lacks_stays_and_so_do_its_neighbours_units():
    """Without fc2 nothing makes or reads its units in the source: they are the anchor's."""
    a, b = mlp(0), mlp(1)
    for name in ("fc2.weight", "fc2.bias"):
        del a[name]
    fused, report = otfuse_cli.merge(a, b, strict=False, repair="none")
    assert torch.equal(fused["fc2.weight"], b["fc2.weight"])
    assert all("fc2.weight" not in s.tensors for s in report.spaces)
    reasons = {p.reason for p in report.graph.pinned}
    assert "its tensors are not in every model" in reasons


def test_nothing_in_common():
    with pytest.raises(IncompatibleModels, match="no tensor in common"):
        otfuse_cli.merge({"other.weight": torch.rand(3, 3)}, mlp(1), strict=False)


def test_a_tensor_that_any_source_lacks_is_the_anchors():
    a, b, c = mlp(0), mlp(1), mlp(2)
    del a["fc2.bias"]
    fused, _ = otfuse_cli.merge(a, b, c, strict=False, **PLAIN)
    assert torch.equal(fused["fc2.bias"], c["fc2.bias"])


@pytest.mark.slow
def test_the_function_is_not_claimed_where_a_model_can_not_be_run(tmp_path):
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Net(nn.Sequential):\n"
        "    def __init__(self):\n"
        "        super().__init__(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))\n\n\n"
        "def make():\n    return Net(), (torch.rand(2, 6),)\n"
    )
    torch.manual_seed(0)
    nets = [
        dict(
            torch.nn.Sequential(
                torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3)
            ).state_dict()
        )
        for _ in range(2)
    ]
    arch = f"{tmp_path / 'net.py'}:make"
    _, report = otfuse_cli.merge(*nets, arch=arch)
    assert report.checks.function == "kept"
    more = {**nets[0], "note": torch.rand(2)}
    _, report = otfuse_cli.merge(more, nets[1], arch=arch, strict=False)
    assert report.checks.function == "kept"  # what the network runs is all there
    less = {n: t for n, t in nets[0].items() if n != "2.bias"}
    _, report = otfuse_cli.merge(less, nets[1], arch=arch, strict=False)
    assert report.checks.function is None
    assert any("function was not checked" in w for w in report.warnings)


# -- vocabularies and classes


@pytest.mark.parametrize(("words", "classes"), [(23, 5), (17, 5), (20, 7), (20, 3), (18, 9)])
@pytest.mark.parametrize("align", ["wts", "none"])
def test_common_rows_are_averaged_and_the_rest_is_the_anchors(spec, words, classes, align):
    anchor = text(1)
    a = text(0, words, classes)
    fused, report = otfuse_cli.merge(a, anchor, arch=spec, vocab="common", align=align)
    assert {n: t.shape for n, t in fused.items()} == {n: t.shape for n, t in anchor.items()}
    common = min(words, 20)
    assert torch.equal(fused["embed.weight"][common:], anchor["embed.weight"][common:])
    common = min(classes, 5)
    assert torch.equal(fused["head.bias"][common:], anchor["head.bias"][common:])
    expected = mean(a["head.bias"][:common], anchor["head.bias"][:common])
    torch.testing.assert_close(fused["head.bias"][:common], expected)
    if align == "none":
        for name in ("embed.weight", "head.weight"):
            c = min(len(a[name]), len(anchor[name]))
            torch.testing.assert_close(fused[name][:c], mean(a[name][:c], anchor[name][:c]))
    assert any("rows are averaged" in w for w in report.warnings)
    assert report.recipe["vocab"] == "common"


def test_a_permuted_twin_with_more_words_is_recovered(spec):
    anchor = text(1)
    twin = permuted(anchor, seed=4, arch=spec)
    more = torch.cat([twin["embed.weight"], torch.rand(3, 4)])
    fused, _ = otfuse_cli.merge({**twin, "embed.weight": more}, anchor, arch=spec, vocab="common")
    for name, tensor in anchor.items():
        torch.testing.assert_close(fused[name], tensor)


def test_the_anchors_rows_are_kept_whole(spec):
    anchor = text(1)
    fused, report = otfuse_cli.merge(text(0, 23), anchor, arch=spec, vocab="anchor", align="none")
    assert torch.equal(fused["embed.weight"], anchor["embed.weight"])
    assert not torch.equal(fused["head.weight"], anchor["head.weight"])
    assert any("embed.weight: all 20 rows are those of" in w for w in report.warnings)


def test_different_rows_are_an_error_that_names_both_sizes(cli, spec, tmp_path):
    torch.save(text(0, 23), tmp_path / "a.pt")
    torch.save(text(1), tmp_path / "b.pt")
    line = ["merge", tmp_path / "a.pt", tmp_path / "b.pt", "-o", tmp_path / "c.pt", "--arch", spec]
    done = cli(*line)
    assert done.code == 4
    for word in ("embed.weight", "[23, 4]", "[20, 4]", "--vocab common", "--vocab anchor"):
        assert word in done.err
    assert cli("inspect", *line[1:3], "--arch", spec).code == 4
    assert cli("inspect", *line[1:3], "--arch", spec, "--vocab", "common").code == 0
    assert cli(*line, "--vocab", "common").code == 0
    assert cli(*line, "--vocab", "none").code == 2


def test_widths_may_differ_too(spec):
    anchor = text(1)
    fused, _ = otfuse_cli.merge(text(0, 23, h=9), anchor, arch=spec, vocab="common")
    assert fused["head.weight"].shape == (5, 6)


def test_different_inputs_stay_an_error(spec):
    with pytest.raises(IncompatibleModels, match="more than widths"):
        otfuse_cli.merge(
            state(randomise(Mlp((14, 9, 8, 7, 5)), 0)), mlp(1), vocab="common", strict=False
        )


# -- complex tensors


def test_complex_tensors_in_place_are_averaged_and_others_refused(tmp_path):
    (tmp_path / "c.yaml").write_text("layers:\n  rot: [2, 3]\n  fc: h <- in\n  head: out <- h\n")
    arch = str(tmp_path / "c.yaml")

    def net(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        real = {"fc.weight": torch.rand(4, 3), "head.weight": torch.rand(2, 4)}
        return {"rot": torch.rand(2, 3, dtype=torch.complex64), **real}

    a, b = net(0), net(1)
    fused, _ = otfuse_cli.merge(a, b, arch=arch)
    torch.testing.assert_close(fused["rot"], mean(a["rot"], b["rot"]))
    with pytest.raises(IncompatibleModels, match="complex tensor in one model"):
        otfuse_cli.merge({**a, "rot": torch.rand(2, 3)}, b, arch=arch)
    a["fc.weight"], b["fc.weight"] = a["fc.weight"] + 1j, b["fc.weight"] + 1j
    with pytest.raises(IncompatibleModels, match="units to match") as caught:
        otfuse_cli.merge(a, b, arch=arch)
    assert "fc.weight" in str(caught.value.where)
    fused, _ = otfuse_cli.merge(a, b, arch=arch, align="none")
    torch.testing.assert_close(fused["fc.weight"], mean(a["fc.weight"], b["fc.weight"]))
