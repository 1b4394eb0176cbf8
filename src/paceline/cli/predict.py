"""``paceline predict``."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from . import options


def predict(
    model: Annotated[Path, typer.Argument(help="Directory that 'paceline train --save' wrote.")],
    data: options.Data,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the predictions; standard output if not given.")
    ] = None,
    format: options.Format = None,
    header: options.Header = "auto",
    strict: options.Strict = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print no losses of the predictions; warnings are still printed.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Write P(click) of each line, one per line, and the losses on standard error if there are labels.

    With --json the final figures go to standard output as one object, and predictions only to --output.
    Example: paceline predict model day4.tsv --output predictions.txt
    """
    from paceline.training.predict import run_prediction

    result = run_prediction(model, data, output=output, format=format, header=header, strict=strict, echo=not json)
    if json:
        typer.echo(json_module.dumps(result.as_json(), allow_nan=False))
    elif not quiet:
        typer.echo(result.sentence(), err=True)
    for note in result.notes():
        typer.echo(f"paceline: {note}", err=True)
