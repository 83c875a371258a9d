"""The paper's tables (examples/paper): training on, distillation, and what is kept of a run."""

from __future__ import annotations

import itertools
import json
from statistics import mean

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
    assert "[1 of 2; 0 min, about 1 min left] S0: a" in capsys.readouterr().out
    again = jobs.Results(tmp_path / "results.json")
    jobs.run([job("a", epochs=1), job("b", epochs=2)], again)
    assert calls == ["a", "b", "b"]
    assert len(json.loads((tmp_path / "results.json").read_text())) == 3
    items = {"S0": page.Item("what", "otfuse merge", "Reproduced."), "S9": page.Item("none", "")}
    rows = page.measured(items, [job("a", epochs=1), job("a", epochs=2), job("c")], again)
    text = page.written(items, rows, {"S0": "there.png"}, "# Head")
    assert text.count("| a | 1.50 ± 0.50 | 5.00 | 97.5 |") == 1
    assert "paper: fused" in text
    assert "![what](there.png)" in text
    assert "S9" not in text
    assert "| c |" not in text


def test_rows_in_two_processes_are_those_in_one_and_one_that_fails_stops_none(tmp_path, capsys):
    jobs = example("jobs", PAPER)
    rows = [
        jobs.Job("S0", f"{at}", {"at": at}, lambda at=at: {"fused": [at, at * 2]}, seconds=60)
        for at in range(5)
    ]
    bad = jobs.Job("S0", "bad", {}, lambda: {"fused": [1 / 0]})
    found = {}
    for workers in (1, 2):
        results = jobs.Results(tmp_path / f"{workers}.json")
        assert jobs.run([*rows, bad], results, workers) == [bad]
        found[workers] = [jobs.Results(results.path).of(row).values for row in rows]
        said = capsys.readouterr()
        assert "[6 of 6; 0 min, about 0 min left] S0" in said.out
        assert "S0: bad failed" in said.out
        assert "ZeroDivisionError" in said.err
        assert results.of(bad) is None
    assert found[1] == found[2] == [{"fused": [at, at * 2]} for at in range(5)]


def test_the_best_along_a_curve_is_that_of_the_means():
    page = example("page", PAPER)
    values = {
        "A": [90.0],
        "joint @0.1": [90.0, 92.0],
        "joint @0.2": [99.0, 80.0],
        "plain @0.1": [1],
    }
    assert page.best_along(values) == {
        "A": "90.00",
        "joint": "91.00 ± 1.00 (0.1)",
        "plain": "1.00 (0.1)",
    }


def test_parts_of_a_name_and_shares_of_a_curve_are_told_in_one_cell():
    page = example("page", PAPER)
    values = {
        "A": [9.0],
        "--paper, activations, start": [1],
        "--paper, activations, best": [2, 4],
        "plain, best": [6],
        "plain, start": [5],
    }
    assert page.gathered("{start} → {best}")(values) == {
        "A": "9.00",
        "--paper, activations": "1.00 → 3.00 ± 1.00",
        "plain": "5.00 → 6.00",
    }
    pruned = {"dense": [9], "cut @0.2": [1], "fused @0.2": [2, 4], "cut @0.4": [0]}
    assert page.along(pruned) == {"dense": "9.00", "20 %": "1.00, 3.00 ± 1.00", "40 %": "0.00"}


@pytest.mark.slow
def test_an_average_of_an_aligned_model_is_the_merge(mnist):
    """Along w models are matched once where they can be."""
    transfer, laboratory = example("transfer", PAPER), example("laboratory", PAPER)
    lab = laboratory.Laboratory(mnist.options("").parse_args([]), quick=True)
    generator = torch.Generator().manual_seed(0)

    def network(*widths):
        return {
            f"fc{at}.weight": torch.randn(o, i, generator=generator)
            for at, (i, o) in enumerate(itertools.pairwise(widths), start=1)
        }

    images = torch.rand(40, 12, generator=generator)
    for a in (network(12, 8, 6, 10), network(12, 5, 4, 10)):
        pair = a, network(12, 8, 6, 10)
        for name, way in transfer.ON_A.items():
            if name == "plain" and len(a["fc1.weight"]) == 5:
                continue
            way = {**way, "inputs": 30} if "inputs" in way else way
            found = transfer.Averages(lab, pair, way, images, seed=3).at(0.3)
            whole = lab.fused(pair, way, seed=3, images=images, weights=(0.7, 0.3))
            assert all(torch.equal(found[n], t) for n, t in whole.items()), name


