"""`INDEX=VALUE`: one value for all checkpoints, values of their own for some."""

from __future__ import annotations

import numpy as np
import pytest

from otfuse_cli import OtfuseError
from otfuse_cli.requests.indexed_option import per_index

GIVEN = [
    (None, [None, None, None]),
    ("net.py:make", ["net.py:make"] * 3),
    ("1=ema", [None, "ema", None]),
    (("0=a", "2=b"), ["a", None, "b"]),
    (["rest", "2=b"], ["rest", "rest", "b"]),
    ({1: "b"}, [None, "b", None]),
    ({np.int64(0): "a", "2": "c"}, ["a", None, "c"]),
    ("runs/lr=0.1/net.py:make", ["runs/lr=0.1/net.py:make"] * 3),
    ("lr=0.1/net.py:make", ["lr=0.1/net.py:make"] * 3),
    ("0=lr=0.1/net.py:make", ["lr=0.1/net.py:make", None, None]),
    ((), [None, None, None]),
]


@pytest.mark.parametrize(("values", "expected"), GIVEN, ids=str)
def test_every_form_says_a_value_for_each_checkpoint(values, expected):
    found = per_index(values, 3, "--arch")
    assert [found[at] for at in range(3)] == expected


REFUSED = [
    ("3=a", "no such checkpoint"),
    ("-1=a", "no such checkpoint"),
    ({5: "a"}, "no such checkpoint"),
    (["0=a", "0=b"], "two values for one checkpoint"),
    (["0=a", "+0=a"], "two values for one checkpoint"),
    ({0: "a", "0": "b"}, "two values for one checkpoint"),
    (["a", "b"], "two values for all checkpoints"),
    ("0=", "a position without a value"),
    ({0: None}, "a position without a value"),
    ({"first": "a"}, "a position is a whole number"),
    ({1.5: "a"}, "a position is a whole number"),
]


@pytest.mark.parametrize(("values", "what"), REFUSED, ids=str)
def test_what_can_not_be_meant_is_refused_with_the_option(values, what):
    with pytest.raises(OtfuseError) as raised:
        per_index(values, 3, "--key")
    assert raised.value.exit_code == 2
    assert raised.value.what == what
    assert "--key" in str(raised.value.where)
    assert raised.value.fix
