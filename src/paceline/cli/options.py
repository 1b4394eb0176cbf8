"""Define options that several commands share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.command_options import option
from paceline.environment import environment, naming
from paceline.errors import UsageError

from .data_arguments import find_data

if TYPE_CHECKING:
    from paceline.data.guessing import ReadOptions

Data = Annotated[
    list[str],
    typer.Argument(
        callback=find_data,
        help="Files to read, in this order, or quoted patterns. .gz and .zst are decompressed; - is standard input.",
    ),
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        help="criteo, libsvm, libffm, vw, jsonl, csv, parquet, numpy or paceline; default: detected from the content.",
    ),
]
Label = Annotated[
    str | None,
    typer.Option(help="csv, parquet, jsonl: column of the label, by name or (except jsonl) number from 0."),
]
Positive = Annotated[
    str | None,
    typer.Option(
        help="The positive label (a number or a word) if labels are not 0 and 1. All other labels are negative."
    ),
]
Header = Annotated[
    str, typer.Option(help="csv: whether the first row has column names: yes, no or auto (detected from the values).")
]
NumericScale = Annotated[
    str,
    typer.Option(
        help="Scale of numbers, except for criteo: standard (mean 0, deviation 1), log (logarithms), none; categories: "
        "quantile:N (N bins by quantiles), log-bins; or auto (the best predictor of the label).",
    ),
]
Weight = Annotated[
    str | None,
    typer.Option(help="csv, parquet, jsonl: column with each row's weight, a number of 0 or more."),
]
Strict = Annotated[bool, typer.Option(help="Stop at the first malformed line instead of skipping it.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress line.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]
Scheduler = Annotated[str | None, typer.Option(help="Address of the cluster's scheduler, HOST:PORT.")]
TokenFile = Annotated[Path | None, typer.Option(help="File with the cluster's token (or set PACELINE_TOKEN).")]


@dataclass(frozen=True, kw_only=True)
class ColumnFlags:
    """The columns of the data."""

    categorical: str | None = option(
        "csv, parquet, jsonl: categorical columns, separated by commas; the kinds of other columns are guessed."
    )
    numeric: str | None = option("csv, parquet, jsonl: numeric columns, separated by commas.")
    text: str | None = option("csv, parquet: text columns, separated by commas; each word is a feature.")
    ignore: str | None = option(
        "csv, parquet: columns to leave out, separated by commas; '*' leaves out all columns without another option."
    )
    header: Header = "auto"

    def parse(self, label: str | None) -> ReadOptions:
        from paceline.data.guessing import ReadOptions

        return ReadOptions(
            label=label,
            categorical=_split_names(self.categorical),
            numeric=_split_names(self.numeric),
            text=_split_names(self.text),
            ignore=_split_names(self.ignore),
            header=self.header,
        )


def _split_names(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip()) if text else ()


def find_scheduler(given: str | None) -> str:
    found = given or environment().scheduler
    if not found:
        raise UsageError("no scheduler. Pass its address with --scheduler HOST:PORT or set PACELINE_SCHEDULER")
    from paceline.transport import Address

    with naming("--scheduler" if given else "PACELINE_SCHEDULER"):
        Address.parse(found)
    return found


def find_token(file: Path | None, *, create: bool = False) -> str:
    """Return the token from the file or the environment; with `create`, create a missing file with a new token."""
    from paceline.transport import make_token, read_token
    from paceline.transport.security.authentication import check_token

    if file is not None:
        if create and not file.exists():
            token = make_token()
            try:
                number = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            except OSError as error:
                raise UsageError(f"cannot write the token to {file}: {error.strerror}") from None
            with os.fdopen(number, "w") as out:
                out.write(token + "\n")
            return token
        return read_token(file)
    token_found = environment().token
    if token_found:
        return check_token(token_found, "PACELINE_TOKEN")
    raise UsageError("no token. Pass the cluster's token with --token-file FILE or set PACELINE_TOKEN")


def find_positive(text: str | None) -> float | str | None:
    from paceline.data.labels import parse_positive

    return None if text is None else parse_positive(text)
