"""Pictures: png and svg by matplotlib, html by ourselves, each looked at as its readers would."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from otfuse_cli.errors import OutputRefused, UsageError
from otfuse_cli.plot import save
from otfuse_cli.plot.charts import HeatMap, LineChart, Picture, Series
from otfuse_cli.plot.page import page
from otfuse_cli.plot.save import write_picture

HOSTILE = "</script><img src=x onerror=alert(1)> $x_$"
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
NOTHING_FETCHED = re.compile(r"(?i)(src|href)\s*=|@import|url\(|fetch\(|XMLHttpRequest|WebSocket")


@pytest.fixture
def picture():
    names = ("conv1", "layer1.0.conv1", HOSTILE)
    lines = (
        Series("OT", (0, 1, 2), (0.5, 0.25, None)),
        Series("identity", (0, 1, 2), (1.5, None, 1.25), "dashed"),
    )
    return Picture(
        "Costs",
        "of two checkpoints",
        (LineChart("", "layer", "OT cost", lines, names, from_zero=True),),
        (
            HeatMap("conv1", "anchor unit", "source unit", ((0.5, 0.0), (0.0, 0.5)), (2, 2)),
            HeatMap(
                "All pairs",
                "anchor",
                "source",
                ((None, 1.25), (0.5, None)),
                (2, 2),
                ("0", "1"),
                ("0", "1"),
                numbers=True,
            ),
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".png", ".svg", ".html"])
def test_same_picture_same_bytes(tmp_path, picture, suffix):
    paths = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    for path in paths:
        write_picture(path, picture)
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    with pytest.raises(OutputRefused):
        write_picture(paths[0], picture)
    write_picture(paths[0], picture, overwrite=True)


@pytest.mark.slow
def test_png_is_an_image_with_ink(tmp_path, picture):
    image = pytest.importorskip("PIL.Image")
    write_picture(tmp_path / "a.png", picture)
    with image.open(tmp_path / "a.png") as shown:
        assert min(shown.size) > 500
        assert len(shown.convert("L").getcolors()) > 20


def test_svg_is_xml(tmp_path, picture):
    write_picture(tmp_path / "a.svg", picture)
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")


class Tags(HTMLParser):
    """Tags that close properly, the text of the data, and every cell of the table."""

    void = ("meta", "img", "link", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.data, self.cells = [], [], "", []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.seen[-1:] and self.seen[-1][1].get("id") == "data" and self.open[-1:] == ["script"]:
            self.data += data
        if self.open[-1:] in (["td"], ["th"]):
            self.cells.append(data)


def test_page_is_whole_escaped_and_alone(picture):
    text = page(picture)
    tags = Tags(text)
    assert "img" not in {tag for tag, _ in tags.seen}
    data = json.loads(tags.data)
    assert data["lines"][0]["categories"][2] == HOSTILE
    assert data["lines"][0]["series"][1]["y"] == [1.5, None, 1.25]
    assert tags.cells[:6] == ["layer", "OT", "identity", "conv1", "0.5", "1.5"]
    assert HOSTILE in tags.cells
    ours = text.replace(json.dumps(HOSTILE)[1:-1].replace("<", "\\u003c"), "")
    ours = ours.replace("&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt; $x_$", "")
    assert not NOTHING_FETCHED.search(ours)
    assert set(re.findall(r"https?://[^\"'\s]+", ours)) == {"http://www.w3.org/2000/svg"}
    policy = [a["content"] for t, a in tags.seen if t == "meta" and "http-equiv" in a]
    assert policy[0].startswith("default-src 'none';")


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no browser")
def test_page_in_a_browser(tmp_path, picture):
    write_picture(tmp_path / "a.html", picture)
    dom = in_browser(tmp_path / "a.html", tmp_path)
    assert 'data-drawn="yes"' in dom
    series = re.findall(r'<g class="series" data-name="(\w+)">(.*?)</g>', dom)
    assert [(name, inside.count("<circle")) for name, inside in series] == [
        ("OT", 2),
        ("identity", 2),
    ]
    assert dom.count("<canvas") == 1
    assert re.findall(r'<td class="cell"[^>]*>([\d.]*)</td>', dom) == ["", "1.25", "0.5", ""]
    assert dom.count('aria-pressed="true"') == 2
    assert "<img" not in dom


@pytest.mark.skipif(BROWSER is None, reason="no browser")
def test_page_answers_the_mouse(tmp_path, picture):
    script = """<script>
    const move = { clientX: 5, clientY: 5, bubbles: true };
    document.querySelector("circle").dispatchEvent(new MouseEvent("mousemove", move));
    document.body.dataset.dot = document.getElementById("tip").textContent;
    const area = document.querySelector("canvas").getBoundingClientRect();
    const corner = { clientX: area.right - 2, clientY: area.bottom - 2 };
    document.querySelector("canvas").dispatchEvent(new MouseEvent("mousemove", corner));
    document.body.dataset.cell = document.getElementById("tip").textContent;
    document.querySelectorAll(".legend button")[1].click();
    </script></body>"""
    (tmp_path / "a.html").write_text(page(picture).replace("</body>", script))
    dom = in_browser(tmp_path / "a.html", tmp_path)
    body = re.search(r"<body[^>]*>", dom).group()
    assert 'data-dot="conv1\nOT: 0.5"' in body
    assert 'data-cell="source unit 1\nanchor unit 1\n0.5"' in body
    assert re.findall(r'<button[^>]*aria-pressed="(\w+)"', dom) == ["true", "false"]
    assert re.findall(r'data-name="(\w+)" style="display: none;"', dom) == ["identity"]


def in_browser(path, home):
    """The page as the browser has it once its script has run."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={home / 'profile'}"]
    line = [BROWSER, *options, "--virtual-time-budget=5000", "--dump-dom", path.as_uri()]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=True).stdout


def test_unknown_suffix(tmp_path):
    with pytest.raises(UsageError, match="no such kind of plot") as refused:
        save.check_plot(tmp_path / "a.pdf", overwrite=False)
    assert ".png, .svg, .html" in refused.value.fix


def test_without_matplotlib_there_is_still_html(tmp_path, picture, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(save, "find_spec", lambda n: None if n == "matplotlib" else found(n))
    with pytest.raises(UsageError, match="matplotlib, which is not installed") as refused:
        write_picture(tmp_path / "a.png", picture)
    assert "pip install 'otfuse-cli[plot]'" in refused.value.fix
    write_picture(tmp_path / "a.html", picture)
