"""The names of a model's features, kept beside it: ``paceline train --feature-names``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from paceline.data import Dataset
from paceline.data.feature_names import find_feature_names, write_feature_names
from paceline.errors import ModelError
from paceline.models.stored import read_stored_model


def keep_feature_names(directory: str | Path, dataset: Dataset) -> None:
    """Find the names of the features that have a weight, by reading the data again, and keep them beside the model."""
    stored = read_stored_model(directory)
    table = stored.tables[0]
    pieces = [keys[records[:, : table.spec.dim].any(axis=1)] for keys, records in stored.records(table)]
    keys = np.concatenate([np.empty(0, np.uint64), *pieces])
    names = find_feature_names(dataset.files, dataset.format, dataset.columns, keys)
    try:
        write_feature_names(Path(directory), names)
    except OSError as error:
        raise ModelError(f"cannot keep the names of features in {directory}: {error.strerror or error}") from None
