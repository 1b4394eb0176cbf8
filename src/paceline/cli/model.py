"""Saved models: ``paceline predict``, ``inspect``, ``serve`` and ``model``."""

from __future__ import annotations

import contextlib
import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from . import options
from .data_arguments import find_data


def predict(
    model: Annotated[Path, typer.Argument(help="Directory written by 'paceline train --save'.")],
    data: options.Data,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the predictions; default: standard output.")
    ] = None,
    format: options.Format = None,
    header: options.Header = "auto",
    strict: options.Strict = False,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", "-q", help="Print neither progress nor losses; warnings are still printed."),
    ] = False,
    json: options.Json = False,
) -> None:
    """Predict each line of data files with a saved model.

    Writes P(click), one per line. The losses go to standard error if there are labels.
    With --json the final figures are one object on standard output, and predictions are written only to --output.
    Example: paceline predict model day4.tsv --output predictions.txt
    """
    from paceline.observe.work import show_progress
    from paceline.training.predict import run_prediction

    show_progress(not quiet)
    result = run_prediction(model, data, output=output, format=format, header=header, strict=strict, echo=not json)
    if json:
        typer.echo(json_module.dumps(result.as_json(), allow_nan=False))
    elif not quiet:
        typer.echo(result.sentence(), err=True)
    for note in result.notes():
        typer.echo(f"paceline: {note}", err=True)


def inspect(
    model: Annotated[Path, typer.Argument(help="Directory written by 'paceline train --save'.")],
    data: Annotated[
        list[str] | None,
        typer.Option(callback=find_data, help="File with data to check the calibration; may be given several times."),
    ] = None,
    top: Annotated[int, typer.Option(min=0, help="Number of largest weights to show.")] = 20,
    html: Annotated[Path | None, typer.Option(help="File for one page with plots.")] = None,
    png: Annotated[Path | None, typer.Option(help="File for the plots, drawn by Matplotlib.")] = None,
    format: options.Format = None,
    json: options.Json = False,
) -> None:
    """Show the features, norms and weights of a saved model.

    With --data it also predicts these files, compares predictions with clicks in ten groups, and names the features
    that occur in the files, unless the model already has names (paceline train --feature-names). Example: paceline
    inspect model --data day4.tsv --html model.html
    """
    from paceline.data import Columns, detect_format
    from paceline.data.feature_names import read_feature_names
    from paceline.errors import ModelError
    from paceline.inference.inspection import calibrate_model, inspect_model, name_weights
    from paceline.inference.reports import describe_calibration, describe_model, make_page
    from paceline.launch import prepare_kernels
    from paceline.output_files import replacing

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
        from paceline.inference.reports import write_png

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


def serve(
    model: Annotated[Path, typer.Argument(help="Directory of a model, or of a training's snapshots.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 accepts other hosts too.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for a free port.")] = 8000,
    poll: Annotated[float, typer.Option(min=0.05, help="Seconds between checks for a newer model.")] = 1.0,
) -> None:
    """Serve predictions over HTTP until Ctrl-C.

    The paths are POST /predict, GET /health and GET /metrics.
    When a newer model appears in the directory, the server loads it and replaces the old model without a gap.
    Example: paceline serve model --port 8000
    Then: curl -d '[{"site": "news", "age": 31.5}]' localhost:8000/predict
    """
    from paceline.serving.server import serve as run_server

    def report_address(address: str) -> None:
        typer.echo(f"paceline: serving {model} on {address}, until Ctrl-C", err=True)

    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is the regular end of a server
        run_server(model, host=host, port=port, poll_s=poll, on_ready=report_address)


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
    """Compare the norms and weights of two models.

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
        str | None, typer.Option(help="Weights of the models in the mean, separated by commas; default: equal weights.")
    ] = None,
) -> None:
    """Write the mean of several linear models.

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
    """Write a model's nonzero weights, or its network, for other programs.

    Example: paceline model export model weights.npz
    """
    from paceline.inference.export import export_model

    count = export_model(model, file, to)
    typer.echo(f"{count:,} weights in {file}")
