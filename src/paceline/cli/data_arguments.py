"""Data files as they are named on a command line: patterns that the shell did not expand, and standard input."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Sequence

import typer

from paceline.errors import DataError, UsageError

STANDARD_INPUT = "-"


def find_data(context: typer.Context, names: list[str] | None) -> list[str] | None:
    """Return the files that arguments name: a callback of options.

    A pattern of `*`, `?` or `[...]` stands for the files that fit it, in order of their names; `-` for standard input,
    which is kept in a temporary file as long as the command runs. Raises DataError where no file fits.
    """
    if names is None or context.resilient_parsing:
        return names
    found: list[str] = []
    for name in names:
        if name == STANDARD_INPUT:
            found.append(_keep_standard_input(context))
        else:
            found += expand_pattern(name)
    return found


def find_sources(context: typer.Context, names: list[str]) -> list[str]:
    """The same where the last of the names is that of a file to write."""
    *sources, out = names
    return [*(find_data(context, sources) or ()), out]


def expand_pattern(name: str) -> Sequence[str]:
    """Return the files that a pattern stands for; of a name that is none, or that there is a file of, itself.

    Labels of arrays, which are read with the file that they stand beside (``x.y.npy`` beside ``x.npy``), are left out.
    """
    if "://" in name:
        from paceline.data.streams import expand_url, is_url

        if is_url(name):
            return expand_url(name)
    if not glob.has_magic(name) or os.path.exists(name):
        return [name]
    fitting = sorted(path for path in glob.glob(name, recursive=True) if not os.path.isdir(path))
    if not fitting:
        raise DataError(f"no file fits {name}")
    if not any(path.endswith(".npy") for path in fitting):
        return fitting
    from paceline.data.binary.arrays import holds_labels_of

    return [path for path in fitting if not holds_labels_of(path, fitting)]


def _keep_standard_input(context: typer.Context) -> str:
    """Write standard input to a file, which goes with the command; return its name."""
    from paceline.data.streams import standard_input

    root = context.find_root()
    if STANDARD_INPUT in root.meta:
        raise UsageError("'-' is named twice: standard input can be read once")
    folder = root.meta[STANDARD_INPUT] = standard_input.make_folder()
    root.call_on_close(folder.close)  # the command's own context is closed only if all its arguments are right
    try:
        path = standard_input.keep(sys.stdin.buffer, folder.path)
    except OSError as error:
        raise DataError(f"standard input cannot be kept in {folder.path}: {error.strerror or error}") from error
    size = path.stat().st_size
    if not size:
        raise DataError("standard input is empty: it has no line to read")
    typer.echo(f"paceline: standard input, {size:,} bytes, is kept in {path} while this command runs", err=True)
    return str(path)
