"""`--untie`: the output layer gets a tensor of its own, and what is written loads that way."""

from __future__ import annotations

import copy
import json
import sys

import numpy as np
import pytest
import torch
from torch import nn

import otfuse_cli
from otfuse_cli.checkpoint.open import open_checkpoint
from otfuse_cli.checkpoint.untied import Untied
from otfuse_cli.errors import UsageError
from otfuse_cli.graph.trace.from_module import trace
from otfuse_cli.running.relabel import draw_maps, relabel_state
from otfuse_cli.running.untie import output_splits, untie
from test_joint_streams import inputs_for
from test_orthogonal import folder, made

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("kept_graphs")
HEAD = "lm_head.weight"
EMBEDDING = {"gpt2": "transformer.wte.weight", "llama-tied": "model.embed_tokens.weight"}
TIED = tuple(EMBEDDING)


def state_of(name: str, seed: int = 0) -> dict[str, torch.Tensor]:
    return dict(made(name, seed)[0].state_dict())


def twin_of(name: str) -> dict[str, torch.Tensor]:
    """The same function with the units, the stream's among them, in another order."""
    module, inputs = made(name)
    graph = trace(module, (), inputs, source=name)
    return relabel_state(state_of(name), graph, draw_maps(graph, torch.Generator().manual_seed(3)))


def logits(name: str, fused) -> torch.Tensor:
    """What a network with an output layer of its own computes with these tensors."""
    module, inputs = made(name)
    kind = type(module)
    config = kind.config_class.from_dict({**module.config.to_dict(), "tie_word_embeddings": False})
    own = kind(config).eval()
    assert not own.load_state_dict(fused, strict=False).unexpected_keys
    with torch.no_grad():
        return own(**inputs).logits


def change(name: str, fused) -> float:
    """How far these tensors are from the first network of this name, relative."""
    module, inputs = made(name)
    with torch.no_grad():
        wanted = module(**inputs).logits
    return float((logits(name, fused) - wanted).abs().max() / wanted.abs().max())


def options_for(way: str, name: str) -> dict:
    if way == "joint":
        return {"blend": "joint", "matcher": "sweep", "samples": inputs_for(name)}
    return {"align": "none"} if way == "average" else {"residual": "orthogonal"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, "average") for name in TIED),
        ("gpt2", "orthogonal"),
        pytest.param("llama-tied", "orthogonal", marks=pytest.mark.slow),
        *(pytest.param(name, "joint", marks=pytest.mark.slow) for name in TIED),
    ],
)
def test_a_tied_net_with_itself_keeps_its_function(name, way, tmp_path):
    own = state_of(name)
    arch = folder(name, tmp_path)
    fused, report = otfuse_cli.merge(own, own, arch=arch, untie=True, **options_for(way, name))
    assert {HEAD, EMBEDDING[name]} <= fused.keys()
    assert change(name, fused) < 1e-4
    assert any(HEAD in w and "tie_word_embeddings=False" in w for w in report.warnings)
    assert report.recipe["untie"] is True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(("gpt2", way) for way in ("orthogonal", "joint")),
        *(pytest.param("llama-tied", w, marks=pytest.mark.slow) for w in ("orthogonal", "joint")),
    ],
)
def test_so_does_a_permuted_twin(name, way, tmp_path):
    models, arch = (twin_of(name), state_of(name)), folder(name, tmp_path)
    fused, _ = otfuse_cli.merge(*models, arch=arch, untie=True, **options_for(way, name))
    assert change(name, fused) < 1e-4
    # The gain of the last norm went into the output layer, and not into the embedding.
    assert not torch.allclose(fused[HEAD], fused[EMBEDDING[name]], atol=1e-2)
    plain, _ = otfuse_cli.merge(*models, arch=arch, untie=True, align="none")
    assert change(name, plain) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama-tied", marks=pytest.mark.slow)])
