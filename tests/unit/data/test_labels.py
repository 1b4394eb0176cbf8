"""How labels are read: positive above 0, positive at one value, or as numbers; and how words are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.random_examples import num_examples

from paceline.data import open_dataset, open_spec
from paceline.data.columns import find_label, usual_label
from paceline.data.labels import (
    MOST_CLASSES,
    clicks_where,
    count_labels,
    describe_classes,
    describe_label_words,
    describe_not_binary,
    find_classes,
    parse_positive,
    positive_in,
    read_as,
    read_label,
    resolve_positive,
)
from paceline.errors import UsageError
from paceline.kernels.text.values import LABEL_WORDS
from paceline.models.registry import make_model, read_model_settings
from paceline.training.files.data_files import sample_data
from paceline.training.files.describing import describe_data


@pytest.mark.parametrize(
    ("positive", "expected"), [(None, [0, 0, 1, 1, 1]), (2.0, [0, 0, 0, 1, 0]), (0.0, [0, 1, 0, 0, 0])]
)
def test_labels_of_clicks(positive: float | None, expected: list[int]) -> None:
    labels = clicks_where(positive)
    assert positive_in(labels) == positive
    found = np.array([-1, 0, 1, 2, 2.5], np.float32)
    read_as(labels, found)
    assert found.tolist() == expected


def test_a_positive_label_that_float32_rounds_is_found() -> None:
    found = np.array([0.1, 0.2], np.float32)
    read_as(clicks_where(0.1), found)
    assert found.tolist() == [1, 0]
    assert describe_not_binary({0.1: 5, 0.2: 5}, clicks_where(0.1)) is None


def test_unknown_labels_stay_unknown() -> None:
    found = np.array([2, np.nan, 1], np.float32)
    read_as("clicks:2.0", found, unknown=True)
    np.testing.assert_array_equal(found, [1, np.nan, 0])


@pytest.mark.parametrize("labels", ["", "counts", "clicks:", "clicks:nan", "clicks:inf", "numbers:2"])
def test_unknown_readings_of_labels_are_rejected(labels: str) -> None:
    with pytest.raises(UsageError, match="expected numbers, clicks, or clicks:2"):
        positive_in(labels)


def test_the_positive_label_may_be_a_word() -> None:
    assert [parse_positive(text) for text in ("2", "-1", "No", " spam ")] == [2, -1, "No", "spam"]
    assert [resolve_positive(text, ()) for text in (2.0, None, "No", "true")] == [2, None, 0, 1]
    for text in ("", "1e39"):
        with pytest.raises(UsageError, match=f"--positive {text}: expected a finite number or a word"):
            parse_positive(text)
    with pytest.raises(UsageError, match="--positive spam: the labels of this data are numbers, because"):
        resolve_positive("spam", ())


def test_the_positive_label_of_words() -> None:
    assert resolve_positive("ham", ("ham", "spam")) == 0
    assert resolve_positive("spam", ("ham", "spam")) is None  # the last word is positive by default
    assert resolve_positive("b", ("a", "b", "c")) == 1
    with pytest.raises(UsageError, match="--positive Ham: no sampled row has this label"):
        resolve_positive("Ham", ("ham", "spam"))


@pytest.mark.parametrize(
    ("cells", "classes"),
    [
        (["malignant", " benign", "", "benign", "NA"], ("benign", "malignant")),
        ([">50K", "<=50K"], ("<=50K", ">50K")),
        (["F", "M"], ("F", "M")),  # with M, F does not mean false
        (["yes", "unclear"], ("unclear", "yes")),
        (["no", "lost"], ("no", "lost")),
        (["spam", "not spam"], ("not spam", "spam")),
        (["Clicked", "Not clicked"], ("Not clicked", "Clicked")),
        (["click", "no click"], ("no click", "click")),
        (["default", "non-default"], ("non-default", "default")),
        (["clicked", "unclicked"], ("unclicked", "clicked")),
        (["bought", "not_bought"], ("not_bought", "bought")),
        (["Click", "noclick"], ("noclick", "Click")),
        (["b", "c", "a"], ("a", "b", "c")),
        (["yes", "no"], ()),
        (["y", "n", "unknown"], ("n", "unknown", "y")),
        (["yes", "no", "unknown"], ("no", "unknown", "yes")),
        (["TRUE", "FALSE", "true"], ()),
        (["TRUE", "FALSE", "UNSURE"], ("FALSE", "TRUE", "UNSURE")),
        ([*"ABYN"], ("A", "B", "N", "Y")),
        ([*"FEDCBA"], ("A", "B", "C", "D", "E", "F")),
        ([*"LSM"], ("L", "M", "S")),
        ([*"NSEW"], ("E", "N", "S", "W")),
        ([*"TY"], ("T", "Y")),
        ([*"NF"], ("F", "N")),
        (["yes", "Y"], ()),
        (["1", "x", "y"], ()),
        (["benign", "benign"], ()),
        ([], ()),
        ([f"name {at}" for at in range(MOST_CLASSES + 1)], ()),
    ],
)
def test_words_as_classes(cells: list[str], classes: tuple[str, ...]) -> None:
    assert find_classes(cells) == classes
    if classes:
        assert count_labels([*cells, "another"], classes) == count_labels(cells, classes)
        assert sorted(count_labels(cells, classes)) == [*range(len(classes))]


@given(
    words=st.lists(st.sampled_from([*"ABCDEFNSTWY", "yes", "No", "TRUE", "false", "lost"]), min_size=2, unique=True),
    form=st.sampled_from(["csv", "jsonl"]),
)
@num_examples(40)
def test_no_word_is_lost_or_merged(words: list[str], form: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every row is read. Different words stay separate unless all of them mean 0 or 1."""
    path = tmp_path_factory.mktemp("words") / f"x.{form}"
    cells = words * 30
    row = "{},{}\n" if form == "csv" else '{{"city": "{}", "label": "{}"}}\n'
    lines = [row.format(at % 7, cell) for at, cell in enumerate(cells)]
    path.write_text(("city,label\n" if form == "csv" else "") + "".join(lines))
    columns = sample_data([path]).columns
    with open_dataset(path, columns=columns, labels="numbers") as dataset:
        labels = [label for batch in dataset.batches(4096) for label in batch.labels.tolist()]
        assert dataset.bad_lines.count == 0
    expected = [sorted(words).index(cell) for cell in cells]
    if all(word.lower() in LABEL_WORDS for word in words):
        truths = [LABEL_WORDS[cell.lower()] for cell in cells]
        assert labels == truths or (len(set(truths)) == 1 and labels == expected)
    elif len(words) > 2:
        assert labels == expected
    else:
        assert len({*zip(cells, labels, strict=True)}) == 2 == len(set(labels))


