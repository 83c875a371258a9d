"""One tensor, whether a file stores it once, twice, or under another name."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import otfuse_cli
from family_nets import HF
from nets import Mlp, randomise, state
from otfuse_cli.checkpoint.open import open_checkpoint
from otfuse_cli.checkpoint.tied import Tied, copies, same_values
from otfuse_cli.errors import IncompatibleModels

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.usefixtures("kept_graphs"),
]

State = dict[str, torch.Tensor]
SIZES = {"vocab_size": 19, "d_model": 16, "pad_token_id": 0, "decoder_start_token_id": 0}


def t5() -> nn.Module:
    config = transformers.T5Config(
        **SIZES, d_kv=4, num_heads=4, d_ff=24, num_layers=1, num_decoder_layers=1, eos_token_id=1
    )
    return transformers.T5ForConditionalGeneration(config)


def marian() -> nn.Module:
    layers = {
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
    }
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = transformers.MarianConfig(
        **SIZES, **layers, **heads, eos_token_id=1, tie_encoder_decoder=False
    )
    return transformers.MarianMTModel(config)


def of_family(name: str):
    return lambda: HF[name].make()[0]


# Family, how to make it, the name that stays, and the names that are stored again.
FAMILIES = {
    "gpt2": (of_family("gpt2"), "transformer.wte.weight", ["lm_head.weight"]),
    "llama": (of_family("llama-tied"), "model.embed_tokens.weight", ["lm_head.weight"]),
    "qwen2": (of_family("qwen2-tied"), "model.embed_tokens.weight", ["lm_head.weight"]),
    "bert": (
        of_family("bert-masked"),
        "bert.embeddings.word_embeddings.weight",
        ["cls.predictions.decoder.weight"],
    ),
}
TRACED = {
    "t5": (
        t5,
        "shared.weight",
        ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"],
    ),
    "marian": (
        marian,
        "model.shared.weight",
        [*(f"model.{s}.embed_tokens.weight" for s in ("encoder", "decoder")), "lm_head.weight"],
    ),
}  # fmt: skip
EVERY = {**FAMILIES, **TRACED}


@cache
def net(name: str, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = EVERY[name][0]().eval()
        for parameter in module.parameters():
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    return module


def tensors(name: str, seed: int, *, twice: bool) -> State:
    """All tensors of a network, tied ones once or under each of their names."""
    held = {n: t.detach().clone() for n, t in net(name, seed).state_dict().items()}
    again = [n for n in held if twice_stored(name, n)]
    return held if twice else {n: t for n, t in held.items() if n not in again}


def twice_stored(name: str, tensor: str) -> bool:
    return tensor in EVERY[name][2] or tensor == "cls.predictions.decoder.bias"


def folder(path: Path, value: State, name: str, kind: str = "safetensors") -> Path:
    path.mkdir()
    net(name, 0).config.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    config["architectures"] = [type(net(name, 0)).__name__]
    (path / "config.json").write_text(json.dumps(config))
    if kind == "safetensors":
        save_file(value, path / "model.safetensors", {"format": "pt"})
    else:
        torch.save(value, path / "pytorch_model.bin")
    return path


def merged(tmp_path: Path, one: Path, two: Path, *, arch: str = "auto", **options) -> State:
    out = tmp_path / f"out-{one.name}-{two.name}"
    otfuse_cli.merge(one, two, output=out, arch=arch, matcher="sweep", **options)
    return load_file(out / "model.safetensors")


def require_one(name: str, found: State, wanted: State, *, twice: bool) -> None:
    """The result of tied files, bit for bit, and the names that the anchor's file has."""
    _, kept, again = EVERY[name]
    assert found.keys() == tensors(name, 0, twice=twice).keys()
    for tensor, values in wanted.items():
        assert torch.equal(found[tensor], values), tensor
    for other in again if twice else ():
        assert torch.equal(found[other], found[kept])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "safetensors") for name in FAMILIES), ("gpt2", "bin")]
)
def test_stored_twice_is_one_tensor(name, kind, tmp_path):
    once, twice = (
        [
            folder(tmp_path / f"{again}{s}", tensors(name, s, twice=again), name, kind)
            for s in (0, 1)
        ]
        for again in (False, True)
    )
    wanted = merged(tmp_path, *once)
    require_one(name, merged(tmp_path, *twice), wanted, twice=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strict"), [*((name, True) for name in FAMILIES), ("gpt2", False)]
)
def test_stored_twice_in_one_of_the_files(name, strict, tmp_path):
    once = [folder(tmp_path / f"o{s}", tensors(name, s, twice=False), name) for s in (0, 1)]
    twice = [folder(tmp_path / f"t{s}", tensors(name, s, twice=True), name) for s in (0, 1)]
    wanted = merged(tmp_path, *once)
    for one, two in ((once[0], twice[1]), (twice[0], once[1])):
        found = merged(tmp_path, one, two, strict=strict)
        require_one(name, found, wanted, twice=two is twice[1])