def test_the_librarys_own_class_loads_the_folder(name, cli, tmp_path):
    """Saved by the library, a tied net has no output layer in its file."""
    for seed, letter in enumerate("ab"):
        made(name, seed)[0].save_pretrained(tmp_path / letter)
    with open_checkpoint(tmp_path / "a") as held:
        assert HEAD not in held.infos
    run = cli(
        *("merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "out", "--untie"),
        *("--arch", f"hf:{tmp_path / 'b'}", "--residual", "orthogonal"),
    )
    assert run.code == 0, run.err
    assert "--untie: lm_head.weight got a tensor of its own" in run.err
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    kind = type(made(name)[0])
    net, info = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    assert net.lm_head.weight is not net.get_input_embeddings().weight
    with open_checkpoint(tmp_path / "out") as held:
        fused = {n: held.read(n) for n in held.infos}
    with torch.no_grad():
        found = net.eval()(**made(name)[1]).logits
    torch.testing.assert_close(found, logits(name, fused), rtol=1e-4, atol=1e-4)


@pytest.mark.quick_cases("gpt2")
@pytest.mark.parametrize("name", [*TIED, "bert-masked"])
def test_names_and_shapes_tell_it_too(name, tmp_path):
    """Of a family's file that leaves the output layer out; a bias that was shared is there too."""
    module, inputs = made(name)
    module.save_pretrained(tmp_path / "a")
    out = tmp_path / "out"
    otfuse_cli.merge(tmp_path / "a", tmp_path / "a", untie=True, align="none", output=out)
    net, info = type(module).from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    with torch.no_grad():
        torch.testing.assert_close(net.eval()(**inputs).logits, module(**inputs).logits)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_files_hold_both_tensors(suffix, tmp_path):
    """They no longer share their storage."""
    torch.save(state_of("gpt2"), tmp_path / "a.pt")
    out = tmp_path / f"out{suffix}"
    arch = folder("gpt2", tmp_path)
    options = {"untie": True, "residual": "orthogonal", "arch": arch}
    otfuse_cli.merge(tmp_path / "a.pt", tmp_path / "a.pt", output=out, **options)
    with open_checkpoint(out) as held:
        assert not held.aliases
        fused = {n: held.read(n) for n in held.infos}
    assert change("gpt2", fused) < 1e-4


@pytest.mark.slow
def test_a_source_that_is_untied_already(tmp_path):
    """The anchor says what is tied; who stores both tensors keeps them."""
    own = state_of("gpt2")
    other = own | {HEAD: own[HEAD].clone() + 1}
    fused, _ = otfuse_cli.merge(
        other, own, arch=folder("gpt2", tmp_path), untie=True, align="none", weights=(0.5, 0.5)
    )
    torch.testing.assert_close(fused[HEAD], own[HEAD] + 0.5)
    torch.testing.assert_close(fused[EMBEDDING["gpt2"]], own[EMBEDDING["gpt2"]])


@pytest.mark.quick_cases("auto")
@pytest.mark.parametrize("arch", ["auto", "given"])
def test_nothing_is_tied(arch, tmp_path):
    own = state_of("gpt2-untied")
    arch = folder("gpt2-untied", tmp_path) if arch == "given" else arch
    fused, report = otfuse_cli.merge(own, own, arch=arch, untie=True, align="none")
    assert "--untie: nothing is tied" in report.warnings
    assert fused.keys() == own.keys() & fused.keys()


@pytest.mark.slow
def test_a_curve_of_tied_nets(cli, tmp_path):
    made("gpt2")[0].save_pretrained(tmp_path / "a")
    np.savez(tmp_path / "x.npz", x=inputs_for("gpt2", 40).numpy())
    line = ("curve", tmp_path / "a", tmp_path / "a", "--arch", f"hf:{tmp_path / 'a'}", "--untie")
    run = cli(*line, "--samples", tmp_path / "x.npz", "--steps", "2", "--json")
    assert run.code == 0, run.err
    report = json.loads(run.out)["report"]
    assert report["recipe"]["untie"] is True
    assert any("lm_head.weight got a tensor" in w for w in report["warnings"])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"residual": "orthogonal"}, {"blend": "joint"}])
def test_without_it_the_refusal_names_it(options, tmp_path):
    own, inputs = state_of("gpt2"), {}
    if "blend" in options:
        inputs = {"samples": inputs_for("gpt2"), "matcher": "sweep"}
    with pytest.raises(UsageError, match="tied") as error:
        otfuse_cli.merge(own, own, arch=folder("gpt2", tmp_path), **options, **inputs)
    assert "--untie" in error.value.fix


@pytest.mark.slow
def test_blend_auto_says_why_joint_was_not_tried(tmp_path):
    own = state_of("gpt2")
    options = {"blend": "auto", "samples": inputs_for("gpt2"), "matcher": "sweep"}
    _, report = otfuse_cli.merge(own, own, arch=folder("gpt2", tmp_path), **options)
    (said,) = [w for w in report.warnings if "joint was not tried" in w]
    assert "tied" in said
    assert "--untie" in said


