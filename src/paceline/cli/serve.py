"""``paceline serve``."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer


def serve(
    model: Annotated[Path, typer.Argument(help="Directory of a model, or of a training's snapshots.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for other hosts too.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for any that is free.")] = 8000,
    poll: Annotated[float, typer.Option(min=0.05, help="Seconds between checks for a newer model.")] = 1.0,
) -> None:
    """Serve predictions over HTTP, until Ctrl-C: POST /predict, GET /health, GET /metrics.

    If a newer model is saved in the directory, the server loads it and then replaces the old one, without a gap.
    Example: paceline serve model --port 8000
    Then: curl -d '[{"site": "news", "age": 31.5}]' localhost:8000/predict
    """
    from paceline.serving.server import serve as run_server

    def report_address(address: str) -> None:
        typer.echo(f"paceline: serving {model} on {address}, until Ctrl-C", err=True)

    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is the regular end of a server
        run_server(model, host=host, port=port, poll_s=poll, on_ready=report_address)
