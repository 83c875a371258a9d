"""Keywords of the library in every type that is natural in Python: they work, or say what to do.

What a value means is what the command line makes of its text. A field of a request without a case
here fails.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import fields
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import otfuse_cli
from otfuse_cli import OtfuseError
from otfuse_cli.cli.options import build_request
from otfuse_cli.requests import requests
from otfuse_cli.requests.keywords import request
from otfuse_cli.requests.recipe import Recipe

pytestmark = pytest.mark.usefixtures("kept_graphs")

KINDS = {
    "merge": requests.MergeRequest,
    "prune_fuse": requests.PruneFuseRequest,
    "prune": requests.PruneRequest,
    "inspect": requests.InspectRequest,
    "check": requests.CheckRequest,
    "evaluate": requests.EvaluateRequest,
    "curve": requests.CurveRequest,
}
A, B = Path("a.pt"), Path("b.pt")
NEEDED = {
    "merge": {"checkpoints": (A, B)},
    "prune_fuse": {"dense": A, "pruned": B},
    "prune": {"checkpoint": A},
    "inspect": {"checkpoints": (A,)},
    "check": {"checkpoint": A, "arch": ["mlp"]},
    "evaluate": {"checkpoints": (A,), "samples": "x.npz"},
    "curve": {"checkpoints": (A, B), "samples": "x.npz"},
}


class PathLike:
    """A path of another library."""

    def __fspath__(self):
        return "out.pt"


def make_net():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


NET = make_net()
FLAGS = (True, [True, np.True_, np.bool_(1)])
REAL = (0.5, [0.5, np.float64(0.5), np.float32(0.5), torch.tensor(0.5), Fraction(1, 2)])
NUMBER = (2, [2, np.int64(2), np.uint8(2), torch.tensor(2)])
FILE = (Path("out.pt"), ["out.pt", Path("out.pt"), PathLike(), np.str_("out.pt")])


def choice(*values):
    return (values[0], [values[0], np.str_(values[0])])


# Field: what Typer makes of the option's text, and what Python callers write for the same.
CASES = {
    "checkpoints": ((A, B), [("a.pt", "b.pt"), [A, "b.pt"], [Path("a.pt"), np.str_("b.pt")]]),
    "checkpoint": (A, ["a.pt", A]),
    "dense": (A, ["a.pt", A]),
    "pruned": (A, ["a.pt", A]),
    "weights": (
        "0.75,0.25",
        [
            [0.75, 0.25],
            (0.75, Fraction(1, 4)),
            np.array([0.75, 0.25]),
            torch.tensor([0.75, 0.25]),
            torch.tensor([0.75, 0.25], requires_grad=True),
            [np.float32(0.75), torch.tensor(0.25)],
            "0.75,0.25",
        ],
    ),
    "anchor": ("0", [0, np.int64(0), torch.tensor(0), "0"]),
    "dense_weight": REAL,
    "amount": REAL,
    "criterion": choice("ot"),
    "layer": (["fc1=0.5"], [{"fc1": 0.5}, {"fc1": np.float32(0.5)}, ["fc1=0.5"], "fc1=0.5"]),
    "only": (["fc1.*"], ["fc1.*", ["fc1.*"], ("fc1.*",), {"fc1.*"}, np.array(["fc1.*"])]),
    "skip": (["a", "b"], [["a", "b"], ("a", "b"), {"b", "a"}, np.array(["a", "b"])]),
    "arch": (["net.yaml"], ["net.yaml", Path("net.yaml"), np.str_("net.yaml")]),
    "spec": ("net.yaml", ["net.yaml", Path("net.yaml")]),
    "key": (["model"], ["model", np.str_("model")]),
    "samples": ("x.npz", ["x.npz"]),
    "input_shape": (
        "1,28,28",
        [(1, 28, 28), [1, 28, 28], torch.Size([1, 28, 28]), np.array([1, 28, 28]), "1,28,28"],
    ),
    "num_samples": NUMBER,
    "num_inputs": NUMBER,
    "inputs": ("x.npz", ["x.npz"]),
    "width": REAL,
    "width_multiple": NUMBER,
    "widths": ("1,1.5", [(1, 1.5), [1, Fraction(3, 2)], np.array([1, 1.5]), "1,1.5"]),
    "over": choice("width"),
    "batch": NUMBER,
    "steps": NUMBER,
    "synthetic_steps": NUMBER,
    "passes": NUMBER,
    "iterate": NUMBER,
    "seed": NUMBER,
    "cluster": choice("auto"),
    "device": ("cpu", ["cpu", torch.device("cpu")]),
    "dtype": ("float16", ["float16", torch.float16, np.float16, np.dtype("float16")]),
    "shard_size": ("1000", [1000, np.int64(1000), "1000"]),
    "output": FILE,
    "report": FILE,
    "plot": FILE,
    "write_spec": FILE,
    "max_memory": REAL,
    "pass_memory": REAL,
    "max_cost": REAL,
    "max_moved": REAL,
    "effort": REAL,
    "epsilon": REAL,
    "beta": REAL,
    "ridge": REAL,
    "align": choice("acts"),
    "matcher": choice("sweep"),
    "metric": choice("cosine"),
    "mass": choice("norm"),
    "solver": choice("sinkhorn"),
    "epsilon_unit": choice("cost"),
    "residual": choice("identity"),
    "scale": choice("preserve"),
    "repair": choice("none"),
    "blend": choice("joint"),
    "calibrate": choice("bn"),
    "vocab": choice("common"),
    "synthetic_kind": choice("leaves"),
    **dict.fromkeys(
        (
            *("free_outputs", "strict", "paper", "unit_norm", "post_activations", "synthetic"),
            *("refit", "force", "overwrite", "keep_extras", "untie", "keep_shape", "ot_costs"),
            *("graph", "ensemble", "average", "depth", "require_proof", "require_gain"),
        ),
        FLAGS,
    ),
}
# What is a flag of one verb, and a number of another.
OTHERWISE = {("prune", "depth"): NUMBER}


def cases(verb, name):
    return OTHERWISE.get((verb, name), CASES[name])


# Option: the verbs that take it.
VERBS = {
    name: [verb for verb, kind in KINDS.items() if name in {field.name for field in fields(kind)}]
    for name in CASES
}


def test_every_keyword_has_its_cases():
    assert {field.name for kind in KINDS.values() for field in fields(kind)} == set(CASES)
    assert all(VERBS.values())
    assert {field.name for field in fields(Recipe)} <= set(CASES)


def named(value):
    return type(value).__name__ if not isinstance(value, str) else str(value)


@pytest.mark.parametrize("name", VERBS)
def test_a_value_means_what_its_text_means(name):
    for verb in VERBS[name]:
        needed = NEEDED[verb]
        plain, alike = cases(verb, name)
        said = getattr(build_request(KINDS[verb], {**needed, name: plain}), name)
        for given in alike:
            found = getattr(request(KINDS[verb], **{**needed, "arch": "mlp", name: given}), name)
            assert found == said, (verb, given)
            assert type(found) is type(said), (verb, given)


@pytest.mark.parametrize("name", VERBS)
def test_none_stands_for_an_option_that_was_not_given(name):
    for verb in VERBS[name]:
        needed = NEEDED[verb]
        if name in needed:
            with pytest.raises(OtfuseError):
                request(KINDS[verb], **{**needed, name: None})
        else:
            left_out = request(KINDS[verb], **needed)
            assert request(KINDS[verb], **{**needed, name: None}) == left_out, verb


WRONG = [object(), b"bytes", 3j, [object()], {"x": object()}, {1: {2: 3}}, [[0.5], [0.5]], ""]


@pytest.mark.parametrize("name", [n for n in VERBS if n not in ("samples", "inputs", "key")])
def test_what_can_not_be_meant_is_a_usage_error(name):
    """Flags and numbers are no text, texts no numbers; nothing else is taken for either."""
    for verb in VERBS[name]:
        for wrong in wrong_for(name, cases(verb, name)[0]):
            with pytest.raises(OtfuseError) as raised:
                build_and_resolve(verb, name, wrong)
            assert raised.value.exit_code == 2, (verb, wrong)
            assert raised.value.where


def wrong_for(name, plain):
    """Values that an option can't have, which has `plain` for one that it can have."""
    more = []
    if isinstance(plain, bool):
        more = ["yes", 1, np.array([True])]
    elif isinstance(plain, int | float):
        more = ["0.5", True, np.array([2, 3]), torch.ones(2)]
    elif isinstance(plain, str) and name not in ("weights", "anchor", "device", "input_shape"):
        more = [1.5, True]
    for wrong in [*WRONG, *more]:
        if isinstance(wrong, dict) and name in ("arch", "checkpoint", "dense", "pruned"):
            continue  # decided once files are read: see below
        if (
            isinstance(wrong, str)
            and not wrong
            and name in ("anchor", "cluster", "device", "skip", "only", "synthetic_kind")
        ):
            continue
        yield wrong


