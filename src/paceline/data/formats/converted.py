"""Converted data: the output of ``paceline convert``, which has the features of its sources."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence

from typing_extensions import override

from paceline.data.binary.blocks import MAGIC
from paceline.data.binary.converted import (
    ConvertedFile,
    ConvertedReader,
    Description,
    check_columns,
    describe_converted,
    merge_guesses,
)
from paceline.data.columns import Columns
from paceline.data.feature_names import NameFinder
from paceline.data.formats.base import Format
from paceline.data.guessing import ReadOptions
from paceline.data.reader import ReadSettings, ShardReader
from paceline.data.sampling import Sample
from paceline.errors import DataError, UsageError

CONVERTED = "paceline"


class ConvertedData(Format):
    """The format of converted data."""

    name = CONVERTED
    magics = (MAGIC,)
    is_random_access = True

    @override
    def source_of(self, path: str) -> str:
        return describe_converted(path).description.format

    @override
    def resolve(self, files: Sequence[str], columns: Columns | None, *, needs_label: bool) -> Columns | None:
        first = describe_converted(files[0]).description
        for file in files:
            found = describe_converted(file).description
            if found.format != first.format and not (_is_table(found) and _is_table(first)):
                raise DataError(
                    f"{file} was converted from {found.format}, and {files[0]} from {first.format}: Pass files of one "
                    "format"
                )
            check_columns(file, found.columns, first.columns if columns is None else columns)
        if columns is not None and first.columns is None:
            raise UsageError(f"{first.format} has no columns to choose. Leave columns out")
        return columns or first.columns

    @override
    def sample(self, files: Sequence[str], columns: Columns | None, options: ReadOptions, weight: str | None) -> Sample:
        converted = tuple(map(describe_converted, files))
        first = converted[0].description
        stored = first.columns
        names = [guess.name for guess in first.guesses]
        if options.given and (stored is None or not options.fit(files[0], stored, names or stored.names)):
            raise UsageError(
                f"{files[0]} was converted with other columns. Leave {', '.join(options.given)} out, or convert its "
                "sources again"
            )
        if weight is not None and (stored is None or weight != stored.weight):
            raise UsageError(f"{files[0]} was converted without --weight {weight}. Convert its sources with it")
        return Sample(
            files=tuple(files),
            format=self.name,
            labels=self.sample_labels(files, None),
            columns=self.resolve(files, columns, needs_label=True),
            guesses=merge_guesses(converted),
            fields=tuple(dict.fromkeys(name for file in converted for name in file.description.fields)),
            converted=converted,
        )

    @override
    def sample_labels(self, files: Sequence[str], columns: Columns | None) -> dict[float, int]:
        counts: Counter[float] = Counter()
        for file in files:
            counts.update(describe_converted(file).labels)
        return dict(sorted(counts.items()))

    @override
    def add_names(self, finder: NameFinder, files: Sequence[str], columns: Columns | None) -> None:
        for path in files:
            with contextlib.closing(ConvertedFile(path)) as file:
                for key, name in (file.names() or {}).items():
                    finder.add(key, name)

    @override
    def open_reader(self, path: str, settings: ReadSettings) -> ShardReader:
        return ConvertedReader(path, settings.columns, settings.shard_bytes)


def _is_table(description: Description) -> bool:
    return description.columns is not None and not description.columns.is_open
