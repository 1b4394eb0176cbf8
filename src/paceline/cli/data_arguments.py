"""Resolve data arguments of commands: files, patterns not expanded by the shell, and standard input."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Sequence

import typer

from paceline.errors import DataError, UsageError

STANDARD_INPUT = "-"


def find_data(context: typer.Context, names: list[str] | None) -> list[str] | None:
    """Return the files named by arguments. Typer calls this function for an option or argument.

    A pattern with `*`, `?` or `[...]` stands for the matching files, sorted by name. `-` stands for standard input,
    which is copied to a temporary file until the command ends. Raises DataError if no file matches.
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
    """Do the same as :func:`find_data`, except for the last name, which is a file to write."""
    *sources, out = names
    return [*(find_data(context, sources) or ()), out]


def expand_pattern(name: str) -> Sequence[str]:
    """Return the files that match a pattern. A plain name, or the name of an existing file, is returned unchanged.

    Files with labels (``x.y.npy`` for ``x.npy``) are left out, because the reader of the array opens them itself.
    """
    if "://" in name:
        from paceline.data.streams import expand_url, is_url

        if is_url(name):
            return expand_url(name)
    if not glob.has_magic(name) or os.path.exists(name):
        return [name]
    fitting = sorted(path for path in glob.glob(name, recursive=True) if not os.path.isdir(path))
    if not fitting:
        raise DataError(f"{name}: no file matches")
    if not any(path.endswith(".npy") for path in fitting):
        return fitting
    from paceline.data.formats.numpy_arrays import holds_labels_of

    return [path for path in fitting if not holds_labels_of(path, fitting)]


def _keep_standard_input(context: typer.Context) -> str:
    """Copy standard input to a file, which is deleted at the end of the command; return its name."""
    from paceline.data.streams import standard_input

    root = context.find_root()
    if STANDARD_INPUT in root.meta:
        raise UsageError("'-' is given twice, but standard input can be read only once. Pass it once")
    folder = root.meta[STANDARD_INPUT] = standard_input.make_folder()
    root.call_on_close(folder.close)  # not the command's own context: it stays open after a wrong argument
    try:
        path = standard_input.keep(sys.stdin.buffer, folder.path)
    except OSError as error:
        raise DataError(f"cannot copy standard input to {folder.path}: {error.strerror or error}") from error
    size = path.stat().st_size
    if not size:
        raise DataError("standard input is empty. Pass at least one line")
    typer.echo(f"paceline: standard input, {size:,} bytes, is stored in {path} while this command runs", err=True)
    return str(path)