def build_and_resolve(verb, name, value):
    found = request(KINDS[verb], **{**NEEDED[verb], name: value})
    if hasattr(found, "recipe"):
        found.recipe()
    return found


def test_an_unknown_keyword_says_which_one_is_near():
    with pytest.raises(OtfuseError, match="did you mean weights"):
        otfuse_cli.merge(NET, NET, wieghts=[1, 1])


# -- the verbs themselves


def pair():
    nets = [make_net(), make_net()]
    for seed, net in enumerate(nets):
        generator = torch.Generator().manual_seed(seed)
        for tensor in net.parameters():
            tensor.data.normal_(generator=generator)
    return nets


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


ONE, TWO = (net.state_dict() for net in pair())
STATES = {
    "modules": lambda: tuple(pair()),
    "one list": lambda: ([ONE, TWO],),
    "a generator": lambda: (state for state in (ONE, TWO)),
    "ordered": lambda: (OrderedDict(ONE), OrderedDict(TWO)),
    "parameters": lambda: ({n: nn.Parameter(t) for n, t in s.items()} for s in (ONE, TWO)),
    "not contiguous": lambda: (
        {n: t[None].expand(2, *t.shape).movedim(0, -1)[..., 0] for n, t in s.items()}
        for s in (ONE, TWO)
    ),
    "views": lambda: ({n: torch.stack([t, t])[1] for n, t in s.items()} for s in (ONE, TWO)),
    "keep_vars": lambda: (net.state_dict(keep_vars=True) for net in pair()),
}


