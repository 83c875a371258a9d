"""The last steps of `inspect`, for costs just computed or those of a report: draw, file, gate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..report.gate import gate
from ..report.records import Report
from ..requests.requests import STANDARD, InspectRequest

if TYPE_CHECKING:
    from ..plot.charts import HeatMap


def check_outputs(request: InspectRequest) -> None:
    """Say no before any work.

    Raises:
        UsageError: Two outputs of one name, or a plot that nobody can draw.
        OutputRefused: One exists, or can't be written.
    """
    from ..checkpoint.write import check_output
    from ..plot.save import check_plot

    files = [path for path in (request.write_spec, request.plot, _file(request)) if path]
    if len(set(files)) < len(files):
        raise UsageError("two outputs have the same name", where=str(files[-1]))
    for path in files:
        if path == request.plot:
            check_plot(path, overwrite=request.overwrite)
        else:
            check_output(path, overwrite=request.overwrite)


def finish(
    report: Report,
    request: InspectRequest,
    maps: Sequence[HeatMap] = (),
    spec: str | None = None,
) -> Report:
    """Write what was asked for (`spec`, plot, report), then hold the costs against the limits.

    Raises:
        GateFailed: A limit was passed; carries the report, which is written all the same.
        UsageError: There are no costs to draw.
    """
    from ..checkpoint.publication import Publication

    with Publication(overwrite=request.overwrite) as outputs:
        if spec is not None and request.write_spec is not None:
            outputs.write(request.write_spec, spec)
        if request.plot is not None:
            from ..plot.costs import picture
            from ..plot.save import drawn

            outputs.write(request.plot, drawn(request.plot, picture(report, maps)))
        path = _file(request)
        if path is not None:
            outputs.write(path, report.to_json())
    return gate(report, request.max_cost, request.max_moved)


def _file(request: InspectRequest) -> Path | None:
    return None if request.report == STANDARD else request.report
