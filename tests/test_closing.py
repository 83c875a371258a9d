"""The last sentence of a fusion."""

from __future__ import annotations

import json

import pytest

from conftest import make_report
from otfuse_cli.cli.closing import closing
from otfuse_cli.report.records import Checks, SpaceRecord

pytestmark = pytest.mark.usefixtures("kept_graphs")


def space(ot_cost, identity_cost, random_cost=None, size=10, source=10):
    return SpaceRecord(
        "s", 0, (source, size), ("w",), ot_cost, identity_cost, 0.5, "exact", 0.0, random_cost
    )


def fusion(*spaces, function=None, **recipe):
    report = make_report()
    return report.replace(
        command="merge", spaces=spaces, checks=Checks(function), recipe={**recipe}
    )


@pytest.mark.parametrize(
    ("spaces", "nearer"),
    [
        ([space(3.0, 4.0)], "25 % nearer than in the order they had"),
        ([space(1.0, 2.0), space(1.0, 6.0)], "75 % nearer than in the order they had"),
        ([space(1.0, 2.0), space(5.0, None)], "50 % nearer than in the order they had"),
        ([space(1.0, 2.0, random_cost=10.0)], "90 % nearer than by chance"),
        ([space(2.0, 2.0)], "as near as in the order they had"),
    ],
)
def test_it_says_how_near_units_were_brought(spaces, nearer):
    assert f"matched, {nearer};" in closing(fusion(*spaces))


def test_widths_apart_have_no_order_to_compare_with():
    assert "2 spaces were matched;" in closing(fusion(space(1.0, None), space(2.0, None)))


def test_it_counts_the_anchors_units():
    assert closing(fusion(space(1, 2, size=7, source=9), space(1, 2, size=5))).startswith(
        "12 units in 2 spaces were matched,"
    )


@pytest.mark.parametrize(
    ("function", "words"),
    [("kept", "running the network showed"), ("assumed", "assumed"), (None, "not checked")],
)
def test_it_says_what_the_function_rests_on(function, words):
    text = closing(fusion(space(1, 2), function=function))
    assert words in text
    assert "computes" not in text  # merged units may lose something whatever was proven


def test_it_says_what_to_do_next():
    assert "--synthetic" in closing(fusion(space(1, 2)))
    for given in ({"samples": "x.npz"}, {"synthetic": True}):
        after = closing(fusion(space(1, 2), **given))
        assert "--synthetic" not in after
        assert "otfuse eval" in after


def test_nothing_matched_is_said():
    text = closing(fusion())
    assert text.startswith("Nothing was matched. Next:")  # all weight on one model, joint fusion
    assert "change places" not in text
    assert closing(fusion(align="none")).startswith("Nothing was matched: tensors were averaged")


def test_other_commands_end_as_they_did():
    assert closing(fusion(space(1, 2)).replace(command="inspect")) is None


@pytest.mark.slow
def test_it_ends_the_text_and_nothing_else(cli, demo_pair, tmp_path):
    run = cli("merge", *demo_pair, "-o", tmp_path / "one.safetensors")
    assert run.out.rstrip().splitlines()[-1].startswith(tuple("123456789"))
    assert "nearer than in the order they had" in run.out.rstrip().splitlines()[-1]
    assert cli("merge", *demo_pair, "-o", tmp_path / "two.safetensors", "-q").out == ""
    envelope = cli("merge", *demo_pair, "-o", tmp_path / "three.safetensors", "--json").out
    assert json.loads(envelope)
    assert "nearer than" not in envelope
