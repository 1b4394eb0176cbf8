"""Show a running command: ``paceline top``."""

from __future__ import annotations

from typing import Annotated

import typer


def top(
    url: Annotated[
        str, typer.Argument(help="Address that --dashboard of a running command has printed, with its token.")
    ],
) -> None:
    """Show the figures of a running command in the terminal, until the command ends or Ctrl-C.

    The command is paceline run, train or scheduler with --dashboard. It prints the address.

    Example: paceline top 'http://127.0.0.1:8800/?token=...'
    """
    from rich.console import Console

    from paceline.observe.top import show_top

    show_top(url, Console())
