"""``paceline inspect``."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from . import options
from .data_arguments import find_data


def inspect(
    model: Annotated[Path, typer.Argument(help="Directory that 'paceline train --save' wrote.")],
    data: Annotated[
        list[str] | None,
        typer.Option(callback=find_data, help="File to calibrate the model on; may be given several times."),
    ] = None,
    top: Annotated[int, typer.Option(min=0, help="Number of largest weights to show.")] = 20,
    html: Annotated[Path | None, typer.Option(help="File for one page with plots.")] = None,
    png: Annotated[Path | None, typer.Option(help="File for the plots, drawn by Matplotlib.")] = None,
    format: options.Format = None,
    json: options.Json = False,
) -> None:
    """Show a model: features, norms, a histogram of its weights and the largest weights.

    With --data it also predicts these files, compares predictions and clicks by tenths of the predictions, and names
    the features that occur there, unless the model has names already (paceline train --feature-names).
    Example: paceline inspect model --data day4.tsv --html model.html
    """
    from paceline.data import Columns, detect_format
    from paceline.data.feature_names import read_feature_names
    from paceline.errors import ModelError
    from paceline.inference.calibration import calibrate_model
    from paceline.inference.inspection import inspect_model, name_weights
    from paceline.inference.reports import describe_calibration, describe_model, make_page
    from paceline.launch import prepare_kernels
    from paceline.storage.durable_io import replacing

    names = read_feature_names(model)
    summary, calibration = inspect_model(model, top, names), None
    if data:
        prepare_kernels()
        calibration = calibrate_model(model, data, format)
        if not names:
            columns = summary.description.get("columns")
            found_format = format or detect_format(data[0])
            summary = name_weights(summary, data, found_format, columns and Columns.from_fields(columns))
    if html is not None:
        try:
            with replacing(html) as aside:
                Path(aside).write_text(make_page(summary, calibration), encoding="utf-8")
        except OSError as error:
            raise ModelError(f"cannot write the page to {html}: {error.strerror or error}") from None
    if png is not None:
        from paceline.inference.drawing import write_png

        write_png(png, summary, calibration)
    if json:
        found = summary.as_json()
        if calibration is not None:
            found["calibration"] = calibration.as_json()
        typer.echo(json_module.dumps(found, allow_nan=False))
        return
    typer.echo(describe_model(summary))
    if calibration is not None:
        typer.echo(f"\n{describe_calibration(calibration)}")
