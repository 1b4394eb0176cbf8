"""Arrays in files."""

from __future__ import annotations

import contextlib
import io
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.random_examples import num_examples

from paceline.data import FORMATS, Batch, detect_format, open_dataset
from paceline.errors import DataError

sparse = pytest.importorskip("scipy.sparse")

X = np.where(np.random.default_rng(1).random((300, 9)) < 0.4, np.arange(9) + 0.5, 0.0).astype(np.float32)
Y = np.arange(300) % 2


def write_npz(folder: Path) -> Path:
    np.savez(folder / "x.npz", X=X, y=Y)
    return folder / "x.npz"


def write_npy(folder: Path) -> Path:
    np.save(folder / "x.npy", X)
    np.save(folder / "x.y.npy", Y)
    return folder / "x.npy"


def write_sparse(folder: Path) -> Path:
    sparse.save_npz(folder / "x.npz", sparse.csr_matrix(X))
    np.save(folder / "x.y.npy", Y)
    return folder / "x.npz"


def read(path: Path, **options: Any) -> Batch:
    with open_dataset(path, **options) as dataset:
        return Batch.concatenate(list(dataset.batches(7)))


@pytest.mark.parametrize("write", [write_npz, write_npy, write_sparse])
def test_rows_of_arrays_are_examples(tmp_path: Path, write: Any) -> None:
    path = write(tmp_path)
    assert detect_format(path) == "numpy"
    text = tmp_path / "x.svm"
    text.write_text(
        "".join(
            f"{label} " + " ".join(f"{k}:{value:.9g}" for k, value in enumerate(row.tolist()) if value) + "\n"
            for label, row in zip(Y.tolist(), X, strict=True)
        )
    )
    expected = read(text, format="libsvm")
    for shard_bytes in (1, 500, 10**6):
        with open_dataset(path, shard_bytes=shard_bytes) as dataset:
            assert dataset.source_format == "libsvm"
            shards = range(dataset.num_shards(0) or 0)
            found = Batch.concatenate([batch for shard in shards for batch in dataset.read(0, shard, 7)])
        for name in ("labels", "indptr", "keys", "values"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    assert FORMATS["numpy"].sample_labels([str(path)], None) == {0: 150, 1: 150}


def test_labels_may_be_missing_for_predictions(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    with pytest.raises(DataError, match=r"has no labels: expected y in this file, or .*x\.y\.npy"):
        read(tmp_path / "x.npy")
    assert np.isnan(read(tmp_path / "x.npy", needs_labels=False).labels).all()


def test_non_finite_rows_are_malformed(tmp_path: Path) -> None:
    bad = X.copy()
    bad[5, 2], bad[7, 3] = np.nan, np.inf
    np.savez(tmp_path / "x.npz", X=bad, y=Y)
    with open_dataset(tmp_path / "x.npz") as dataset:
        assert sum(batch.num_examples for batch in dataset.batches(50)) == 298
        assert [line.row for line in dataset.bad_lines.first] == [6, 8]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"Z": X}, "has Z: expected X, or a csr matrix"),
        ({"X": X, "y": Y[:5]}, r"y has shape \(5,\)"),
        ({"X": X[0], "y": Y}, r"X has shape \(9,\)"),
        ({"indptr": [0, 9], "indices": [1], "data": [1.0]}, "no valid csr matrix"),
        ({"format": "csc", "indptr": [0, 1], "indices": [1], "data": [1.0]}, "expected csr"),
        ({"X": np.array([{}])}, "cannot be read as NumPy arrays"),
        ({"indptr": [0, 1.5, 2], "indices": [1, 2], "data": [1.0, 2.0]}, "no valid csr matrix"),
        ({"indptr": [0, 2], "indices": [0.5, np.nan], "data": [1.0, 2.0]}, "no valid csr matrix"),
        ({"indptr": [0, 2], "indices": 3, "data": [1.0, 2.0]}, "no valid csr matrix"),
        ({"indptr": [0, 2], "indices": [[1, 2], [3, 4]], "data": np.ones((2, 2))}, "no valid csr matrix"),
        ({"indptr": ["0", "2"], "indices": [1, 2], "data": [1.0, 2.0]}, "no valid csr matrix"),
    ],
)
def test_mismatches_are_rejected(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(DataError, match=message):
        read(tmp_path / "x.npz")


def test_numbers_beyond_float32_are_malformed_without_a_warning(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", X=np.array([[1e300], [1], [1], [2]]), y=[0, 1e300, 1, 0])
    with open_dataset(tmp_path / "x.npz", labels="numbers") as dataset:
        assert [batch.labels.tolist() for batch in dataset.batches(9)] == [[1, 0]]
        assert [line.row for line in dataset.bad_lines.first] == [1, 2]


@pytest.mark.parametrize("is_sparse", [False, True])
def test_wide_rows_are_read_in_small_batches(tmp_path: Path, is_sparse: bool) -> None:
    dense = np.ones((45, 50_000), np.int8)
    if is_sparse:
        sparse.save_npz(tmp_path / "x.npz", sparse.csr_matrix(dense))
    else:
        np.savez(tmp_path / "x.npz", X=dense)
    with open_dataset(tmp_path / "x.npz", shard_bytes=10**9, needs_labels=False) as dataset:
        assert [batch.num_examples for batch in dataset.blocks()] == [20, 20, 5]


def npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def zipped(method: int, **members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def header(text: str) -> bytes:
    return b"\x93NUMPY\x01\0" + len(text).to_bytes(2, "little") + text.encode() + bytes(64)


def test_malformed_array_files_are_rejected_with_a_message(tmp_path: Path) -> None:
    large = "{'descr': '<f8', 'fortran_order': False, 'shape': (%d, 4)}\n"
    y = npy(Y)
    for number, data in enumerate(
        (
            zipped(zipfile.ZIP_STORED, X=b"hello", **{"y.npy": y}),
            zipped(zipfile.ZIP_STORED, **{"X.npy": header(large % 10**12), "y.npy": y}),
            zipped(zipfile.ZIP_STORED, **{"X.npy": header("{'descr': '<f8'"), "y.npy": y}),
            header(large % 2**62),
            header(large % -1),
            header("{'descr': '<f8', 'fortran_order': False, 'shape': (1,\n"),
            header("[" * 5000),
        )
    ):
        path = tmp_path / f"{number}.npz"
        path.write_bytes(data)
        with pytest.raises(DataError, match=r"(cannot be read as NumPy arrays: .|has shape .*: expected rows)") as it:
            read(path, format="numpy")
        assert "\n" not in str(it.value)


FILES = {
    "npy": npy(X[:40]),
    "stored": zipped(zipfile.ZIP_STORED, **{"X.npy": npy(X[:40]), "y.npy": npy(Y[:40])}),
    "deflated": zipped(zipfile.ZIP_DEFLATED, **{"X.npy": npy(X[:40]), "y.npy": npy(Y[:40])}),
    "csr": zipped(
        zipfile.ZIP_DEFLATED,
        **{"indptr.npy": npy([0, 2, 3]), "indices.npy": npy([1, 2, 3]), "data.npy": npy(X[0, :3]), "y.npy": npy(Y[:2])},
    ),
}


@num_examples(150)
@given(
    st.sampled_from(sorted(FILES)),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), max_size=6),
    st.floats(0, 1),
    st.booleans(),
)
def test_damaged_arrays_are_read_or_refused(
    kind: str, flips: list[tuple[float, int]], kept: float, in_header: bool
) -> None:
    data = bytearray(FILES[kind])
    for place, bits in flips:
        data[int(place * (min(len(data), 128) if in_header else len(data)))] ^= bits
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.npz")
        path.write_bytes(data[: 1 + int(kept * len(data))])
        with contextlib.suppress(DataError):
            assert read(path, format="numpy", needs_labels=False).num_examples <= 40
