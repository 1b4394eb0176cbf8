"""The mean of linear models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import UsageError
from paceline.inference import load
from paceline.inference.merging import merge_models
from paceline.models.base import BIAS_KEY
from paceline.models.logistic import SparseLogisticRegression
from paceline.models.regression import LeastSquares
from paceline.models.stored import read_stored_model
from paceline.ps import to_fields
from paceline.storage.model_directory import save_model
from paceline.tables.initializers import Zeros
from paceline.tables.rules import FTRL, SGD, UpdateRule
from paceline.tables.spec import TableSpec

RULE = FTRL(alpha=0.3, beta=2.0, l1=0.5, l2=0.25)


def trained(folder: Path, seed: int, described: dict[str, Any], rule: UpdateRule = RULE) -> Path:
    """Save a model whose table has received pushes."""
    random = np.random.default_rng(seed)
    spec = TableSpec(
        name=described["kind"], kind="sparse", dim=1, update=to_fields(rule), initializer=to_fields(Zeros()), seed=0
    )
    keys = np.append(random.choice(40, 20, replace=False).astype(np.uint64), np.uint64(BIAS_KEY))
    words = 1 + 2 * isinstance(rule, FTRL)
    records = np.zeros((len(keys), words), np.float32)
    records[:, 0] = random.normal(size=len(keys))
    records[:, -1] = np.abs(random.normal(size=len(keys))) if words > 1 else records[:, -1]
    manifest = {"finished": True, "format": "libsvm", "columns": None, **described}
    save_model(folder, [(spec, [(keys, records)])], manifest)
    return folder


def test_a_margin_of_the_merged_model_is_the_mean_of_the_margins(tmp_path: Path) -> None:
    models = [trained(tmp_path / str(at), at, SparseLogisticRegression(offset=at / 2).describe()) for at in range(3)]
    rows = np.random.default_rng(9).integers(0, 3, (50, 40)).astype(np.float32)
    margins = np.array([np.log(p / (1 - p)) for p in (load(model).predict(rows) for model in models)])
    for shares, expected in ((None, margins.mean(0)), ((3, 1, 0.5), np.average(margins, axis=0, weights=(3, 1, 0.5)))):
        assert merge_models(models, tmp_path / "all", shares) == load(tmp_path / "all").num_features
        found = load(tmp_path / "all").predict(rows)
        np.testing.assert_allclose(np.log(found / (1 - found)), expected, rtol=1e-4, atol=1e-4)


def test_a_predicted_quantity_is_the_mean_of_the_quantities(tmp_path: Path) -> None:
    models = [
        trained(tmp_path / str(at), at, LeastSquares(center=5.0 * at, scale=1.0 + at).describe()) for at in range(2)
    ]
    rows = np.eye(40, dtype=np.float32)
    merge_models(models, tmp_path / "all")
    expected = np.mean([load(model).predict(rows) for model in models], axis=0)
    np.testing.assert_allclose(load(tmp_path / "all").predict(rows), expected, rtol=1e-4, atol=1e-4)


def test_training_continues_from_the_merged_model(tmp_path: Path) -> None:
    """A push of a zero gradient changes no weight, because z and n match the weights. The n of all models are added."""
    models = [trained(tmp_path / str(at), at, SparseLogisticRegression().describe()) for at in range(2)]
    merge_models(models, tmp_path / "all")
    stored = read_stored_model(tmp_path / "all")
    store = stored.load_store("lr")
    keys, before = map(np.concatenate, zip(*store.items(), strict=True))
    store.push(keys, np.zeros(len(keys), np.float32))
    after, _ = store.read_records(keys)
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)
    stored_models = [read_stored_model(model) for model in models]
    squares = sum(records[:, 2].sum() for model in stored_models for _, records in model.records(model.tables[0]))
    assert before[:, 2].sum() == pytest.approx(squares, rel=1e-5)


def test_models_without_a_mean_are_rejected(tmp_path: Path) -> None:
    lr = SparseLogisticRegression().describe()
    one, other = trained(tmp_path / "one", 1, lr), trained(tmp_path / "other", 2, {**lr, "format": "vw"})
    with pytest.raises(UsageError, match=r"one and .*other differ in format, libsvm and vw"):
        merge_models([one, other], tmp_path / "all")
    with pytest.raises(UsageError, match="is of kind 'fm': only lr, regression, poisson, softmax"):
        merge_models([one, trained(tmp_path / "fm", 1, {"kind": "fm"})], tmp_path / "all")
    sgd = [trained(tmp_path / name, 1, lr, SGD(lr=0.1)) for name in "ab"]
    with pytest.raises(UsageError, match="was trained by SGD"):
        merge_models(sgd, tmp_path / "all")
    with pytest.raises(UsageError, match="merge needs two or more"):
        merge_models([one], tmp_path / "all")
    with pytest.raises(UsageError, match="shares 1, -2: expected 2 numbers above 0"):
        merge_models([one, one], tmp_path / "all", (1, -2))
    assert not (tmp_path / "all").exists()
