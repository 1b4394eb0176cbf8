"""Synthetic click logs: Criteo's format, reproducible, and with the promised AUC."""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from paceline.data import ClickLogSpec, open_dataset, synthetic, write_click_log
from paceline.errors import DataError, UsageError
from paceline.kernels.hashing import MASK, hash_bytes
from paceline.kernels.text.criteo import field_seed, integer_category
from paceline.models.metrics import auc, log_loss

Array = npt.NDArray[Any]

GOLDEN_SHA256 = "2257de38ed9d9d5503800ec2d1d53b267b1f270bcfb8904442eb1a7a8991f066"
GOLDEN_AUC = 0.7802166016480189
"""The digest of 20,000 rows of seed 7. A change of these rows breaks comparisons between versions."""


def read(path: Path) -> tuple[Array, Array]:
    labels, keys = [], []
    with open_dataset(path, strict=True) as dataset:
        assert dataset.format == "criteo"
        for shard in range(dataset.num_shards(0) or 0):
            for batch in dataset.read(0, shard, 8192):
                labels.append(batch.labels)
                keys.append(batch.keys.reshape(-1, 39))
        assert dataset.bad_lines.count == 0
    return np.concatenate(labels), np.concatenate(keys)


def true_probabilities(model: synthetic.ClickModel, path: Path) -> Array:
    """Return the probabilities, computed from the keys that the reader finds and the model's weight of each key."""
    weight_of: dict[int, int] = {}
    for number, field in enumerate(model.fields, 1):
        for text, weight in zip(field.text.tolist(), field.weight.tolist(), strict=True):
            value = text.to_bytes(8, "little").rstrip(b"\0")
            if number <= 13 and value:
                value = (integer_category(int(value)) & MASK).to_bytes(8, "little")
            key = hash_bytes(value, field_seed(number))
            assert weight_of.setdefault(key, weight) == weight  # equal keys have equal weights
    _, keys = read(path)
    logits = np.array([[weight_of[key] for key in row] for row in keys.tolist()]).sum(axis=1) + model.intercept
    result: Array = 1 / (1 + np.exp(-logits / 256))
    return result


def test_the_truth_is_a_logistic_model_over_the_keys_of_the_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = [shape._replace(vocabulary=min(shape.vocabulary, 500)) for shape in synthetic.CATEGORIES]
    monkeypatch.setattr(synthetic, "CATEGORIES", tuple(small))
    spec = ClickLogSpec(rows=10_000, seed=3)
    path = tmp_path / "log.tsv"
    truth = write_click_log(path, spec)
    labels, _ = read(path)
    probabilities = true_probabilities(synthetic.ClickModel(spec), path)
    assert truth.examples == len(labels) == 10_000
    assert truth.clicks == labels.sum()
    assert truth.best_auc == auc(labels, np.round(probabilities, 12))  # rounded: equal logits are equal
    assert truth.best_log_loss == pytest.approx(log_loss(labels, probabilities), rel=1e-6)
    # The labels are drawn from these probabilities: their sum is within five deviations.
    deviation = math.sqrt((probabilities * (1 - probabilities)).sum())
    assert abs(labels.sum() - probabilities.sum()) < 5 * deviation
    for low, high in [(0, 0.1), (0.1, 0.3), (0.3, 0.5), (0.5, 1)]:
        chosen = (low <= probabilities) & (probabilities < high)
        sure = math.sqrt((probabilities * (1 - probabilities))[chosen].sum())
        assert abs(labels[chosen].sum() - probabilities[chosen].sum()) < 5 * sure


def test_two_files_of_one_model(tmp_path: Path) -> None:
    spec = ClickLogSpec(rows=30_000, eval_rows=15_000)
    truth = write_click_log(tmp_path / "train.tsv", spec, eval_path=tmp_path / "eval.tsv")
    (train_labels, train_keys), (labels, keys) = read(tmp_path / "train.tsv"), read(tmp_path / "eval.tsv")
    assert (len(train_labels), len(labels)) == (30_000, 15_000)
    assert (truth.examples, truth.clicks) == (15_000, labels.sum())
    assert 0.76 < truth.best_auc < 0.80
    assert 0.44 < truth.best_log_loss < 0.49
    for clicks in (train_labels, labels):
        assert 0.24 < clicks.mean() < 0.26
    assert not np.array_equal(train_keys[: len(keys)], keys)
    # The same features are frequent in both files, because one model generates both.
    for field in range(39):
        common = np.bincount(np.unique(train_keys[:, field], return_inverse=True)[1]).argmax()
        key = np.unique(train_keys[:, field])[common]
        shares = [(k[:, field] == key).mean() for k in (train_keys, keys)]
        assert shares[0] == pytest.approx(shares[1], abs=0.015)


