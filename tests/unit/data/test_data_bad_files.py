"""Messages about lines and files that cannot be read."""

from __future__ import annotations

import gzip
import os
import sys
import zlib
from pathlib import Path

import pytest

from paceline.data import FORMATS, BadLine, detect_format, open_dataset
from paceline.errors import DataError, UsageError

CRITEO = b"1\t" + b"\t".join([b"5"] * 13 + [b"05db9164"] * 26) + b"\n"
LIBSVM = b"-1 3:1 11:0.5\n+1 2:1\n"


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def read_all(path: Path, format: str | None = None, **options: bool) -> int:
    with open_dataset(path, format, **options) as dataset:  # type: ignore[arg-type]
        return sum(batch.num_examples for batch in dataset.read(0, 0, 100))


def failure(path: Path, format: str | None = None, **options: bool) -> str:
    with pytest.raises(DataError) as caught:
        read_all(path, format, **options)
    return str(caught.value).replace(str(path), "X")


@pytest.mark.parametrize(
    ("content", "name", "format"),
    [
        (CRITEO, "x", "criteo"),
        (b"0" + b"\t" * 39 + b"\n", "x.tsv", "criteo"),
        (CRITEO * 1000, "x.gz", "criteo"),
        (LIBSVM, "x", "libsvm"),
        (b"# weights\n" + LIBSVM, "x", "libsvm"),
        (b"1 qid:3 7:2\r\n", "x.csv", "libsvm"),
        (b"click,site\n1,a\n0,b\n", "x", "csv"),
        (b'click,site\n1,"a,b"\n0,b\n' * 9000, "x.gz", "csv"),
        (b"click;site\n1;a,b\n0;c\n", "x", "csv"),
        (b"1\t0.5\t3\n0\t0.25\t4\n", "x", "csv"),
        (b"PAR1....", "x", "parquet"),
        (b"-1 '1720 |r white |n age:23 educ:10.0\n", "x", "vw"),
        (b"1 0.5 'tag| a b:2\n", "x", "vw"),
    ],
)
def test_detect_format(tmp_path: Path, content: bytes, name: str, format: str) -> None:
    assert detect_format(write(tmp_path / name, content)) == format


@pytest.mark.parametrize(
    "content",
    [b"once upon a time\n", b"one, two\nthree\nfour, five, six\n", b"\0\1\2" * 99, b"\n\n", b"\xff\xfd" * 99],
)
def test_a_file_of_unknown_format(tmp_path: Path, content: bytes) -> None:
    text = failure(write(tmp_path / "x", content))
    assert text.startswith(f"X looks like none of {', '.join(FORMATS)}: ")
    assert "--format" in text


def test_a_file_with_only_a_header(tmp_path: Path) -> None:
    for content in (b"label,site\n", b"label;site;age"):
        assert "has one line, 'label" in failure(write(tmp_path / "x.csv", content))


@pytest.mark.parametrize("name", ["x", "x.gz"])
def test_rows_longer_than_the_first_sample(tmp_path: Path, name: str) -> None:
    """The rows have about a megabyte each. The sample has only labels of complete rows."""
    pairs = b" ".join(b"%d:1" % i for i in range(120_000))
    path = write(tmp_path / name, b"".join(b"%d %s\n" % (i % 2, pairs) for i in range(7)))
    assert detect_format(path) == "libsvm"
    assert set(FORMATS["libsvm"].sample_labels([str(path)], None)) <= {0.0, 1.0}
    with open_dataset(path) as dataset:
        assert sum(batch.num_examples for batch in dataset.batches(1)) == 7


def test_bad_lines_are_skipped_counted_and_described(tmp_path: Path) -> None:
    bad = b"".join(b"1 %d:x\n" % i for i in range(7))
    for name in ("x.svm", "x.svm.gz"):
        path = write(tmp_path / name, LIBSVM + bad + b"nan 1:1\0\n" + LIBSVM)
        with open_dataset(path, "libsvm", shard_bytes=30) as dataset:
            dataset.num_shards(0)
            for _ in range(2):  # a shard that is read again is counted once
                rows = sum(b.num_examples for s in range(4) for b in dataset.read(0, s, 10))
                assert rows == 4
                assert dataset.bad_lines.count == 8
                assert len(dataset.bad_lines.first) == 5
            line = BadLine(str(path), len(LIBSVM), None, "1 0:x", "a value is not a finite float32 number")
            assert dataset.bad_lines.first[0] == line


def test_the_shown_part_of_a_bad_line_is_short_and_printable(tmp_path: Path) -> None:
    path = write(tmp_path / "x", LIBSVM + b"\x00\xff\x1b[31m" + b"z" * 500 + b"\n")
    with open_dataset(path, "libsvm") as dataset:
        assert sum(b.num_examples for b in dataset.read(0, 0, 10)) == 2
        text = dataset.bad_lines.first[0].text
    assert text.startswith("\\x00\N{REPLACEMENT CHARACTER}\\x1b[31mzzz")
    assert text.endswith("z…")
    assert len(text) == 80


