"""Options of commands as fields of dataclasses, without the library that parses the command line."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(help: str, *names: str, default: Any = None, **settings: Any) -> Any:
    """Return a dataclass field that is an option of a command.

    Without `names` the option has the name of the field. The `settings` are those of ``typer.Option``.
    """
    return field(default=default, metadata={"parameter": "Option", "names": names, "help": help, **settings})


def argument(help: str, *, default: Any = None, **settings: Any) -> Any:
    """Return a dataclass field that is a positional argument; the `settings` are those of ``typer.Argument``."""
    return field(default=default, metadata={"parameter": "Argument", "names": (), "help": help, **settings})
