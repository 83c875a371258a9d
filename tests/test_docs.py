"""Documents against the tree: links, citations of docs/ in code, and the list of modules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conftest import ROOT
from test_imports import LEVEL

PACKAGE = ROOT / "src" / "otfuse_cli"
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")

LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
# docs/methods/refit.md, or docs/methods/refit.md, Soft maps
CITATION = re.compile(r"\bdocs/[\w/-]+\.md(?:,\s+([A-Z][\w -]*))?")
ROOM = re.compile(r"^### `([\w/]+)/`$", re.MULTILINE)
ROW = re.compile(r"^\| `(\w+)` \| (.+) \|$", re.MULTILINE)
# Rooms of the diagram, and what stands on what: cli["cli<br/>the terminal"], cli --> commands
NODE = re.compile(r'(\w+)\["([\w, ]+)<br/>')
ARROW = re.compile(r"(\w+)(?:\[[^]]*\])? --> (\w+)")
# A path of a module in running text: fusion/average.py
PLACE = re.compile(r"`((?:\w+/)*[a-z_]\w*\.py)`")


def anchors(path: Path) -> set[str]:
    """What a link may name of a document, as GitHub spells it."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    slugs = set()
    for heading in HEADING.findall(text):
        plain = LINK.sub("]", heading).lower()
        slugs.add(re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-"))
    return slugs


def headings(path: Path) -> set[str]:
    return {h.replace("`", "") for h in HEADING.findall(path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    for target in LINK.findall(document.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        file, _, section = target.partition("#")
        path = (document.parent / file).resolve() if file else document
        assert path.exists(), target
        if section:
            assert section in anchors(path), target


def cited() -> list[tuple[Path, str, str]]:
    """Where docs/ is cited in code: the file, the document, the section or nothing."""
    places = []
    for folder in ("src", "tests", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            # A citation may be broken over two lines of a comment.
            text = re.sub(r"\n\s*(# ?)?", " ", path.read_text(encoding="utf-8"))
            for match in CITATION.finditer(text):
                document, _, _ = match[0].partition(",")
                places.append((path, document, match[1] or ""))
    return places


def test_citations_in_code_lead_somewhere():
    places = [place for place in cited() if place[0] != Path(__file__)]
    assert len(places) > 20
    for path, document, section in places:
        assert (ROOT / document).exists(), (path, document)
        words = section.strip()
        known = headings(ROOT / document)
        assert not words or any(h.startswith(words) for h in known), (path, document, words)


def listed() -> list[tuple[str, str]]:
    """Every row of the module tables: the path of its module, and what it says."""
    parts = ROOM.split(ARCHITECTURE.partition("## Modules")[2])
    rows = []
    for room, text in zip(parts[1::2], parts[2::2], strict=True):
        folder = "" if room == PACKAGE.name else f"{room}/"
        rows += [(f"{folder}{name}.py", says) for name, says in ROW.findall(text)]
    return rows


def modules() -> set[str]:
    return {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py" or path.parent == PACKAGE
    }


def test_every_module_has_one_line_and_nothing_else_has():
    names = [name for name, _ in listed()]
    assert sorted(set(names)) == sorted(names), "a module twice"
    assert modules() - set(names) == set(), "modules without a line"
    assert set(names) - modules() == set(), "lines without a module"


def test_every_room_has_a_table():
    rooms = {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("__init__.py")} - {"."}
    assert set(ROOM.findall(ARCHITECTURE)) == rooms | {PACKAGE.name}


def test_the_diagram_has_every_room_and_arrows_point_down():
    diagram = ARCHITECTURE.partition("```mermaid")[2].partition("```")[0]
    rooms = {node: names.split(", ") for node, names in NODE.findall(diagram)}
    named = [name for names in rooms.values() for name in names]
    assert sorted(named) == sorted(room or "__init__" for room in LEVEL)
    levels = {node: LEVEL[names[0].removeprefix("__init__")] for node, names in rooms.items()}
    arrows = ARROW.findall(diagram)
    assert {node for arrow in arrows for node in arrow} == set(rooms)
    # Rooms of one level may stand on each other one way (tests/test_imports.py).
    assert [arrow for arrow in arrows if levels[arrow[0]] > levels[arrow[1]]] == []


def test_no_cell_is_a_paragraph():
    """One short sentence for each module."""
    for name, says in listed():
        assert len(says.split()) <= 16, (name, says)
    for line in ARCHITECTURE.splitlines():
        if line.startswith("|"):
            assert all(len(cell.split()) <= 20 for cell in line.split("|")), line


def test_modules_named_in_the_text_exist():
    text = "".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    for place in PLACE.findall(text):
        folder = ROOT if place.startswith(("tests/", "examples/", "benchmarks/")) else PACKAGE
        if "/" in place:
            assert (folder / place).exists(), place


def test_every_example_has_a_line():
    shown = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    missing = [p.name for p in (ROOT / "examples").glob("*.py") if f"`{p.name}`" not in shown]
    assert missing == []
