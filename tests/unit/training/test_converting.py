"""Converted data: the same examples as in the sources, reported damage, and complete files only."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.random_examples import num_examples

from paceline.data import Batch, Columns, Dataset, describe_converted, detect_format, open_dataset, open_spec
from paceline.data.binary.blocks import TRAILER, BlockFile
from paceline.data.formats import FORMATS
from paceline.data.guessing import ReadOptions
from paceline.errors import DataError, UsageError
from paceline.models.ffm import FieldAwareMachine
from paceline.models.registry import make_model
from paceline.observe.work import SilentWork
from paceline.training.files.converting import Conversion, convert_data, sample_sources
from paceline.training.files.data_files import format_of_evaluation, resolve_files, sample_data
from paceline.training.files.describing import describe_data
from paceline.training.options import TrainOptions
from paceline.training.planning import plan_training

COLUMNS = Columns("click", ("site",), ("age", "price"), weight="w")


def csv_text(num_rows: int) -> str:
    """Return rows whose label depends on the logarithm of the price. Each price is too rare to show its effect."""
    rows = (
        f"{k / 4 - 5 > i % 7 - 3:d},s{i % 7},{'' if i % 5 == 0 else i % 50},{math.exp(k / 4):.3f},{1 + i % 2}\n"
        for i, k in enumerate(itertools.islice(itertools.cycle(range(40)), num_rows))
    )
    return "click,site,age,price,w\n" + "".join(rows)


SOURCES = {
    "criteo": "".join(
        f"{i % 2}\t" + "\t".join([str(i)] * 13 + [f"{i * k:08x}" for k in range(26)]) + "\n" for i in range(500)
    ),
    "libsvm": "".join(f"{i % 5 - 2} " + " ".join(f"{k}:{k / 4}" for k in range(i % 9)) + "\n" for i in range(3000)),
    "csv": csv_text(3000),
    "vw": "".join(f"{i % 2 * 2 - 1} {1 + i % 3} |a x:{i % 7} |b y{i % 5}\n" for i in range(500)),
    "jsonl": "".join(
        json.dumps(
            {"click": i % 2, "site": f"s{i % 7}", "age": i % 50 if i % 5 else None, "tags": [1, "b"], "w": 1 + i % 2}
        )
        + "\n"
        for i in range(500)
    ),
    "numpy": "",
}


def convert(source: Path, out: Path, columns: Columns | None = None, **options: Any) -> Conversion:
    sample = sample_sources([str(source)], out, format=None, columns=columns)
    return convert_data([str(source)], out, sample, **options)


def read_all(dataset: Dataset) -> Batch:
    with dataset:
        return Batch.concatenate(list(dataset.batches(100)))


def assert_same(a: Batch, b: Batch) -> None:
    for name in ("labels", "indptr", "keys", "values", "weights"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), name)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with x.csv and the converted file `out`."""
    folder = tmp_path_factory.mktemp("converted")
    (folder / "x.csv").write_text(SOURCES["csv"])
    convert(folder / "x.csv", folder / "out", COLUMNS)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "x.csv"
    path.write_text(SOURCES["csv"])
    return path


@pytest.fixture
def out(converted: Path, source: Path) -> Path:
    """The converted file of the source."""
    return Path(shutil.copy2(converted / "out", source.with_name("out")))