def test_a_saved_program_stays_as_it_is(tmp_path):
    own = {"weight": torch.randn(3, 3)}
    with pytest.raises(UsageError, match="saved program can't be untied"):
        otfuse_cli.merge(own, own, arch=str(tmp_path / "net.pt2"), untie=True)


def test_a_class_that_ties_whatever_its_config_says(monkeypatch, tmp_path):
    """What would be written is not what it would load."""

    class Stubborn(transformers.GPT2LMHeadModel):
        def __init__(self, config) -> None:
            super().__init__(config)
            self.lm_head.weight = self.transformer.wte.weight

    own = state_of("gpt2")
    Stubborn(copy.deepcopy(made("gpt2")[0].config)).save_pretrained(tmp_path / "net")
    # The library puts another module object in its place now and then.
    for library in (transformers, sys.modules["transformers"]):
        monkeypatch.setattr(library, "Stubborn", Stubborn, raising=False)
    with pytest.raises(UsageError, match="can't be untied") as error:
        otfuse_cli.merge(own, own, arch=f"hf:{tmp_path / 'net'}", untie=True)
    assert "Stubborn" in error.value.why


FACTORY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, 6), nn.LayerNorm(6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.norm(self.embed(x)))

def net():
    return Net(), (torch.arange(6).view(2, 3),)
"""


def test_a_network_of_the_users_own(tmp_path):
    (tmp_path / "net.py").write_text(FACTORY)
    torch.manual_seed(0)
    weight, gain, shift = torch.randn(7, 6), 1 + torch.rand(6), torch.randn(6)
    own = {"embed.weight": weight, "norm.weight": gain, "norm.bias": shift, "head.weight": weight}
    order = torch.randperm(6)
    other = {n: t[..., order] for n, t in own.items()}
    other["head.weight"] = other["embed.weight"]
    arch = f"{tmp_path / 'net.py'}:net"
    fused, report = otfuse_cli.merge(other, own, arch=arch, untie=True, residual="orthogonal")
    assert report.checks.function == "kept"
    wanted = nn.functional.layer_norm(weight, (6,), gain, shift) @ weight.T
    found = nn.functional.layer_norm(
        fused["embed.weight"], (6,), fused["norm.weight"], fused["norm.bias"]
    )
    torch.testing.assert_close(found @ fused["head.weight"].T, wanted, rtol=1e-4, atol=1e-4)


class Shared(nn.Module):
    """Two embeddings, an output layer with a bias that is shared too, and two twin layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Embedding(5, 3), nn.Embedding(5, 3)
        self.left, self.right = nn.Linear(3, 3), nn.Linear(3, 3)
        self.head, self.bias = nn.Linear(3, 5), nn.Parameter(torch.zeros(5))
        self.two.weight = self.head.weight = self.one.weight
        self.right.weight = self.left.weight
        self.head.bias = self.bias


def test_only_the_output_layer_is_split_off():
    net = Shared()
    assert set(output_splits(net)) == {
        (("bias",), ("head.bias",)),
        (("one.weight", "two.weight"), ("head.weight",)),
    }
    before = {n: t.clone() for n, t in net.state_dict().items()}
    untie(net)
    assert output_splits(net) == ()
    assert net.two.weight is net.one.weight
    assert net.right.weight is net.left.weight
    assert all(torch.equal(t, before[n]) for n, t in net.state_dict().items())


@pytest.mark.parametrize("stored", ["head.weight", "one.weight"])
def test_a_view_has_one_tensor_for_each_that_is_kept(stored):
    """Whichever name the file has; names that stay tied stay other names."""
    tensor = torch.randn(5, 3)
    names = dict.fromkeys([stored, "two.weight", "one.weight", "head.weight"], tensor)
    view = Untied(open_checkpoint(names), [(("one.weight", "two.weight"), ("head.weight",))])
    embedding = next(n for n in view.infos if n != "head.weight")
    assert view.infos.keys() == {embedding, "head.weight"}
    assert view.aliases == {embedding: tuple({"one.weight", "two.weight"} - {embedding})}
    assert torch.equal(view.read("head.weight"), tensor)
    assert torch.equal(view.read_rows(embedding, 1, 3), tensor[1:3])
