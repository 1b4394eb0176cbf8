"""A model's weights for other programs: NumPy's arrays, or lines of text as in a readable model of Vowpal Wabbit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import numpy as np

from paceline.errors import ModelError, UsageError
from paceline.inference.weights import Weights, read_weights
from paceline.models.stored import read_stored_model
from paceline.storage.durable_io import replacing

FORMATS: Final = ("npz", "text")


def export_model(directory: str | os.PathLike[str], file: Path, format: str | None = None) -> int:
    """Write the weights of a model that are not 0 to a file; return how many features have one.

    ``npz`` has arrays `keys` (uint64 [n]), `values` (float32 [n, dim]) and `bias` (float32 [dim]) of each table, behind
    the table's name and a dot. ``text`` has a line ``KEY:WEIGHT`` for each, and ``Constant:WEIGHT`` for the bias, of
    models of one number per feature. None: by the file's suffix. Raises UsageError for what cannot be written so.
    """
    format = format or ("npz" if file.suffix == ".npz" else "text")
    if format not in FORMATS:
        raise UsageError(f"--to {format}: expected {' or '.join(FORMATS)}")
    stored = read_stored_model(directory)
    tables = {table.spec.name: _nonzero(read_weights(stored, table)) for table in stored.tables}
    first = next(iter(tables.values()))
    if format == "text" and (len(tables) > 1 or first.values.shape[1] > 1):
        raise UsageError(f"{directory} has several numbers per feature, and text has one: export it --to npz")
    try:
        with replacing(file) as aside, open(aside, "wb") as out:
            if format == "npz":
                arrays = {f"{name}.{part}": array for name, w in tables.items() for part, array in w._asdict().items()}
                np.savez(out, allow_pickle=False, **arrays)
            else:
                out.write(_as_text(first).encode())
    except OSError as error:
        raise ModelError(f"cannot write the weights to {file}: {error.strerror or error}") from None
    return len(first.keys)


def _nonzero(weights: Weights) -> Weights:
    present = (weights.values != 0).any(axis=1)
    return Weights(weights.keys[present], weights.values[present], weights.bias)


def _as_text(weights: Weights) -> str:
    """Return ``Constant`` and keys with their weights, in as many digits as a float32 has."""
    lines = [f"Constant:{weights.bias[0]:.9g}"]
    lines += [
        f"{key}:{value:.9g}" for key, value in zip(weights.keys.tolist(), weights.values[:, 0].tolist(), strict=True)
    ]
    return "\n".join(lines) + "\n"