def test_the_error_of_strict_names_file_line_text_and_reason(tmp_path: Path) -> None:
    path = write(tmp_path / "x", LIBSVM * 1000 + b"1 a:1\n" + LIBSVM)
    assert failure(path, strict=True) == (
        "X: line 2,001 is malformed: an index is not an integer from 0 to 2^64-1 with a colon after it: '1 a:1'"
    )
    assert read_all(path) == 2002


def test_a_file_in_another_format_than_declared(tmp_path: Path) -> None:
    for count in (1, 20):
        text = failure(write(tmp_path / "x", CRITEO * count), "libsvm")
        assert text.startswith("X does not look like libsvm: its first line is '1\\t5\\t5")
        assert text.endswith("'. It looks like criteo. Pass --format criteo")
    text = failure(write(tmp_path / "y.gz", b"once upon a time\n" * 20), "criteo").replace("y.gz", "")
    assert text == "X does not look like criteo: its first line is 'once upon a time'"
    mostly_bad = write(tmp_path / "z", LIBSVM + b"once upon a time\n" * 20)
    assert read_all(mostly_bad, "libsvm") == 2


def test_missing_empty_and_unreadable_files_and_folders(tmp_path: Path) -> None:
    assert failure(tmp_path / "x") == "X does not exist"
    assert failure(write(tmp_path / "x", b"")) == "X is empty: it has no line or row to read"
    assert failure(tmp_path).startswith("X is a folder, not a data file")
    assert "is empty" in failure(write(tmp_path / "x.gz", b""), "libsvm")
    if os.geteuid():
        (tmp_path / "x").write_bytes(LIBSVM)
        (tmp_path / "x").chmod(0)
        assert failure(tmp_path / "x") == "X cannot be read: permission is denied"


def test_zstd_files(tmp_path: Path) -> None:
    """A file of several frames, with a skippable frame between them, is complete, truncated, damaged or empty."""
    zstandard = pytest.importorskip("zstandard")
    pack = zstandard.ZstdCompressor().compress
    text = b"".join(b"%d %d:1\n" % (i % 2, i) for i in range(100_000))
    skipped = b"\x5a\x2a\x4d\x18" + (20_000).to_bytes(4, "little") + bytes(20_000)
    whole = pack(text[:777_777]) + skipped + pack(b"") + skipped + pack(text[777_777:]) + skipped
    path = tmp_path / "x.svm.zst"
    path.write_bytes(whole)
    assert detect_format(path) == "libsvm"
    with open_dataset(path, shard_bytes=100_000) as dataset:
        assert [key for batch in dataset.batches(1000) for key in batch.keys.tolist()] == list(range(100_000))
        assert dataset.ended(0) == -(-len(text) // 100_000)
        assert next(iter(dataset.read(0, 3, 10))).num_examples == 10  # an earlier shard: decompression starts again
    for content, message in (
        (whole[: len(whole) // 3], "is truncated: its zstd stream ends after"),
        (whole[:50] + b"\xff" * 40_000 + whole[40_050:], "is damaged: decompression fails after"),
        (pack(text) + b"more", "other bytes follow its zstd stream"),
    ):
        path.write_bytes(content)
        with open_dataset(path, "libsvm") as dataset, pytest.raises(DataError, match=message):
            list(dataset.batches(1000))
    path.write_bytes(text)
    assert failure(path).endswith("ends in .zst but is not a zstd file. Rename it")


def test_zstd_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "x.zst").write_bytes(b"...")
    with pytest.raises(UsageError, match=r"needs zstandard, which is not installed: pip install 'paceline\[zstd\]'"):
        open_dataset(tmp_path / "x.zst")


def test_damaged_gzip_files(tmp_path: Path) -> None:
    text = os.urandom(100_000).hex().encode()
    whole = gzip.compress(b"1 1:1 #" + text + b"\n" + LIBSVM)
    path = tmp_path / "x.gz"

    def message_of(content: bytes) -> str:
        path.write_bytes(content)
        return failure(path, "libsvm")

    cut = zlib.decompressobj(wbits=31)
    num_bytes = len(cut.decompress(whole[:60_000]))
    expected = f"X is truncated: its gzip stream ends after {num_bytes:,} bytes of text"
    assert message_of(whole[:60_000]) == expected
    assert message_of(whole[:-3]).startswith("X is truncated")
    assert message_of(whole[:1]).startswith("X is truncated")
    assert message_of(LIBSVM) == "X ends in .gz but is not a gzip file. Rename it"
    assert message_of(whole[:50_000] + b"\xff" * 99 + whole[50_099:]).startswith("X is damaged: decompression fails")
    assert message_of(whole[:-8] + b"\0" * 4 + whole[-4:]).startswith("X is damaged: decompression fails")
    assert message_of(whole + b"more") == "X is damaged: other bytes follow its gzip stream"


def test_an_endless_line_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with open(path, "wb") as file:
        file.write(LIBSVM)
        file.truncate(20 << 20)
    text = failure(path, "libsvm")
    assert text.startswith("X has a line of more than 16 MiB, from byte 21 on")


def test_a_file_removed_after_opening_is_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "x", LIBSVM)
    dataset = open_dataset(path)
    path.unlink()
    with pytest.raises(DataError, match="does not exist"):
        list(dataset.read(0, 0, 1))
