"""Saved models with chosen weights, in the form of trained models, and small files with matching data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.data import Columns, open_dataset
from paceline.models.base import BIAS_KEY
from paceline.ps import SGD, SparseStore, to_fields
from paceline.storage.model_directory import save_model
from paceline.tables.initializers import Zeros
from paceline.tables.spec import TableSpec

CSV = """label,site,age,device
1,news,31.5,phone
0,shop,,tablet
1,news,7,
0,42,2.25,phone
"""
LIBSVM = "1 1:0.5 3:1\n-1 2:1.25 3:-1\n1 5:1\n"
CRITEO_FIELDS = [*(str(number) for number in range(1, 13)), "", *(f"{number:08x}" for number in range(25)), ""]


def criteo_lines() -> str:
    return "".join(f"{row % 2}\t" + "\t".join([str(row), *CRITEO_FIELDS[1:]]) + "\n" for row in range(12))


def write_model(directory: Path, data: Path, format: str, columns: Columns | None = None) -> Path:
    """Save a logistic regression with a weight for every key of the data."""
    with open_dataset(data, format, columns) as dataset:
        columns = dataset.columns
        keys = np.unique(np.concatenate([batch.keys for batch in dataset.batches(1000)])).tolist()
    weights = dict(zip(keys, np.random.default_rng(1).standard_normal(len(keys)).tolist(), strict=True))
    return save_weights(directory, weights, 0.25, format, columns)


def save_weights(
    directory: Path,
    weights: dict[int, float],
    bias: float = 0.0,
    format: str = "libsvm",
    columns: Columns | None = None,
    described: dict[str, Any] | None = None,
) -> Path:
    """Save a logistic regression; `described` has further fields of its manifest."""
    store = SparseStore(dim=1, rule=SGD(lr=1.0))
    keys = np.array([*weights, BIAS_KEY], np.uint64)
    store.write_records(keys, np.array([*weights.values(), bias], np.float32).reshape(-1, 1))
    spec = TableSpec(name="lr", kind="sparse", update=to_fields(SGD(lr=1.0)), initializer=to_fields(Zeros()), dim=1)
    described = {"kind": "lr", "finished": True, "format": format, "columns": None, **(described or {})}
    if columns is not None:
        described["columns"] = columns.to_fields()
    save_model(directory, [(spec, store.items())], described)
    return directory


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    file = tmp_path / "data.csv"
    file.write_text(CSV)
    return file


@pytest.fixture
def libsvm(tmp_path: Path) -> Path:
    file = tmp_path / "data.svm"
    file.write_text(LIBSVM)
    return file


@pytest.fixture
def criteo(tmp_path: Path) -> Path:
    file = tmp_path / "data.tsv"
    file.write_text(criteo_lines())
    return file


@pytest.fixture
def csv_model(tmp_path: Path, csv: Path) -> Path:
    return write_model(tmp_path / "model", csv, "csv", Columns("label", ("site", "device"), ("age",)))


@pytest.fixture
def libsvm_model(tmp_path: Path, libsvm: Path) -> Path:
    return write_model(tmp_path / "model", libsvm, "libsvm")


@pytest.fixture
def criteo_model(tmp_path: Path, criteo: Path) -> Path:
    return write_model(tmp_path / "model", criteo, "criteo")
