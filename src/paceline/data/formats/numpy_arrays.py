"""Arrays of NumPy, and sparse matrices of SciPy. The number of a column is the key, as in LIBSVM's format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from typing_extensions import override

from paceline.data.binary.arrays import NPY_MAGIC, ZIP_MAGIC, ArrayFile, ArrayFileReader, stat_arrays
from paceline.data.columns import Columns
from paceline.data.formats.base import Format
from paceline.data.formats.libsvm import Libsvm
from paceline.data.reader import ReadSettings, ShardReader
from paceline.data.streams import FileStatus

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
        return dict(Counter(float(label) for y in labels for label in y[:: len(y) // _SAMPLED_ROWS + 1]))

    @override
    def open_reader(self, path: str, settings: ReadSettings) -> ShardReader:
        return ArrayFileReader(path, settings.shard_bytes, needs_label=settings.needs_label)
