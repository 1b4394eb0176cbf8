"""The plots of a model as a PNG file, drawn by Matplotlib (the extra ``paceline[plots]``)."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from paceline.errors import ModelError, UsageError
from paceline.inference.calibration import Calibration
from paceline.inference.inspection import ModelSummary
from paceline.storage.durable_io import replacing

_INCHES, _DOTS_PER_INCH = 4.0, 120


def write_png(file: Path, summary: ModelSummary, calibration: Calibration | None) -> None:
    """Draw the histogram of each table's weights next to the calibration, if given.

    Raises UsageError without Matplotlib, ModelError if the file cannot be written.
    """
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
    drawing = BytesIO()  # Matplotlib's PNG writer seeks, and a FIFO cannot
    figure.savefig(drawing, format="png", dpi=_DOTS_PER_INCH)
    try:
        with replacing(file) as aside:
            aside.write_bytes(drawing.getvalue())
    except OSError as error:
        raise ModelError(f"cannot write the plots to {file}: {error.strerror or error}") from None
