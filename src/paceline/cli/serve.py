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
    poll: Annotated[float, typer.Option(min=0.05, help="Look for a newer model every so many seconds.")] = 1.0,
) -> None:
    """Answer predictions over HTTP, until Ctrl-C: POST /predict, GET /health, GET /metrics.

    A model that is saved over this one is served as soon as it is loaded, without a gap.
    Example: paceline serve model --port 8000
    Then: curl -d '[{"site": "news", "age": 31.5}]' localhost:8000/predict
    """
    from paceline.serving.server import serve as run_server

    def say(address: str) -> None:
        typer.echo(f"paceline: serving {model} on {address}, until Ctrl-C", err=True)

    with contextlib.suppress(KeyboardInterrupt):  # to be told to end is the end of a server
        run_server(model, host=host, port=port, poll_s=poll, on_ready=say)