FACTORY = """
import torch, transformers

def net():
    config = transformers.AutoConfig.from_pretrained("{folder}")
    ids = torch.arange(10).view(2, 5)
    inputs = {{"input_ids": ids, "decoder_input_ids": ids + 3}}
    return transformers.AutoModelForSeq2SeqLM.from_config(config), inputs
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACED)
def test_names_that_the_network_ties(name, tmp_path):
    """Files of one network may keep the tensor under different names, once or several times."""
    _, kept, again = EVERY[name]
    once = [folder(tmp_path / f"o{s}", tensors(name, s, twice=False), name) for s in (0, 1)]
    twice = folder(tmp_path / "t1", tensors(name, 1, twice=True), name)
    other = tensors(name, 0, twice=False)
    other[again[-1]] = other.pop(kept)
    moved = folder(tmp_path / "m0", other, name)
    (tmp_path / "net.py").write_text(FACTORY.format(folder=once[0]))
    arch = {"arch": f"{tmp_path / 'net.py'}:net"}
    wanted = merged(tmp_path, *once, **arch)
    require_one(name, merged(tmp_path, moved, twice, **arch), wanted, twice=True)
    require_one(name, merged(tmp_path, moved, once[1], **arch), wanted, twice=False)


OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lin = nn.Embedding(7, 6), nn.Linear(6, 6)
        self.out, self.extra = nn.Linear(6, 7, bias=False), nn.Linear(6, 7)
        self.out.weight = self.extra.weight = self.embed.weight

    def forward(self, x):
        h = torch.relu(self.lin(self.embed(x)))
        return self.out(h) + self.extra(h)

def net():
    return Net(), (torch.arange(6).view(2, 3),)
"""


@pytest.mark.parametrize(
    ("stored", "anchor"),
    [
        (("out",), ("extra",)),
        (("out",), ("embed", "out", "extra")),
        (("embed", "out"), ("embed",)),
        (("extra", "out", "embed"), ("embed",)),
        (("extra", "out", "embed"), ("embed", "out", "extra")),
    ],
)
def test_a_network_of_the_users_own(stored, anchor, tmp_path):
    """Whatever names the two files have the tensor under."""
    (tmp_path / "net.py").write_text(OWN)
    generator = torch.Generator().manual_seed(0)
    shapes = {"lin.weight": (6, 6), "lin.bias": (6,), "extra.bias": (7,)}
    one, two = ({n: torch.randn(s, generator=generator) for n, s in shapes.items()} for _ in "ab")
    weights = torch.randn(2, 7, 6, generator=generator)
    options = {"arch": f"{tmp_path / 'net.py'}:net", "matcher": "sweep"}
    wanted, _ = otfuse_cli.merge(
        {"embed.weight": weights[0]} | one, {"embed.weight": weights[1]} | two, **options
    )
    for own, names, weight in ((one, stored, weights[0]), (two, anchor, weights[1])):
        own.update({f"{n}.weight": weight.clone() for n in names})
    found, report = otfuse_cli.merge(one, two, **options)
    assert report.checks.max_error < 1e-5
    assert found.keys() == two.keys()
    for name in anchor:
        assert torch.equal(found[f"{name}.weight"], wanted["embed.weight"])
    for name in shapes:
        assert torch.equal(found[name], wanted[name])


@pytest.mark.slow
def test_a_file_of_two_storages_in_torchs_format(tmp_path):
    """Without a folder or a config.json the values tell it."""
    for seed, letter in enumerate("ab"):
        torch.save(tensors("llama", seed, twice=True), tmp_path / f"{letter}.pt")
    out = tmp_path / "out.pt"
    otfuse_cli.merge(tmp_path / "a.pt", tmp_path / "b.pt", output=out)
    found = torch.load(out, weights_only=True)
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    wanted, _ = otfuse_cli.merge(*(tensors("llama", s, twice=False) for s in (0, 1)))
    assert torch.equal(found["lm_head.weight"], wanted["model.embed_tokens.weight"])