@pytest.mark.quick_cases("a generator", "parameters", "one list")
@pytest.mark.parametrize("kind", STATES)
def test_checkpoints_in_memory(kind):
    expected, _ = otfuse_cli.merge(ONE, TWO)
    given = STATES[kind]()
    fused, report = otfuse_cli.merge(*given)
    assert same(fused, expected)
    assert not any(tensor.requires_grad for tensor in fused.values())
    assert [i.path for i in report.inputs] == ["state dict 0", "state dict 1"]


def test_checkpoints_in_files(tmp_path):
    for name, state in (("a.pt", ONE), ("b.pt", TWO)):
        torch.save(state, tmp_path / name)
    files = [tmp_path / "a.pt", str(tmp_path / "b.pt")]
    expected, _ = otfuse_cli.merge(ONE, TWO)
    for given in (files, [files], [(f for f in files)]):
        assert same(otfuse_cli.merge(*given)[0], expected)
    assert otfuse_cli.inspect(files).graph.spaces == otfuse_cli.inspect(*files).graph.spaces
    out = tmp_path / "f.safetensors"
    otfuse_cli.merge(*files, output=str(out), report=str(tmp_path / "r.json"))
    assert out.exists()
    assert (tmp_path / "r.json").exists()


@pytest.mark.quick_cases(
    "{'anchor': np.int64(1)}-{'anchor': 'last'}",
    "{'skip': '0.*'}-{'skip': ['0.*']}",
    "{'anchor': 0}-{'anchor': 'first'}",
)
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"anchor": 0}, {"anchor": "first"}),
        ({"anchor": np.int64(1)}, {"anchor": "last"}),
        ({"weights": torch.tensor([0.75, 0.25])}, {"weights": "0.75,0.25"}),
        ({"weights": {"0.*": np.array([1, 0])}}, {"weights": {"0.*": (1.0, 0.0)}}),
        ({"skip": "0.*"}, {"skip": ["0.*"]}),
        ({"dtype": torch.bfloat16}, {"dtype": "bfloat16"}),
        ({"device": torch.device("cpu"), "seed": np.uint32(3)}, {"device": "cpu", "seed": 3}),
        ({"effort": 10**13, "passes": np.int8(2)}, {"effort": 1e13, "passes": 2}),
        ({"metric": np.str_("cosine")}, {"metric": "cosine"}),
        ({"unit_norm": np.False_}, {"unit_norm": False}),
    ],
    ids=str,
)
def test_a_fusion_comes_out_as_with_the_text(given, text):
    fused, report = otfuse_cli.merge(ONE, TWO, **given)
    again, other = otfuse_cli.merge(ONE, TWO, **text)
    assert same(fused, again)
    assert report.recipe == other.recipe


