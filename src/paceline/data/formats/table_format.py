"""Interface of the formats of tables, whose rows have named columns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

from typing_extensions import override

from paceline.data.columns import Columns
from paceline.data.feature_names import NameFinder, decoded, encoded
from paceline.data.formats.base import Format
from paceline.data.guessing import guess_columns
from paceline.data.labels import count_labels
from paceline.data.sampling import TextTable
from paceline.kernels.hashing import name_seed
from paceline.kernels.text.values import split_words


class TableFormat(Format):
    """A format of tables."""

    has_columns = True
    column_options: ClassVar[tuple[str, ...]] = ("--label", "--categorical", "--numeric", "--text", "--ignore")

    @abstractmethod
    def sample_table(self, files: Sequence[str], wanted: Sequence[str] = (), header: str = "auto") -> TextTable:
        """Return rows spread over the files.

        `wanted` and `header` have the same meaning as in :func:`paceline.data.dialect.guess_dialect`.
        """

    @abstractmethod
    def read_cells(self, files: Sequence[str], columns: Columns, name: str) -> Iterator[str]:
        """Yield the text of each cell of a column; of a list, the text of each element."""

    @override
    def resolve(self, files: Sequence[str], columns: Columns | None, *, needs_label: bool) -> Columns | None:
        if columns is None:
            columns = guess_columns(files[0], self.sample_table(files)).columns
        for file in files:
            names = self.column_names(file, columns.names, columns.header)
            columns.check_in(file, names, needs_label=needs_label)
        return columns

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
        """Add the names of the values of categorical columns to `finder`."""
        for name in columns.categorical:
            finder.read([name], [name_seed(name)], ([cell] for cell in self.read_cells(files, columns, name)))


def trimmed(cell: str, columns: Columns) -> str:
    """Return a category without blanks around it, if `columns` ignore them."""
    return cell.strip(" ") if columns.trims else cell
