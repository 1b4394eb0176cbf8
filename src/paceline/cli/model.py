"""``paceline model``: compare, merge and export saved models."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from . import options

app = typer.Typer(help="Work with saved models.", no_args_is_help=True)


@app.callback()
def _model() -> None:
    pass


@app.command("diff")
def diff(
    first: Annotated[Path, typer.Argument(help="Directory of a model.")],
    second: Annotated[Path, typer.Argument(help="Directory of another model of the same kind.")],
    top: Annotated[int, typer.Option(min=0, help="Number of largest changes to show.")] = 20,
    json: options.Json = False,
) -> None:
    """Compare two models: norms, cosine, and the weights that differ most.

    Example: paceline model diff monday tuesday --top 50
    """
    from paceline.inference.inspection import compare_models
    from paceline.inference.reports import describe_difference

    found = compare_models(first, second, top)
    typer.echo(json_module.dumps(found.as_json(), allow_nan=False) if json else describe_difference(found))


@app.command("merge")
def merge(
    models: Annotated[list[Path], typer.Argument(help="Directories of linear models, trained on different data.")],
    save: Annotated[Path, typer.Option(help="Directory for the mean.")],
    shares: Annotated[
        str | None, typer.Option(help="Weight of each model in the mean, separated by commas; default: all equal.")
    ] = None,
) -> None:
    """Write one model whose weights are the mean of several models' weights.

    Example: paceline model merge monday tuesday --shares 3,1 --save both
    """
    from paceline.errors import UsageError
    from paceline.inference.merging import merge_models

    try:
        numbers = None if shares is None else [float(share) for share in shares.split(",")]
    except ValueError:
        raise UsageError(f"--shares {shares}: expected numbers above 0, such as 3,1") from None
    typer.echo(f"{merge_models(models, save, numbers):,} features in {save}")


@app.command("export")
def export(
    model: Annotated[Path, typer.Argument(help="Directory of a model.")],
    file: Annotated[Path, typer.Argument(help="File to write.")],
    to: Annotated[
        str | None,
        typer.Option(
            help="npz (NumPy), text (KEY:WEIGHT, one per line) or onnx (the network of deepfm, dcn); default: by the "
            "file's name."
        ),
    ] = None,
) -> None:
    """Write the nonzero weights, or the network, for other programs.

    Example: paceline model export model weights.npz
    """
    from paceline.inference.export import export_model

    count = export_model(model, file, to)
    typer.echo(f"{count:,} weights in {file}")
