"""Parents whose code fixes their widths: each is run with a network of its own (`INDEX=SPEC`).

The oracles: torch's own modules, units that were doubled, and the other way of saying the same.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import otfuse_cli
from nets import distance, from_factory, state
from otfuse_cli.checkpoint.open import open_checkpoint
from otfuse_cli.errors import IncompatibleModels, OtfuseError, SolveFailed, UsageError
from otfuse_cli.graph.axes import axis_units
from otfuse_cli.graph.model import Role
from otfuse_cli.running.arch_value import takes_shapes
from otfuse_cli.running.relabel import draw_maps, relabel, relabel_state
from otfuse_cli.session.find_architecture import find_architecture
from own_nets import NETS

pytestmark = pytest.mark.usefixtures("kept_graphs")


class Case:
    """Two networks of one architecture, and the three ways to name them."""

    def __init__(self, name, folder):
        text, shape = NETS[name]
        self.file = folder / "net.py"
        self.file.write_text(text)
        self.wide, self.narrow = (
            from_factory(self.arch(n), s) for s, n in enumerate(("wide", "narrow"))
        )
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(60, *shape, generator=generator)
        if name == "tokens":
            self.x = torch.randint(11, (60, *shape), generator=generator)
        self.y = torch.arange(60) % 5
        self.samples = (self.x, self.y)
        self.states = state(self.wide), state(self.narrow)
        self.each = {0: self.arch("wide"), 1: self.arch("narrow")}

    def arch(self, name):
        return f"{self.file}:{name}"

    def merge(self, arch, *states, **options):
        return otfuse_cli.merge(*(states or self.states), arch=arch, **options)


@pytest.fixture
def case(request, tmp_path):
    return Case(request.param, tmp_path)


def families(*names):
    return pytest.mark.parametrize("case", names or list(NETS), indirect=True)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.quick_cases("gate-each", "gate-shapes")
@pytest.mark.parametrize(
    ("case", "way"),
    [*((name, "shapes") for name in NETS), ("channels last", "each"), ("gate", "each")],
    indirect=["case"],
)
def test_eval_measures_every_checkpoint_with_a_network_of_its_own(case, way):
    arch = case.each if way == "each" else case.arch("from_shapes")
    report = otfuse_cli.evaluate(*case.states, arch=arch, samples=case.samples, ensemble=True)
    with torch.no_grad():
        logits = [net(case.x) for net in (case.wide, case.narrow)]
    expected = [float(F.cross_entropy(out, case.y)) for out in (*logits, sum(logits) / 2)]
    found = list(report.evaluation["cross-entropy"].values())[:3]
    assert found == pytest.approx(expected, abs=1e-5)
    assert report.recipe["arch"] == (list(arch.values()) if way == "each" else arch)


def doubled(case):
    """The narrow network with every unit twice, half of it read each time: the same function."""
    with open_checkpoint(state(case.narrow)) as checkpoint:
        graph = find_architecture(checkpoint, case.arch("narrow")).graph
    twice = {s.id: torch.arange(s.size).repeat_interleave(2) for s in graph.free()}
    tensors = {}
    for name, tensor in case.states[1].items():
        node = graph.tensors[name]
        moved = relabel(tensor, node, twice, graph.spaces)
        read = [
            a for a in node.axes if Role.CONSUME in a.roles and twice.keys() & {*axis_units(a.expr)}
        ]
        tensors[name] = moved / 2 ** len(read) if moved.is_floating_point() else moved
    return tensors


@pytest.mark.quick_cases("gate-each-no inputs")
@pytest.mark.parametrize(
    ("case", "way", "inputs"),
    [
        *((name, "each", "no inputs") for name in ("channels last", "view", "depthwise", "gate")),
        ("depthwise", "shapes", "refit"),
        ("view", "each", "acts"),
    ],
    indirect=["case"],
)
def test_doubled_units_are_merged_exactly(case, way, inputs):
    """Widths 2n against n: whatever the weights, what comes out computes what both computed."""
    wide = doubled(case)
    case.wide.load_state_dict(wide)
    with torch.no_grad():
        expected = case.narrow(case.x)
        assert distance(case.wide(case.x), expected) < 1e-4
    arch = case.each if way == "each" else case.arch("from_shapes")
    options = {} if inputs == "no inputs" else {"samples": case.x}
    if inputs == "acts":
        options["align"] = "acts"
    fused, _ = case.merge(arch, wide, case.states[1], scale="preserve", **options)
    case.narrow.load_state_dict(fused)
    with torch.no_grad():
        assert distance(case.narrow(case.x), expected) < 1e-3


@pytest.mark.quick_cases("gate")
@families()
def test_a_factory_of_shapes_says_the_same_as_one_for_each(case):
    fused, _ = case.merge(case.each, anchor="first")
    again, _ = case.merge(case.arch("from_shapes"), anchor="first")
    assert same(fused, again)
    assert {n: t.shape for n, t in fused.items()} == {n: t.shape for n, t in case.states[0].items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "options"),
    [
        *((name, {"blend": "joint"}) for name in ("channels last", "view", "gate", "stream")),
        ("depthwise", {"align": "acts"}),
    ],
    ids=str,
    indirect=["case"],
)
def test_so_it_does_with_inputs(case, options):
    fused, report = case.merge(case.each, samples=case.x, **options)
    again, other = case.merge(case.arch("from_shapes"), samples=case.x, **options)
    assert same(fused, again)
    assert report.steps == other.steps
    assert report.steps[-1].agreement > 0.75


@pytest.mark.quick_cases("gate", "tokens")
@families()
def test_a_permuted_twin_is_found_in_a_network_of_its_own(case):
    """Equal widths from two factories: the source's own network says what it computed before."""
    code = case.file.read_text() + "\n\ndef twin():\n    return narrow()\n"
    case.file.write_text(code)
    with open_checkpoint(case.states[1]) as checkpoint:
        graph = find_architecture(checkpoint, case.arch("narrow")).graph
    maps = draw_maps(graph, torch.Generator().manual_seed(0))
    twin = relabel_state(case.states[1], graph, maps)
    fused, report = case.merge({0: case.arch("twin"), 1: case.arch("narrow")}, twin, case.states[1])
    assert report.checks.function == "kept"
    for name, tensor in case.states[1].items():
        assert torch.allclose(fused[name].float(), tensor.float(), atol=1e-6), name