def test_values_that_differ_are_two_tensors_and_said_so(tmp_path):
    """config.json says tied, the file says something else: some loaders take one, some both."""
    paths = []
    for seed in (0, 1):
        own = tensors("llama", seed, twice=True)
        own["lm_head.weight"] = own["lm_head.weight"] + 1
        paths.append(folder(tmp_path / f"{seed}", own, "llama"))
    found, report = otfuse_cli.merge(*paths, align="none")
    said = [w for w in report.warnings if "tie_word_embeddings" in w]
    assert [w.partition(":")[0] for w in said] == [str(p) for p in paths]
    torch.testing.assert_close(found["lm_head.weight"], found["model.embed_tokens.weight"] + 1)
    with pytest.raises(IncompatibleModels, match="different values") as caught:
        otfuse_cli.merge(*paths, arch=f"hf:{paths[0]}")
    assert "lm_head.weight" in caught.value.where
    assert "tie_word_embeddings=False" in caught.value.fix


@pytest.mark.slow
def test_a_config_that_says_untied_is_believed(tmp_path):
    paths = []
    for seed in (0, 1):
        path = folder(tmp_path / f"{seed}", tensors("llama", seed, twice=True), "llama")
        config = json.loads((path / "config.json").read_text()) | {"tie_word_embeddings": False}
        (path / "config.json").write_text(json.dumps(config))
        paths.append(path)
    _, report = otfuse_cli.merge(*paths, weights=(0.5, 0.5))
    assert not any("tie" in w for w in report.warnings)
    with open_checkpoint(paths[0]) as held:
        assert "lm_head.weight" in held.infos


@pytest.mark.slow
def test_inspect_and_eval_take_the_same_files(tmp_path):
    paths = [folder(tmp_path / f"{s}", tensors("gpt2", s, twice=True), "gpt2") for s in (0, 1)]
    one = folder(tmp_path / "once", tensors("gpt2", 0, twice=False), "gpt2")
    assert not otfuse_cli.inspect(one, paths[1]).differences
    ids = torch.randint(0, 19, (6, 7), generator=torch.Generator().manual_seed(0))
    arch = {"arch": f"hf:{one}", "samples": {"input_ids": ids}}
    scores = [otfuse_cli.evaluate(p, **arch).evaluation["cross-entropy"] for p in (paths[0], one)]
    assert [*scores[0].values()] == [*scores[1].values()]


def test_prune_and_check_take_them_too(tmp_path):
    generator = torch.Generator().manual_seed(0)
    (tmp_path / "net.py").write_text(OWN)
    shapes = {"lin.weight": (6, 6), "lin.bias": (6,), "extra.bias": (7,), "embed.weight": (7, 6)}
    own = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
    own["out.weight"] = own["embed.weight"].clone()
    arch = f"{tmp_path / 'net.py'}:net"
    assert otfuse_cli.check(own, arch=arch).checks.max_error < 1e-8
    net = tensors("llama", 0, twice=True)
    pruned, _ = otfuse_cli.prune(net, amount=0.5)
    assert pruned.keys() == net.keys()
    assert torch.equal(pruned["lm_head.weight"], pruned["model.embed_tokens.weight"])


@pytest.mark.quick_cases("gpt2")
@pytest.mark.parametrize("name", FAMILIES)
def test_prune_fuse_sees_one_tensor_too(name, tmp_path):
    small = otfuse_cli.prune(tensors(name, 0, twice=False), amount=0.5)[0]
    head = [n for n in tensors(name, 0, twice=True) if twice_stored(name, n)]
    again = {n: t.clone() for n, t in small.items()}
    for other in head:
        kept = EVERY[name][1] if other in EVERY[name][2] else "cls.predictions.bias"
        again[other] = again[kept].clone()
    dense = tensors(name, 0, twice=False), tensors(name, 0, twice=True)
    wanted, report = otfuse_cli.prune_fuse(dense[0], small)
    assert not any("two names" in w for w in report.warnings)
    for parents in ((dense[0], again), (dense[1], again), (dense[1], small)):
        found, _ = otfuse_cli.prune_fuse(*parents)
        assert found.keys() == parents[1].keys()
        for tensor, values in wanted.items():
            assert torch.equal(found[tensor], values), tensor
        for other in EVERY[name][2] if parents[1] is again else ():
            assert torch.equal(found[other], found[EVERY[name][1]])


def test_units_pruned_in_place_leave_two_tensors_and_say_so():
    dense = tensors("llama", 0, twice=True)
    masked = {n: t.clone() for n, t in dense.items()}
    for part in ("gate_proj.weight", "up_proj.weight"):
        masked[f"model.layers.0.mlp.{part}"][:3] = 0
    found, report = otfuse_cli.prune_fuse(dense, masked)
    assert found.keys() == dense.keys()
    assert any("fused as two tensors" in w for w in report.warnings)


