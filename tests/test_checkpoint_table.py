"""Every row of the table in docs/checkpoints.md: what goes in, what comes out or which error."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoint_cases import CASES, Case
from conftest import ROOT


def files(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def limits() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.container}-{c.tensors}-{c.odd}")
def test_case(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    line = case.build(tmp_path)
    before = files(tmp_path)
    out = tmp_path / case.out
    case.during(monkeypatch, tmp_path)
    done = cli("merge", *line, "-o", out)
    monkeypatch.undo()
    assert done.code == case.code, done.err
    for word in case.words:
        assert word in done.err
    assert "Traceback" not in done.err
    shrunk = {tmp_path / "a.pt"} if "shrinks" in case.odd else set()
    after = files(tmp_path)
    assert {p: data for p, data in after.items() if p in before and p not in shrunk} == {
        p: data for p, data in before.items() if p not in shrunk
    }, "an input was touched"
    case.check(out)
    if case.code:
        assert after.keys() == before.keys(), "a failed run left something"
        return
    again = out.with_name(f"again{out.suffix}")
    assert cli("merge", *line, "-o", again).code == 0
    first = files(out) if out.is_dir() else {out: out.read_bytes()}
    for path, data in first.items():
        other = again / path.relative_to(out)
        assert "report" in path.name or other.read_bytes() == data, "two runs differ"


def test_the_docs_show_every_case() -> None:
    lines = (ROOT / "docs" / "checkpoints.md").read_text().splitlines()
    rows = [case.row for case in CASES]
    assert [row for row in rows if row not in lines] == []
    assert len(set(rows)) == len(rows) >= 40
