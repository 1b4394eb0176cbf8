"""Predictions of a loaded model do not depend on the form of the data; other data is rejected."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
from paceline.data.formats.criteo import CRITEO_NAMES
from paceline.errors import DataError, ModelError, UsageError

from .conftest import CRITEO_FIELDS, write_model

COLUMNS: dict[str, list[Any]] = {
    "site": ["news", "shop", "news", "42"],
    "age": [31.5, None, 7, 2.25],
    "device": ["phone", "tablet", None, "phone"],
}
DENSE = np.array([[0, 0.5, 0, 1, 0, 0], [0, 0, 1.25, -1, 0, 0], [0, 0, 0, 0, 0, 1]])


class Frame:
    """A minimal DataFrame."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self._columns = columns
        self.columns = list(columns)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, name: str) -> Any:
        return self._columns[name]


def rows_of(columns: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


class TestColumns:
    def test_predictions_of_frames_dicts_and_rows_equal_the_predictions_of_the_file(
        self, csv_model: Path, csv: Path
    ) -> None:
        model = paceline.load(csv_model)
        expected = model.predict(csv)
        assert expected.dtype == np.float32
        assert len(set(expected.tolist())) == 4
        for given in (COLUMNS, Frame({"label": [1, 0, 1, 0], **COLUMNS}), rows_of(COLUMNS), [csv]):
            np.testing.assert_array_equal(model.predict(given), expected)
        with_nan = {**COLUMNS, "age": np.array([31.5, np.nan, 7, 2.25])}
        np.testing.assert_array_equal(model.predict(with_nan), expected)
        as_text = {**COLUMNS, "age": ["31.5", "", "7", "2.25"]}
        np.testing.assert_array_equal(model.predict(as_text), expected)

    @pytest.mark.parametrize("package", ["pandas", "polars"])
    def test_frames_of_packages(self, csv_model: Path, csv: Path, package: str) -> None:
        frame = pytest.importorskip(package).DataFrame(COLUMNS)
        model = paceline.load(csv_model)
        np.testing.assert_array_equal(model.predict(frame), model.predict(csv))

    def test_parquet(self, tmp_path: Path) -> None:
        arrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        table = arrow.table(
            {"label": [1, 0, 1], "shop": [3, 4, 3], "rate": [0.5, 2.0, None], "new": [True, False, True]}
        )
        parquet.write_table(table, tmp_path / "data.parquet")
        columns = paceline.data.Columns("label", ("shop", "rate", "new"))
        model = paceline.load(write_model(tmp_path / "model", tmp_path / "data.parquet", "parquet", columns))
        expected = model.predict(tmp_path / "data.parquet")
        np.testing.assert_array_equal(model.predict(table), expected)
        np.testing.assert_array_equal(model.predict({name: table[name] for name in columns.categorical}), expected)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"site": None}, "no column site"),
            ({"site": ["news"]}, "different lengths: {'site': 1"),
            ({"site": [1.5, 2.0, 3.0, 4.0]}, "'site' is categorical, but double here"),
            ({"site": [True, False, True, True]}, "'site' is categorical, but bool here"),
            ({"site": ["\ud800", "a", "b", "c"]}, "column 'site' does not hold text or numbers: 'utf-8' codec"),
            ({"site": [{"a": 1}] * 4}, "column 'site' is categorical, but struct<a: int64> here"),
            ({"site": [object()] * 4}, "'site' does not hold text or numbers"),
            (
                {"site": [None, "a", "b", 3]},
                "column 'site' holds 'a' in row 1 and 3 in row 3: expected values of one type",
            ),
            ({"age": [1.0, np.inf, 2.0, 3.0]}, "row 1 of the frame: its column 'age' is not a finite number"),
            ({"age": ["1", "x", "2", "3"]}, "row 1 of the frame: its column 'age' is not a finite number"),
            ({"age": [True, False, True, True]}, "'age' is numeric, but bool here"),
            ({"age": [b"1", b"2", b"3", b"4"]}, "'age' is numeric, but binary here"),
            (
                {"site": "news", "age": 2.0, "device": "phone"},
                "X is a dict of single values",
            ),
        ],
    )
    def test_unsuitable_columns_are_rejected(self, csv_model: Path, change: dict[str, Any], message: str) -> None:
        columns = {name: column for name, column in {**COLUMNS, **change}.items() if column is not None}
        with pytest.raises(UsageError) as raised:
            paceline.load(csv_model).predict(columns)
        assert message in str(raised.value)

    def test_a_row_without_a_column_is_named(self, csv_model: Path) -> None:
        rows = rows_of(COLUMNS)
        del rows[2]["age"]
        with pytest.raises(UsageError, match="row 2 has no 'age': expected site, device, age"):
            paceline.load(csv_model).predict(rows)

    def test_a_column_with_only_unknown_values_is_reported(self, csv_model: Path) -> None:
        strange = {"site": ["News"] * 300, "age": [1.0] * 300, "device": ["phone"] * 300}
        with pytest.warns(UserWarning, match="none of the first 256 values of column 'site', such as 'News'"):
            paceline.load(csv_model).predict(strange)

    def test_two_columns_with_the_same_name_are_rejected(self, csv_model: Path) -> None:
        table = pytest.importorskip("pyarrow").table(
            [["news"], [2.0], ["phone"], [1.0]], ["site", "age", "device", "age"]
        )
        with pytest.raises(UsageError, match="the frame has more than one column 'age'"):
            paceline.load(csv_model).predict(table)

    def test_no_rows_have_no_predictions(self, csv_model: Path, libsvm_model: Path) -> None:
        for model in map(paceline.load, (csv_model, libsvm_model)):
            assert model.predict([]).shape == model.predict(()).shape == (0,)

    def test_blanks_around_names_and_values_are_ignored(self, csv_model: Path, csv: Path) -> None:
        sites = [None if site is None else f" {site} " for site in COLUMNS["site"]]
        padded = {" site": sites, "age ": COLUMNS["age"], "device": COLUMNS["device"]}
        np.testing.assert_array_equal(paceline.load(csv_model).predict(padded), paceline.load(csv_model).predict(csv))

    def test_predictions_of_text_equal_the_predictions_of_the_file(self, tmp_path: Path) -> None:
        (tmp_path / "x.csv").write_text("label,note,n\n1,Cheap pills!,1\n0,,2\n1,the agenda: pills,\n")
        columns = paceline.data.Columns("label", (), ("n",), text=("note",))
        model = paceline.load(write_model(tmp_path / "model", tmp_path / "x.csv", "csv", columns))
        assert model.columns == columns
        expected = model.predict(tmp_path / "x.csv")
        frame = {"note": ["Cheap pills!", None, "the agenda: pills"], "n": [1.0, 2.0, None]}
        for given in (frame, rows_of(frame)):
            np.testing.assert_array_equal(model.predict(given), expected)
        with pytest.raises(UsageError, match="column 'note' is text, but int64 here"):
            model.predict({**frame, "note": [1, 2, 3]})

    def test_arrays_are_rejected_by_models_with_named_columns(self, csv_model: Path) -> None:
        with pytest.raises(UsageError, match="no column names, but the model was trained on csv"):
            paceline.load(csv_model).predict(DENSE)


