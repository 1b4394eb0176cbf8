"""Arguments that name data files: patterns, and ``-`` for standard input."""

from __future__ import annotations

import gzip
import io
import json
import sys
import tempfile
from pathlib import Path

import pytest

from paceline import cli
from paceline.cli.data_arguments import expand_pattern

TEXT = b"".join(b"%d %d:1 7:2\n" % (i % 2, i) for i in range(200))


def test_patterns_are_replaced_by_the_matching_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b.svm", "a.svm", "[x].svm", "a.tsv"):
        Path(name).touch()
    Path("c.svm").mkdir()
    assert expand_pattern("*.svm") == ["[x].svm", "a.svm", "b.svm"]
    assert expand_pattern("[x].svm") == ["[x].svm"]
    assert expand_pattern("?.tsv") == ["a.tsv"]
    assert expand_pattern("missing.svm") == ["missing.svm"]


def test_a_pattern_of_arrays_does_not_match_label_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.npy", "a.y.npy", "b.npz", "b.y.npy", "c.y.npy"):
        Path(name).touch()
    assert expand_pattern("*.np[yz]") == ["a.npy", "b.npz", "c.y.npy"]
    assert expand_pattern("*.y.npy") == ["a.y.npy", "b.y.npy", "c.y.npy"]


@pytest.mark.parametrize("is_packed", [False, True])
def test_standard_input_is_stored_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_packed: bool
) -> None:
    """Standard input, compressed or not, is stored in a file, which the command reports and removes at its end."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(cli, "raise_on_sigterm", lambda: None)
    data = gzip.compress(TEXT) if is_packed else TEXT
    for arguments in (["describe", "-", "--json"], ["convert", "-", str(tmp_path / "out"), "--json"]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
        cli.main()
        captured = capsys.readouterr()
        assert f"paceline: standard input, {len(data):,} bytes, is stored in {tmp_path}" in captured.err
        found = json.loads(captured.out)
        assert found.get("format", "libsvm") == "libsvm"
        assert found.get("examples", 200) == 200
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("arguments", "text", "status", "message"),
    [
        (["-"], b"", 1, "standard input is empty"),
        (["-", "-"], TEXT, 2, "'-' is given twice"),
        (["-", "--no-such-option"], TEXT, 2, "unknown option"),
        (["-", "--format", "none"], TEXT, 2, "none"),
    ],
)
def test_unreadable_standard_input(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    text: bytes,
    status: int,
    message: str,
) -> None:
    """The error is one sentence and no file remains, even if the command does not start."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(cli, "raise_on_sigterm", lambda: None)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    monkeypatch.setattr(sys, "argv", ["paceline", "describe", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code, message in capsys.readouterr().err) == (status, True)
    assert list(tmp_path.iterdir()) == []
