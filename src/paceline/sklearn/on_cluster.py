"""Train an estimator on a cluster, whose workers read the examples from a file."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.data import Batch
from paceline.data.key_scaling import read_key_scaling
from paceline.launch import connect
from paceline.models.registry import read_model_settings
from paceline.models.stored import read_stored_model
from paceline.protocol import parse_consistency
from paceline.sklearn.model_tables import ModelTables
from paceline.temporary import TemporaryFolder
from paceline.training.driver import train_locally, train_on
from paceline.training.options import TrainOptions

_ROWS = 4096


def train_on_cluster(
    examples: Batch,
    order: npt.NDArray[np.int64],
    options: TrainOptions,
    *,
    workers: int,
    servers: int,
    consistency: str,
    scheduler: str | None,
    token: str | None,
) -> ModelTables:
    """Train on examples in this order, as ``paceline train`` does; return the model's tables.

    The cluster has `workers` and `servers` as processes of this machine, or is the one of a `scheduler`.
    """
    with TemporaryFolder.make("sklearn") as folder:
        data, directory = folder.path / "examples.svm", folder.path / "model"
        write_libsvm(data, examples, order)
        options = dataclasses.replace(options, data=[str(data)], format="libsvm", save=directory)
        if scheduler is None:
            train_locally(options, servers=servers, workers=workers, consistency=parse_consistency(consistency))
        else:
            with contextlib.closing(connect(scheduler, token=token, observer=True)) as client:
                train_on(options, client)
        stored = read_stored_model(directory)
        model = read_model_settings(stored.described)
        tables = [(table.spec, stored.load_store(table.spec.name)) for table in stored.tables]
        return ModelTables(model, tables, read_key_scaling(stored.described))


def write_libsvm(path: Path, examples: Batch, order: npt.NDArray[np.int64]) -> None:
    """Write examples as LIBSVM text without loss, because nine digits determine a float32."""
    with open(path, "w", encoding="ascii") as out:
        for start in range(0, len(order), _ROWS):
            part = examples.take(order[start : start + _ROWS])
            values = [1.0] * len(part.keys) if part.values is None else part.values.tolist()
            pairs = [f"{key}:{value:.9g}" for key, value in zip(part.keys.tolist(), values, strict=True)]
            ends = part.indptr.tolist()
            for row, label in enumerate(part.labels.tolist()):
                out.write(f"{label:.9g} {' '.join(pairs[ends[row] : ends[row + 1]])}\n")