INPUTS = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
SAMPLES = {
    "a tensor": INPUTS,
    "an array": INPUTS.numpy(),
    "float64": INPUTS.double().numpy(),
    "on the tape": INPUTS.clone().requires_grad_(),
    "not contiguous": INPUTS.T.contiguous().T,
    "a pair": (INPUTS, np.arange(30) % 3),
    "a mapping": {"x": INPUTS.numpy(), "y": torch.arange(30) % 3},
    "lists": {"x": INPUTS.tolist()},
    "a pair of lists": (INPUTS.tolist(), [0, 1, 2] * 10),
}


LABELLED = ("a pair", "a mapping", "a pair of lists")


@pytest.mark.quick_cases("lists")
@pytest.mark.parametrize("kind", SAMPLES)
def test_samples_in_memory(kind):
    labels = {"y": torch.arange(30) % 3} if kind in LABELLED else {}
    fused, report = otfuse_cli.merge(ONE, TWO, arch="mlp", samples=SAMPLES[kind])
    expected, _ = otfuse_cli.merge(ONE, TWO, arch="mlp", samples={"x": INPUTS, **labels})
    assert all(torch.allclose(fused[n], expected[n], atol=1e-5) for n in fused)
    assert report.recipe["samples"] is None


def written_factory(tmp_path):
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef make_net():\n"
        "    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))\n"
    )
    return f"{tmp_path / 'net.py'}:make_net"


ARCHES = {
    "a function": make_net,
    "a lambda": lambda: (make_net(), torch.rand(2, 4)),
    "a module": NET,
    "a function of shapes": lambda shapes: nn.Sequential(
        nn.Linear(*shapes["0.weight"][::-1]), nn.ReLU(), nn.Linear(*shapes["2.weight"][::-1])
    ),
    "one for each": {0: make_net, 1: NET},
    "by numpy's numbers": {np.int64(0): make_net, np.int64(1): make_net},
}


@pytest.mark.quick_cases("a module")
@pytest.mark.parametrize("kind", ARCHES)
def test_a_network_as_an_object(kind, tmp_path):
    arch = ARCHES[kind]
    written = written_factory(tmp_path)
    NET.train()
    before = {n: t.clone() for n, t in NET.state_dict().items()}
    fused, report = otfuse_cli.merge(ONE, TWO, arch=arch, samples=INPUTS)
    again, other = otfuse_cli.merge(ONE, TWO, arch=written, samples=INPUTS)
    assert same(fused, again)
    assert report.checks.function == "kept"
    assert report.graph.spaces == other.graph.spaces
    assert NET.training  # the user's own module is left as it is
    assert same(NET.state_dict(), before)
    assert all(isinstance(a, str) for a in np.atleast_1d(report.recipe["arch"]))
    assert report.to_json()


def test_the_other_verbs_take_a_network_as_an_object():
    assert otfuse_cli.check(ONE, NET).checks.function == "kept"
    assert otfuse_cli.check(ONE, make_net, seed=np.int64(1)).checks.function == "kept"
    small, report = otfuse_cli.prune(ONE, amount=np.float32(0.5), arch=NET)
    assert report.checks.function == "kept"
    options = {"samples": (INPUTS, np.arange(30) % 3), "arch": make_net}
    measured = otfuse_cli.evaluate([ONE, TWO], **options).evaluation["accuracy"]
    assert list(measured) == ["state dict 0", "state dict 1"]
    assert otfuse_cli.curve(ONE, TWO, steps=np.int64(3), **options).evaluation
    assert otfuse_cli.inspect(ONE, TWO, ot_costs=np.True_, arch=NET).spaces
    assert otfuse_cli.prune_fuse(pair()[0], small, arch="mlp", dense_weight=Fraction(1, 2))[0]