def test_equal_layers_of_a_deep_network_are_no_tie():
    """Each has units of its own; and a model that lacks one of them lacks a layer."""
    deep = [state(randomise(Mlp((6, 6, 6, 6, 4)), seed)) for seed in (0, 1)]
    for own in deep:
        own["fc3.weight"] = own["fc2.weight"].clone()
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0))
    twin = dict(deep[1])
    twin["fc2.weight"], twin["fc2.bias"] = twin["fc2.weight"][order], twin["fc2.bias"][order]
    twin["fc3.weight"] = twin["fc3.weight"][:, order]
    found, _ = otfuse_cli.merge(twin, deep[1], arch="mlp")
    for name, values in deep[1].items():
        assert torch.equal(found[name], values)
    shorter = {n: t for n, t in deep[0].items() if not n.startswith("fc3.")}
    with pytest.raises(IncompatibleModels):
        otfuse_cli.merge(shorter, deep[1], arch="mlp")


BRANCHES = """
layers:
  a: h <- in
  b: k <- in
  c: out <- h
  d: out <- k
"""
PARALLEL = """
layers:
  a: h <- in
  p: h <- h
  q: h <- h
  c: out <- h
"""


def test_equal_layers_of_two_branches_are_no_tie(tmp_path):
    """They read the same inputs and make units of their own, which may move apart."""
    (tmp_path / "net.yaml").write_text(BRANCHES)
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(6, 4, generator=generator)
    own = {"a.weight": first, "b.weight": first.clone()}
    own |= {f"{n}.weight": torch.randn(3, 6, generator=generator) for n in "cd"}
    order = torch.randperm(6, generator=generator)
    twin = own | {"b.weight": first[order], "d.weight": own["d.weight"][:, order]}
    for pair in ((own, own), (twin, own)):
        found, _ = otfuse_cli.merge(*pair, arch=str(tmp_path / "net.yaml"))
        assert all(torch.equal(found[name], own[name]) for name in own)


def test_a_layer_that_one_model_lacks_is_no_copy_of_another(tmp_path):
    (tmp_path / "net.yaml").write_text(PARALLEL)
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (6, 4), "p.weight": (6, 6), "c.weight": (3, 6)}
    own = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
    deeper = own | {"q.weight": own["p.weight"].clone()}
    for pair in ((own, deeper), (deeper, own)):
        with pytest.raises(IncompatibleModels):
            otfuse_cli.merge(*pair, arch=str(tmp_path / "net.yaml"))


def test_an_untied_model_does_not_fit_a_tied_one(tmp_path):
    own = tensors("gpt2", 0, twice=True)
    own["lm_head.weight"] = own["lm_head.weight"] + 1
    with pytest.raises(IncompatibleModels, match="different tensors") as caught:
        otfuse_cli.merge(own, dict(net("gpt2", 1).state_dict()))
    assert "lm_head.weight" in str(caught.value)


def test_copies_are_equal_matrices_that_are_not_constant():
    generator = torch.Generator().manual_seed(0)
    one = torch.randn(300, 8, generator=generator)
    near = one.clone()
    near[-1, -1] += 1e-6
    zeros = torch.zeros(4, 4)
    value = {
        "a": one, "b": one.clone(), "c": near, "d": one.double(), "e": zeros, "f": zeros.clone(),
        "g": one[0].clone(), "h": one[0].clone(),
        "p": one.to(torch.float8_e5m2), "q": one.to(torch.float8_e5m2),
        "x": torch.full((2, 2), torch.nan), "y": torch.full((2, 2), torch.nan),
    }  # fmt: skip
    with open_checkpoint(value) as held:
        assert copies(held) == [("a", "b"), ("p", "q")]
        assert same_values(held, "g", "h")
        assert not same_values(held, "a", "d")


def test_a_checkpoint_with_one_tensor_for_each_class():
    one = torch.arange(6.0).view(2, 3)
    value = {"first": torch.zeros(1), "b": one, "a": one.clone(), "last": torch.zeros(2)}
    with open_checkpoint(value) as whole:
        view = Tied(whole, [("a", "b", "c")])
        assert list(view.infos) == ["first", "a", "last"]
        assert view.aliases == {"a": ("b",)}
        assert torch.equal(view.read("a"), one)
        assert torch.equal(view.read_rows("a", 1, 2), one[1:])
        assert view.record().tensors == 3
