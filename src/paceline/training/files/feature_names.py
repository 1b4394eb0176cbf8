"""Find the names of a model's features, including crosses of columns (``country=fr^device=phone``).

``paceline train --feature-names`` saves them with the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paceline.data import FORMATS, Columns, Dataset, open_dataset
from paceline.data.feature_names import write_feature_names
from paceline.data.key_scaling import KeyScaling, read_key_scaling
from paceline.data.scales.bins import bin_names
from paceline.errors import ModelError
from paceline.models.features.interactions import Interactions
from paceline.models.stored import read_stored_model
from paceline.tables.types import Keys

_ROWS = 4096


def keep_feature_names(directory: str | Path, dataset: Dataset) -> None:
    stored = read_stored_model(directory)
    table = stored.tables[0]
    pieces = [keys[records[:, : table.spec.dim].any(axis=1)] for keys, records in stored.records(table)]
    keys = np.concatenate([np.empty(0, np.uint64), *pieces])
    interactions = Interactions.of(stored.described.get("interactions"))
    scaling = read_key_scaling(stored.described)
    names = name_features(dataset.files, dataset.format, dataset.columns, interactions, keys, scaling)
    try:
        write_feature_names(Path(directory), names)
    except OSError as error:
        raise ModelError(f"cannot save the names of features in {directory}: {error.strerror or error}") from None


def name_features(
    files: Sequence[str],
    format: str,
    columns: Columns | None,
    interactions: Interactions | None,
    wanted: Keys,
    scaling: KeyScaling | None = None,
) -> dict[int, str]:
    """Return the names by key of those `wanted` keys that occur in the files.

    A bin of a `scaling` is named after its feature and its bounds. If the model has interactions, the data is read
    twice.
    """
    if interactions is None:
        return _find_names(files, format, columns, wanted, scaling)
    parts = _find_parts(files, format, columns, interactions, wanted, scaling)
    single = np.array(sorted({part for of in parts.values() for part in of}), np.uint64)
    names = _find_names(files, format, columns, np.union1d(wanted, single), scaling)
    found = {key: names[key] for key in wanted.tolist() if key in names}
    for key, of in parts.items():
        if all(part in names for part in of):
            found[key] = "^".join(names[part] for part in of)
    return found


def _find_names(
    files: Sequence[str], format: str, columns: Columns | None, wanted: Keys, scaling: KeyScaling | None
) -> dict[int, str]:
    if scaling is None or not scaling.edges:
        return FORMATS[format].find_names(files, columns, wanted)
    binned = np.array([*scaling.edges], np.uint64)
    names = FORMATS[format].find_names(files, columns, np.union1d(np.setdiff1d(wanted, scaling.bin_keys), binned))
    for key, edges in scaling.edges.items():
        names |= bin_names(names.get(key, str(key)), edges, key=key)
    return {key: names[key] for key in wanted.tolist() if key in names}


def _find_parts(
    files: Sequence[str],
    format: str,
    columns: Columns | None,
    interactions: Interactions,
    wanted: Keys,
    scaling: KeyScaling | None,
) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    missing = np.unique(wanted)
    with open_dataset(files, format, columns, labels="numbers", scaling=scaling) as dataset:
        for batch in dataset.batches(_ROWS):
            rows = interactions.apply(batch)
            is_wanted = np.isin(rows.keys, missing)
            row_of_pair = np.repeat(np.arange(rows.num_examples), np.diff(rows.indptr))
            for key, of in interactions.parts_of(batch.take(np.unique(row_of_pair[is_wanted]))):
                found[key] = of
            missing = np.setdiff1d(missing, np.fromiter(found, np.uint64, len(found)))
    return {key: found[key] for key in wanted.tolist() if key in found}
