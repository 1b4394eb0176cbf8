"""Write a model's summary as text for a terminal, as one HTML page with plots, and as a PNG file of plots."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from io import BytesIO
from pathlib import Path

from paceline.data import Scale
from paceline.errors import ModelError, UsageError, printable
from paceline.inference.inspection import Calibration, Histogram, ModelDifference, ModelSummary, TableSummary
from paceline.output_files import replacing

_BAR, _MOST_NAME = 40, 200
_WIDTH, _HEIGHT, _MARGIN = 460, 300, 46
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .15rem .9rem .15rem 0; text-align: right }
td:first-child, th:first-child { text-align: left } th { border-bottom: 1px solid #999 }
svg { background: #fafafa } svg text { font-size: 11px; fill: #444 } .bar { fill: #4a7ebb } .axis { stroke: #999 }
.ideal { stroke: #bbb; stroke-dasharray: 4 3 } .line { stroke: #c0504d; fill: none } .dot { fill: #c0504d }
"""


def describe_model(summary: ModelSummary) -> str:
    lines = [f"{summary.directory}: {summary.kind}, written by Paceline {summary.paceline}"]
    if not summary.finished:
        lines[0] += ", unfinished: a snapshot, or an interrupted training"
    lines += [f"{name}: {_setting(value)}" for name, value in summary.description.items() if value is not None]
    for table in summary.tables:
        lines += ["", *_describe_table(table)]
    return "\n".join(lines)


def describe_calibration(calibration: Calibration) -> str:
    rows = [
        (f"{g.lowest:.4f} - {g.highest:.4f}", f"{g.count:,}", f"{g.predicted:.4f}", f"{g.observed:.4f}")
        for g in calibration.groups
    ]
    metrics = calibration.metrics
    sentence = f"on {metrics.examples:,} examples: {metrics.sentence()}"
    table = _text_table(("prediction", "examples", "predicted", "observed"), rows)
    return f"{sentence}\n{table}" if rows else sentence


def describe_difference(difference: ModelDifference) -> str:
    lines: list[str] = []
    for table in difference.tables:
        cosine = "-" if table.cosine is None else f"{table.cosine:.6f}"
        lines += [
            f"table {table.name}: {table.changed:,} features changed, {table.only_in[0]:,} have a weight in the first "
            f"model only and {table.only_in[1]:,} in the second only",
            f"L2 norms {table.l2_norms[0]:.6g} and {table.l2_norms[1]:.6g}, of the difference {table.distance:.6g}, "
            f"cosine {cosine}",
        ]
        rows = [(str(key), _number(a), _number(b)) for key, a, b in table.largest_changes]
        if rows:
            lines.append(_text_table(("largest changes: key", "first", "second"), rows))
    return "\n".join(lines)


def make_page(summary: ModelSummary, calibration: Calibration | None) -> str:
    """Return an HTML page without references to other files."""
    parts = [f"<h1>{escape(summary.directory)}</h1>", f"<pre>{escape(describe_model(summary).partition(chr(10))[0])}"]
    parts += [f"{escape(name)}: {escape(_setting(value))}" for name, value in summary.description.items() if value]
    parts.append("</pre>")
    if calibration is not None:
        parts.append("<h2>Calibration</h2>")
        if calibration.groups:
            parts.append(_calibration_plot(calibration))
        parts.append(f"<pre>{escape(describe_calibration(calibration))}</pre>")
    for table in summary.tables:
        title, *_ = _describe_table(table)
        parts += [f"<h2>{escape(title)}</h2>", _histogram_plot(table.histogram)]
        rows = "".join(
            f"<tr><td>{key}</td><td>{escape(weight)}</td><td>{escape(name)}</td></tr>"
            for key, weight, name in _weight_rows(table)
        )
        parts.append(f"<table><tr><th>key</th><th>weight</th><th>feature</th></tr>{rows}</table>")
    title = escape(summary.directory)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _describe_table(table: TableSummary) -> list[str]:
    lines = [
        f"table {table.name}: {table.features:,} features, {table.nonzero:,} with a nonzero weight",
        f"L1 norm {table.l1_norm:.6g}, L2 norm {table.l2_norm:.6g}, largest {table.largest:.6g}, "
        f"bias {_number(table.bias)}",
    ]
    most = max(table.histogram.counts, default=0)
    for left, right, count in zip(
        table.histogram.edges, table.histogram.edges[1:], table.histogram.counts, strict=False
    ):
        bar = "█" * (count * _BAR // most) or ("▏" if count else "")
        lines.append(f"{left:>10.4g} … {right:<10.4g} {count:>10,} {bar}".rstrip())
    if table.largest_weights:
        rows = _weight_rows(table)
        head = ("largest weights: key", "weight", "feature")
        if any(name for _, _, name in rows):
            lines.append(_text_table(head, rows))
        else:
            lines.append(_text_table(head[:2], [row[:2] for row in rows]))
            lines.append("names of features: pass the data with --data, or train with --feature-names")
    return lines


def _weight_rows(table: TableSummary) -> list[tuple[str, str, str]]:
    return [
        (str(weight.key), _number(weight.weight), printable(weight.name or "", _MOST_NAME))
        for weight in table.largest_weights
    ]


def _text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in (head, *rows)
    ]
    return "\n".join(line.rstrip() for line in lines)