@pytest.mark.parametrize("format", SOURCES)
def test_a_converted_file_has_the_examples_of_the_sources(tmp_path: Path, format: str) -> None:
    source, out = tmp_path / "x", tmp_path / "out"
    source.write_text(SOURCES[format])
    if format == "numpy":
        rng = np.random.default_rng(1)
        with open(source, "wb") as file:
            np.savez(file, X=rng.poisson(0.5, (500, 9)), y=rng.integers(0, 2, 500))
    columns = {"csv": COLUMNS, "jsonl": Columns("click", ("age",), weight="w", is_open=True)}.get(format)
    done = convert(source, out, columns)
    assert detect_format(out) == "paceline"
    for labels in ("clicks", "numbers"):
        plain = read_all(open_dataset(source, columns=columns, labels=labels))
        assert_same(read_all(open_dataset(out, labels=labels)), plain)
    assert done.num_examples == plain.num_examples
    assert done.num_positives == (plain.labels > 0).sum()
    sample, sample_before = sample_data([out]), sample_data([source], columns=columns)
    assert set(sample.labels) == set(sample_before.labels)
    assert sample.columns == sample_before.columns
    kept = "libsvm" if format == "numpy" else format
    assert open_dataset(out).source_format == kept
    assert open_spec(json.loads(json.dumps(open_dataset(out).spec()))).source_format == kept
    resolved, _ = resolve_files(TrainOptions(data=[str(out)], model=make_model("regression")))
    assert resolved.columns == sample.columns


def test_numbers_are_scaled_as_requested(source: Path, out: Path) -> None:
    for how in ("auto", "standard", "log", "log-bins", "none"):
        sample = sample_data([out], numeric_scale=how)
        assert sample.columns == sample_data([source], columns=COLUMNS, numeric_scale=how).columns
        assert_same(
            read_all(open_dataset(out, columns=sample.columns)), read_all(open_dataset(source, columns=sample.columns))
        )
    unweighted = sample_data([out]).columns
    assert unweighted is not None
    assert [scale.unit > 0 for scale in unweighted.scales] == [False, True]  # the effect is logarithmic
    assert read_all(open_dataset(out, columns=unweighted.unweighted)).weights is None


@pytest.fixture(scope="module")
def shared() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "x").write_text(SOURCES["libsvm"])
        convert(Path(name) / "x", Path(name) / "out")
        yield Path(name)


@num_examples(40)
@given(st.integers(1, 300_000), st.randoms(use_true_random=False))
def test_shards_are_ranges_of_rows(shared: Path, shard_bytes: int, order: Any) -> None:
    plain = read_all(open_dataset(shared / "x", labels="numbers"))
    with open_dataset(shared / "out", shard_bytes=shard_bytes, labels="numbers") as dataset:
        count = dataset.num_shards(0)
        assert count is not None
        shards = list(range(min(count, 200)))
        order.shuffle(shards)
        found = {shard: Batch.concatenate(list(dataset.read(0, shard, 64))) for shard in shards}
        parts = [found[shard] for shard in sorted(found)]
        rows = sum(part.num_examples for part in parts)
        assert_same(Batch.concatenate(parts), plain.slice(0, rows))
        assert rows == plain.num_examples or count > 200
        assert list(dataset.read(0, count, 64)) == []


def test_sizes_of_blocks_do_not_depend_on_the_width_of_rows(tmp_path: Path) -> None:
    wide = " ".join(f"{key}:1.5" for key in range(1, 3001))
    (tmp_path / "x.svm").write_text("1 1:1\n" * 300 + f"0 {wide}\n" * 50 + "1 7:2\n" * 300)
    convert(tmp_path / "x.svm", tmp_path / "out")
    with BlockFile(tmp_path / "out") as file:
        assert max(entry.num_bytes for entry in file.entries) <= 1 << 18
        assert len(file.entries) < 12
    assert_same(read_all(open_dataset(tmp_path / "out")), read_all(open_dataset(tmp_path / "x.svm")))


