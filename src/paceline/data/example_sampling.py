"""Sample the examples of a data set. Before a training, settings are chosen on the sample."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from paceline.data.batch import Batch
from paceline.data.dataset import Dataset, open_dataset
from paceline.data.formats import FORMATS
from paceline.data.reader import BLOCK_BYTES
from paceline.data.sampling import ExampleSample
from paceline.data.streams import stat_file

MAX_ROWS = 262_144
MAX_PAIRS = 4 << 20
_PIECE_BYTES = 64 << 10
_NUM_PIECES = 256
_NUM_BLOCKS = 64  # blocks of 1 MiB of text or 32,768 rows, from files without random access
_CHUNK_ROWS = 256
_GROUP_RUNS = 128  # runs of 256 rows: 32,768 rows


def sample_examples(dataset: Dataset, *, max_rows: int = MAX_ROWS, max_pairs: int = MAX_PAIRS) -> ExampleSample:
    """Return a sample of a data set, in runs of up to 256 neighbours. The sample of a small data set is complete.

    A sample of plain text has 16 MiB, in evenly spread pieces. A sample of other files has their beginnings: in total
    64 blocks of 1 MiB of text (parquet: 32,768 rows). If the sample exceeds `max_rows` or `max_pairs`, every second run
    is dropped. Malformed lines are skipped even if ``dataset.strict``. Raises the errors of :meth:`Dataset.read`.
    """
    sizes = [stat_file(file).num_bytes for file in dataset.files]
    has_pieces = not FORMATS[dataset.format].samples_beginnings and all(map(dataset.can_enter, range(len(sizes))))
    is_large = has_pieces and sum(sizes) > _NUM_PIECES * _PIECE_BYTES
    shard_bytes = _PIECE_BYTES if is_large else BLOCK_BYTES
    thinned = _Thinned(max_rows, max_pairs)
    with open_dataset(
        list(dataset.files), dataset.format, dataset.columns, shard_bytes, labels=dataset.labels
    ) as reader:
        blocks = _Pieces(reader, sizes) if is_large else _Beginnings(reader)
        for batch in blocks:
            thinned.add(batch)
        return replace(thinned.sample(blocks.share_read), bad_lines=reader.bad_lines)


def sample_batch(batch: Batch, *, max_rows: int = MAX_ROWS, max_pairs: int = MAX_PAIRS) -> ExampleSample:
    thinned = _Thinned(max_rows, max_pairs)
    for start in range(0, batch.num_examples, _CHUNK_ROWS):
        thinned.add(batch.slice(start, min(start + _CHUNK_ROWS, batch.num_examples)))
    return thinned.sample(1.0)


def thin(sample: ExampleSample, most: int) -> tuple[Batch, int]:
    """Return about `most` of a sample's examples, in order, and the number of examples that they represent.

    Every k-th run of neighbours is selected, counted from the end of the data. If labels have two classes, the rarer
    class keeps all its examples, up to half of `most`. The weights of the other class's examples compensate for its
    dropped examples. So sums over both classes are unbiased, except for a common factor.
    """
    batch, n = sample.batch, sample.batch.num_examples
    if n <= most:
        return batch, n
    runs = np.searchsorted(sample.starts, np.arange(n), side="right")
    ages = len(sample.starts) - runs
    classes, members, counts = np.unique(batch.labels, return_inverse=True, return_counts=True)
    is_rare = members == np.argmin(counts) if len(classes) == 2 else np.zeros(n, bool)
    num_rare = int(is_rare.sum())
    rare_step = max(-(-2 * num_rare // most), 1)
    step = -(-(n - num_rare) // (most - num_rare // rare_step))
    if not num_rare or rare_step == step:
        rows = np.flatnonzero(ages % -(-n // most) == 0)
        return batch.take(rows), len(rows)
    is_selected = ages % np.where(is_rare, rare_step, step) == 0
    rare_share, share = is_selected[is_rare].mean(), is_selected[~is_rare].mean()
    weights = np.ones(n, np.float32) if batch.weights is None else batch.weights.copy()
    weights[~is_rare] *= np.float32(rare_share / share)
    rows = np.flatnonzero(is_selected)
    return replace(batch, weights=weights).take(rows), round(n * float(rare_share))


class _Pieces:
    """Reads evenly spread pieces of files with random access."""

    def __init__(self, reader: Dataset, sizes: list[int]) -> None:
        self._reader = reader
        shards = [(file, shard) for file in range(len(sizes)) for shard in range(reader.num_shards(file) or 0)]
        self._chosen = [shards[i * (len(shards) - 1) // (_NUM_PIECES - 1)] for i in range(_NUM_PIECES)]
        self.share_read = len(self._chosen) / len(shards)

    def __iter__(self) -> Iterator[Batch]:
        for file, shard in self._chosen:
            yield from self._reader.read(file, shard, _CHUNK_ROWS)


class _Beginnings:
    """Reads the beginnings of all files: the same number of blocks of each file."""

    def __init__(self, reader: Dataset) -> None:
        self._reader = reader
        self._is_cut = False
        self.share_read = 1.0

    def __iter__(self) -> Iterator[Batch]:
        num_files = len(self._reader.files)
        num_blocks, num_ended = max(_NUM_BLOCKS // num_files, 1), 0
        for file in range(num_files):
            for shard in range(num_blocks):
                yield from self._read(file, shard, num_blocks)
                num_shards = self._reader.ended(file)
                if num_shards is not None and shard + 1 >= num_shards:
                    num_ended += 1
                    break
        if num_ended < num_files or self._is_cut:
            self.share_read = 0.0

    def _read(self, file: int, shard: int, most: int) -> Iterator[Batch]:
        num_groups = self._reader.num_shards(file) if FORMATS[self._reader.format].samples_beginnings else None
        runs = self._reader.read(file, shard, _CHUNK_ROWS)
        if num_groups is None:
            yield from runs
            return
        yield from itertools.islice(runs, _GROUP_RUNS * most // min(num_groups, most))
        self._is_cut |= next(runs, None) is not None


class _Thinned:
    """Collects every 2^k-th run of examples, with k large enough for the limits."""

    def __init__(self, max_rows: int, max_pairs: int) -> None:
        self._bounds = np.array([max_rows, max_pairs])
        self._stride, self._num_runs, self._seen_rows = 1, 0, 0
        self._runs: list[Batch] = []
        self._size = np.zeros(2, np.int64)

    def add(self, run: Batch) -> None:
        self._seen_rows += run.num_examples
        if self._num_runs % self._stride == 0:
            self._runs.append(run.copy())  # a slice would keep the whole block in memory
            self._size += _size(run)
            while len(self._runs) > 1 and (self._size > self._bounds).any():
                self._runs = self._runs[::2]
                self._size = np.sum([_size(run) for run in self._runs], axis=0)
                self._stride *= 2
        self._num_runs += 1

    def sample(self, share_read: float) -> ExampleSample:
        starts = np.cumsum([0, *(run.num_examples for run in self._runs)], dtype=np.int64)[:-1]
        is_whole = share_read == 1.0 and self._stride == 1
        estimate = self._seen_rows / share_read if share_read else np.inf
        num_examples = int(min(estimate, 1 << 62))
        return ExampleSample(Batch.concatenate(self._runs), starts, num_examples, is_whole, None, self._seen_rows)


def _size(run: Batch) -> tuple[int, int]:
    return run.num_examples, len(run.keys)