def test_another_network_of_equal_widths_is_caught_by_running_both(tmp_path):
    """A constant is no structure; where units are permuted, both networks are run."""
    case = Case("view", tmp_path)
    text = case.file.read_text()
    (tmp_path / "other.py").write_text(text.replace("return self.out(", "return 2 * self.out("))
    arch = {0: f"{tmp_path / 'other.py'}:narrow", 1: case.arch("narrow")}
    with pytest.raises(SolveFailed) as raised:
        case.merge(arch, case.states[1], case.states[1])
    assert "other.py:narrow is another network" in raised.value.why


# Same tensors of the same shapes, and another network: what differs is named.
OTHERS = {
    "another activation": ("F.gelu(self.one(x))", "F.relu(self.one(x))", "act gelu"),
    "one operation more": ("view(-1, self.k))", "view(-1, self.k)).tanh()", "act tanh"),
    "another layer first": (
        "self.out(F.gelu(self.two(x)).view(-1, self.k))",
        "self.out(F.gelu(F.gelu(self.two(x))).view(-1, self.k))",
        "at its place",
    ),
    "units that must stay": (
        "F.gelu(self.one(x)).view",
        "F.gelu(self.one(x)).cumsum(2).view",
        "units of one.weight axis 0",
    ),
    "another order of the flatten": (
        ".view(-1, 3 * self.h)",
        ".transpose(1, 2).reshape(-1, 3 * self.h)",
        "two.weight axis 1 is",
    ),
    "no stream": ("x = x + self.down(", "x = self.down(", "down.weight axis 0 is"),
}


@pytest.mark.quick_cases("another layer first", "one operation more")
@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_another_structure_is_refused_with_the_first_difference(tmp_path, other):
    case = Case("stream" if other == "no stream" else "view", tmp_path)
    code, changed, said = OTHERS[other]
    text = case.file.read_text()
    assert code in text
    (tmp_path / "other.py").write_text(text.replace(code, changed))
    arch = {0: f"{tmp_path / 'other.py'}:wide", 1: case.arch("narrow")}
    with pytest.raises(IncompatibleModels) as raised:
        case.merge(arch)
    assert raised.value.exit_code == 4
    assert said in raised.value.why
    assert "state dict 0" in raised.value.why
    assert "other.py:wide" in raised.value.where


