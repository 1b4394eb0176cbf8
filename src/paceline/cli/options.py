"""Options that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.environment import environment
from paceline.errors import UsageError

from .data_arguments import find_data

if TYPE_CHECKING:
    from paceline.data.guessing import ReadOptions
    from paceline.transport import TLS

Data = Annotated[
    list[str],
    typer.Argument(
        callback=find_data,
        help="Files to read, in this order, or patterns of them in quotes; .gz and .zst are unpacked on the way; - is "
        "standard input.",
    ),
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        help="criteo, libsvm, libffm, vw, jsonl, csv, parquet, numpy or paceline; default: by the content.",
    ),
]
Label = Annotated[
    str | None,
    typer.Option(help="csv, parquet, jsonl: the column that holds the label, by name or (not jsonl) place from 0."),
]
Positive = Annotated[
    str | None,
    typer.Option(
        help="The label that is the positive one, where labels are not 0 and 1: a number, or a word; "
        "all others are negative."
    ),
]
Categorical = Annotated[
    str | None,
    typer.Option(
        help="csv, parquet, jsonl: categorical columns, separated by commas; those without an option are guessed."
    ),
]
Numeric = Annotated[str | None, typer.Option(help="csv, parquet, jsonl: numeric columns, separated by commas.")]
Text = Annotated[
    str | None,
    typer.Option(help="csv, parquet: columns of text, separated by commas; each word is a feature."),
]
Ignore = Annotated[
    str | None,
    typer.Option(help="csv, parquet: columns to leave out, separated by commas; '*' is all without another option."),
]
Header = Annotated[
    str, typer.Option(help="csv: whether the first row has the names of the columns: yes, no or auto (by the values).")
]
NumericScale = Annotated[
    str,
    typer.Option(
        help="how numbers are scaled, but of criteo: standard (mean 0, deviation 1), log (of logarithms), none; "
        "or cut into categories: quantile:N (N bins by quantiles), log-bins; or auto (what predicts the label best).",
    ),
]
Weight = Annotated[
    str | None,
    typer.Option(help="csv, parquet, jsonl: the column that says how often a row counts, a number from 0 up."),
]
Strict = Annotated[bool, typer.Option(help="Stop at the first malformed line instead of skipping it.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]
Scheduler = Annotated[str | None, typer.Option(help="Address of the cluster's scheduler, HOST:PORT.")]
TokenFile = Annotated[Path | None, typer.Option(help="File that holds the cluster's token (or set PACELINE_TOKEN).")]
HeartbeatTimeout = Annotated[
    float, typer.Option(min=0.5, help="A process that gives no sign of life for so many seconds counts as dead.")
]
OptionalHeartbeatTimeout = Annotated[
    float | None,
    typer.Option(min=0.5, help="A process that gives no sign of life for so many seconds counts as dead; default 10."),
]
Replicas = Annotated[int, typer.Option(min=0, help="How many servers may die without loss: copies of every row.")]
OptionalReplicas = Annotated[
    int | None, typer.Option(min=0, help="How many servers may die without loss: copies of every row; default 0.")
]
OptionalMinReplicas = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Acknowledge a push only when so many replicas have it: while a server that died is not replaced, pushes "
        "wait instead of being on fewer servers; default 0.",
    ),
]
NonFinite = Annotated[
    str | None,
    typer.Option(
        help="Pushes, writes and loads that would leave infinities or NaN in a table: refuse them, or let them in and "
        "count; default refuse.",
    ),
]
FilterModules = Annotated[
    list[str] | None,
    typer.Option(
        "--filter-module",
        metavar="MODULE",
        help="Module with filters of your own, which servers and workers import; may be given several times.",
    ),
]
MemoryLimitSize = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        help="Memory that the rows of sparse tables take on each server, as 512M or 8G; beyond it they lie in files "
        "without a name in --spill-dir, which is slower; default: no limit.",
    ),
]
SpillDir = Annotated[
    Path | None,
    typer.Option(help="Folder for rows beyond --memory-limit, on a disk; default: that of temporary files."),
]
TLSCert = Annotated[Path | None, typer.Option("--tls-cert", help="This process's certificate (PEM); turns TLS on.")]
TLSKey = Annotated[Path | None, typer.Option("--tls-key", help="Key of --tls-cert (PEM).")]
TLSCa = Annotated[Path | None, typer.Option("--tls-ca", help="Certificate that the others' are signed by (PEM).")]


def find_scheduler(given: str | None) -> str:
    """Return the scheduler's address from the option or the environment."""
    found = given or environment().scheduler
    if not found:
        raise UsageError("which cluster? give its scheduler's address with --scheduler HOST:PORT or PACELINE_SCHEDULER")
    return found


def find_token(file: Path | None, *, create: bool = False) -> str:
    """Return the token from the file or the environment; with `create`, make the file if it is missing."""
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
    raise UsageError(
        "a cluster needs a token, which all its processes hold: give --token-file FILE or set PACELINE_TOKEN"
    )


def find_tls(cert: Path | None, key: Path | None, ca: Path | None) -> TLS | None:
    """Return the TLS settings, None if no option is given."""
    from paceline.transport import TLS

    return TLS.of_files(cert, key, ca)


def split_names(text: str | None) -> tuple[str, ...]:
    """Return names separated by commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip()) if text else ()


def choose_reading(
    label: str | None,
    categorical: str | None,
    numeric: str | None,
    text: str | None,
    ignore: str | None,
    header: str,
) -> ReadOptions:
    """Return how the data is read."""
    from paceline.data.guessing import ReadOptions

    return ReadOptions(
        label=label,
        categorical=split_names(categorical),
        numeric=split_names(numeric),
        text=split_names(text),
        ignore=split_names(ignore),
        header=header,
    )


def find_positive(text: str | None) -> float | str | None:
    """Return the label that ``--positive`` names, None if it is not given."""
    from paceline.data.labels import parse_positive

    return None if text is None else parse_positive(text)
