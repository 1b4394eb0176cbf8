"""Options of commands as fields of dataclasses, without the library that parses the command line."""

from __future__ import annotations

from dataclasses import Field, field, fields, is_dataclass
from typing import Any


def option(help: str, *names: str, default: Any = None, panel: str | None = None, **settings: Any) -> Any:
    """Return a dataclass field that is an option of a command.

    Without `names` the option has the name of the field. The help lists it in `panel`, by default in the panel of the
    dataclass, its class attribute ``panel``. The `settings` are those of ``typer.Option``, and an ``effect`` that Typer
    does not get.
    """
    settings = {"parameter": "Option", "names": names, "help": help, "panel": panel, **settings}
    return field(default=default, metadata=settings)


def in_panel(panel: str, **default: Any) -> Any:
    """Return a dataclass field of shared options that the help lists in `panel`; `default` is passed to `field`."""
    return field(metadata={"panel": panel}, **default)


def argument(help: str, *, default: Any = None, **settings: Any) -> Any:
    """Return a dataclass field that is a positional argument; the `settings` are those of ``typer.Argument``."""
    return field(default=default, metadata={"parameter": "Argument", "names": (), "help": help, **settings})


def given_values(flags: Any) -> dict[str, Any]:
    """Return the values by name of all options in a dataclass that are not None, including nested dataclasses."""
    given: dict[str, Any] = {}
    for each in fields(flags):
        value = getattr(flags, each.name)
        if is_dataclass(value):
            given |= given_values(value)
        elif value is not None:
            given[each.name] = value
    return given


def words_of(flags: Any) -> list[str]:
    """Return the command-line words for all options that differ from their defaults, including nested dataclasses."""
    words: list[str] = []
    for each in fields(flags):
        value = getattr(flags, each.name)
        if is_dataclass(value):
            words += words_of(value)
        elif each.metadata.get("parameter") == "Option" and not (value is False or value == each.default):
            for item in value if isinstance(value, list) else [value]:
                values = item if isinstance(item, tuple) else () if item is True else (item,)
                words += [name_of(each), *map(str, values)]
    return words


def name_of(field: Field[Any]) -> str:
    """Return the long name of the option that a dataclass field declares, such as ``--min-ranks``."""
    long_names = (name for name in field.metadata["names"] if name.startswith("--"))
    return next(long_names, f"--{field.name.replace('_', '-')}").partition("/")[0]