@pytest.mark.parametrize("name", ["Label", "CLICK", " Target ", "Y"])
def test_a_label_column_in_capitals_is_found(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.csv"
    path.write_text(f"city,{name}\n" + "".join(f"c{at % 3},{at % 2}\n" for at in range(60)))
    assert find_label("x", ["age", name]) == name
    sample = sample_data([path])
    assert sample.columns is not None
    assert sample.columns.label.strip() == name.strip()
    assert usual_label(["Y", "label", "y"]) == "label"
    assert usual_label(["Y", "y"]) == "y"


def test_classes_are_reported() -> None:
    two, three = ("ham", "spam"), ("a", "b", "c")
    message = "labels are words: ham is 0, and spam is 1, the positive label (--positive 'ham' swaps them)"
    assert describe_classes(two, "clicks") == message
    assert describe_classes(two, "clicks:0.0") == "labels are words: spam is 0, and ham is 1, the positive label"
    message = "labels are words: b is 1, the positive label, and the other 2 are 0"
    assert describe_classes(three, "clicks:1.0") == message
    assert describe_classes(three) == "labels are words, which are read as numbers: a as 0, b as 1, c as 2"
    assert describe_not_binary({0.0: 1, 1.0: 2, 2.0: 3}, "clicks", three) == "labels are a, b and c, expected two"


def test_a_missing_positive_label() -> None:
    assert describe_not_binary({1.0: 3, 2.0: 4}, "clicks:2.0") is None
    assert describe_not_binary({5.0: 3, 1.0: 3, 2.0: 4}, "clicks:5.0") is None
    assert describe_not_binary({}, "clicks:2.0") is None
    message = "labels are 1 and 2, without 3, the positive label"
    assert describe_not_binary({1.0: 3, 2.0: 4}, "clicks:3.0") == message
    assert describe_not_binary({1.0: 3, 2.0: 4, 3.0: 1}, "numbers") is None


def test_label_words_are_described_with_counts() -> None:
    message = "labels are words, which are read as numbers: no as 0, yes as 1"
    assert describe_label_words(["no", "yes"]) == message
    assert describe_label_words(["no", "yes"], clicks_where(0.0)).endswith("no as 1, yes as 0")


def test_words_of_json_lines_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"label": "Yes", "a": "no"}\n{"label": "n", "a": "t"}\n{"label": true, "a": "y"}\n')
    assert sample_data([path]).label_words == ("n", "yes")


def test_other_processes_read_the_same_labels(tmp_path: Path) -> None:
    path = tmp_path / "x.svm"
    path.write_text("1 3:1\n2 4:1\n3 5:1\n")
    with open_dataset(path, labels="clicks:2.0") as dataset, open_spec(dataset.spec()) as other:
        assert [batch.labels.tolist() for batch in other.batches(8)] == [[0, 1, 0]]


def test_a_model_keeps_the_positive_label() -> None:
    model = make_model("lr", positive=2.0)
    assert model.read_labels_as == "clicks:2.0"
    assert read_model_settings(model.describe()) == model
    assert "positive" not in make_model("lr").describe()


@pytest.mark.parametrize("cell", ["1e400", "-1e39", "1" + 60 * "0"])
def test_labels_beyond_float32_are_not_counted(cell: str) -> None:
    assert read_label(cell) is None
    assert count_labels(["1", cell, "0", "0"]) == {1.0: 1, 0.0: 2}


def test_labels_of_skipped_arrays_are_not_counted(tmp_path: Path) -> None:
    labels = np.array([0, 1, np.nan, 1e39, np.inf] * 20)
    np.savez(tmp_path / "data.npz", X=np.ones((100, 2)), y=labels)
    assert describe_data([str(tmp_path / "data.npz")])["labels"] == {"0": 20, "1": 20}


def test_times_after_the_year_9999_are_read(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    end = arrow.array([253_402_300_800_000_000] * 60, arrow.timestamp("us"))
    parquet.write_table(arrow.table({"click": [0, 1] * 30, "end": end}), tmp_path / "x.parquet")
    assert describe_data([str(tmp_path / "x.parquet")])["labels"] == {"0": 30, "1": 30}
