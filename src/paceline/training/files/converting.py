"""Convert data files to one file that needs no parsing: ``paceline convert``."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.data import (
    CONVERTED,
    FORMATS,
    KEPT_SCALES,
    Columns,
    Dataset,
    DataWriter,
    Description,
    Sample,
    Scale,
    describe_converted,
    detect_format,
    open_dataset,
)
from paceline.data.batch import cut_by_bytes
from paceline.data.guessing import NO_OPTIONS, ReadOptions
from paceline.errors import DataError, UsageError
from paceline.launch.kernels import prepare_kernels
from paceline.output_files import replacing
from paceline.storage.durable_io import sync_directory
from paceline.training.bad_data import BadData, find_bad_lines, no_line_left
from paceline.training.files.data_files import sample_data
from paceline.training.files.numeric_scales import fit_scales

_BLOCK_BYTES = 1 << 18
_BLOCK_ROWS = 256
"""The number of rows in a block is a multiple of this, so that most minibatches are parts of one block."""


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion."""

    num_examples: int
    num_positives: int
    num_bytes: int
    seconds: float
    bad_lines: BadData

    def as_json(self) -> dict[str, int | float]:
        return {
            "examples": self.num_examples,
            "positives": self.num_positives,
            "bytes": self.num_bytes,
            "seconds": self.seconds,
            "examples_per_s": self.num_examples / self.seconds,
            "bad_lines": self.bad_lines.count,
        }

    def sentence(self) -> str:
        share = self.num_positives / self.num_examples
        text = (
            f"converted {self.num_examples:,} examples ({share:.1%} above 0) in {self.seconds:.2f} s "
            f"({self.num_examples / self.seconds:,.0f}/s): {self.num_bytes:,} bytes"
        )
        return f"{text}\npaceline: {self.bad_lines.sentence(self.num_examples)}" if self.bad_lines.count else text


def sample_sources(
    sources: Sequence[str],
    out: Path,
    *,
    format: str | None,
    columns: Columns | None = None,
    weight: str | None = None,
    reading: ReadOptions = NO_OPTIONS,
) -> Sample:
    """Return a sample of the sources. Raises DataError and UsageError for unsuitable sources or destinations."""
    _check_place(sources, out)
    sample = sample_data(sources, format, columns, "none", weight, reading)
    if sample.format == CONVERTED:
        raise UsageError(f"{sources[0]} is already a converted file. Pass its original files")
    return sample


def convert_data(
    sources: Sequence[str],
    out: Path,
    sample: Sample,
    *,
    strict: bool = False,
    feature_names: bool = False,
) -> Conversion:
    """Write the examples of the sources to `out`, completely or not at all. Raises DataError."""
    prepare_kernels()
    start = time.perf_counter()
    with _written(out) as aside, contextlib.closing(DataWriter(aside)) as writer:
        scales = _find_scales(sample)
        columns = sample.columns and dataclasses.replace(sample.columns, scales=_centring(scales))
        with open_dataset(sources, sample.format, columns, strict=strict, labels="numbers") as dataset:
            for block in cut_by_bytes(dataset.blocks(), _BLOCK_BYTES, _BLOCK_ROWS):
                writer.append(block)
            if not writer.num_examples:
                raise no_line_left(sources[0], "read", find_bad_lines(dataset))
            names = None
            if feature_names:
                keys = _distinct_keys(dataset)
                names = FORMATS[dataset.format].find_names(dataset.files, dataset.columns, keys)
            found = find_bad_lines(dataset)
            described = _describe(sample, dataset, scales)
        writer.finish(described, names)
    seconds = time.perf_counter() - start
    return Conversion(writer.num_examples, writer.num_positives, out.stat().st_size, seconds, found)


def _find_scales(sample: Sample) -> dict[str, tuple[Scale, ...]]:
    if sample.table is None or sample.columns is None:
        return {}
    return {how: fit_scales(sample, how)[0] for how in KEPT_SCALES}


def _centring(scales: Mapping[str, Sequence[Scale]]) -> tuple[Scale, ...]:
    """Return scales that only subtract the centre of large numbers with small differences, as float32 requires."""
    found = tuple(scale.centring for scale in next(iter(scales.values()), ()))
    return found if any(scale.centre for scale in found) else ()


def _describe(sample: Sample, dataset: Dataset, scales: Mapping[str, tuple[Scale, ...]]) -> Description:
    return Description(
        format=dataset.source_format,
        columns=sample.columns,
        scales=scales,
        guesses=() if sample.guesses is None else sample.guesses.guesses,
        num_guessed_rows=0 if sample.guesses is None else sample.guesses.num_rows,
        sources=dataset.files,
        num_bad=dataset.bad_lines.count,
        bad=dataset.bad_lines.first,
        fields=sample.fields,
    )


def _distinct_keys(dataset: Dataset) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    keys = np.empty(0, np.uint64)
    for block in dataset.blocks():
        keys = np.union1d(keys, block.keys)
    return keys


def _check_place(sources: Sequence[str], out: Path) -> None:
    """Raise UsageError unless `out` does not exist or is a converted file, which may be replaced."""
    if out.is_dir():
        raise UsageError(f"{out} is a folder. Pass the file to write, such as {out / 'train.paceline'}")
    if not out.exists():
        return
    for source in sources:
        if os.path.exists(source) and out.samefile(source):
            raise UsageError(f"{out} is also a source. Pass another file to write")
    try:
        if detect_format(out) == CONVERTED:
            describe_converted(str(out))
            return
    except DataError:
        pass
    raise UsageError(f"{out} exists, and 'paceline convert' did not write it. Pass another file, or remove this one")


@contextlib.contextmanager
def _written(out: Path) -> Iterator[Path]:
    try:
        with replacing(out) as aside:
            yield aside
        sync_directory(out.absolute().parent)
    except OSError as error:
        raise DataError(f"cannot write {out}: {error.strerror or error}") from error