def test_every_row_has_a_recipe_of_its_own_and_an_item_on_the_page():
    run = example("run", PAPER)
    given = run.mnist.options("").parse_args([])
    items = set()
    for quick in (True, False):
        every = run.every_job(given, quick=quick)
        assert len({job.key for job in every}) == len(every)
        assert len({(job.item, job.row) for job in every}) == len(every)
        items |= {job.item for job in every}
    assert items == set(run.ITEMS)


@pytest.fixture
def lab(mnist, shared, tmp_path):
    """The laboratory of the paper's tables, with a cache of its own."""
    data = str(shared / "data" / "mnist.npz")
    given = mnist.options("").parse_args(["--data", data, "--cache", str(tmp_path)])
    return example("laboratory", PAPER).Laboratory(given, quick=True)


@pytest.mark.slow
def test_skill_is_transferred(mnist, lab):
    """Figure 2, S5.3 and S6 in small: an epoch of training, half the widths.

    Measured: activations 1.4 above the plain average; joint fusion 0.2, 0.05 and 0.1 below the
    ensemble.
    """
    transfer, page = example("transfer", PAPER), example("page", PAPER)
    recipe = mnist.Recipe((200, 100, 50), epochs=1, rate=0.1, decay=True)
    ways = {n: transfer.ON_A[n] for n in ("plain", "--paper, activations", "default", "joint")}

    def best(digit, percent, along, seeds):
        found = transfer._curves(lab, digit, percent, "different", along, seeds, ways, recipe)
        return {n: max(map(mean, heights)) for n, (_, heights) in page.curves(found).items()}

    skill = best(4, 10, (0.1, 0.2), [0, 1, 2])
    assert min(skill["--paper, activations"], skill["default"]) > skill["plain"] + 0.5
    assert skill["joint"] > skill["ensemble"] - 0.5
    both = best(None, 30, (0.8,), [0])
    assert both["joint"] > both["ensemble"] - 0.5
    four = transfer._four(lab, (0.7, 0.1, 0.2, 0.1), [0], recipe)
    assert four["joint"][0] > four["ensemble"][0] - 0.5


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.01, 0.002])
def test_training_goes_on_better_from_a_fusion_than_from_the_plain_average(rate, mnist, lab):
    """Table S3 in two epochs."""
    finetune, ways = example("finetune", PAPER), example("laboratory", PAPER).WAYS
    begin = [(name, 0, lab.fused(lab.pair, ways[name])) for name in ("plain", "default")]
    found = finetune.trained(lab, mnist.Recipe(mnist.MLPNET, 2, rate), begin)
    assert found["default, best"][0] > found["plain, best"][0] + 0.2


@pytest.mark.slow
def test_students_learn_better_from_a_fusion_than_from_nothing(mnist, lab):
    """Table S10 at ratio 10 in three epochs, a student that was trained for one."""
    distil = example("distil", PAPER)
    recipe = mnist.Recipe((40, 20, 10), epochs=3)
    short = mnist.Recipe((40, 20, 10), epochs=1, rate=0.1, decay=True)
    (own,) = mnist.students(short, [mnist.Student(0, 0)], lab.given.data, lab.given.cache)
    teacher = lab.pair[0]
    starts = distil._starts(lab, recipe, teacher, own, 0)
    begin = [(name, 0, starts[name]) for name in ("random", "default")]
    logits = mnist.evaluate.mlpnet(teacher, lab.train.images)
    labels = mnist.cross_entropy(lab.train)
    for temperature, factor in ((1.0, 0.7), (4.0, 0.05), (4.0, 0.0)):
        slope = distil.softened([logits, logits], labels, temperature, factor)
        found = example("finetune", PAPER).trained(lab, recipe, begin, slope=slope)
        assert found["default, best"][0] > found["random, best"][0], (temperature, factor, found)
