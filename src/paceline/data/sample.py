"""Define a sample of data files, and properties of the data derived from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.data.bad_lines import BadLines
from paceline.data.batch import Batch
from paceline.data.binary.converted import ConvertedFile
from paceline.data.columns import Columns, Guesses
from paceline.data.labels import MOST_CLASSES, describe_no_numbers
from paceline.data.sampling import TextTable
from paceline.errors import DataError


@dataclass(frozen=True, slots=True, eq=False)
class ExampleSample:
    """Examples in the order of the files, in runs of neighbours. Run i begins with row ``starts[i]`` of `batch`."""

    batch: Batch
    starts: npt.NDArray[np.int64]
    num_examples: int
    """The number of examples in the whole data set; an estimate unless `is_whole`."""
    is_whole: bool
    """Whether the sample contains all examples of the data set."""
    bad_lines: BadLines | None = None
    num_read: int = 0
    """The number of examples read, some of which may not be in the sample."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """A sample of data files, and properties of the data derived from it."""

    files: tuple[str, ...]
    format: str
    labels: dict[float, int]
    """The number of sampled rows with each label; for converted data, of all rows."""
    columns: Columns | None = None
    guesses: Guesses | None = None
    """The guessed kinds of the columns, with reasons."""
    has_guessed_columns: bool = False
    label_words: tuple[str, ...] = ()
    """The words for the labels 0 and 1, such as yes and no, if labels are words."""
    fields: tuple[str, ...] = ()
    """The namespaces or fields of rows, for formats without columns."""
    table: TextTable | None = None
    """The sampled rows of csv and parquet files, as text."""
    converted: tuple[ConvertedFile, ...] = ()
    """The converted files, closed."""
    examples: ExampleSample | None = None
    """The examples used to choose the scales of the columns, if a trial chose the scales."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The words that are labels; empty if labels are numbers."""
        return () if self.columns is None else self.columns.classes

    @property
    def header_note(self) -> str | None:
        """A note that the csv files have no header; None if they have a header or another format."""
        if self.table is None or self.table.has_header:
            return None
        last = self.table.names[-1]
        return (
            f"{self.files[0]} has no header: its columns are c1 to {last} (--header yes reads names from its first row)"
        )


def check_numbers(path: str, columns: Columns, labels: Sequence[str], weights: Sequence[str]) -> None:
    texts = None if columns.classes else describe_no_numbers(labels)
    if texts is not None:
        raise DataError(
            f"{path}: the labels, column '{columns.label}', are {texts}: expected numbers, or 2 to {MOST_CLASSES} "
            "words. Choose another column with --label"
        )
    texts = describe_no_numbers(weights)
    if texts is not None:
        raise DataError(f"{path}: the weights, column '{columns.weight}', are {texts}: expected numbers of 0 or more")
