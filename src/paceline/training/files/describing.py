"""Describe data files for the user: ``paceline describe``, and the table of columns before a training."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from paceline.data import FORMATS, Batch, Columns, Dataset, Sample, describe_not_binary, open_dataset
from paceline.data.bad_lines import shorten
from paceline.data.dialect import is_number
from paceline.data.example_sampling import sample_examples
from paceline.data.guessing import NO_OPTIONS, ReadOptions
from paceline.data.labels import CLICKS, clicks_where, describe_label_words, describe_one_label, resolve_positive
from paceline.data.sampling import spread
from paceline.data.scales.bins import bin_names
from paceline.data.streams import stat_file
from paceline.errors import DataError, printable
from paceline.kernels.hashing import field_of, name_seed
from paceline.launch.kernels import prepare_kernels
from paceline.training.bad_data import BadData, find_bad_lines
from paceline.training.files.data_files import sample_data
from paceline.training.files.numeric_scales import choose_key_scaling

_MOST_COLUMNS, _MOST_LABELS = 40, 10
_MOST_TEXT = 24
_SHARD_BYTES, _SHARDS, _MOST_BEFORE = 256 << 10, 16, 256 << 20
_ROWS, _BATCHES = 4096, 8  # at most 8 batches of 4,096 rows are read per shard; a shard of text has fewer rows


def describe_data(
    data: Sequence[str],
    format: str | None = None,
    columns: Columns | None = None,
    numeric_scale: str = "auto",
    positive: float | str | None = None,
    reading: ReadOptions = NO_OPTIONS,
) -> dict[str, Any]:
    """Return the object that ``paceline describe --json`` prints. The arguments are named as options of a training."""
    sample = sample_data(data, format, columns, numeric_scale, reading=reading)
    prepare_kernels()
    classes = sample.classes
    labels = clicks_where(resolve_positive(positive, classes))
    with open_dataset(data, sample.format, sample.columns, _SHARD_BYTES, labels=labels) as dataset:
        first, num_good = _read_spread(dataset)
        bad = _find_bad(sample, dataset)
        if first is None:
            raise DataError(f"{data[0]} has no row that can be read" + (f": {bad.first[0]}" if bad.first else ""))
        return {
            "format": sample.format,
            "files": list(data),
            "converted": _describe_converted(sample),
            "bytes": sum(stat_file(file).num_bytes for file in dataset.files),
            "sampled_rows": sum(sample.labels.values()) if sample.guesses is None else sample.guesses.num_rows,
            "malformed": {
                "rows_read": num_good + bad.count,
                "count": bad.count,
                "first": bad.first[0] if bad.first else None,
            },
            "labels": _name_labels(sample),
            "positive": _positive_of(positive, classes),
            "classes": list(classes),
            "label_words": list(sample.label_words),
            "header": sample.header_note,
            "warning": _warning(sample, labels, classes),
            "columns": _describe_columns(sample),
            "bent_features": _describe_nonlinear(sample, dataset, numeric_scale),
            "first_row": {
                "label": float(first.labels[0]),
                "is_scaled": not FORMATS[dataset.source_format].is_keyed or numeric_scale == "none",
                "features": _describe_row(sample, dataset, first),
            },
        }


def _name_labels(sample: Sample) -> dict[str, int]:
    classes = sample.classes
    labels = sorted(sample.labels)[:100]
    return {classes[int(label)] if classes else f"{label:g}": sample.labels[label] for label in labels}


def _positive_of(positive: float | str | None, classes: Sequence[str]) -> float | str | None:
    if not classes:
        return resolve_positive(positive, classes)
    return classes[1] if positive is None and len(classes) == 2 else positive


def find_warnings(sample: Sample, labels: str) -> list[str]:
    classes = sample.classes
    one_label = describe_one_label(sample.labels, labels, classes)
    found = [] if one_label is None else [one_label]
    texts = () if sample.table is None else (cell for row in (sample.table.names, *sample.table.rows) for cell in row)
    odd = next((text for text in texts if "\ufffd" in str(text)), None)
    if odd is not None:
        found.append(
            f"text such as '{shorten(str(odd))}' is not UTF-8. Its bytes are the category, so the same text in UTF-8 "
            "would be another category. Convert the file, for example with iconv -f LATIN1 -t UTF-8"
        )
    return found


def _warning(sample: Sample, labels: str, classes: Sequence[str]) -> str | None:
    odd = describe_not_binary(sample.labels, labels, classes)
    if odd is not None:
        return odd if labels != CLICKS else f"{odd}. Pass the positive label with --positive"
    return "; ".join(find_warnings(sample, labels)) or None


def _read_spread(dataset: Dataset) -> tuple[Batch | None, int]:
    """Read rows spread over all files. Return the first batch and the number of valid rows."""
    first, num_good = None, 0
    for file in spread(len(dataset.files), _SHARDS):
        num_shards = dataset.num_shards(file) or 1  # None: of a packed file, only the beginning is read
        if FORMATS[dataset.format].scans_to_enter:
            num_shards = min(num_shards, _MOST_BEFORE // _SHARD_BYTES)
        for shard in spread(num_shards, max(_SHARDS // len(dataset.files), 1)):
            with contextlib.closing(dataset.read(file, shard, _ROWS)) as batches:  # type: ignore[type-var]  # a generator
                for batch in itertools.islice(batches, _BATCHES):
                    first, num_good = first or batch, num_good + batch.num_examples
    return first, num_good


def _find_bad(sample: Sample, dataset: Dataset) -> BadData:
    found = find_bad_lines(dataset)
    for file in sample.converted:
        left_out = file.description
        first = [f"{line.file}: {line.reason}: '{line.text}'" for line in left_out.bad]
        found = BadData(found.count + left_out.num_bad, [*found.first, *first])
    return found


def _describe_converted(sample: Sample) -> dict[str, Any] | None:
    if not sample.converted:
        return None
    return {
        "format": sample.converted[0].description.format,
        "examples": sum(file.num_examples for file in sample.converted),
        "positives": sum(file.num_positives for file in sample.converted),
        "sources": [source for file in sample.converted for source in file.description.sources],
    }


def _describe_columns(sample: Sample) -> list[dict[str, Any]]:
    if sample.guesses is None or sample.columns is None:
        return []
    scales = dict(zip(sample.columns.numeric, sample.columns.scales, strict=False))  # `columns.scales` may be empty
    return [
        {
            "name": guess.name,
            "kind": guess.kind,
            "reason": guess.reason,
            "scale": scales[guess.name].describe() if guess.name in scales else None,
            "distinct": guess.num_distinct,
            "examples": list(guess.examples),
        }
        for guess in sample.guesses.guesses
    ]


def _describe_nonlinear(sample: Sample, dataset: Dataset, numeric_scale: str) -> list[dict[str, Any]]:
    if not FORMATS[dataset.source_format].is_keyed or numeric_scale == "none":
        return []
    examples = sample_examples(dataset)
    scaling = choose_key_scaling(examples, numeric_scale, absent_is_zero=FORMATS[dataset.source_format].absent_is_zero)
    nonlinear = {} if scaling is None else scaling.nonlinear_scales()
    names = FORMATS[dataset.format].find_names(dataset.files, sample.columns, np.array([*nonlinear], np.uint64))
    return [{"name": names.get(key), "key": key, "scale": scale.describe()} for key, scale in nonlinear.items()]


def _describe_row(sample: Sample, dataset: Dataset, batch: Batch) -> list[dict[str, Any]]:
    row = batch.slice(0, 1)
    values = np.ones(len(row.keys), np.float32) if row.values is None else row.values
    if sample.columns is None or sample.columns.is_open:
        known = FORMATS[dataset.format].find_names(dataset.files, sample.columns, row.keys)
        names: list[str | None] = [known.get(key) for key in row.keys.tolist()]
    else:
        numeric = {name_seed(name): name for name in sample.columns.numeric}
        types = {} if sample.table is None else dict(zip(sample.table.names, sample.table.types, strict=True))
        single = [name for name in sample.columns.categorical if types.get(name) != "list"]
        for name, scale in zip(sample.columns.numeric, sample.columns.scales, strict=False):
            numeric |= bin_names(name, scale.edges, scale.centre) if scale.edges else {}
        if row.fields is None:
            names = [*single, *(numeric.get(key) for key in row.keys[len(single) :].tolist())]
        else:
            texts = sample.columns.text
            columns = {field_of(name): name for name in (*sample.columns.categorical, *sample.columns.numeric, *texts)}
            pairs = zip(row.keys.tolist(), row.fields.tolist(), strict=True)
            names = [numeric.get(key) or columns.get(field) for key, field in pairs]
    return [
        {"column": name, "key": key, "value": value}
        for name, key, value in zip(names, row.keys.tolist(), values.tolist(), strict=True)
    ]


def show_description(console: Console, found: dict[str, Any]) -> None:
    labels = ", ".join(f"{label}: {count:,}" for label, count in found["labels"].items())
    if found["positive"] is not None:
        positive = found["positive"] if found["classes"] else f"{found['positive']:g}"
        labels += f" ({positive} is the positive label)"
    words = describe_label_words(found["label_words"]) if found["label_words"] else None
    for name, text in (
        ("format", found["format"] + _converted_from(found["converted"])),
        ("files", f"{len(found['files']):,}, {found['bytes']:,} bytes"),
        ("rows", f"{found['sampled_rows']:,} sampled" + (f"; labels {labels}" if labels else "")),
        ("words", words),
        ("bad rows", _describe_malformed(found["malformed"])),
        ("header", found["header"]),
        ("warning", found["warning"]),
    ):
        if text:
            console.print(f"{name:8} {text}", highlight=False, markup=False, soft_wrap=True)
    if found["columns"]:
        console.print()
        _show_table(console, found["columns"])
    if found["bent_features"]:
        console.print("\nnumbers with a nonlinear effect, and their scales in training:", highlight=False)
        table = _new_table("feature", "key", "scale")
        for feature in found["bent_features"][:_MOST_COLUMNS]:
            table.add_row(_plain(feature["name"] or ""), str(feature["key"]), feature["scale"])
        console.print(table, highlight=False)
        if len(found["bent_features"]) > _MOST_COLUMNS:
            console.print(f"... and {len(found['bent_features']) - _MOST_COLUMNS} more (--json shows all)")
    rows = found["first_row"]
    table = _new_table("column", "key", "value")
    for feature in rows["features"]:
        table.add_row(_plain(feature["column"] or ""), str(feature["key"]), f"{feature['value']:g}")
    scale = "" if rows["is_scaled"] else " (unscaled values: training scales them)"
    console.print(f"\nthe first row has label {rows['label']:g} and these features{scale}:", highlight=False)
    console.print(table, highlight=False)


def _describe_malformed(found: dict[str, Any]) -> str | None:
    if not found["count"]:
        return None
    of_all = f"{found['count']:,} of the {found['rows_read']:,} rows read ({found['count'] / found['rows_read']:.0%})"
    return f"{of_all} are malformed, and training skips them. The first: {found['first']}"


def _converted_from(converted: dict[str, Any] | None) -> str:
    if converted is None:
        return ""
    return (
        f", converted from {converted['format']}: {converted['examples']:,} examples, "
        f"{converted['positives']:,} of them above 0"
    )


def show_columns(console: Console, sample: Sample) -> None:
    columns = _describe_columns(sample)
    rows = f"{sample.guesses.num_rows:,} rows" if sample.guesses is not None else "rows"
    console.print(
        f"columns, by {rows} (--categorical, --numeric, --text and --ignore change them):",
        highlight=False,
        soft_wrap=True,
    )
    _show_table(console, columns[:_MOST_COLUMNS])
    if len(columns) > _MOST_COLUMNS:
        console.print(f"... and {len(columns) - _MOST_COLUMNS} more ('paceline describe' shows all)")
    labels = [f"{label}: {count:,}" for label, count in _name_labels(sample).items()]
    shown = ", ".join(labels[:_MOST_LABELS]) + ", ..." * (len(labels) > _MOST_LABELS)
    console.print(f"labels: {shown}", highlight=False, markup=False, soft_wrap=True)


def _show_table(console: Console, columns: Sequence[dict[str, Any]]) -> None:
    table = _new_table("column", "taken for", "distinct", "values")
    for column in columns:
        notes = "; ".join(filter(None, (column["reason"], column["scale"])))
        kind = f"{column['kind']} ({notes})" if notes else column["kind"]
        table.add_row(
            _plain(column["name"]),
            kind,
            f"{column['distinct']:,}",
            ", ".join(_example(text, column["kind"]) for text in column["examples"]),
        )
    console.print(table, highlight=False)


def _new_table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in ("distinct", "key", "value") else "left")
    return table


def _example(text: str, kind: str) -> str:
    if kind == "numeric" and is_number(text) and not text.strip().lstrip("+-").isdigit():
        return f"{float(text):.6g}"
    return _plain(text) or "''"


def _plain(text: str) -> str:
    return printable(text, _MOST_TEXT).replace("[", "\\[")
