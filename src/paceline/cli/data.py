"""``paceline describe`` and ``paceline convert``."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from . import options
from .data_arguments import find_sources
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
    """Show how 'paceline train' would read the data.

    Prints the format, the labels, the columns, and the first row as keys.

    Example: paceline describe clicks.csv --label clicked
    """
    from rich.console import Console

    from paceline.training.files.describing import describe_data, show_description

    reading = columns.parse(label)
    found_positive = options.find_positive(positive)
    found = describe_data(data, format, numeric_scale=numeric_scale, positive=found_positive, reading=reading)
    if json:
        typer.echo(json_module.dumps(found))
    else:
        show_description(Console(), found)


@expand_flags
def convert(
    *,
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="DATA... OUT",
            callback=find_sources,
            help="Files to read, as for train, and the file to write.",
        ),
    ],
    format: options.Format = None,
    label: options.Label = None,
    columns: options.ColumnFlags,
    weight: options.Weight = None,
    feature_names: Annotated[
        bool, typer.Option("--feature-names", help="Store the names of features; this reads the data twice.")
    ] = False,
    strict: options.Strict = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Convert data files to one file that needs no parsing.

    'train', 'predict' and 'describe' read OUT like any data file. It has checksums. A failed conversion leaves no
    file.

    Example: paceline convert day1.tsv.gz day2.tsv.gz days.paceline
    """
    from rich.console import Console

    from paceline.errors import UsageError
    from paceline.observe.work import show_progress
    from paceline.training.files.converting import convert_data, sample_sources
    from paceline.training.files.describing import show_columns

    if len(sources) < 2:
        raise UsageError(f"no output file. Pass its name last: paceline convert {sources[0]} OUT")
    show_progress(not quiet)
    *data, out = sources
    reading = columns.parse(label)
    sample = sample_sources(data, Path(out), format=format, weight=weight, reading=reading)
    console = Console(stderr=True)
    if sample.has_guessed_columns and not quiet:
        show_columns(console, sample)
        if sample.header_note is not None:
            typer.echo(f"paceline: {sample.header_note}", err=True)
    done = convert_data(data, Path(out), sample, strict=strict, feature_names=feature_names)
    if json:
        typer.echo(json_module.dumps(done.as_json()))
    else:
        typer.echo(done.sentence())