def test_a_damaged_block_is_reported_and_skipped(source: Path, out: Path) -> None:
    with BlockFile(out) as file:
        entries = file.entries
    assert len(entries) == 1
    whole = read_all(open_dataset(out))
    large = source.with_name("large.csv")
    large.write_text(csv_text(30_000))
    convert(large, out, COLUMNS)
    with BlockFile(out) as file:
        entries = file.entries
    assert len(entries) > 3
    data = bytearray(out.read_bytes())
    data[entries[1].offset + 100] ^= 4
    out.write_bytes(data)
    rows, first = entries[1].num_rows, entries[0].num_rows
    with open_dataset(out, shard_bytes=20_000) as dataset:
        found = read_all(dataset)
        assert found.num_examples == 30_000 - rows
        assert dataset.bad_lines.count == rows
        (*_, line) = dataset.bad_lines.first
        assert line.row == first + 1
        assert line.reason.startswith(f"the block of rows {first + 1:,} to {first + rows:,} has a wrong checksum")
        assert line.text.startswith(f"bytes {entries[1].offset:,} to ")
    assert_same(found.slice(0, 100), whole.slice(0, 100))
    with (
        open_dataset(out, strict=True) as dataset,
        pytest.raises(DataError, match=rf"out: row {first + 1:,} is malformed: the block"),
    ):
        list(dataset.batches(100))


def test_a_file_with_only_damaged_blocks_is_reported(out: Path) -> None:
    with BlockFile(out) as file:
        (entry,) = file.entries
    data = bytearray(out.read_bytes())
    data[entry.offset + 100] ^= 4
    out.write_bytes(data)
    damage = r": .*out, row 1: the block of rows 1 to 3,000 has a wrong checksum: 'bytes 64 to "
    for strict in (False, True):
        with pytest.raises(DataError, match=f"out has no line that can be trained on{damage}"):
            plan_training(resolve_files(TrainOptions(data=[str(out)], strict=strict))[0])
    with pytest.raises(DataError, match=f"out has no row that can be read{damage}"):
        describe_data([str(out)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-1], "is damaged"),
        (lambda data: data[:100], "is damaged"),
        (lambda data: data[:8] + b"\xff" + data[9:], "another version"),
        (lambda data: data[:-60] + bytes([data[-60] ^ 1]) + data[-59:], "the footer is damaged"),
    ],
)
def test_an_incomplete_file_is_refused(out: Path, change: Any, message: str) -> None:
    out.write_bytes(change(out.read_bytes()))
    with pytest.raises(DataError, match=message):
        open_dataset(out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "cache"}, "is a cache file"),
        ({"hash": 1}, "keys of another hash"),
        ({"num_examples": 5}, "number of rows is wrong"),
        ({"labels": [[1]]}, "is damaged"),
        ({"columns": {"label": 5}}, "is damaged"),
        ({"scales": {"auto": [[0, 1, 1]]}}, "numbers of scales"),
        ({"scales": []}, "is damaged"),
        ({"guesses": [1]}, "is damaged"),
        ({"bad": [[1, 2, 3, 4, 5]]}, "is damaged"),
        ({"sources": 3}, "is damaged"),
        ({"names": [0, 2**62, 0]}, "a section is invalid"),
        ({"names": [0, 10**30, 0]}, "a section is invalid"),
        ({"names": [-1, 5, 0]}, "a section is invalid"),
        ({"names": [0, 5]}, "is damaged"),
        ({"labels": [[10**400, 1]]}, "is damaged"),
        ({"num_examples": 3000.0}, "number of rows is wrong"),
        ({"guesses": [["a", "label", "", "many", []]]}, "is damaged"),
        ({"num_guessed_rows": "x"}, "is damaged"),
        ({"columns": {"label": "click", "categorical": [5], "numeric": []}, "scales": {}}, "is damaged"),
    ],
    ids=str,
)
def test_a_forged_footer_is_refused(out: Path, change: dict[str, Any], message: str) -> None:
    data = out.read_bytes()
    length, _, version, magic = TRAILER.unpack(data[-TRAILER.size :])
    start = len(data) - TRAILER.size - length
    footer = json.dumps({**json.loads(data[start : start + length]), **change}).encode()
    out.write_bytes(data[:start] + footer + TRAILER.pack(len(footer), zlib.crc32(footer), version, magic))
    with pytest.raises(DataError, match=message):
        describe_converted(str(out))


