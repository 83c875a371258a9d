"""Names that differ by what wrappers put into them: taken off, put back, or named in an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import otfuse_cli
from otfuse_cli.checkpoint.names import clean_names
from otfuse_cli.checkpoint.open import open_checkpoint
from otfuse_cli.errors import IncompatibleModels
from test_publication import mlp

pytestmark = pytest.mark.usefixtures("kept_graphs")

State = dict[str, torch.Tensor]
A, B = mlp(0), mlp(1)
MEAN = {n: (A[n] + B[n]) / 2 for n in A}


def behind(prefix: str, state: State) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


def inside(part: str, state: State) -> State:
    """`0.weight` as `0.part.weight`."""
    return {n.replace(".", f".{part}."): t for n, t in state.items()}


def averaged(state: State) -> State:
    """What torch's own AveragedModel (SWA, EMA) stores."""
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    net.load_state_dict(state)
    mean = AveragedModel(net)
    mean.update_parameters(net)
    return dict(mean.state_dict())


def compiled_twice(state: State) -> State:
    return behind("_orig_mod.", inside("_orig_mod", state))


# How one file spells the names of the other.
SPELLINGS: dict[str, Any] = {
    "net.": lambda s: behind("net.", s),
    "model.": lambda s: behind("model.", s),
    "a.b.c.": lambda s: behind("a.b.c.", s),
    "module.": lambda s: behind("module.", s),
    "_orig_mod.": lambda s: behind("_orig_mod.", s),
    "_fsdp_wrapped_module.": lambda s: behind("_fsdp_wrapped_module.", s),
    "_forward_module.": lambda s: behind("_forward_module.", s),
    "module._fsdp_wrapped_module.": lambda s: behind("module._fsdp_wrapped_module.", s),
    "inner _orig_mod.": lambda s: inside("_orig_mod", s),
    "inner FSDP": lambda s: inside("_fsdp_wrapped_module", s),
    "inner checkpointing": lambda s: inside("_checkpoint_wrapped_module", s),
    "compiled parts of a compiled net": compiled_twice,
    "FSDP around checkpointing": lambda s: behind(
        "_fsdp_wrapped_module.", inside("_fsdp_wrapped_module._checkpoint_wrapped_module", s)
    ),
    "net. around compiled parts": lambda s: behind("net.", inside("_orig_mod", s)),
    "some parts compiled": lambda s: {n.replace("0.", "0._orig_mod."): t for n, t in s.items()},
    "SWA": averaged,
}


# Every spelling, and the formats for those that are told apart in writing.
FORMATS = [(name, ".pt") for name in SPELLINGS]
FORMATS += [(n, s) for n in ("net.", "inner FSDP", "SWA") for s in (".safetensors", "")]


@pytest.mark.quick_cases(
    "net.-.pt-source",
    "net.-.pt-anchor",
    "net.-.safetensors-source",
    "SWA-.pt-source",
    "inner FSDP-.pt-source",
    "inner FSDP--anchor",
    "compiled parts of a compiled net-.pt-anchor",
    "some parts compiled-.pt-source",
    "a.b.c.-.pt-anchor",
)
@pytest.mark.parametrize("turned", [False, True], ids=["source", "anchor"])
@pytest.mark.parametrize(("name", "suffix"), FORMATS)
def test_one_file_has_a_prefix(
    cli: Any, tmp_path: Path, name: str, turned: bool, suffix: str
) -> None:
    """The output has the anchor's names, all of them, as its loader wants them."""
    spell = SPELLINGS[name]
    source, anchor = (A, spell(B)) if turned else (spell(A), B)
    torch.save(source, tmp_path / "a.pt")
    torch.save(anchor, tmp_path / "b.pt")
    out = tmp_path / f"out{suffix}"
    line = ["merge", tmp_path / "a.pt", tmp_path / "b.pt", "--align", "none", "-o", out]
    done = cli(*line)
    assert done.code == 0, done.err
    if suffix == ".pt":
        got = torch.load(out, weights_only=True)
        assert list(got) == list(anchor)
    else:
        got = safetensors.torch.load_file(out if suffix else out / "model.safetensors")
        assert set(got) == set(anchor)
    wanted = spell(MEAN) if turned else MEAN
    assert all(torch.allclose(got[n].float(), wanted[n].float()) for n in anchor)
    with open_checkpoint(out) as again:
        assert again.infos.keys() == open_checkpoint(anchor).infos.keys()


