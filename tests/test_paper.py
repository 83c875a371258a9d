"""The paper's tables (examples/paper): training on, distillation, and what is kept of a run."""

from __future__ import annotations

import json

import pytest
import torch

from test_examples import EXAMPLES, example

PAPER = EXAMPLES / "paper"


@pytest.fixture(scope="module")
def mnist():
    """examples/mnist.py."""
    return example("mnist")


@pytest.fixture
def train(mnist):
    """A few made examples."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(150, 12, generator=generator)
    return mnist.Split(images, torch.randint(10, (150,), generator=generator))


def test_training_on_begins_where_it_is_told_and_goes_where_training_goes(mnist, train):
    group = [mnist.Student(0, 0), mnist.Student(1, 1)]
    seen = {}
    whole = mnist.fit(
        mnist.Recipe((8, 6), epochs=3),
        group,
        train,
        after_epoch=lambda epoch, networks: seen.setdefault(epoch, networks),
    )
    assert list(seen) == [1, 2, 3]
    for name, tensor in whole[1].items():
        assert torch.equal(seen[3][1][name], tensor)
        assert not torch.equal(seen[1][1][name], tensor)
    # No momentum: the first epoch from given weights is the first epoch from the same drawn ones.
    plain = mnist.Recipe((8, 6), epochs=1, momentum=0.0)
    drawn = mnist.fit(mnist.Recipe((8, 6), epochs=0), group, train)
    once = mnist.fit(plain, group, train)
    again = mnist.fit(plain, group, train, begin=drawn)
    assert all(torch.equal(again[1][name], tensor) for name, tensor in once[1].items())


@pytest.mark.parametrize(("temperature", "factor"), [(1.0, 0.05), (4.0, 0.7), (4.0, 0.0)])
def test_distillation_goes_down_the_papers_loss(mnist, train, temperature, factor):
    distil = example("distil", PAPER)
    generator = torch.Generator().manual_seed(1)
    teachers = [3 * torch.randn(150, 10, generator=generator) for _ in range(2)]
    slope = distil.softened(teachers, mnist.cross_entropy(train), temperature, factor)
    logits = torch.randn(2, 7, 10, generator=generator, requires_grad=True)
    index = torch.randint(150, (2, 7), generator=generator)
    loss = torch.zeros(())
    for at in range(2):
        wanted = (teachers[at][index[at]] / temperature).softmax(-1)
        student = (logits[at] / temperature).log_softmax(-1)
        divergence = torch.nn.functional.kl_div(student, wanted, reduction="sum")
        labels = torch.nn.functional.cross_entropy(
            logits[at], train.labels[index[at]], reduction="sum"
        )
        loss = loss + factor * labels + (1 - factor) * temperature**2 * divergence
    loss.backward()
    torch.testing.assert_close(slope(logits.detach(), index), logits.grad, rtol=0, atol=1e-5)


def test_a_row_is_measured_once_and_again_when_its_recipe_changes(tmp_path, capsys):
    jobs, page = example("jobs", PAPER), example("page", PAPER)
    calls = []

    def job(row, **recipe):
        def measure():
            calls.append(row)
            return {"fused": [1.0, 2.0], "plain": [5]}

        return jobs.Job("S0", row, recipe, measure, {"fused": 97.5}, seconds=60)

    results = jobs.Results(tmp_path / "results.json")
    jobs.run([job("a", epochs=1), job("b", epochs=1)], results)
    assert "[1/2, about 2 min left] S0: a" in capsys.readouterr().out
    again = jobs.Results(tmp_path / "results.json")
    jobs.run([job("a", epochs=1), job("b", epochs=2)], again)
    assert calls == ["a", "b", "b"]
    assert len(json.loads((tmp_path / "results.json").read_text())) == 3
    items = {"S0": page.Item("what", "otfuse merge", "Reproduced."), "S9": page.Item("none", "")}
    text = page.written(items, [job("a", epochs=1), job("c")], again, "# Head")
    assert "| a | 1.50 ± 0.50 | 5.00 | 97.5 |" in text
    assert "paper: fused" in text
    assert "S9" not in text
    assert "| c |" not in text


def test_every_row_has_a_recipe_of_its_own_and_an_item_on_the_page(tmp_path):
    run, laboratory = example("run", PAPER), example("laboratory", PAPER)
    for quick in (True, False):
        lab = laboratory.Laboratory(run.mnist.options("").parse_args([]), quick=quick)
        every = [*run.one_shot.jobs(lab), *run.skill.jobs(lab)]
        every += [*run.finetune.jobs(lab), *run.distil.jobs(lab)]
        assert len({job.key for job in every}) == len(every)
        assert {job.item for job in every} == set(run.ITEMS)
