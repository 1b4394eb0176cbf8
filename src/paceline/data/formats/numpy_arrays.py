"""Read arrays from files: NumPy's ``.npy`` and ``.npz``, and sparse matrices saved by SciPy.

A column's number is the key, as in LIBSVM's format. A ``.npz`` file has the examples as `X` or as the arrays of
``scipy.sparse.save_npz`` (csr), and the labels as `y`. Otherwise the labels are in a separate file with the same name
and the ending ``.y.npy``. A shard is a range of rows.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from paceline.data.bad_lines import NUM_KEPT, BadLine
from paceline.data.batch import Batch
from paceline.data.columns import Columns
from paceline.data.formats.base import Format
from paceline.data.formats.libsvm import Libsvm
from paceline.data.reader import ReadSettings, Report, ShardReader
from paceline.data.streams import FileStatus, check_local, stat_file
from paceline.errors import DataError, printable
from paceline.kernels.text.values import MAX_FLOAT32

NPY_MAGIC, ZIP_MAGIC = b"\x93NUMPY", b"PK\x03\x04"
_PARTS = ("indptr", "indices", "data")
_ROWS, _CELLS = 4096, 1 << 20  # the largest piece to read in one step
_MOST_TEXT = 200
_LABELS = ".y.npy"
_LARGEST = float(np.finfo(np.float32).max)
_SAMPLED_ROWS = 16_000


class NumpyArrays(Format):
    """``.npy`` and ``.npz`` files."""

    name = "numpy"
    magics = (NPY_MAGIC, ZIP_MAGIC)
    is_random_access = True
    is_keyed = True
    has_numbered_features = True

    @override
    def source_of(self, path: str) -> str:
        return Libsvm.name

    @override
    def stat(self, path: str) -> FileStatus:
        return stat_arrays(path)

    @override
    def sample_labels(self, files: Sequence[str], columns: Columns | None) -> dict[float, int]:
        labels = [file.y for file in map(ArrayFile, files) if file.y is not None]
        sampled = (float(label) for y in labels for label in y[:: len(y) // _SAMPLED_ROWS + 1])
        return dict(Counter(label for label in sampled if abs(label) <= MAX_FLOAT32))  # other labels are malformed

    @override
    def open_reader(self, path: str, settings: ReadSettings) -> ShardReader:
        return ArrayFileReader(path, settings.shard_bytes, needs_label=settings.needs_label)


class ArrayFile:
    """The examples of a file: `X`, dense [rows, columns] or sparse, and `y` [rows], or None without labels.

    Raises DataError for a file without such arrays. Arrays in ``.npy`` files are memory-mapped.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        check_local(path, "NumPy's")
        try:
            with _quietly():
                arrays = _load(path)
        except Exception as error:  # NumPy may raise any exception, because it evaluates headers as Python
            why = printable(str(error).partition("\n")[0] or type(error).__name__, _MOST_TEXT)
            raise DataError(f"{path} cannot be read as NumPy arrays: {why}") from error
        self.X: npt.NDArray[Any] | None = arrays.get("X")
        self.indptr, self.indices, self.values = (arrays.get(name) for name in _PARTS)
        self.y: npt.NDArray[Any] | None = arrays.get("y")
        if self.X is None and (self.indptr is None or self.indices is None or self.values is None):
            raise DataError(
                f"{path} has {', '.join(arrays) or 'no arrays'}: expected X, or a csr matrix written by "
                "scipy.sparse.save_npz"
            )
        self._check()

    @property
    def num_rows(self) -> int:
        if self.X is not None:
            return len(self.X)
        assert self.indptr is not None
        return len(self.indptr) - 1

    def _check(self) -> None:
        X, y, indptr = self.X, self.y, self.indptr
        if X is not None and (X.ndim != 2 or X.dtype.kind not in "fiub"):
            raise DataError(f"{self._path}: X has shape {X.shape} and dtype {X.dtype}: expected rows of numbers")
        if X is None and not _is_csr(indptr, self.indices, self.values):
            raise DataError(f"{self._path} has no valid csr matrix of numbers")
        if y is not None and (y.shape != (self.num_rows,) or y.dtype.kind not in "fiub"):
            raise DataError(
                f"{self._path}: y has shape {y.shape} and dtype {y.dtype}: expected {self.num_rows:,} numbers"
            )

    def end_of_piece(self, start: int, stop: int) -> int:
        """Return the end of the piece that starts at row `start`: `stop`, or less if the piece would be too large."""
        stop = min(start + _ROWS, stop)
        if self.X is not None:
            return min(stop, start + max(_CELLS // max(int(self.X.shape[1]), 1), 1))
        assert self.indptr is not None
        within = int(np.searchsorted(self.indptr[start + 1 : stop + 1], self.indptr[start] + _CELLS, side="right"))
        return start + max(within, 1)

    def rows(self, start: int, stop: int) -> Batch:
        with _quietly():
            return self._rows(start, stop)

    def _rows(self, start: int, stop: int) -> Batch:
        labels = np.full(stop - start, np.nan, np.float32)
        if self.y is not None:
            labels[:] = self.y[start:stop]
        if self.X is not None:
            piece = self.X[start:stop]
            row, column = np.nonzero(piece)
            indptr = np.zeros(len(piece) + 1, np.int64)
            np.cumsum(np.bincount(row, minlength=len(piece)), out=indptr[1:])
            return Batch(labels, indptr, column.astype(np.uint64), piece[row, column].astype(np.float32))
        assert self.indptr is not None
        assert self.indices is not None
        assert self.values is not None
        indptr = self.indptr[start : stop + 1].astype(np.int64)
        pairs = slice(int(indptr[0]), int(indptr[-1]))
        values = self.values[pairs].astype(np.float32)
        return Batch(labels, indptr - indptr[0], self.indices[pairs].astype(np.uint64), values)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Suppress NumPy's warnings about large numbers and unusual headers. The caller checks both."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


def labels_path(path: str | Path) -> Path:
    return Path(path).with_suffix(_LABELS)


def holds_labels_of(path: str, files: Container[str]) -> bool:
    name = path.removesuffix(_LABELS)
    return name != path and any(name + suffix in files for suffix in (".npy", ".npz"))


def stat_arrays(path: str) -> FileStatus:
    arrays, path_of_labels = stat_file(path), labels_path(path)
    if not path_of_labels.exists():
        return arrays
    labels = stat_file(path_of_labels)
    return FileStatus(arrays.num_bytes + labels.num_bytes, f"{arrays.version} {labels.version}")


def _load(path: str) -> dict[str, npt.NDArray[Any]]:
    separate = labels_path(path)
    labels = {"y": np.load(separate, allow_pickle=False)} if separate.exists() else {}
    with open(path, "rb") as file:
        if file.read(2) == ZIP_MAGIC[:2]:
            file.seek(0)
            return {**labels, **_load_archive(file)}
    return {"X": np.load(path, mmap_mode="r", allow_pickle=False), **labels}


def _load_archive(file: BinaryIO) -> dict[str, npt.NDArray[Any]]:
    with np.load(file, allow_pickle=False) as found:
        if "format" in found.files and found["format"].item() not in (b"csr", "csr"):
            raise ValueError(f"the matrix is {found['format'].item()!r}, expected csr. Save X.tocsr()")
        arrays = {name: found[name] for name in found.files if name not in ("format", "shape")}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise ValueError(f"{name} is not an array")
    return arrays


def _is_csr(indptr: npt.NDArray[Any] | None, indices: npt.NDArray[Any] | None, values: npt.NDArray[Any] | None) -> bool:
    if indptr is None or indices is None or values is None:
        return False
    if (indptr.ndim, indices.ndim, values.ndim) != (1, 1, 1) or len(indices) != len(values):
        return False
    if indptr.dtype.kind not in "iu" or indices.dtype.kind not in "iu" or values.dtype.kind not in "fiub":
        return False
    if not len(indptr) or indptr[0] != 0 or indptr[-1] != len(indices) or not (indptr[1:] >= indptr[:-1]).all():
        return False
    return not len(indices) or bool(indices.min() >= 0)


class ArrayFileReader:
    """Shards of a file of arrays: ranges of rows, on average of the given size in bytes."""

    def __init__(self, path: str, shard_bytes: int, *, needs_label: bool) -> None:
        self._path = path
        self._file = ArrayFile(path)
        if self._file.y is None and needs_label:
            raise DataError(f"{path} has no labels: expected y in this file, or the file {labels_path(path)}")
        self._needs_label = needs_label
        num_rows = self._file.num_rows
        self._shard_rows = max(num_rows * shard_bytes // stat_file(path).num_bytes, 1)
        self.num_shards: int | None = -(-num_rows // self._shard_rows)

    def close(self) -> None:
        """Do nothing, because no file is open."""

    def blocks(self, shard: int, report: Report) -> Iterator[Batch]:
        """Yield up to 4,096 rows per batch. A row with a number that is not finite is malformed."""
        end, stop = shard * self._shard_rows, min((shard + 1) * self._shard_rows, self._file.num_rows)
        while end < stop:
            start, end = end, self._file.end_of_piece(end, stop)
            batch = self._file.rows(start, end)
            assert batch.values is not None
            row = np.repeat(np.arange(batch.num_examples), np.diff(batch.indptr))
            is_bad = np.zeros(batch.num_examples, np.bool_)
            is_bad[row[~(np.abs(batch.values) <= _LARGEST)]] = True
            is_bad |= ~np.isfinite(batch.labels) & (self._needs_label | ~np.isnan(batch.labels))
            if is_bad.any():
                bad = np.flatnonzero(is_bad)
                report(len(bad), [self._describe(start + int(at)) for at in bad[:NUM_KEPT]])
                batch = batch.take(np.flatnonzero(~is_bad))
            if batch.num_examples:
                yield batch

    def _describe(self, row: int) -> BadLine:
        return BadLine(self._path, None, row + 1, "", "its label or one of its values is not a finite number")