def test_sizes_of_vocabularies_differ_and_frequencies_follow_a_power_law(tmp_path: Path) -> None:
    write_click_log(tmp_path / "log.tsv", ClickLogSpec(rows=100_000))
    _, keys = read(tmp_path / "log.tsv")
    distinct = [len(np.unique(keys[:, field])) for field in range(39)]
    assert min(distinct[13:]) <= 16
    assert max(distinct[13:]) > 20_000  # of 100,000 values: most rare values need more rows
    assert all(6 <= count < 250 for count in distinct[:13])
    counts = np.sort(np.unique(keys[:, 15], return_counts=True)[1])[::-1]
    assert counts[0] > 4 * counts[9] > 16 * counts[99]
    missing = [np.mean(keys[:, field] == np.uint64(hash_bytes(b"", field_seed(field + 1)))) for field in range(39)]
    assert missing[13] == 0
    assert missing[0] == pytest.approx(0.45, abs=0.01)
    assert missing[34] == pytest.approx(0.763, abs=0.01)


def test_a_spec_gives_the_same_bytes_on_every_machine(tmp_path: Path) -> None:
    path = tmp_path / "log.tsv"
    truth = write_click_log(path, ClickLogSpec(rows=20_000, seed=7))
    assert hashlib.sha256(path.read_bytes()).hexdigest() == GOLDEN_SHA256
    assert truth.best_auc == GOLDEN_AUC


def test_a_longer_log_begins_with_a_shorter_one(tmp_path: Path) -> None:
    write_click_log(tmp_path / "short.tsv", ClickLogSpec(rows=100))
    write_click_log(tmp_path / "long.tsv", ClickLogSpec(rows=8192 + 50))
    short, long = (tmp_path / "short.tsv").read_bytes(), (tmp_path / "long.tsv").read_bytes()
    assert long.startswith(short)
    assert (short.count(b"\n"), long.count(b"\n")) == (100, 8242)
    assert all(line.count(b"\t") == 39 for line in long.splitlines())


def test_another_seed_gives_another_model(tmp_path: Path) -> None:
    write_click_log(tmp_path / "a.tsv", ClickLogSpec(rows=2000, seed=1))
    write_click_log(tmp_path / "b.tsv", ClickLogSpec(rows=2000, seed=2))
    a, b = read(tmp_path / "a.tsv")[1], read(tmp_path / "b.tsv")[1]
    assert not set(a[:, 15].tolist()) & set(b[:, 15].tolist()) - {hash_bytes(b"", field_seed(16))}


def test_the_share_of_clicks_can_be_chosen(tmp_path: Path) -> None:
    truth = write_click_log(tmp_path / "log.tsv", ClickLogSpec(rows=50_000, click_share=0.05))
    assert 0.045 < truth.clicks / truth.examples < 0.055


def test_the_auc_of_one_row_is_undefined(tmp_path: Path) -> None:
    truth = write_click_log(tmp_path / "log.tsv", ClickLogSpec(rows=1))
    assert math.isnan(truth.best_auc)
    assert truth.best_log_loss > 0


def test_probabilities_are_the_logistic_function() -> None:
    thresholds = synthetic.click_thresholds()
    logits = (np.arange(len(thresholds)) - len(thresholds) // 2) / 256
    np.testing.assert_allclose(thresholds / 2**32, 1 / (1 + np.exp(-logits)), rtol=0, atol=2**-32)
    assert 0 < thresholds[0] < thresholds[-1] < 2**32
    assert np.array_equal(thresholds + thresholds[::-1], np.full(len(thresholds), 2**32))


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be written"):
        write_click_log(tmp_path / "missing" / "log.tsv", ClickLogSpec(rows=10))
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="cannot be written"):
        write_click_log(tmp_path / "folder", ClickLogSpec(rows=10))
    assert os.listdir(tmp_path) == ["folder"]


def test_invalid_specs_are_rejected(tmp_path: Path) -> None:
    for options in ({"rows": 0}, {"eval_rows": 0}, {"seed": -1}, {"seed": 1 << 64}, {"click_share": 0.0}):
        with pytest.raises(UsageError):
            ClickLogSpec(**options)
    with pytest.raises(UsageError, match="another name"):
        write_click_log(tmp_path / "a", ClickLogSpec(rows=1), eval_path=tmp_path / "b" / ".." / "a")