BAD = {
    "no such checkpoint": ["--arch", "2={f}:wide"],
    "a negative position": ["--arch", "-1={f}:wide"],
    "one checkpoint twice": ["--arch", "0={f}:wide", "--arch", "0={f}:narrow"],
    "two for all": ["--arch", "{f}:wide", "--arch", "{f}:narrow"],
    "names and shapes for the other": ["--arch", "0={f}:wide"],
    "a chain for the other": ["--arch", "0={f}:wide", "--arch", "1=mlp"],
    "nothing behind the position": ["--arch", "0="],
}


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("verb", ["merge", "eval"])
def test_a_bad_position_is_a_usage_error(cli, tmp_path, bad, verb):
    case = Case("stream", tmp_path)
    files = [str(tmp_path / n) for n in ("a.pt", "b.pt")]
    for tensors, path in zip(case.states, files, strict=True):
        torch.save(tensors, path)
    more = ["-o", str(tmp_path / "f.pt")] if verb == "merge" else ["--samples", "x.npz"]
    run = cli(verb, *files, *more, *[part.format(f=case.file) for part in BAD[bad]])
    assert run.code == 2
    assert "--arch" in run.err
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix != ".py" and p.is_file()) == [
        "a.pt",
        "b.pt",
    ]


WRONG_FACTORIES = {
    "def make(shapes):\n    return shapes['nowhere']\n": "called with the checkpoint's shapes",
    "def make(hidden):\n    return nn.Linear(hidden, 2)\n": "called with the checkpoint's shapes",
    "def make(one, two):\n    return None\n": "without arguments",
    "def make(shapes):\n    return None\n": "return a torch.nn.Module",
    "def make(*, hidden):\n    return None\n": "without arguments",
}


@pytest.mark.parametrize("code", WRONG_FACTORIES, ids=range(len(WRONG_FACTORIES)))
def test_a_factory_that_fails_says_what_it_was_given(tmp_path, code):
    (tmp_path / "net.py").write_text("from torch import nn\n" + code)
    with pytest.raises(IncompatibleModels) as raised:
        otfuse_cli.inspect({"w": torch.ones(2, 3)}, arch=f"{tmp_path}/net.py:make")
    assert WRONG_FACTORIES[code] in raised.value.fix


FACTORIES = {
    "one position": "def make(wanted):\n    return built(wanted)\n",
    "a keyword": "def make(depth=3, *, shapes):\n    return built(shapes)\n",
    "shapes with a default": "def make(shapes=None):\n    return built(shapes)\n",
    "a class": "class make(nn.Sequential):\n    def __init__(self, shapes):\n"
    "        super().__init__(*built(shapes))\n",
    "no arguments": "def make(depth=3):\n    return built({'0.weight': (5, 4)})\n",
}


@pytest.mark.parametrize("kind", FACTORIES, ids=str)
def test_the_signature_decides_what_a_factory_is_given(tmp_path, kind):
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef built(shapes):\n    h, n = shapes['0.weight']\n"
        "    return nn.Sequential(nn.Linear(n, h), nn.ReLU(), nn.Linear(h, 2))\n" + FACTORIES[kind]
    )
    from torch import nn

    tensors = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)).state_dict()
    report = otfuse_cli.inspect(tensors, arch=f"{tmp_path}/net.py:make")
    assert report.graph.spaces == {"0.weight:0": 5}


def test_tied_tensors_have_shapes_under_all_their_names(tmp_path):
    (tmp_path / "net.py").write_text(
        "from torch import nn\nimport torch\nclass Net(nn.Module):\n"
        "    def __init__(self, n, c):\n        super().__init__()\n"
        "        self.e, self.o = nn.Embedding(n, c), nn.Linear(c, n, bias=False)\n"
        "        self.o.weight = self.e.weight\n"
        "    def forward(self, x): return self.o(self.e(x))\n"
        "def make(shapes):\n    return Net(*shapes['o.weight'])\n"
    )
    weight = torch.randn(7, 3)
    report = otfuse_cli.inspect(
        {"e.weight": weight, "o.weight": weight}, arch=f"{tmp_path}/net.py:make"
    )
    assert report.graph.spaces == {"e.weight:1": 3}


