"""JSON lines: one object per line, whose fields are the columns. Other files may have additional fields."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from paceline.data.columns import Columns, Guess, Guesses, shown_names, usual_label
from paceline.data.dialect import LABEL_NAMES
from paceline.data.feature_names import NameFinder, decoded, encoded, text_lines
from paceline.data.formats.base import Format, share_of_lines
from paceline.data.guessing import IN_LISTS, LEAST_ROWS, NO_OPTIONS, NUM_EXAMPLES, ReadOptions, judge_column
from paceline.data.labels import count_labels, find_classes, find_label_words
from paceline.data.reader import ReadSettings, ShardReader
from paceline.data.sampling import Sample, check_numbers, json_text, text_pieces
from paceline.data.text import Parse, Parsed, SparseArrays, TextReader, call_kernel
from paceline.errors import UsageError
from paceline.kernels.hashing import name_seed
from paceline.kernels.text.values import category_text, number_text

_SCRATCH_BYTES = 128


class JsonLines(Format):
    """JSON lines. A field of a nested object has a name with dots (`user.age`). Elements of lists are categories."""

    name = "jsonl"
    column_options = ("--label", "--categorical", "--numeric")
    is_keyed = True
    absent_is_zero = False

    @override
    def matches(self, path: str, lines: Sequence[str]) -> bool:
        return share_of_lines(lines, _is_object) > 0.5 or _is_object(lines[0])

    @override
    def resolve(self, files: Sequence[str], columns: Columns | None, *, needs_label: bool) -> Columns | None:
        if columns is None:
            return find_json_columns(files[0], sample_objects(files))
        if columns.numeric:
            raise UsageError("all numbers of JSON lines are numeric. Leave --numeric out")
        return replace(columns, is_open=True)

    @override
    def sample(self, files: Sequence[str], columns: Columns | None, options: ReadOptions, weight: str | None) -> Sample:
        objects = sample_objects(files)
        guessed = ReadOptions(label=columns.label) if columns else options
        found = find_json_columns(files[0], objects, guessed, weight or "")
        if columns is not None:
            found = replace(columns, is_open=True, classes=columns.classes or found.classes)
        cells = json_cells(objects, found.label)
        check_numbers(files[0], found, cells, json_cells(objects, found.weight))
        for file in files:
            self.stat(file)
        self.resolve(files, found, needs_label=True)
        texts = (
            value
            for item in objects
            for name, value, _ in walk_fields(item)
            if name == found.label and isinstance(value, str)
        )
        names = dict.fromkeys(name for item in objects for name in item)
        return Sample(
            files=tuple(files),
            format=self.name,
            labels=count_labels(cells, found.classes),
            columns=found,
            guesses=describe_json(objects, found),
            has_guessed_columns=columns is None,
            label_words=() if found.classes else find_label_words(texts),
            fields=tuple(name for name in names if name not in (found.label, found.weight)),
        )

    @override
    def sample_labels(self, files: Sequence[str], columns: Columns | None) -> dict[float, int]:
        assert columns is not None
        return count_labels(json_cells(sample_objects(files), columns.label), columns.classes)

    @override
    def add_names(self, finder: NameFinder, files: Sequence[str], columns: Columns | None) -> None:
        finder.read_pairs(_features(files, () if columns is None else columns.categorical))

    @override
    def open_reader(self, path: str, settings: ReadSettings) -> ShardReader:
        assert settings.columns is not None
        parse = json_parser(settings.columns, needs_label=settings.needs_label)
        return TextReader(path, self.name, parse, settings)


def _is_object(line: str) -> bool:
    line = line.strip()
    return line.startswith("{") and line.endswith("}") and '"' in line[:4096]


def json_parser(columns: Columns, *, needs_label: bool) -> Parse:
    from paceline.kernels.text import json_lines as kernels
    from paceline.kernels.text.lines import NUM_COUNTS
    from paceline.kernels.text.values import powers_of_ten

    powers = powers_of_ten()
    label, weight = np.uint64(name_seed(columns.label)), np.uint64(name_seed(columns.weight) if columns.weight else 0)
    as_text, classes = (
        np.array([name_seed(name) for name in names], np.uint64) for names in (columns.categorical, columns.classes)
    )
    scratch = np.empty(0, np.uint8)

    def parse(text: npt.NDArray[np.uint8], start: int, stop: int) -> Parsed:
        nonlocal scratch
        if len(scratch) < len(text) + _SCRATCH_BYTES:
            scratch = np.empty(len(text) + _SCRATCH_BYTES, np.uint8)
        arrays = SparseArrays((stop - start) // 2 + 1)
        (rows, num_bad, position, pairs, all_ones), bad = call_kernel(
            *(kernels.parse_json_lines, NUM_COUNTS, text, start, stop, int(needs_label), label, weight),
            *(as_text, powers, classes, scratch, *arrays.all),
        )
        batch = arrays.batch(rows, pairs, all_ones=bool(all_ones), is_weighted=bool(columns.weight))
        return Parsed(batch, position, num_bad, bad)

    return parse


def sample_objects(files: Sequence[str]) -> list[dict[str, Any]]:
    objects = []
    for _, _, lines in text_pieces(files):
        for line in lines.split(b"\n"):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                objects.append(value)
    return objects


def json_cells(objects: Sequence[Mapping[str, Any]], wanted: str) -> list[str]:
    return [json_text(value) for item in objects for name, value, _ in walk_fields(item) if name == wanted]


def walk_fields(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any, bool]]:
    """Yield each value that is neither object nor list: its dotted name, the value, and whether it is in a list."""
    for name, member in value.items():
        yield from _walk(member, f"{path}.{name}" if path else name, in_list=False)


def _walk(value: Any, path: str, *, in_list: bool) -> Iterator[tuple[str, Any, bool]]:
    if isinstance(value, dict):
        yield from walk_fields(value, path)
    elif isinstance(value, list):
        for element in value:
            yield from _walk(element, path, in_list=True)
    else:
        yield path, value, in_list


def find_json_columns(
    path: str, objects: Sequence[Mapping[str, Any]], options: ReadOptions = NO_OPTIONS, weight: str = ""
) -> Columns:
    """Return the columns of JSON lines: the label, the weight, and the fields whose numbers are categories.

    If `options` do not name the label, it is the first of `LABEL_NAMES` that is a field's name, ignoring case. In
    fields that `options` do not name, numbers are categories if they are identifiers or codes. Raises UsageError for an
    unknown field.
    """
    label = options.label
    refused = [option for option in options.given if option not in JsonLines.column_options]
    if refused:
        raise UsageError(f"{refused[0]} applies to csv and parquet, but {path} has JSON lines. Leave it out")
    values = _values_by_field(objects)
    names = list(values)
    found = usual_label(names) if label is None else label if label in names else None
    shown = shown_names(names) or "none"
    if found is None:
        missing = f"'{label}'" if label is not None else f"named {', '.join(LABEL_NAMES)}"
        raise UsageError(
            f"{path} has no field {missing} in the sampled rows. Its fields are {shown}. Name the label with --label"
        )
    for name in (weight, *options.categorical, *options.numeric):
        if name not in ("", *names):
            raise UsageError(f"{path} has no field '{name}' in the sampled rows. Its fields are {shown}")
    given = options.kinds(path, names, found)
    codes = tuple(
        name
        for name in names
        if name not in (found, weight)
        and (given[name] == "categorical" if name in given else _are_codes(name, values[name]))
    )
    return Columns(found, codes, weight=weight, is_open=True, classes=find_classes(json_cells(objects, found)))


def _values_by_field(objects: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    values: dict[str, list[Any]] = {}
    for item in objects:
        for name, value, in_list in walk_fields(item):
            found = values.setdefault(name, [])
            if not in_list:
                found.append(value)
    return values


def _are_codes(name: str, values: Sequence[Any]) -> bool:
    if not values or not all(_is_integer(value) for value in values):
        return False
    cells = list(map(json_text, values))
    kind, reason = judge_column(name, cells, Counter(cells))
    return kind == "left out" or "codes" in reason or "digits" in reason


def _is_integer(value: Any) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())


def describe_json(objects: Sequence[Mapping[str, Any]], columns: Columns) -> Guesses:
    counts: dict[str, Counter[str]] = {}
    kinds: dict[str, Counter[str]] = {}
    for item in objects:
        for name, value, in_list in walk_fields(item):
            counts.setdefault(name, Counter())[json_text(value)] += value is not None
            if value is not None:
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                as_category = in_list or not is_number or name in columns.categorical
                kind = "numeric" if not as_category else IN_LISTS if in_list else "categorical"
                kinds.setdefault(name, Counter())[kind] += 1
    guesses = []
    for name, found in counts.items():
        kind, reason = _describe_kinds(kinds.get(name, Counter()))
        if kind == "categorical" and found.total() == len(found) == len(objects) >= LEAST_ROWS:
            reason = "all distinct: a feature for each row"
        if name in (columns.label, columns.weight):
            kind, reason = ("label" if name == columns.label else "weight"), ""
        examples = tuple(text for text, count in found.items() if count)[:NUM_EXAMPLES]
        guesses.append(Guess(name, kind, reason, sum(count > 0 for count in found.values()), examples))
    return Guesses(columns, tuple(guesses), len(objects))


def _describe_kinds(found: Mapping[str, int]) -> tuple[str, str]:
    if not found:
        return "left out", ""
    if len(found) == 1:
        (kind,) = found
        return ("categorical", IN_LISTS) if kind == IN_LISTS else (kind, "")
    names = {"numeric": "as numbers", "categorical": "as categories", IN_LISTS: "in lists, as categories"}
    kind = "numeric and categorical" if "numeric" in found else "categorical"
    return kind, ", ".join(f"{found[kind]:,} {text}" for kind, text in names.items() if kind in found)


def _features(files: Sequence[str], categorical: Sequence[str]) -> Iterator[tuple[str, str | None, str]]:
    for line in text_lines(files):
        try:
            item = json.loads(line, parse_int=_NumberText, parse_float=_NumberText)
        except (ValueError, RecursionError):
            continue
        for path, value, in_list in walk_fields(item) if isinstance(item, dict) else ():
            as_text = in_list or path in categorical
            if isinstance(value, _NumberText) and not as_text:
                yield path, None, path
            elif value is not None:
                text = number_text(value) if isinstance(value, _NumberText) else json_text(value)
                yield path, decoded(category_text(encoded(text))), f"{path}={text}"


class _NumberText(str):
    """The text of a number in JSON."""
