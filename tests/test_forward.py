"""Networks built from their graph, run with any tensors, and what outputs are worth."""

from __future__ import annotations

from math import exp, log

import pytest
import torch
from torch import nn

from nets import state
from otfuse_cli.errors import IncompatibleModels, UsageError
from otfuse_cli.running.architecture import architecture, module_state
from otfuse_cli.running.evaluation import Tally, agreement, ensemble, score
from otfuse_cli.running.factory import Network
from otfuse_cli.running.forward import logit_batches, logits
from otfuse_cli.running.samples import Samples
from test_samples import Text, image_net, text_net


def shapes(module):
    return {name: tuple(tensor.shape) for name, tensor in state(module).items()}


class Nested(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 5, bias), nn.ReLU(), nn.Linear(5, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.encoder(x).relu())


@pytest.mark.parametrize("bias", [True, False])
def test_an_mlp_is_built_from_names_and_shapes(bias):
    net = Nested(bias)
    known = architecture("mlp", shapes(net))
    assert known.assumption is None
    assert list(known.network.module.state_dict()) == list(state(net))
    assert known.names == {n: n for n in state(net)}
    x = torch.randn(7, 2, 3)
    mine = logits(known.network, state(net), Samples((x,)), batch=3)
    torch.testing.assert_close(mine, net(x.flatten(1)).detach())
    assert known.network.args[0].shape[1] == 6
    assert torch.equal(known.network.args[0], architecture("mlp", shapes(net)).network.args[0])


def test_building_it_draws_no_global_random_numbers():
    known = shapes(Nested())
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    assert architecture("mlp", known).network is not None
    assert torch.equal(torch.rand(1), expected)


def test_a_recognised_chain_is_run_on_an_assumption_that_is_said():
    chain = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    known = architecture("auto", shapes(chain))
    assert known.network is not None
    assert "--arch mlp" in known.assumption


def test_what_is_no_plain_mlp_is_not_built(tmp_path):
    conv = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    assert architecture("auto", shapes(conv)).network is None
    normed = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    assert architecture("auto", shapes(normed)).network is None
    chain = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    spec = tmp_path / "net.yaml"
    spec.write_text("chain: ['*']\n")
    assert architecture(str(spec), shapes(chain)).network is None
    spec.write_text("chain: ['*']\nact: relu\n")
    assert architecture(str(spec), shapes(chain)).network is not None


def test_outputs_come_in_float32_whatever_is_stored_and_the_module_stays():
    net = image_net()
    before = {n: t.clone() for n, t in net.module.state_dict().items()}
    net.module.train()
    half = {n: (t * 2).half() for n, t in before.items()}
    x = torch.randn(5, 3, 8, 8)
    out = logits(net, half, Samples((x,)), batch=2)
    assert out.dtype is torch.float32
    torch.testing.assert_close(out, 2 * net.module(x).detach(), rtol=1e-2, atol=1e-2)
    assert net.module.training
    assert all(torch.equal(before[n], t) for n, t in net.module.state_dict().items())


def test_other_widths_run_in_the_same_network():
    known = architecture("mlp", shapes(Nested()))
    wide = Nested()
    wide.encoder = nn.Sequential(nn.Linear(6, 50), nn.ReLU(), nn.Linear(50, 4))
    x = torch.randn(3, 6)
    torch.testing.assert_close(logits(known.network, state(wide), Samples((x,))), wide(x).detach())


def test_a_program_runs_in_batches_of_its_own_size():
    net = image_net()
    program = torch.export.export(net.module, net.args).module(check_guards=False)
    fixed = Network("net.pt2", program, net.args)
    x = torch.randn(5, 3, 8, 8)
    tensors = net.module.state_dict()
    batches = list(logit_batches(fixed, tensors, Samples((x,)), batch=100))
    assert [len(b) for b in batches] == [2, 2, 1]
    torch.testing.assert_close(torch.cat(batches), net.module(x).detach())


def test_logits_are_picked_and_constants_stay():
    class Wrapped(Text):
        def forward(self, input_ids, attention_mask=None, scale=1):
            return {"other": input_ids, "logits": scale * super().forward(input_ids)}

    ids = torch.zeros(2, 5, dtype=torch.long)
    net = Network("f", Wrapped(), (), {"input_ids": ids, "scale": 3})
    out = logits(net, net.module.state_dict(), Samples((), {"input_ids": ids}))
    torch.testing.assert_close(out, 3 * Text.forward(net.module, ids).detach())


def test_what_cannot_be_run_says_so():
    net = image_net()
    x = Samples((torch.randn(2, 3, 8, 8),))
    wrong = {n: t[:, :1] if t.ndim > 1 else t for n, t in net.module.state_dict().items()}
    with pytest.raises(IncompatibleModels, match="can't be run"):
        logits(net, wrong, x)

    class Mean(nn.Module):
        def forward(self, x):
            return x.mean(0)

    with pytest.raises(IncompatibleModels, match="a row for each sample"):
        logits(Network("f", Mean(), (torch.rand(3, 4),)), {}, Samples((torch.rand(3, 4),)))