class TestNumberedFeatures:
    def test_predictions_of_arrays_and_rows_equal_the_predictions_of_the_file(
        self, libsvm_model: Path, libsvm: Path
    ) -> None:
        model = paceline.load(str(libsvm_model))
        expected = model.predict(str(libsvm))
        rows = [{"1": 0.5, "3": 1}, {2: 1.25, 3: -1}, {"5": 1.0}]
        for given in (DENSE, DENSE.astype(np.float32), DENSE.tolist(), rows, np.asfortranarray(DENSE)):
            np.testing.assert_array_equal(model.predict(given), expected)
        assert model.predict(np.zeros((0, 6))).shape == (0,)

    def test_nan_is_a_missing_value(self, libsvm_model: Path) -> None:
        model = paceline.load(libsvm_model)
        expected = model.predict(np.where(DENSE == 1.25, 0, DENSE))
        missing = np.where(DENSE == 1.25, np.nan, DENSE)
        sparse = pytest.importorskip("scipy.sparse")
        for given in (missing, sparse.csr_array(missing), [dict(enumerate(row)) for row in missing.tolist()]):
            np.testing.assert_array_equal(model.predict(given), expected)

    def test_sparse_matrices(self, libsvm_model: Path, libsvm: Path) -> None:
        sparse = pytest.importorskip("scipy.sparse")
        model = paceline.load(libsvm_model)
        expected = model.predict(libsvm)
        for given in (sparse.csr_matrix(DENSE), sparse.csc_array(DENSE), sparse.coo_array(DENSE)):
            np.testing.assert_array_equal(model.predict(given), expected)
        twice = sparse.csr_array((np.full(8, 0.5), np.array([1, 1] * 4), np.array([0, 8])), shape=(1, 6))
        np.testing.assert_array_equal(model.predict(twice), model.predict([[0, 4, 0, 0, 0, 0]]))

    def test_many_rows_are_predicted_in_several_batches(self, libsvm_model: Path) -> None:
        model = paceline.load(libsvm_model)
        many = model.predict(np.tile(DENSE, (5000, 1)))
        np.testing.assert_array_equal(many, np.tile(model.predict(DENSE), 5000))

    @pytest.mark.parametrize(
        ("X", "message"),
        [
            (
                DENSE[0],
                "shape (6,): expected two dimensions, examples by columns. For a single example pass X.reshape(1, -1)",
            ),
            (
                DENSE[:, :5],
                "0 to 4, but the model has keys from 1 to 5. The keys start at 1",
            ),
            (DENSE[:, :3], "X has 3 columns, 0 to 2, but the model has keys from 1 to 5"),
            (DENSE.astype(str), "X has dtype <U32: expected numbers"),
            (np.where(DENSE == 1.25, 1e39, DENSE), "X has 1e+39 in row 1, column 2"),
            ([{1: np.nan, 2: 1.0}, {3: np.inf}], "X has inf in row 1, column 3"),
            ({3: 1.0}, "X is a dict of single values"),
            ([[1, 2], [3]], "X is a list: expected an array of numbers"),
            (None, "X is None: expected an array"),
            ({"a": [1]}, "trained on libsvm, which has numbered features. Pass an array"),
            ([{"x": 1}], "row 0 has the key 'x': expected a whole number from 0 to 2^64 - 1"),
            ([{1: 1}, {-1: 1}], "row 1 has the key -1"),
            ([{1: "1"}], "row 0, key 1: the value is '1', expected a number"),
            ([{1: np.inf}], "X has inf in row 0, column 1"),
        ],
    )
    def test_unsuitable_arrays_are_rejected(self, libsvm_model: Path, X: Any, message: str) -> None:
        with pytest.raises(UsageError) as raised:
            paceline.load(libsvm_model).predict(X)
        assert message in str(raised.value)


