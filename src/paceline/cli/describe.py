"""``paceline describe``."""

from __future__ import annotations

import json as json_module

import typer

from . import options
from .parameters import expand_flags


@expand_flags
def describe(
    *,
    data: options.Data,
    format: options.Format = None,
    label: options.Label = None,
    columns: options.ColumnFlags,
    numeric_scale: options.NumericScale = "auto",
    positive: options.Positive = None,
    json: options.Json = False,
) -> None:
    """Show how 'paceline train' would read the data: format, labels, columns, and the first row as keys.

    Example: paceline describe clicks.csv --label clicked
    """
    from rich.console import Console

    from paceline.training.files.describing import describe_data, show_description

    reading = columns.parse(label)
    found = describe_data(
        *(data, format), numeric_scale=numeric_scale, positive=options.find_positive(positive), reading=reading
    )
    if json:
        typer.echo(json_module.dumps(found))
    else:
        show_description(Console(), found)