def test_names_of_features_are_stored_on_request(source: Path, out: Path) -> None:
    batch = read_all(open_dataset(out))
    keys = np.unique(batch.keys)
    assert FORMATS["paceline"].find_names([str(out)], None, keys) == {}
    options = TrainOptions(data=[str(out)], feature_names=True)
    with pytest.raises(UsageError, match="has no feature names"):
        resolve_files(options)
    convert(source, out, COLUMNS, feature_names=True)
    expected = FORMATS["csv"].find_names([str(source)], COLUMNS, keys)
    assert len(expected) == len(keys)
    assert FORMATS["paceline"].find_names([str(out)], None, keys) == expected
    resolve_files(options)
    out.write_bytes(out.read_bytes().replace(b"site=s3", b"site=s4"))
    with pytest.raises(DataError, match="the names of its features are damaged"):
        FORMATS["paceline"].find_names([str(out)], None, keys)


def test_the_description_equals_the_description_of_the_sources(source: Path, out: Path) -> None:
    found, before = (describe_data([str(path)], columns=columns) for path, columns in ((out, None), (source, COLUMNS)))
    assert found["format"] == "paceline"
    sources = found["converted"].pop("sources")
    assert found["converted"] == {"format": "csv", "examples": 3000, "positives": 1425}
    assert [Path(source).name for source in sources] == [source.name]
    assert {**found, "format": 0, "files": 0, "bytes": 0, "labels": 0, "converted": 0} == {
        **before, "format": 0, "files": 0, "bytes": 0, "labels": 0, "converted": 0,
    }  # fmt: skip
    assert found["labels"] == {"0": 1575, "1": 1425}


def test_mismatches_are_rejected(source: Path, out: Path, tmp_path: Path) -> None:
    other = tmp_path / "x.svm"
    other.write_text(SOURCES["libsvm"])
    convert(other, tmp_path / "svm")
    for files in ([out, tmp_path / "svm"], [tmp_path / "svm", out]):
        message = r"{1} was converted from {3}, and {0} from {2}"
        names = [*map(str, files), *(describe_converted(str(file)).description.format for file in files)]
        with pytest.raises(DataError, match=message.format(*names)):
            open_dataset(files)
    options = TrainOptions(data=[out], evaluation=[tmp_path / "svm"])
    with pytest.raises(DataError, match=r"svm is converted from libsvm, and .*out is converted from csv. Pass"):
        resolve_files(options)
    with pytest.raises(DataError, match=r"x.csv was not written by 'paceline convert'"):
        sample_data([out, source])
    with pytest.raises(DataError, match=r"other numeric columns \(price\)"):
        open_dataset(out, columns=Columns("click", ("site",), ("age",)))
    with pytest.raises(DataError, match="without weights"):
        open_dataset(out, columns=Columns("click", ("site",), ("age", "price"), weight="importance"))
    with pytest.raises(UsageError, match="was converted with other columns"):
        sample_data([out], reading=ReadOptions(label="age"))
    for place, message in (
        (tmp_path, "is a folder"),
        (source, "is also a source"),
        (other, "'paceline convert' did not write it"),
    ):
        with pytest.raises(UsageError, match=message):
            convert(source, place, COLUMNS)
    with pytest.raises(UsageError, match="already a converted file"):
        convert(out, tmp_path / "again")
    with pytest.raises(DataError, match=r"cannot write .*nowhere/x: No such file"):
        convert(source, tmp_path / "nowhere" / "x", COLUMNS)


