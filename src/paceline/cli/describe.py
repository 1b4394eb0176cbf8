"""``paceline describe``."""

from __future__ import annotations

import json as json_module

import typer

from . import options


def describe(
    data: options.Data,
    format: options.Format = None,
    label: options.Label = None,
    categorical: options.Categorical = None,
    numeric: options.Numeric = None,
    numeric_scale: options.NumericScale = "auto",
    positive: options.Positive = None,
    json: options.Json = False,
) -> None:
    """Say what 'paceline train' would understand of the data: format, labels, columns, and the first row as keys.

    Example: paceline describe clicks.csv --label clicked
    """
    from rich.console import Console

    from paceline.launch.train.describing import describe_data, show_description

    columns = options.choose_columns(label, categorical, numeric)
    found = describe_data(data, format, columns, label, numeric_scale, options.find_positive(positive))
    if json:
        typer.echo(json_module.dumps(found))
    else:
        show_description(Console(), found)
