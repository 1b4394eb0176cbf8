"""A sample of examples covers all of the data, has a bounded size and is reproducible."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from paceline.data import Batch, Columns, open_dataset
from paceline.data.example_sampling import sample_batch, sample_examples, thin


def write_sorted(path: Path, rows: int, width: int = 3) -> Path:
    """Write a file whose labels are 0 in the first half and 1 in the second half; a key is the row's number."""
    lines = (f"{int(i >= rows // 2)} {i}:1 " + " ".join(f"{rows + k}:2" for k in range(width - 1)) for i in range(rows))
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_sample_of_a_small_file_has_all_examples(tmp_path: Path) -> None:
    with open_dataset(write_sorted(tmp_path / "x.svm", 1000)) as dataset:
        sample = sample_examples(dataset)
    assert sample.is_whole
    assert sample.num_examples == sample.batch.num_examples == 1000
    assert sample.starts.tolist() == [0, 256, 512, 768]


@pytest.mark.parametrize("pack", [False, True])
def test_a_sample_with_too_many_rows_is_thinned_evenly(tmp_path: Path, pack: bool) -> None:
    file = write_sorted(tmp_path / "x.svm", 20_000)
    if pack:
        file = tmp_path / "x.svm.gz"
        file.write_bytes(gzip.compress((tmp_path / "x.svm").read_bytes()))
    with open_dataset(file) as dataset:
        sample = sample_examples(dataset, max_rows=3000)
    assert 1500 <= sample.batch.num_examples <= 3000
    assert not sample.is_whole
    assert sample.num_examples == 20_000
    assert sample.batch.labels.mean() == pytest.approx(0.5, abs=0.1)
    # in the order of the files
    assert np.all(np.diff(sample.batch.keys[sample.batch.indptr[:-1]].astype(np.int64)) > 0)


def test_the_number_of_pairs_is_bounded(tmp_path: Path) -> None:
    with open_dataset(write_sorted(tmp_path / "x.svm", 5000, width=20)) as dataset:
        sample = sample_examples(dataset, max_pairs=30_000)
    assert len(sample.batch.keys) <= 30_000


def test_only_pieces_of_a_large_file_are_read(tmp_path: Path) -> None:
    rows = 600_000  # over 16 MiB
    with open_dataset(write_sorted(tmp_path / "x.svm", rows)) as dataset:
        sample, again = sample_examples(dataset), sample_examples(dataset)
    assert not sample.is_whole
    assert sample.num_examples == pytest.approx(rows, rel=0.1)
    assert sample.batch.labels.mean() == pytest.approx(0.5, abs=0.05)
    assert sample.batch.keys.tobytes() == again.batch.keys.tobytes()


def test_the_sample_has_examples_of_every_csv_file(tmp_path: Path) -> None:
    files = []
    for number in range(3):
        files.append(tmp_path / f"{number}.csv")
        files[-1].write_text("y,c\n" + f"{number % 2},v{number}\n" * 300)
    with open_dataset(files, "csv", Columns("y", ("c",))) as dataset:
        sample = sample_examples(dataset)
    assert sample.is_whole
    assert sample.num_examples == 900
    assert len(np.unique(sample.batch.keys)) == 3


@pytest.mark.parametrize("rate", [0.002, 0.03, 0.2, 0.5])
def test_thinning_keeps_positives_and_stays_unbiased(rate: float) -> None:
    rng = np.random.default_rng(0)
    n = 100_000
    keys = rng.integers(0, 10, n).astype(np.uint64)
    labels = (rng.random(n) < rate * (0.5 + keys / 9)).astype(np.float32)
    sample = sample_batch(Batch(labels, np.arange(n + 1), keys))
    part, num_represented = thin(sample, 10_000)
    num_kept = int(part.labels.sum())
    assert part.num_examples == pytest.approx(10_000, rel=0.1)
    assert num_kept == labels.sum() if labels.sum() <= 5000 else num_kept == pytest.approx(5000, rel=0.35)
    assert num_represented == pytest.approx(n * num_kept / labels.sum(), rel=0.05)
    weights = np.ones(part.num_examples) if part.weights is None else part.weights
    assert weights[part.labels > 0].tolist() == [1] * num_kept
    assert weights.sum() == pytest.approx(num_represented, rel=0.01)
    for key in (0, 9):
        rows = part.keys == key
        expected = labels[keys == key].mean()
        assert np.average(part.labels[rows], weights=weights[rows]) == pytest.approx(expected, rel=0.15)
    assert part.labels[-100:].tolist() == labels[-100:].tolist() or rate < 0.1  # the last examples are all kept
    assert thin(sample, n) == (sample.batch, n)


def test_labels_of_more_than_two_classes_are_thinned_by_runs_of_rows() -> None:
    labels = np.arange(10_000, dtype=np.float32)
    part, num_represented = thin(sample_batch(Batch(labels, np.arange(10_001), labels.astype(np.uint64))), 2_000)
    assert part.weights is None
    assert num_represented == part.num_examples <= 2_000 + 256
    assert part.labels[-1] == 9_999