def test_the_evaluation_data_may_have_another_format_with_columns(source: Path, out: Path, tmp_path: Path) -> None:
    import pyarrow.csv
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.csv.read_csv(source), tmp_path / "x.parquet")
    files = [source, out, tmp_path / "x.parquet"]
    for data, evaluation in zip(files, [*files[1:], source], strict=True):
        columns = None if data == out else COLUMNS
        resolved, _ = resolve_files(TrainOptions(data=[data], evaluation=[evaluation], columns=columns))
        assert resolved.format is not None
        assert format_of_evaluation([evaluation], resolved.format) == detect_format(evaluation)
    assert format_of_evaluation([source], "libsvm") == "libsvm"  # as declared


def test_files_may_have_their_columns_in_another_order(tmp_path: Path) -> None:
    """The pairs have the order of the option, or the order in the first of several files."""
    orders = [("click", "a", "b", "x", "y"), ("click", "b", "y", "a", "x")]
    rows = [
        {"click": i % 2, "a": f"a{i % 3}", "b": f"b{i % 4}", "x": i / 8 if i % 5 else "", "y": i % 9} for i in range(90)
    ]
    for name, order in zip("pq", orders, strict=True):
        lines = [",".join(order), *(",".join(str(row[column]) for column in order) for row in rows)]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\n")
        categorical = tuple(column for column in order if column in "ab")
        numeric = tuple(column for column in order if column in "xy")
        convert(tmp_path / f"{name}.csv", tmp_path / name, Columns("click", categorical, numeric))
    p, q = tmp_path / "p", tmp_path / "q"
    columns = sample_data([p]).columns
    whole = read_all(open_dataset(p, columns=columns))
    assert whole.keys[0] != read_all(open_dataset(q)).keys[0]
    assert_same(read_all(open_dataset(q, columns=columns)), whole)
    assert_same(read_all(open_dataset([p, q], columns=columns)), Batch.concatenate([whole, whole]))
    assert_same(read_all(open_dataset([p, q])), Batch.concatenate([read_all(open_dataset(p))] * 2))


def test_lists_are_unchanged_next_to_scaled_numbers(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = range(200)
    table = {
        "click": [i % 2 for i in rows],
        "tags": [["a", f"t{i % 3}"][: i % 3] for i in rows],
        "x": [100.5 + i for i in rows],
    }
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "x.parquet")
    source, out = tmp_path / "x.parquet", tmp_path / "out"
    convert(source, out)
    columns = sample_data([source]).columns
    assert columns is not None
    assert columns.scales
    assert_same(read_all(open_dataset(out, columns=columns)), read_all(open_dataset(source, columns=columns)))
    (tmp_path / "x.vw").write_text("".join(f"{i % 2} |a t{i % 3} |b u:{i}\n" for i in rows))
    convert(tmp_path / "x.vw", tmp_path / "vw.out")
    for path, num_fields in ((tmp_path / "x.vw", 3), (tmp_path / "vw.out", 3), (source, 2), (out, 2)):
        model = resolve_files(TrainOptions(data=[path], model=make_model("ffm")))[0].model
        assert isinstance(model, FieldAwareMachine)
        assert model.layout is not None
        assert len(model.layout) == num_fields
        with open_dataset(path) as dataset:
            assert set(model.layout.fields_of(next(dataset.batches(200))).tolist()) == {0, 1}


def test_an_interruption_leaves_no_files(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(progress: SilentWork, done: float, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SilentWork, "update", interrupt)
    source.write_text(csv_text(20_000))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", COLUMNS)
    assert sorted(tmp_path.iterdir()) == before


def test_malformed_lines_are_skipped_and_reported(tmp_path: Path) -> None:
    path, out = tmp_path / "x.svm", tmp_path / "out"
    path.write_text("1 1:1\n1 x:1\n0 2:1\n")
    done = convert(path, out)
    assert (done.num_examples, done.bad_lines.count) == (2, 1)
    assert "x.svm, line 2:" in done.sentence()
    assert describe_converted(str(out)).description.num_bad == 1
    with pytest.raises(DataError, match="line 2 is malformed"):
        convert(path, out, strict=True)
    assert describe_converted(str(out)).num_examples == 2  # the old file