@pytest.mark.slow_cases("arch Linear-merge")
@pytest.mark.parametrize("verb", ["merge", "inspect", "evaluate"])
@pytest.mark.parametrize(
    "options",
    [
        {"arch": object()},
        {"arch": 5},
        {"arch": ""},
        {"arch": nn.Linear},
        {"arch": {0: object(), 1: make_net}},
        {"arch": {2: make_net}},
        {"arch": {"first": make_net}},
        {"arch": [make_net, make_net]},
        {"arch": nn.Linear(4, 3)},
        {"arch": lambda: None},
        {"arch": lambda: 1 / 0},
        {"samples": object()},
        {"samples": [INPUTS]},
        {"samples": (INPUTS,)},
        {"samples": {"x": [[1.0], [2.0, 3.0]]}},
        {"samples": {"x": [object()]}},
        {"samples": {"z": INPUTS}},
        {"samples": 3},
        {"samples": np.array(["a", "b"])},
        {"samples": INPUTS.to_sparse()},
        {"device": 99},
        {"device": torch.device("meta")},
        {"device": "tpu"},
        {"seed": -1},
        {"seed": 2**70},
        {"key": 3},
    ],
    ids=lambda options: f"{next(iter(options))} {named(next(iter(options.values())))[:20]}",
)
def test_what_fails_later_is_still_one_clear_error(verb, options):
    base = {"arch": "mlp", "samples": (INPUTS, np.arange(30) % 3)}
    with pytest.raises(OtfuseError) as raised:
        getattr(otfuse_cli, verb)(ONE, TWO, **{**base, **options})
    assert raised.value.what
    assert raised.value.exit_code in (2, 3, 4)


BAD_CHECKPOINTS = {
    "an object": (object(), TWO),
    "a number": (5, TWO),
    "bytes": (b"a.pt", TWO),
    "nothing": (None, TWO),
    "no tensors": ({}, TWO),
    "names of numbers": ({0: torch.ones(2)}, TWO),
    "arrays": ({n: t.numpy() for n, t in ONE.items()}, TWO),
    "a nested list": ([ONE], [TWO]),
    "a class": (nn.Linear, TWO),
    "one alone": (ONE,),
    "none": (),
    "an empty text": ("", TWO),
    "a tensor": (torch.ones(2, 2), TWO),
    "a list of lists": ([[ONE], [TWO]],),
}


@pytest.mark.parametrize("kind", BAD_CHECKPOINTS)
def test_what_is_no_checkpoint_is_one_clear_error(kind):
    with pytest.raises(OtfuseError) as raised:
        otfuse_cli.merge(*BAD_CHECKPOINTS[kind])
    assert raised.value.exit_code in (2, 3, 4)


# -- two layers

ROWS = [[1.0, 2.0, 0.5], [0.1, 3.0, -1.0]]


@pytest.mark.parametrize(
    "kind",
    [list, tuple, np.array, torch.tensor, lambda rows: nn.Parameter(torch.tensor(rows))],
    ids=["list", "tuple", "array", "tensor", "parameter"],
)
def test_align_takes_what_makes_a_tensor(kind):
    options = {"metric": np.str_("cosine"), "beta": Fraction(1, 2)}
    found = otfuse_cli.align(kind(ROWS), kind(ROWS[::-1]), **options)
    assert torch.equal(found.weight.float(), torch.tensor(ROWS[::-1]))
    assert not found.weight.requires_grad


@pytest.mark.parametrize(
    ("source", "options", "what"),
    [
        (object(), {}, "source can't be a object"),
        ("rows", {}, "source can't be a str"),
        ([[1.0], [1.0, 2.0]], {}, "source can't be a list"),
        (3.5, {}, "the layers don't fit together"),
        (torch.ones(2, 3, dtype=torch.complex64), {}, "source can't be a Tensor"),
        (ROWS, {"metric": 3}, "metric can't be a int"),
        (ROWS, {"metric": "manhattan"}, "unknown value 'manhattan'"),
        (ROWS, {"unit_norm": "yes"}, "unit_norm can't be a str"),
        (ROWS, {"epsilon": "0.1"}, "epsilon can't be a str"),
        (ROWS, {"seed": -1}, "out of range"),
        (ROWS, {"metrics": "cosine"}, "no such option"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict | str) else type(value).__name__,
)
def test_align_refuses_the_rest(source, options, what):
    with pytest.raises(OtfuseError) as caught:
        otfuse_cli.align(source, ROWS, **options)
    assert caught.value.what == what
