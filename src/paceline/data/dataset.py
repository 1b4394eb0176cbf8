"""Present data files to workers as shards of minibatches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.closing import Closing
from paceline.data.bad_lines import BadLine, BadLineLog, BadLines
from paceline.data.batch import Batch, rebatch
from paceline.data.binary.cache import CacheWriter, ShardCache
from paceline.data.columns import Columns
from paceline.data.formats import FORMATS, Format, detect_format, find_format
from paceline.data.key_scaling import KeyScaling, read_key_scaling
from paceline.data.labels import CLICKS, positive_in, read_as
from paceline.data.reader import IdleFiles, OpenFile, OtherFormatError, ReadSettings
from paceline.data.streams import FileStatus, full_path, is_packed, line_number, stat_file, text_size
from paceline.errors import DataError, UsageError
from paceline.observe.work import start_work

MIN_SHARD_BYTES = 256 << 10
MAX_SHARD_BYTES = 16 << 20
_SHARDS_WANTED = 64
_PACKED_RATIO = 3  # click logs shrink to about a third
_SPEC_NAMES = ("files", "format", "label", "categorical", "numeric", "shard_bytes", "strict", "cache_dir", "labels")

Spec = dict[str, Any]
"""A description from which another process opens the same dataset. Its values are for JSON and msgpack."""


def open_dataset(
    paths: str | Path | Sequence[str | Path],
    format: str | None = None,
    columns: Columns | None = None,
    shard_bytes: int | None = None,
    strict: bool = False,
    cache_dir: str | Path | None = None,
    labels: str = CLICKS,
    scaling: KeyScaling | None = None,
    needs_labels: bool = True,
) -> Dataset:
    """Open data files of one format, in this order, as a :class:`Dataset`.

    `format` is one of :data:`FORMATS`; None detects the format of the first file. `columns` applies to csv, parquet and
    JSON lines; None guesses the columns from rows spread over the files. `shard_bytes` is the size of a shard in bytes
    of text (parquet: a row group); None means a 64th of all text, between 256 KiB and 16 MiB. If `strict`, the first
    malformed line raises DataError; otherwise malformed lines are skipped and counted. `cache_dir` stores parsed shards
    for later passes. `labels` is the conversion of labels (:mod:`paceline.data.labels`). `scaling` applies to formats
    without columns. If `needs_labels` is False, a missing label is NaN.

    Raises DataError if a file is missing, empty or unreadable, or if the format is unknown. Raises UsageError for
    inconsistent arguments, and if parquet is read without pyarrow.
    """
    if isinstance(paths, str | Path):
        paths = [paths]
    if not paths:
        raise UsageError("no data file is given. Pass at least one")
    files = [full_path(path) for path in paths]
    format = format or detect_format(files[0])
    kind = find_format(format)
    sizes = [kind.stat(file).num_bytes for file in files]
    positive_in(labels)
    if shard_bytes is None:
        total = sum(size * (_PACKED_RATIO if is_packed(file) else 1) for file, size in zip(files, sizes, strict=True))
        shard_bytes = min(max(total // _SHARDS_WANTED, MIN_SHARD_BYTES), MAX_SHARD_BYTES)
    elif shard_bytes < 1:
        raise UsageError(f"a shard has at least 1 byte, not {shard_bytes}")
    columns = kind.resolve(files, columns, needs_label=needs_labels)
    source_format = kind.source_of(files[0])
    if scaling is not None and not FORMATS[source_format].is_keyed:
        raise UsageError(f"values of {format} belong to columns, so they are not scaled by key. Leave scaling out")
    return Dataset(
        files=tuple(files),
        format=format,
        columns=columns,
        shard_bytes=shard_bytes,
        strict=strict,
        cache_dir=None if cache_dir is None else Path(cache_dir),
        labels=labels,
        scaling=scaling,
        source_format=source_format,
        needs_labels=needs_labels,
        sizes=sizes,
    )


def open_spec(spec: Mapping[str, Any]) -> Dataset:
    """Open the dataset described by :meth:`Dataset.spec`, in any process with the same files."""
    missing = [name for name in _SPEC_NAMES if name not in spec]
    if missing:
        raise UsageError(f"the spec lacks {', '.join(missing)}. Pass the result of Dataset.spec()")
    for file in spec["files"]:
        stat_file(file)
    return Dataset(
        files=tuple(spec["files"]),
        format=spec["format"],
        columns=Columns.from_fields(spec) if spec["label"] else None,
        shard_bytes=spec["shard_bytes"],
        strict=spec["strict"],
        cache_dir=Path(spec["cache_dir"]) if spec["cache_dir"] else None,
        labels=spec["labels"],
        scaling=read_key_scaling(spec),
        source_format=spec.get("source_format") or spec["format"],
        sizes=spec.get("sizes"),
    )


@dataclass(eq=False, repr=False, kw_only=True)
class Dataset(Closing):
    """Shards of several files, each read as a stream of :class:`Batch`; created by :func:`open_dataset`.

    A file's number is its index in `files`; a shard's number is its index in the file. Reading is streamed, with about
    1 MiB of text and its examples in memory. Readers of the most recently used files stay open, so shards in ascending
    order need no search. If a file changes while the data set is in use, DataError is raised, even in processes that
    opened it with :func:`open_spec`. Not thread-safe.
    """

    files: tuple[str, ...]
    format: str
    columns: Columns | None
    shard_bytes: int
    strict: bool
    cache_dir: Path | None
    labels: str
    scaling: KeyScaling | None
    source_format: str
    """The format that determines the features; for converted data this is the format of the sources."""
    needs_labels: bool = True
    sizes: Sequence[int] | None = None

    def __post_init__(self) -> None:
        self.cache_error: str | None = None
        """The reason why caching stopped, such as a full disk. Reading continues without a cache."""
        self.cache_dir = None if self.cache_dir is None else self.cache_dir.absolute()
        self._kind = FORMATS[self.format]
        self.in_use = FilesInUse(self.files, self._kind, self.sizes)
        self._cache = self._open_cache()
        self._log = BadLineLog()
        self._idle = IdleFiles()

    def close(self) -> None:
        """Close the files. The next read opens them again."""
        self._idle.close()

    @property
    def bad_lines(self) -> BadLines:
        """The malformed lines of all shards read so far. A shard that was read several times counts once."""
        return self._log.total()

    @property
    def bad_lines_by_shard(self) -> dict[tuple[int, int], int]:
        """The number of malformed lines of each shard, by file and shard, if it is not 0."""
        return self._log.by_shard()

    @property
    def is_cached(self) -> bool:
        """Whether parsed shards are stored for later passes."""
        return self._cache is not None

    def can_enter(self, file: int) -> bool:
        """Return whether a file's shards can be read without parsing earlier shards."""
        return self._kind.is_random_access or text_size(self.files[file], 0) is not None

    def num_shards(self, file: int) -> int | None:
        """Return a file's number of shards; None for some compressed files that were not read to the end."""
        if file not in self.in_use.num_shards:
            if self._kind.is_random_access:
                self._give_back(file, self._take(file))
            elif (size := text_size(self.files[file], self.in_use.check(file).num_bytes)) is not None:
                self.in_use.num_shards[file] = -(-size // self.shard_bytes)
        return self.in_use.num_shards.get(file)

    def ended(self, file: int) -> int | None:
        """Return the file's number of shards if it is known, without accessing the disk; otherwise None."""
        return self.in_use.num_shards.get(file)

    def read(self, file: int, shard: int, batch_size: int) -> Iterator[Batch]:
        """Return the examples of one shard, in order, in batches of `batch_size` rows. The last batch may be smaller.

        A shard after the end of the file has no examples. The caller may write to the arrays. The iterator raises
        DataError if the file is damaged or has another format. If `strict`, the first malformed line raises DataError
        too.
        """
        if not 0 <= file < len(self.files):
            raise UsageError(f"file {file} does not exist. The dataset has {len(self.files)} files, numbered from 0")
        if shard < 0 or batch_size < 1:
            raise UsageError(f"shard {shard}, batches of {batch_size}: expected at least shard 0 and batches of 1")
        return rebatch(self._blocks(file, shard), batch_size)

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """Return all examples of all files, in order, in batches of `batch_size` rows. The last may be smaller."""
        if batch_size < 1:
            raise UsageError(f"batches of {batch_size} rows: expected 1 or more")
        return rebatch(self.blocks(), batch_size)

    def blocks(self) -> Iterator[Batch]:
        """Yield all examples of all files, in order, in batches of about 1 MiB of text."""
        with start_work("reading", unit="examples") as progress:
            num_examples = num_shards_read = 0
            for file, name in enumerate(self.files):
                for shard in itertools.count():
                    num_shards = self.num_shards(file)
                    if num_shards is not None and shard >= num_shards:
                        break
                    for block in self._blocks(file, shard):
                        yield block
                        num_examples += block.num_examples
                        progress.update(
                            num_examples, fraction=self._fraction(num_shards_read), title=f"reading {Path(name).name}"
                        )
                    num_shards_read += 1

    def _fraction(self, num_shards_read: int) -> float | None:
        """Return the part of the data in this number of shards; None for files whose size is unknown."""
        sizes = [self.num_shards(file) for file in range(len(self.files))]
        known = sum(size for size in sizes if size is not None)
        return num_shards_read / known if known and None not in sizes else None

    def spec(self) -> Spec:
        """Return a description with which :func:`open_spec` opens the same dataset in another process."""
        no_columns = {"label": "", "categorical": [], "numeric": []}
        columns = no_columns if self.columns is None else self.columns.to_fields()
        return {
            "files": list(self.files),
            "format": self.format,
            **columns,
            "shard_bytes": self.shard_bytes,
            "strict": self.strict,
            "cache_dir": "" if self.cache_dir is None else str(self.cache_dir),
            "labels": self.labels,
            "scaling": None if self.scaling is None else self.scaling.spec(),
            "source_format": self.source_format,
            "sizes": None if self.sizes is None else list(self.sizes),
        }

    def _blocks(self, file: int, shard: int) -> Iterator[Batch]:
        are_clicks = self.labels == CLICKS and FORMATS[self.source_format].has_binary_labels
        for block in self._blocks_as_stored(file, shard):
            if not are_clicks:
                read_as(self.labels, block.labels, unknown=not self.needs_labels)
            yield block

    def _blocks_as_stored(self, file: int, shard: int) -> Iterator[Batch]:
        self._log.begin(file, shard)
        if self._cache is not None:
            cached = self._cache.load(self.files[file], self.in_use.check(file), shard)
            if cached is not None and not (self.strict and cached.num_bad):
                self._log.add(file, shard, cached.num_bad, cached.bad)
                if cached.num_shards is not None:
                    self.in_use.num_shards[file] = cached.num_shards
                yield from cached.blocks
                return
        yield from self._parsed_blocks(file, shard)

    def _parsed_blocks(self, file: int, shard: int) -> Iterator[Batch]:
        opened = self._take(file)
        writing = _Writing(self, file, opened.status, shard)
        is_complete = False
        try:
            for parsed in opened.reader.blocks(shard, writing.report):
                block = parsed if self.scaling is None else self.scaling.apply(parsed)
                writing.append(block)
                yield block
            self.in_use.check(file)
            self._give_back(file, opened)
            writing.commit(opened.reader.num_shards)
            is_complete = True
        except GeneratorExit:
            self._give_back(file, opened)
            raise
        except BaseException as error:
            opened.reader.close()
            if isinstance(error, OtherFormatError):
                raise self._with_detected_format(file, error) from None
            raise
        finally:
            if not is_complete:
                writing.discard()

    def _with_detected_format(self, file: int, error: OtherFormatError) -> DataError:
        try:
            found = detect_format(self.files[file])
        except DataError:
            return error
        return error if found == self.format else DataError(f"{error}. It looks like {found}. Pass --format {found}")

    def _take(self, file: int) -> OpenFile:
        opened = self._idle.take(file)
        if opened is None:
            status = self.in_use.check(file)  # before opening the file, so that any later change is detected
            settings = ReadSettings(
                shard_bytes=self.shard_bytes,
                num_bytes=status.num_bytes,
                columns=self.columns,
                needs_label=self.needs_labels,
            )
            opened = OpenFile(status, self._kind.open_reader(self.files[file], settings))
        return opened

    def _give_back(self, file: int, opened: OpenFile) -> None:
        if opened.reader.num_shards is not None:
            self.in_use.num_shards[file] = opened.reader.num_shards
        self._idle.give_back(file, opened)

    def _open_cache(self) -> ShardCache | None:
        if self.cache_dir is None:
            return None
        irrelevant = ("files", "strict", "cache_dir", "labels", "scaling", "source_format", "sizes")
        identity = {name: value for name, value in self.spec().items() if name not in irrelevant}
        if self.scaling is not None:
            identity["scaling"] = self.scaling.digest()
        try:
            return ShardCache(self.cache_dir, identity)
        except OSError as error:
            self._stop_caching(error)
            return None

    def _stop_caching(self, error: OSError) -> None:
        self._cache = None
        self.cache_error = (
            f"parsed shards are not stored in {self.cache_dir}: {error.strerror or error}. Every pass parses the text "
            "again"
        )


class FilesInUse:
    """Checks that files do not change. `sizes` are expected sizes in bytes; None accepts any size."""

    def __init__(self, files: Sequence[str], format: Format, sizes: Sequence[int] | None) -> None:
        self._sizes = sizes
        self.num_shards: dict[int, int] = {}
        """The number of shards of each file for which it is known."""
        self._files = tuple(files)
        self._format = format
        self._statuses: dict[int, FileStatus] = {}

    def check(self, file: int) -> FileStatus:
        """Return a file's status. Raises DataError if it has changed since the first call.

        A copy of the file on another host must have the same size.
        """
        path = self._files[file]
        status = self._format.stat(path)
        first = self._statuses.setdefault(file, status)
        size = first.num_bytes if self._sizes is None else self._sizes[file]
        if status.num_bytes != size:
            raise DataError(
                f"{path} has changed during its use, from {size:,} to {status.num_bytes:,} bytes. The rows read so far "
                "may be of two versions. Run the command again when the file is complete"
            )
        if status != first:
            raise DataError(
                f"{path} was written to during its use. The rows read so far may be of two versions. Run the command "
                "again when the file is complete"
            )
        return status


class _Writing:
    """Writes a shard to the cache while the shard is read. If writing fails, reading continues without a cache."""

    def __init__(self, dataset: Dataset, file: int, status: FileStatus, shard: int) -> None:
        self._dataset = dataset
        self._file = file
        self._shard = shard
        self._writer: CacheWriter | None = None
        if dataset._cache is not None:
            try:
                self._writer = dataset._cache.writer(dataset.files[file], status, shard)
            except OSError as error:
                dataset._stop_caching(error)

    def report(self, count: int, first: Sequence[BadLine]) -> None:
        if count and self._dataset.strict:
            line = first[0]
            if line.offset is not None:
                where = f"line {line_number(line.file, line.offset):,}"
            else:
                where = "a row" if line.row is None else f"row {line.row:,}"
            raise DataError(f"{line.file}: {where} is malformed: {line.reason}: '{line.text}'")
        self._dataset._log.add(self._file, self._shard, count, first)
        if self._writer is not None:
            self._writer.add_bad(count, first)

    def append(self, block: Batch) -> None:
        try:
            if self._writer is not None:
                self._writer.append(block)
        except OSError as error:
            self._fail(error)

    def commit(self, num_shards: int | None) -> None:
        try:
            if self._writer is not None:
                self._writer.commit(num_shards)
        except OSError as error:
            self._fail(error)

    def discard(self) -> None:
        if self._writer is not None:
            self._writer.discard()
            self._writer = None

    def _fail(self, error: OSError) -> None:
        self._dataset._stop_caching(error)
        self.discard()