def test_tied_tensors_come_under_each_of_their_names():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x))

    net = Network("f", Tied(), (torch.rand(2, 4),))
    stored = {n: torch.randn(t.shape) for n, t in Tied().state_dict().items() if n != "b.weight"}
    found = module_state(net, {n: n for n in stored}, lambda n: stored[n].clone())
    x = torch.rand(3, 4)
    expected = (x @ stored["a.weight"].T + stored["a.bias"]) @ stored["a.weight"].T
    torch.testing.assert_close(logits(net, found, Samples((x,))), expected + stored["b.bias"])


# -- scores


def test_score_of_classes_and_of_batches():
    out = torch.tensor([[2.0, 0, 0], [0, 1, 0], [0, 0, 1], [3, 0, 0]])
    labels = torch.tensor([0, 1, 1, -100])
    samples = Samples((torch.zeros(4, 1),), {}, labels)
    whole = score(out, samples)
    assert whole.predictions == 3
    assert whole.accuracy == pytest.approx(200 / 3)
    expected = torch.nn.functional.cross_entropy(out, labels).item()
    assert whole.cross_entropy == pytest.approx(expected)
    assert whole.perplexity is None
    tally = Tally()
    for part, batch in zip(out.split(3), samples.batches(3), strict=True):
        tally.add(part, batch)
    assert tally.score().cross_entropy == pytest.approx(expected)


def test_score_of_pixels():
    out = torch.randn(2, 3, 4, 5)
    samples = Samples((torch.zeros(2, 1, 4, 5),), {}, out.argmax(1))
    assert score(out, samples).accuracy == 100


def test_language_models_predict_the_next_token():
    ids = torch.tensor([[1, 2, 3, 0], [4, 5, 6, 7]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    out = torch.nn.functional.one_hot(ids.roll(-1, 1), 11).float() * 9
    plain = Samples((), {"input_ids": ids, "attention_mask": mask})
    found = score(out, plain)
    assert found.predictions == 5  # the padding is not predicted
    assert found.accuracy == 100
    assert found.perplexity == pytest.approx(exp(found.cross_entropy))
    repeated = Samples((), plain.kwargs, torch.where(mask == 1, ids, -100))
    assert score(out, repeated) == found
    own = Samples((), {"input_ids": ids}, ids.roll(-1, 1))
    assert score(out, own).predictions == 8
    assert score(out, own).accuracy == 100


def test_ensembles():
    a, b = torch.tensor([[4.0, 0, 0]]), torch.tensor([[0.0, 1, 0]])
    torch.testing.assert_close(ensemble([a, b]), torch.tensor([[2.0, 0.5, 0]]))
    expected = ((a.softmax(1) + b.softmax(1)) / 2).log()
    torch.testing.assert_close(ensemble([a, b], mean="probabilities"), expected)
    last = ensemble([a[:, None], b[:, None]], mean="probabilities", axis=-1)
    torch.testing.assert_close(last[:, 0], expected)
    with pytest.raises(ValueError):
        ensemble([a], mean="median")


def test_agreement_is_a_share_of_rows():
    a = torch.eye(4)
    assert agreement(a, a * 5) == 1
    assert agreement(a, a.roll(1, 1)) == 0
    assert agreement(a, torch.cat([a[:1], a[:1], a[2:]])) == 0.75


@pytest.mark.parametrize(
    ("out", "labels", "words"),
    [
        (
            torch.zeros(2, 3),
            torch.tensor([0, 3]),
            ["beyond the last class", "label 3", "3 outputs"],
        ),
        (torch.zeros(2, 3), torch.zeros(2, 1).long(), ["[2, 1]", "[2, 3]"]),
        (torch.zeros(2, 1), torch.tensor([0, 0]), ["no classification"]),
        (torch.zeros(2), torch.tensor([0, 0]), ["no classification"]),
        (torch.zeros(2, 3), None, ["without labels"]),
        (torch.zeros(2, 3), torch.tensor([-100, -100]), ["no labels to compare"]),
    ],
)
def test_labels_that_do_not_fit(out, labels, words):
    with pytest.raises(UsageError) as caught:
        score(out, Samples((torch.zeros(2, 4),), {}, labels))
    for word in words:
        assert word in str(caught.value)


def test_chance_has_the_perplexity_of_the_vocabulary():
    net = text_net()
    ids = torch.zeros(3, 5, dtype=torch.long)
    found = score(torch.zeros(3, 5, 11), Samples((), {"input_ids": ids}))
    assert found.perplexity == pytest.approx(11)
    assert found.cross_entropy == pytest.approx(log(11))
    assert net.kwargs