@pytest.mark.slow
def test_a_network_that_fixes_other_widths_is_refused_with_the_way_out(tmp_path):
    case = Case("channels last", tmp_path)
    for states in (case.states, (case.states[1], case.states[1])):
        with pytest.raises(IncompatibleModels) as raised:
            case.merge(case.arch("wide"), *states)
        assert "[6, 1, 5] in state dict 1, [12, 1, 5] in" in raised.value.where
        assert "INDEX=" in raised.value.fix
    with pytest.raises(IncompatibleModels) as raised:
        case.merge(case.arch("narrow"), samples=case.x)
    assert "def make_net(shapes)" in raised.value.fix


@pytest.mark.slow
@families("view")
@pytest.mark.parametrize("way", ["each", "shapes"])
def test_all_verbs_take_networks_of_their_own(cli, case, way, tmp_path):
    files = [str(tmp_path / n) for n in ("wide.pt", "narrow.pt")]
    for tensors, path in zip(case.states, files, strict=True):
        torch.save(tensors, path)
    torch.save({"x": case.x, "y": case.y}, tmp_path / "s.pt")
    each = [f"{at}={arch}" for at, arch in case.each.items()]
    arches = each if way == "each" else [case.arch("from_shapes")]
    said = [part for arch in arches for part in ("--arch", arch)]
    samples = ["--samples", str(tmp_path / "s.pt")]
    lines = [
        ["curve", *files, "--steps", "2", *samples, *said],
        ["prune-fuse", *files, "-o", str(tmp_path / "f.pt"), *samples, *said],
    ]
    if way == "each":
        lines.append(["inspect", *files, "--ot-costs", *samples, *said])
    else:
        lines.append(["check", files[0], *said])
    for line in lines:
        run = cli(*line)
        assert run.code == 0, run.err


@pytest.mark.slow
def test_prune_runs_the_network_that_the_factory_builds_for_what_is_left(tmp_path):
    case = Case("channels last", tmp_path)
    fixed = otfuse_cli.prune(case.states[0], amount=0.5, arch=case.arch("wide"))[1]
    assert fixed.checks.function is None  # its code runs at one set of widths
    shaped = otfuse_cli.prune(case.states[0], amount=0.5, arch=case.arch("from_shapes"))[1]
    assert shaped.checks.function == "kept"
    options = {"amount": 0.5, "criterion": "reconstruct", "samples": case.x}
    with pytest.raises(IncompatibleModels):
        otfuse_cli.prune(case.states[0], arch=case.arch("wide"), **options)
    report = otfuse_cli.prune(case.states[0], arch=case.arch("from_shapes"), **options)[1]
    assert report.steps


@pytest.mark.slow
def test_a_saved_program_for_each(tmp_path):
    case = Case("view", tmp_path)
    arch = {}
    for at, net in enumerate((case.wide, case.narrow)):
        exported = torch.export.export(net, (torch.rand(4, 3, 4),))
        arch[at] = str(tmp_path / f"{at}.pt2")
        torch.export.save(exported, arch[at])
    fused, report = case.merge(arch, samples=case.x, blend="average")
    assert [s.name for s in report.steps] == ["average", "refit"]
    assert (
        same(fused, case.merge(case.each, samples=case.x, blend="average")[0])
        or report.steps[1].agreement > 0.9
    )
    torch.export.save(torch.export.export(case.wide, (torch.rand(2, 3, 4),)), arch[0])
    with pytest.raises(UsageError, match="batches of different size"):
        case.merge(arch, samples=case.x)
    with pytest.raises(UsageError, match="batches of different size"):
        otfuse_cli.evaluate(*case.states, arch=arch, samples=case.samples, ensemble=True)


def test_checkpoints_of_other_tensors_are_still_told_apart_by_name(tmp_path):
    case = Case("view", tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    more = Case("stream", other)
    with pytest.raises(OtfuseError, match="hold different tensors") as raised:
        otfuse_cli.merge(
            more.states[0], case.states[1], arch={0: more.arch("wide"), 1: case.arch("narrow")}
        )
    assert raised.value.exit_code == 4


@pytest.mark.parametrize(
    ("factory", "takes"),
    [
        (lambda: None, False),
        (lambda width=8: None, False),
        (lambda shapes=None: None, True),
        (lambda anything: None, True),
        (lambda anything, width=8: None, True),
        (lambda one, two: None, False),
        (lambda *many: None, False),
    ],
)
def test_a_factory_is_given_shapes_where_it_needs_one_argument(factory, takes):
    assert takes_shapes(factory) is takes