def _number(value: float | list[float]) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(f"{number:.4g}" for number in value[:8]) + (", …]" if len(value) > 8 else "]")
    return f"{value:.6g}"


def _setting(value: object) -> str:
    if isinstance(value, dict):
        shown = value
        if "numeric" in value and "scales" in value:  # the value describes columns
            scales = [Scale.from_fields(fields).describe() for fields in value["scales"]]
            shown = {**value, "scales": "; ".join(scales)}
        return ", ".join(
            f"{printable(str(name), _MOST_NAME)}: {_setting(item)}" for name, item in shown.items() if item
        )
    if isinstance(value, list | tuple):
        return " ".join(map(_setting, value))
    return printable(str(value), _MOST_NAME)


def _svg(content: Sequence[str]) -> str:
    axes = (
        f'<line class="axis" x1="{_MARGIN}" y1="{_HEIGHT - _MARGIN}" x2="{_WIDTH - 10}" y2="{_HEIGHT - _MARGIN}"/>'
        f'<line class="axis" x1="{_MARGIN}" y1="10" x2="{_MARGIN}" y2="{_HEIGHT - _MARGIN}"/>'
    )
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}">{axes}{"".join(content)}</svg>'


def _x(share: float) -> float:
    return round(_MARGIN + share * (_WIDTH - _MARGIN - 10), 1)


def _y(share: float) -> float:
    return round(_HEIGHT - _MARGIN - share * (_HEIGHT - _MARGIN - 10), 1)


def _label(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def _histogram_plot(histogram: Histogram) -> str:
    most = max(histogram.counts, default=0)
    if not most:
        return "<p>All weights are 0.</p>"
    width = 1 / len(histogram.counts)
    content = [
        f'<rect class="bar" x="{_x(at * width)}" y="{_y(count / most)}" width="{_x(width) - _x(0) - 1:.1f}" '
        f'height="{_y(0) - _y(count / most):.1f}"><title>{count:,}</title></rect>'
        for at, count in enumerate(histogram.counts)
    ]
    ends = [(0.0, histogram.edges[0]), (1.0, histogram.edges[-1])]
    content += [_label(_x(share), _HEIGHT - _MARGIN + 16, f"{edge:.4g}") for share, edge in ends]
    content += [_label(_MARGIN - 4, _y(1) + 8, f"{most:,}", "end"), _label(_x(0.5), _HEIGHT - 12, "weight")]
    return _svg(content)


def _calibration_plot(calibration: Calibration) -> str:
    ends = [value for g in calibration.groups for value in (g.predicted, g.observed)]
    least, most = min(0.0, *ends), max(*ends)
    width = most - least or 1.0
    points = [(_x((g.predicted - least) / width), _y((g.observed - least) / width)) for g in calibration.groups]
    content = [f'<line class="ideal" x1="{_x(0)}" y1="{_y(0)}" x2="{_x(1)}" y2="{_y(1)}"/>']
    content.append(f'<polyline class="line" points="{" ".join(f"{x},{y}" for x, y in points)}"/>')
    content += [
        f'<circle class="dot" cx="{x}" cy="{y}" r="4"><title>predicted {g.predicted:.4f}, observed {g.observed:.4f}, '
        f"{g.count:,} examples</title></circle>"
        for (x, y), g in zip(points, calibration.groups, strict=True)
    ]
    content += [
        _label(_x(1) - 10, _HEIGHT - _MARGIN + 16, f"{most:.3g}"),
        _label(_MARGIN - 4, _y(1) + 8, f"{most:.3g}", "end"),
    ]
    content += [_label(_x(0.5), _HEIGHT - 12, "predicted"), _label(_MARGIN - 4, _y(0.5), "observed", "end")]
    return _svg(content)


_INCHES, _DOTS_PER_INCH = 4.0, 120


def write_png(file: Path, summary: ModelSummary, calibration: Calibration | None) -> None:
    """Draw the tables' histograms, and the calibration if given. Raises ModelError, UsageError without Matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("--png needs matplotlib, which is not installed: pip install 'paceline[plots]'") from error
    groups = [] if calibration is None else calibration.groups
    num_plots = len(summary.tables) + bool(groups)
    figure = Figure((_INCHES * 1.3 * num_plots, _INCHES), layout="constrained")
    plots = figure.subplots(1, num_plots, squeeze=False)[0]
    if groups:
        plots[0].axline((groups[0].predicted, groups[0].predicted), slope=1, color="silver", linestyle="--")
        plots[0].plot(
            [group.predicted for group in groups], [group.observed for group in groups], "o-", color="tab:red"
        )
        plots[0].set(title="calibration, by tenths", xlabel="predicted", ylabel="observed")
    for plot, table in zip(plots[bool(groups) :], summary.tables, strict=True):
        if table.histogram.counts:
            plot.stairs(table.histogram.counts, table.histogram.edges, fill=True)
        plot.set(title=f"{table.name}: {table.nonzero:,} of {table.features:,}", xlabel="weight", ylabel="features")
    drawing = BytesIO()  # Matplotlib's PNG writer seeks, which a FIFO does not support
    figure.savefig(drawing, format="png", dpi=_DOTS_PER_INCH)
    try:
        with replacing(file) as aside:
            aside.write_bytes(drawing.getvalue())
    except OSError as error:
        raise ModelError(f"cannot write the plots to {file}: {error.strerror or error}") from None