@pytest.mark.parametrize("name", ["net.", "_fsdp_wrapped_module.", "inner _orig_mod.", "SWA"])
def test_a_permuted_twin_under_other_names_is_recovered(
    cli: Any, tmp_path: Path, name: str
) -> None:
    order = torch.tensor([2, 0, 3, 1])
    twin = {
        "0.weight": B["0.weight"][order],
        "0.bias": B["0.bias"][order],
        "2.weight": B["2.weight"][:, order],
        "2.bias": B["2.bias"],
    }
    torch.save(SPELLINGS[name](twin), tmp_path / "a.pt")
    torch.save(B, tmp_path / "b.pt")
    done = cli("merge", tmp_path / "a.pt", tmp_path / "b.pt", "-o", tmp_path / "out.pt")
    assert done.code == 0, done.err
    got = torch.load(tmp_path / "out.pt", weights_only=True)
    assert all(torch.allclose(got[n], B[n], atol=1e-6) for n in B)


def test_the_output_of_an_averaged_anchor_loads_there(tmp_path: Path) -> None:
    anchor = averaged(B)
    torch.save(anchor, tmp_path / "b.pt")
    otfuse_cli.merge(A, tmp_path / "b.pt", align="none", output=tmp_path / "out.pt")
    net = AveragedModel(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    net.load_state_dict(torch.load(tmp_path / "out.pt", weights_only=True), strict=True)
    assert net.n_averaged == anchor["n_averaged"] == 1
    shards = tmp_path / "shards"
    otfuse_cli.merge(A, tmp_path / "b.pt", align="none", output=shards, shard_size="0.05KB")
    files = [safetensors.torch.load_file(f) for f in sorted(shards.glob("*.safetensors"))]
    assert len(files) > 2
    net.load_state_dict({n: t for f in files for n, t in f.items()}, strict=True)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("inspect a.pt b.pt", 0),
        ("inspect a.pt b.pt --ot-costs", 0),
        ("inspect a.pt b.pt --anchor medoid --ot-costs", 0),
        ("merge a.pt b.pt c.pt -o o.pt", 0),
        ("merge a.pt b.pt c.pt -o o.pt --anchor first", 0),
        ("prune-fuse a.pt b.pt -o o.pt", 0),
        ("eval a.pt b.pt --samples s.pt --arch mlp", 0),
        ("curve a.pt b.pt --samples s.pt --arch mlp --steps 2", 0),
    ],
)
def test_every_command_finds_the_same_tensors(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(behind("net.", A), "a.pt")
    torch.save(B, "b.pt")
    torch.save(averaged(mlp(2)), "c.pt")
    torch.save({"x": torch.rand(12, 3), "y": torch.arange(12) % 2}, "s.pt")
    done = cli(*line.split())
    assert done.code == code, done.err


def test_ties_are_renamed_too(tmp_path: Path) -> None:
    shared = torch.rand(5, 3)
    state = {"embed.weight": shared, "fc.weight": torch.rand(3, 3), "head.weight": shared}
    other = {n: t.clone() for n, t in state.items()}
    other["head.weight"] = other["embed.weight"]
    torch.save(behind("net.", other), tmp_path / "a.pt")
    torch.save(state, tmp_path / "b.pt")
    spec = tmp_path / "s.yaml"
    spec.write_text("layers:\n  embed: in -> e\n  fc: e <- e\n  head: in <- e\n")
    otfuse_cli.merge(
        *(tmp_path / "a.pt", tmp_path / "b.pt"),
        align="none",
        output=tmp_path / "o.pt",
        arch=str(spec),
    )
    out = torch.load(tmp_path / "o.pt", weights_only=True)
    assert out["head.weight"].data_ptr() == out["embed.weight"].data_ptr()


# Prefixes that some names alone have, or that differ: what the error must name.
MORE = {"0.gain": torch.rand(4), "extra.weight": torch.rand(2, 2)}
DIFFERENT: dict[str, tuple[State, State, tuple[str, ...]]] = {
    "not all of the source": (behind("net.", A) | {"step": torch.tensor(3.0)}, B, ("net.", "step")),
    "not all of the anchor": (A, behind("net.", B) | {"step": torch.tensor(3.0)}, ("net.", "step")),
    "a prefix each": (behind("net.", A), behind("backbone.", B), ("net.", "backbone.")),
    "two levels each": (behind("x.net.", A), behind("y.net.", B), ("x.", "y.")),
    "with others beside": (behind("net.", A) | behind("ema.", MORE), B, ("net.", "ema.")),
    "encoder and decoder": (behind("encoder.", A), behind("decoder.", B), ("encoder.", "decoder.")),
}


@pytest.mark.quick_cases(
    "a prefix each-False", "encoder and decoder-True", "not all of the anchor-False"
)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", DIFFERENT)
def test_a_prefix_that_can_not_be_taken_off_is_named(
    cli: Any, tmp_path: Path, name: str, strict: bool
) -> None:
    source, anchor, words = DIFFERENT[name]
    torch.save(source, tmp_path / "a.pt")
    torch.save(anchor, tmp_path / "b.pt")
    options = [] if strict else ["--no-strict"]
    line = [tmp_path / "a.pt", tmp_path / "b.pt", "--align", "none", *options]
    for done in (cli("merge", *line, "-o", tmp_path / "o.pt"), cli("inspect", *line)):
        assert done.code == 4, done.err
        assert all(word in done.err for word in words)
        assert "--no-strict" not in done.err
        assert "removeprefix" in done.err
    assert not (tmp_path / "o.pt").exists()


def test_a_whole_prefix_and_one_tensor_less(tmp_path: Path) -> None:
    """The prefix is no hindrance; what is left is an ordinary difference."""
    source = behind("net.", {n: t for n, t in A.items() if n != "2.bias"})
    with pytest.raises(IncompatibleModels, match=r"2\.bias"):
        otfuse_cli.merge(source, B, align="none")
    tensors, _ = otfuse_cli.merge(source, B, align="none", strict=False)
    assert torch.equal(tensors["2.bias"], B["2.bias"])
    assert torch.allclose(tensors["0.weight"], MEAN["0.weight"])


@pytest.mark.parametrize(
    ("names", "clean", "prefix", "counter"),
    [
        (["a.w", "b.w"], ["a.w", "b.w"], "", None),
        (["a._orig_mod.w", "b.w"], ["a.w", "b.w"], "", None),
        # Both names stay where taking the wrapper off would make them one.
        (["a._orig_mod.w", "a.w"], ["a._orig_mod.w", "a.w"], "", None),
        (["_orig_mod.a._orig_mod.w"], ["a.w"], "_orig_mod.", None),
        (["n_averaged", "module.a"], ["a"], "module.", "n_averaged"),
        (["n_averaged", "a"], ["n_averaged", "a"], "", None),
        (["module.n_averaged", "module.a"], ["n_averaged", "a"], "module.", None),
        (["n_averaged"], ["n_averaged"], "", None),
        (["n_averaged", "module._orig_mod.a"], ["a"], "module._orig_mod.", "n_averaged"),
        # A tensor may be called like a wrapper.
        (["a._orig_mod", "b.w"], ["a._orig_mod", "b.w"], "", None),
    ],
)
def test_clean_names(names: list[str], clean: list[str], prefix: str, counter: str | None) -> None:
    found = clean_names(names)
    assert list(found.clean.values()) == clean
    assert (found.prefix, found.counter) == (prefix, counter)
