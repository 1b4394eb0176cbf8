"""Read real files. Reading needs no compilation after compile_kernels()."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from tests.reference import text as reference

from paceline.data import Batch, detect_format, open_dataset
from paceline.kernels.text import lines as kernels


def test_criteo(real_data: Path) -> None:
    path = real_data / "criteo" / "train.tsv.gz"
    labels, keys, shard = [], [], 0
    with open_dataset(path) as dataset:
        assert dataset.format == "criteo"
        while (count := dataset.ended(0)) is None or shard < count:
            for batch in dataset.read(0, shard, 4096):
                labels.append(batch.labels)
                keys.append(batch.keys.reshape(-1, 39))
                assert batch.values is None
            shard += 1
        assert dataset.bad_lines.count == 0
    all_labels, all_keys = np.concatenate(labels), np.concatenate(keys)
    assert len(all_labels) == 137_139
    assert 0.256 < all_labels.mean() < 0.258
    lines, places = [], range(0, 137_139, 997)
    with gzip.open(path) as file:
        lines = [line.rstrip(b"\n") for at, line in enumerate(file) if at % 997 == 0]
    for at, line in zip(places, lines, strict=True):
        assert reference.criteo_line(line) == (all_labels[at], all_keys[at].tolist())
    assert len({*all_keys[:, 13:].reshape(-1).tolist()}) > 316_000


@pytest.mark.parametrize(
    ("name", "rows", "keys"),
    [
        pytest.param("a9a/a9a", 32_561, 123, marks=pytest.mark.thorough),
        ("a9a/a9a.t", 16_281, 122),
        ("agaricus/agaricus.txt.train", 6_513, 126),
    ],
)
def test_libsvm(real_data: Path, name: str, rows: int, keys: int) -> None:
    with open_dataset(real_data / name, shard_bytes=100_000, labels="numbers") as dataset:
        assert dataset.format == "libsvm"
        shards = dataset.num_shards(0)
        assert shards is not None
        whole = Batch.concatenate([b for shard in range(shards) for b in dataset.read(0, shard, 512)])
        assert dataset.bad_lines.count == 0
    assert whole.num_examples == rows
    assert whole.values is None
    assert whole.keys.max() <= keys
    expected = [reference.libsvm_line(line) for line in (real_data / name).read_bytes().splitlines()]
    good = [row for row in expected if isinstance(row, tuple)]
    assert whole.labels.tolist() == [row[0] for row in good]
    assert whole.keys.tolist() == [key for row in good for key in row[1]]


def test_plain_text_has_no_format(real_data: Path) -> None:
    with pytest.raises(Exception, match="looks like none of"):
        detect_format(real_data / "text" / "tinyshakespeare.txt")


def test_reading_compiles_no_further_signatures(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    kernels.compile_kernels()
    row = b"1\t" + b"\t".join([b"5"] * 13 + [b"05db9164"] * 26) + b"\n"
    files = {"a": row * 10 + b"bad\n", "b": b"1 1:1\n0 2:2.5\nbad\n", "c": b"y,a,b\n1,x,2\n0,y,z\n"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        for _ in range(2):
            with open_dataset(tmp_path / name, cache_dir=tmp_path / "cache") as dataset:
                assert list(dataset.read(0, 0, 3))
    for kernel in kernels.KERNELS:
        assert len(getattr(kernel, "signatures", [0])) == 1, kernel