class TestCriteo:
    def test_predictions_of_frames_and_rows_equal_the_predictions_of_the_file(
        self, criteo_model: Path, criteo: Path
    ) -> None:
        model = paceline.load(criteo_model)
        columns: dict[str, Any] = {
            name: [value or None] * 12 for name, value in zip(CRITEO_NAMES, CRITEO_FIELDS, strict=True)
        }
        columns["I1"] = np.arange(12)
        columns["I2"] = np.full(12, 2.0)
        expected = model.predict(criteo)
        np.testing.assert_array_equal(model.predict(columns), expected)
        np.testing.assert_array_equal(model.predict(rows_of(columns)[3:5]), expected[3:5])
        for change, message in (
            ({"I5": ["x"] * 12}, "row 0 of the frame: "),
            ({"C5": [5] * 12}, "'C5' holds the number 5"),
            ({"C5": ["a\tb"] * 12}, "row 0 of the frame holds a tab or a newline"),
        ):
            with pytest.raises(UsageError) as raised:
                model.predict({**columns, **change})
            assert message in str(raised.value)


def test_description_of_a_model(csv_model: Path, tmp_path: Path) -> None:
    model = paceline.load(csv_model)
    text = "lr: 7 features, trained on csv, categorical: site, device, numeric: age; from"
    assert repr(model) == f"<LoadedModel {text} {csv_model}>"
    assert (model.kind, model.format, model.num_features, model.directory) == ("lr", "csv", 7, csv_model)
    assert model.columns is not None
    assert model.columns.numeric == ("age",)
    with pytest.raises(ModelError, match="holds no model"):
        paceline.load(tmp_path)


def test_malformed_lines_are_an_error_by_default(libsvm_model: Path, tmp_path: Path) -> None:
    model = paceline.load(libsvm_model)
    file = tmp_path / "bad.svm"
    file.write_text("1 1:0.5\n1 x:1\n1 3:1\n")
    with pytest.raises(DataError, match="line 2 is malformed"):
        model.predict(file)
    assert len(model.predict(file, strict=False)) == 2


def test_importing_paceline_is_quick() -> None:
    code = (
        "import sys, paceline; import paceline.errors\n"
        "sys.exit(bool({'numba', 'numpy', 'torch', 'pandas', 'pyarrow', 'sklearn', 'scipy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
