"""Pictures as one HTML file: data, style and script inside, nothing fetched, nothing to install.

The script draws; the numbers stand below as a table too, for readers without scripts.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from html import escape
from importlib import resources

from .charts import COLOURS, LineChart, Picture

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<h1>{title}</h1>
<p>{note}</p>
<main id="charts"><noscript>Without scripts there are no charts; the numbers are below.</noscript>
</main>
{tables}
<script type="application/json" id="data">{data}</script>
<script>
{script}</script>
</body>
</html>
"""


def page(picture: Picture) -> str:
    """The text of the page. Names in it come from files: they are escaped everywhere."""
    folder = resources.files(__package__)
    data = {"colours": COLOURS, **asdict(picture)}
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return _PAGE.format(
        title=escape(picture.title),
        note=escape(picture.note),
        style=(folder / "page.css").read_text(encoding="utf-8"),
        script=(folder / "page.js").read_text(encoding="utf-8"),
        tables="\n".join(_table(chart) for chart in picture.lines),
        # A name with `</script>` in it would end the data.
        data=text.replace("<", "\\u003c"),
    )


def _table(chart: LineChart) -> str:
    """The numbers behind a chart."""
    values: dict[float, dict[int, float]] = {}
    for at, line in enumerate(chart.series):
        for x, y in zip(line.x, line.y, strict=True):
            row = values.setdefault(x, {})
            if y is not None:
                row[at] = y
    lines = ["<details>", f"<summary>{escape(chart.title or chart.ylabel)}: the numbers</summary>"]
    head = [chart.xlabel, *(line.name for line in chart.series)]
    lines += ["<table>", _row(head, "th")]
    for x in sorted(values):
        name = f"{x:g}" if chart.categories is None else chart.categories[int(x)]
        cells = [f"{values[x][at]:.6g}" if at in values[x] else "" for at in range(len(head) - 1)]
        lines.append(_row([name, *cells], "td"))
    return "\n".join([*lines, "</table>", "</details>"])


def _row(cells: list[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
