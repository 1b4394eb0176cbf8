"""What was understood of data files, for people: ``paceline describe``, and a table before a training."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from paceline.data import Batch, Columns, describe_not_binary, open_dataset
from paceline.data.labels import clicks_where, describe_label_words
from paceline.data.streams import stat_file
from paceline.errors import DataError, printable
from paceline.kernels.text.reference import name_seed
from paceline.launch.kernels import prepare_kernels
from paceline.launch.train.data_files import DataLook, look_at

_MOST_COLUMNS = 40
_MOST_TEXT = 24


def describe_data(
    data: Sequence[str],
    format: str | None,
    columns: Columns | None,
    label: str | None,
    numeric_scale: str = "auto",
    positive: float | None = None,
) -> dict[str, Any]:
    """Return what was understood of the files, fit for JSON: the object of ``paceline describe --json``.

    Arguments as :class:`TrainOptions` and models of clicks have them. Raises what is wrong with the files.
    """
    look = look_at(data, format, columns, label, numeric_scale)
    prepare_kernels()
    labels = clicks_where(positive)
    with open_dataset(data, look.format, look.columns, labels=labels) as dataset:
        with contextlib.closing(dataset.batches(1)) as rows:  # type: ignore[type-var]  # a generator
            first = next(rows, None)
        if first is None:
            raise DataError(f"{data[0]} has no row that can be read")
        return {
            "format": look.format,
            "files": list(data),
            "converted": _describe_converted(look),
            "bytes": sum(stat_file(file).num_bytes for file in dataset.files),
            "rows_looked_at": sum(look.labels.values()) if look.guesses is None else look.guesses.num_rows,
            "labels": {f"{label:g}": look.labels[label] for label in sorted(look.labels)[:100]},
            "positive": positive,
            "label_words": list(look.label_words),
            "warning": describe_not_binary(look.labels, labels),
            "columns": _describe_columns(look),
            "first_row": {"label": float(first.labels[0]), "features": _describe_row(look, first)},
        }


def _describe_converted(look: DataLook) -> dict[str, Any] | None:
    if not look.known:
        return None
    return {
        "format": look.known[0].description.format,
        "examples": sum(file.num_examples for file in look.known),
        "positives": sum(file.num_positives for file in look.known),
        "sources": [source for file in look.known for source in file.description.sources],
    }


def _describe_columns(look: DataLook) -> list[dict[str, Any]]:
    if look.guesses is None or look.columns is None:
        return []
    scales = dict(zip(look.columns.numeric, look.columns.scales, strict=False))  # there may be none
    return [
        {
            "name": guess.name,
            "kind": guess.kind,
            "reason": guess.reason,
            "scale": scales[guess.name].describe() if guess.name in scales else None,
            "distinct": guess.num_distinct,
            "examples": list(guess.examples),
        }
        for guess in look.guesses.guesses
    ]


def _describe_row(look: DataLook, row: Batch) -> list[dict[str, Any]]:
    """The features of a row: column, where it has a name, key and value."""
    values = np.ones(len(row.keys), np.float32) if row.values is None else row.values
    names: list[str | None] = [None] * len(row.keys)
    if look.columns is not None and look.columns.is_open and look.guesses is not None:
        known = {name_seed(guess.name): guess.name for guess in look.guesses.guesses}
        names = [known.get(key) for key in row.keys.tolist()]
    elif look.columns is not None:
        numeric = {name_seed(name): name for name in look.columns.numeric}
        types = {} if look.sample is None else dict(zip(look.sample.names, look.sample.types, strict=True))
        single = [name for name in look.columns.categorical if types.get(name) != "list"]
        names = [*single, *(numeric.get(key) for key in row.keys[len(single) :].tolist())]
    return [
        {"column": name, "key": key, "value": value}
        for name, key, value in zip(names, row.keys.tolist(), values.tolist(), strict=True)
    ]


def show_description(console: Console, found: dict[str, Any]) -> None:
    """Print what :func:`describe_data` returned."""
    labels = ", ".join(f"{label}: {count:,}" for label, count in found["labels"].items())
    if found["positive"] is not None:
        labels += f" ({found['positive']:g} is the positive one)"
    words = describe_label_words(found["label_words"]) if found["label_words"] else None
    for name, text in (
        ("format", found["format"] + _converted_from(found["converted"])),
        ("files", f"{len(found['files']):,}, {found['bytes']:,} bytes"),
        ("rows", f"{found['rows_looked_at']:,} looked at" + (f"; labels {labels}" if labels else "")),
        ("words", words),
        ("warning", found["warning"]),
    ):
        if text:
            console.print(f"{name:8} {text}", highlight=False, markup=False, soft_wrap=True)
    if found["columns"]:
        console.print()
        _show_table(console, found["columns"])
    table = _new_table("column", "key", "value")
    for feature in found["first_row"]["features"]:
        table.add_row(_plain(feature["column"] or ""), str(feature["key"]), f"{feature['value']:g}")
    console.print(f"\nthe first row has label {found['first_row']['label']:g} and these features:", highlight=False)
    console.print(table, highlight=False)


def _converted_from(converted: dict[str, Any] | None) -> str:
    if converted is None:
        return ""
    return (
        f", converted from {converted['format']}: {converted['examples']:,} examples, "
        f"{converted['positives']:,} of them above 0"
    )


def show_columns(console: Console, look: DataLook) -> None:
    """Print what columns were taken for, before a training: the first of them."""
    columns = _describe_columns(look)
    rows = f"{look.guesses.num_rows:,} rows" if look.guesses is not None else "rows"
    console.print(f"columns, by {rows} (--categorical and --numeric name others):", highlight=False, soft_wrap=True)
    _show_table(console, columns[:_MOST_COLUMNS])
    if len(columns) > _MOST_COLUMNS:
        console.print(f"... and {len(columns) - _MOST_COLUMNS} more ('paceline describe' shows all)")


def _show_table(console: Console, columns: Sequence[dict[str, Any]]) -> None:
    table = _new_table("column", "taken for", "distinct", "values")
    for column in columns:
        notes = "; ".join(filter(None, (column["reason"], column["scale"])))
        kind = f"{column['kind']} ({notes})" if notes else column["kind"]
        table.add_row(
            _plain(column["name"]), kind, f"{column['distinct']:,}", ", ".join(map(_plain, column["examples"]))
        )
    console.print(table, highlight=False)


def _new_table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in ("distinct", "key", "value") else "left")
    return table


def _plain(text: str) -> str:
    """A text of the data, short, and without what rich would take for markup."""
    return printable(text, _MOST_TEXT).replace("[", "\\[")
