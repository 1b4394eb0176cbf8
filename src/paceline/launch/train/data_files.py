"""The files of a training: what is wrong with them before anything starts, and how they are cut into shards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from paceline.data import Dataset, describe_not_binary, detect_format, open_dataset, sample_labels
from paceline.errors import DataError, ModelError
from paceline.launch.train.options import TrainOptions
from paceline.storage.model_directory import prepare_directory

_CACHE_SPARE = 4  # a temporary cache is made where there is this many times the data's size of free disk


def check_files(options: TrainOptions) -> None:
    """Raise what is wrong with the files and with the place for the model, as far as a look at them shows it."""
    with open_dataset(options.data, options.format, options.columns, strict=options.strict) as dataset:
        format, columns = dataset.format, dataset.columns
        odd = describe_not_binary(sample_labels(dataset.files, format, columns))
    if odd is not None:
        raise DataError(f"{options.data[0]}: {odd}: map them before you train lr on them")
    if options.format is None:
        for file in (*options.data, *options.evaluation):
            found = detect_format(file)
            if found != format:
                raise DataError(
                    f"{file} looks like {found}, and {options.data[0]} like {format}: all must be of one format"
                )
    if options.evaluation:
        open_dataset(options.evaluation, format, columns).close()
    if options.save is not None:
        try:
            for made in prepare_directory(Path(options.save)):
                made.rmdir()  # it can be made: it is when there is a model to put in
            if Path(options.save).is_dir() and not os.access(options.save, os.W_OK):
                raise ModelError(f"cannot save a model in {options.save}: it may not be written to")
        except OSError as error:
            raise ModelError(f"cannot save a model in {options.save}: {error.strerror or error}") from None


def total_size(files: Sequence[str | Path]) -> int:
    """Return the size of files in bytes."""
    return sum(os.path.getsize(file) for file in files)


def open_training_data(
    options: TrainOptions, num_workers: int, spare: Path | None, shard_bytes: int | None = None
) -> Dataset:
    """Open the data, in shards that suit the number of workers unless `shard_bytes` is given.

    Several passes are cached in `spare`, given room.
    """
    dataset = open_dataset(options.data, options.format, options.columns, strict=options.strict)
    size = sum(os.path.getsize(file) for file in dataset.files)
    cache: Path | None = None if options.cache is None else Path(options.cache)
    if cache is None and spare is not None and options.epochs > 1:
        disk = os.statvfs(spare)
        packed = 8 if any(str(file).endswith(".gz") for file in dataset.files) else 1
        if disk.f_bavail * disk.f_frsize > _CACHE_SPARE * size * packed:
            cache = spare
    if shard_bytes is None:
        shard_bytes = max(256 << 10, min(size // (16 * num_workers), 16 << 20))
    format, columns = dataset.format, dataset.columns
    dataset.close()
    return open_dataset(options.data, format, columns, shard_bytes, options.strict, cache)
