"""Define the interface of formats of tables, whose rows have named columns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

from typing_extensions import override

from paceline.data.columns import Columns
from paceline.data.dialect import is_number
from paceline.data.feature_names import NameFinder, decoded, encoded
from paceline.data.formats.base import Format
from paceline.data.guessing import ReadOptions, describe_named, guess_columns
from paceline.data.labels import count_labels, find_label_words
from paceline.data.sampling import Sample, TextTable, check_numbers
from paceline.errors import DataError, UsageError
from paceline.kernels.hashing import name_seed
from paceline.kernels.text.values import split_words


class TableFormat(Format):
    """A format of tables."""

    has_columns = True
    column_options: ClassVar[tuple[str, ...]] = ("--label", "--categorical", "--numeric", "--text", "--ignore")

    @abstractmethod
    def sample_table(self, files: Sequence[str], wanted: Sequence[str] = (), header: str = "auto") -> TextTable:
        """Return rows spread over the files. :func:`.guess_dialect` describes `wanted` and `header`."""

    @abstractmethod
    def read_cells(self, files: Sequence[str], columns: Columns, name: str) -> Iterator[str]:
        """Yield the text of each cell of a column. If a cell is a list, yield the text of each element."""

    @override
    def resolve(self, files: Sequence[str], columns: Columns | None, *, needs_label: bool) -> Columns | None:
        if columns is None:
            columns = guess_columns(files[0], self.sample_table(files)).columns
        for file in files:
            names = self.column_names(file, columns.names, columns.header)
            columns.check_in(file, names, needs_label=needs_label)
        return columns

    @override
    def sample(self, files: Sequence[str], columns: Columns | None, options: ReadOptions, weight: str | None) -> Sample:
        if options.header != "auto" and "--header" not in self.column_options:
            raise UsageError(
                f"--header {options.header}: {files[0]} is {self.name}, which has no header. Leave the option out"
            )
        if columns is None:
            wanted = [name for name in (*options.names, weight) if name and not is_number(name)]  # without positions
            table = self.sample_table(files, wanted, options.header)
            if not table.rows:
                raise DataError(f"{files[0]} has columns, but no row of data. Write rows to it, or name another file")
            guesses = guess_columns(files[0], table, options, weight or "")
        else:
            self.resolve(files, columns, needs_label=True)
            table = self.sample_table(files, columns.names, columns.header)
            guesses = describe_named(table, columns)
        found = guesses.columns
        cells = table.column(found.label)
        self.resolve(files, found, needs_label=True)
        check_numbers(files[0], found, cells, table.column(found.weight) if found.weight else ())
        return Sample(
            files=tuple(files),
            format=self.name,
            labels=count_labels(cells, found.classes),
            columns=found,
            guesses=guesses,
            has_guessed_columns=columns is None,
            label_words=() if found.classes else find_label_words(cells),
            table=table,
        )

    @override
    def sample_labels(self, files: Sequence[str], columns: Columns | None) -> dict[float, int]:
        assert columns is not None
        table = self.sample_table(files, columns.names, columns.header)
        return count_labels(table.column(columns.label), columns.classes) if columns.label in table.names else {}

    @override
    def add_names(self, finder: NameFinder, files: Sequence[str], columns: Columns | None) -> None:
        assert columns is not None
        for name in columns.numeric:
            finder.add(name_seed(name), name)
        self.add_categories(finder, files, columns)
        for name in columns.text:
            cells = self.read_cells(files, columns, name)
            words = ([decoded(word)] for cell in cells for word in split_words(encoded(cell)))
            finder.read([name], [name_seed(name)], words)

    def add_categories(self, finder: NameFinder, files: Sequence[str], columns: Columns) -> None:
        for name in columns.categorical:
            finder.read([name], [name_seed(name)], ([cell] for cell in self.read_cells(files, columns, name)))


def trimmed(cell: str, columns: Columns) -> str:
    return cell.strip(" ") if columns.trims else cell
