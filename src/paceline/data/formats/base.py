"""Define the interface of a data format. Each format is a class in this package."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from typing_extensions import override

from paceline.data.columns import Columns
from paceline.data.feature_names import Keys, NameFinder
from paceline.data.guessing import ReadOptions
from paceline.data.labels import count_labels
from paceline.data.reader import ReadSettings, ShardReader
from paceline.data.sampling import Sample, text_pieces
from paceline.data.scales.bins import bin_names
from paceline.data.streams import FileStatus, stat_file
from paceline.errors import DataError, UsageError


class Format(ABC):
    """A data format: detection, columns, labels, names of features, and reader."""

    name: ClassVar[str]
    magics: ClassVar[tuple[bytes, ...]] = ()
    """The possible first bytes of a file, for binary formats."""
    is_random_access: ClassVar[bool] = False
    """Whether the reader can start at any shard and knows the number of shards after opening."""
    scans_to_enter: ClassVar[bool] = False
    """Whether the reader must scan all text before a shard to find the start of a row."""
    samples_beginnings: ClassVar[bool] = False
    """Whether sampling reads only the beginnings of shards, because shards are large."""
    has_columns: ClassVar[bool] = False
    """Whether rows belong to a table. A model trained on one format of tables can read all others."""
    cells_are_text: ClassVar[bool] = False
    """Whether cells are untyped texts, which are the categories."""
    column_options: ClassVar[tuple[str, ...]] = ()
    """The column options, such as ``--label``, that apply to the format."""
    fixed_columns: ClassVar[tuple[str, ...]] = ()
    """The column names, if they are the same in every file."""
    has_numbers: ClassVar[bool] = True
    """Whether values can be numbers, so that ``--numeric-scale`` applies."""
    is_keyed: ClassVar[bool] = False
    """Whether numbers belong to keys, not to columns. A training scales such numbers by key."""
    absent_is_zero: ClassVar[bool] = True
    """Whether a missing number means 0."""
    has_numbered_features: ClassVar[bool] = False
    """Whether features have numbers instead of names."""
    has_binary_labels: ClassVar[bool] = False
    """Whether the reader accepts only the labels 0 and 1."""
    may_lack_labels: ClassVar[bool] = False
    """Whether rows without a label are usual in training data."""

    def matches(self, path: str, lines: Sequence[str]) -> bool:
        """Return whether a text file begins like this format. Raises DataError for unsupported variants."""
        return False

    def matches_unlabelled(self, path: str) -> bool:
        """Return whether a file has this format, but without labels."""
        return False

    def source_of(self, path: str) -> str:
        """Return the name of the format whose features a file has. Raises DataError.

        This is the original format of a converted file, ``libsvm`` for NumPy arrays, and otherwise this format.
        """
        return self.name

    def stat(self, path: str) -> FileStatus:
        """Return the size and version of a file. Raises DataError."""
        return stat_file(path)

    def resolve(self, files: Sequence[str], columns: Columns | None, *, needs_label: bool) -> Columns | None:
        """Return the columns to read: the given columns, or guessed columns.

        Raises UsageError for columns that the format or a file does not have, DataError for unsuitable files.
        """
        if columns is not None:
            raise UsageError(f"{self.name} has no columns to choose. Leave columns out, or pass csv or parquet")
        return None

    def column_names(self, path: str, wanted: Sequence[str] = (), header: str = "auto") -> list[str]:
        """Return a table file's column names; :func:`.guess_dialect` describes `wanted` and `header`."""
        return []

    @abstractmethod
    def sample_labels(self, files: Sequence[str], columns: Columns | None) -> dict[float, int]:
        """Return the labels of rows spread over the files, with the number of rows for each label."""

    def sample(self, files: Sequence[str], columns: Columns | None, options: ReadOptions, weight: str | None) -> Sample:
        """Return a sample of the files.

        `columns` are the columns to read; None guesses the columns not named by `options`. `weight` is the name of the
        column with the examples' weights. Raises DataError for unsuitable files, and UsageError for unsuitable options.
        """
        given = [*options.given, *(["--weight"] if weight is not None else [])]
        if given and columns is None:
            raise UsageError(
                f"{self.name} has no columns to choose. Leave {given[0]} out, or pass --format csv, parquet or jsonl"
            )
        for file in files:
            self.stat(file)
        self.resolve(files, columns, needs_label=True)
        labels = self.sample_labels(files, None)
        if not labels and self.may_lack_labels:
            raise DataError(
                f"{files[0]} has no label in the sampled lines. Begin each line with one, such as '1 | a b'"
            )
        return Sample(files=tuple(files), format=self.name, labels=labels, fields=self.sample_fields(files))

    def sample_fields(self, files: Sequence[str]) -> tuple[str, ...]:
        """Return the namespaces or fields of rows spread over the files if the format has no columns."""
        return ()

    def find_names(self, files: Sequence[str], columns: Columns | None, wanted: Keys) -> dict[int, str]:
        """Return the names of the `wanted` keys; read the files until all are found.

        A category is named ``column=value``, and a number is named after its column.
        """
        finder = NameFinder(wanted)
        for name, scale in zip(columns.numeric, columns.scales, strict=False) if columns is not None else ():
            for key, text in bin_names(name, scale.edges, scale.centre).items() if scale.edges else ():
                finder.add(key, text)
        self.add_names(finder, files, columns)
        return finder.names

    def add_names(self, finder: NameFinder, files: Sequence[str], columns: Columns | None) -> None:  # noqa: B027
        """Add the names of features in the files to `finder`. Numbered features have no names."""

    @abstractmethod
    def open_reader(self, path: str, settings: ReadSettings) -> ShardReader:
        """Open a file. Raises DataError, and UsageError for columns that the file does not have."""


class LineFormat(Format):
    """A text format with one example per line. A line begins with the label."""

    def label_words(self, files: Sequence[str]) -> Iterator[str]:
        for _, _, lines in text_pieces(files):
            for line in lines.split(b"\n"):
                if line.strip():
                    yield line.split(None, 1)[0].decode("utf-8", errors="replace")

    @override
    def sample_labels(self, files: Sequence[str], columns: Columns | None) -> dict[float, int]:
        return count_labels(self.label_words(files))


def share_of_lines(lines: Sequence[str], test: Callable[[str], object]) -> float:
    return sum(bool(test(line)) for line in lines) / max(len(lines), 1)
