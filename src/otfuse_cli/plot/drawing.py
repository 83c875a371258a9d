"""Pictures by matplotlib: png and svg. The only importer of matplotlib; touches no global state."""

from __future__ import annotations

from io import BytesIO
from textwrap import fill
from typing import Any

from .charts import COLOURS, HeatMap, LineChart, Picture, ticks

DASHES = {"solid": "-", "dashed": "--", "dotted": ":"}
_MARKERS = "osD^vPX"
# Inches; a label of a category needs its share of the width, up to a page of this size.
_WIDTH, _WIDEST, _PER_CATEGORY = 9.0, 22.0, 0.24
# Inches of a line chart and of a map; letters of a title in a line above a map.
_LINE_HEIGHT, _MAP, _MAP_LETTERS = 4.2, 1.8, 26


def drawing(picture: Picture, kind: str) -> bytes:
    """The file of a picture, `png` or `svg`; equal pictures give equal bytes."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # nobody's matplotlibrc may change the file
        matplotlib.rcParams.update(
            {"svg.hashsalt": "otfuse", "text.parse_math": False, "font.size": 9}
        )
        figure = _figure(picture)
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        file = BytesIO()
        figure.savefig(file, format=kind, dpi=150, metadata=metadata)
    return file.getvalue()


def _figure(picture: Picture) -> Any:
    from matplotlib.figure import Figure

    longest = names = 0
    for chart in picture.lines:
        longest = max(longest, len(chart.categories or ()))
        names = max(names, *map(len, chart.categories or ("",)))
    width = min(_WIDEST, max(_WIDTH, 1.5 + _PER_CATEGORY * longest))
    per_row = max(1, int(width / (_MAP + 0.4)))
    # Names of categories stand upright below the axis: longer ones need more height.
    heights = [_LINE_HEIGHT + 0.065 * names] * len(picture.lines)
    map_rows = -(-len(picture.maps) // per_row)
    titles = max((len(chart.title) for chart in picture.maps), default=0)
    heights += [_MAP + 0.9 + 0.13 * (titles // _MAP_LETTERS)] * map_rows
    figure = Figure(figsize=(width, sum(heights) + 0.9), layout="constrained")
    figure.suptitle(fill(picture.title, int(10 * width)))
    bands = figure.subfigures(max(1, len(heights)), 1, height_ratios=heights or None, squeeze=False)
    for band, chart in zip(bands[:, 0], picture.lines, strict=False):
        note = picture.note if chart is picture.lines[0] else ""
        _draw_lines(band.subplots(), chart, note, most=int(width / (0.7 * _PER_CATEGORY)))
    for row in range(map_rows):
        axes = bands[len(picture.lines) + row, 0].subplots(1, per_row, squeeze=False)[0]
        shown = picture.maps[row * per_row : (row + 1) * per_row]
        for at, place in enumerate(axes):
            if at < len(shown):
                _draw_map(place, shown[at])
            else:
                place.set_axis_off()
    return figure


def _draw_lines(axes: Any, chart: LineChart, note: str, *, most: int) -> None:
    handles = []
    for at, line in enumerate(chart.series):
        y = [float("nan") if value is None else value for value in line.y]
        (handle,) = axes.plot(
            line.x,
            y,
            color=COLOURS[(at if line.colour is None else line.colour) % len(COLOURS)],
            linestyle=DASHES[line.style],
            marker=_MARKERS[at % len(_MARKERS)],
            markersize=4,
        )
        handles.append(handle)
    if chart.categories is not None:
        places = ticks(chart.categories, most)
        axes.set_xticks(
            [at for at, _ in places], [name for _, name in places], rotation=90, fontsize=8
        )
        axes.set_xlim(-0.5, len(chart.categories) - 0.5)
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    axes.set(xlabel=chart.xlabel, ylabel=chart.ylabel)
    axes.set_title("\n".join(filter(None, (chart.title, fill(note, 110)))), fontsize=8, loc="left")
    axes.grid(alpha=0.3)
    if len(handles) > 1:
        # A legend leaves out what begins with an underscore.
        names = [line.name if line.name[:1] != "_" else f" {line.name}" for line in chart.series]
        axes.legend(handles, names, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)


def _draw_map(axes: Any, chart: HeatMap) -> None:
    columns, rows = chart.extent
    cells: list[list[float]] = []
    for row in chart.values:  # matplotlib leaves NaN white
        cells.append([float("nan") if value is None else value for value in row])
    image = axes.imshow(
        cells,
        cmap="Blues",
        vmin=0,
        aspect="equal" if columns == rows else "auto",
        interpolation="nearest",
        extent=(-0.5, columns - 0.5, rows - 0.5, -0.5),
    )
    axes.set_title(fill(chart.title, _MAP_LETTERS), fontsize=8)
    axes.set_xlabel(chart.xlabel, fontsize=8)
    axes.set_ylabel(chart.ylabel, fontsize=8)
    axes.tick_params(labelsize=7)
    for axis, names in ((axes.xaxis, chart.columns), (axes.yaxis, chart.rows)):
        if names is not None:
            axis.set_ticks(range(len(names)), names)
        else:
            axis.get_major_locator().set_params(integer=True, nbins=5)
    if chart.numbers:
        for at, row in enumerate(chart.values):
            for column, value in enumerate(row):
                if value is not None:
                    dark = value > 0.6 * image.norm.vmax  # from there on black is hard to read
                    axes.text(
                        column,
                        at,
                        f"{value:.3g}",
                        ha="center",
                        va="center",
                        fontsize=8,
                        color="white" if dark else "black",
                    )
