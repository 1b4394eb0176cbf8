"""Errors that the command line detects before it starts a process: the message is one sentence; the exit status."""

from __future__ import annotations

import gzip
import os
import signal
import sys
from pathlib import Path

import pytest

from paceline import cli
from paceline.cli.termination import Terminated

LINE = "\t".join(["1", *["5"] * 13, *["68fd1e64"] * 26]) + "\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with some files to train on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "raise_on_sigterm", lambda: None)
    (tmp_path / "good.tsv").write_text(LINE * 100)
    (tmp_path / "cut.tsv.gz").write_bytes(gzip.compress(os.urandom(10_000))[:4000])
    (tmp_path / "garbage").write_bytes(bytes(range(256)) * 100)
    (tmp_path / "nolabel.csv").write_text("a,b,c\n" + "1,2,x\n" * 50)
    (tmp_path / "some.csv").write_text("label,b,c\n" + "1,2,x\n" * 50)
    (tmp_path / "classes.csv").write_text("label;b\n" + "".join(f"{i % 3};x\n" for i in range(50)))
    (tmp_path / "onetwo.svm").write_text("1 7:1\n2 8:1\n" * 50)
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "notes.txt").write_text("mine")
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Run a command in this process; return its status and its standard error."""
    monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert isinstance(ended.value.code, int)
    return ended.value.code, captured.err


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ("train cut.tsv.gz", 1, "cut.tsv.gz is truncated"),
        ("train garbage", 1, "looks like none of criteo, libsvm, libffm, jsonl, vw, csv, parquet"),
        ("train good.tsv --eval missing.tsv", 1, "missing.tsv does not exist"),
        ("train good.tsv some.csv", 1, "some.csv looks like csv, and good.tsv looks like criteo"),
        ("train good.tsv --validation some.csv", 1, "some.csv looks like csv, and good.tsv looks like criteo"),
        ("train good.tsv --validation missing.tsv", 1, "missing.tsv does not exist"),
        ("train good.tsv --memory-limit 0", 2, "--memory-limit 0: expected a positive number of bytes"),
        ("train good.tsv --spill-dir .", 2, "--spill-dir . has no effect without a limit"),
        (
            "train good.tsv --memory-limit 8G --spill-dir no",
            2,
            "no: cannot store rows there: No such file or directory",
        ),
        ("server --scheduler 127.0.0.1:1 --memory-limit none", 2, "--memory-limit none: expected a positive"),
        ("train good.tsv --expire-after 0", 2, "--expire-after 0: expected 1 to 62 passes"),
        (
            "train good.tsv --expire-after 2 --filters top-k:0.1",
            2,
            "--expire-after with --filters top-k: ",
        ),
        ("train good.tsv --solver proximal-blocks --expire-after 2", 2, "--expire-after does not apply to --solver"),
        ("train good.tsv --snapshot-dir s", 2, "--snapshot-dir needs --snapshot-every"),
        ("train good.tsv --snapshots 5", 2, "--snapshots needs --snapshot-every"),
        ("train good.tsv --numeric-scale log", 2, "--numeric-scale log applies to numbers, but criteo has none"),
        (
            "train good.tsv --class-weight 7:100",
            2,
            "--class-weight 7:100: no example has this label",
        ),
        (
            "train classes.csv --model softmax --class-weight 2:3,7:9",
            2,
            "--class-weight 7:9: no example has this label. The labels are 0, 1, 2",
        ),
        (
            "train good.tsv --update adagrad --warmup 0.5 --consistency sequential",
            2,
            "--warmup 0.5: under sequential consistency",
        ),
        ("train good.tsv --patience 3", 2, "--patience needs a validation file: pass --validation"),
        ("train good.tsv --solver blocks", 2, "--solver blocks: expected minibatches or proximal-blocks"),
        ("train good.tsv --max-delay 2 --plot p.html", 2, "--max-delay, --plot: only for --solver proximal-blocks"),
        (
            "train good.tsv --solver proximal-blocks --model fm",
            2,
            "needs --model lr, not fm",
        ),
        (
            "train good.tsv --solver proximal-blocks --lr 0.1",
            2,
            "--lr does not apply to --solver proximal-blocks",
        ),
        (
            "train good.tsv --solver proximal-blocks --min-count 2",
            2,
            "--min-count does not apply to --solver proximal-blocks",
        ),
        (
            "train good.tsv --solver proximal-blocks --snapshot-every 5s",
            2,
            "--snapshot-every does not apply to --solver proximal-blocks",
        ),
        (
            "train good.tsv --solver proximal-blocks --consistency bounded:4",
            2,
            "--consistency bounded:4: --solver proximal-blocks sums over all workers",
        ),
        (
            "train good.tsv --solver proximal-blocks --filters key-caching,quantize:8",
            2,
            "--filters quantize: --solver proximal-blocks needs",
        ),
        ("train good.tsv --solver proximal-blocks --plot no/p.html", 2, "--plot no/p.html: No such file"),
        (
            "train good.tsv --solver proximal-blocks --tolerance 0",
            2,
            "--tolerance 0: expected a number greater than 0 and less than 1",
        ),
        ("train good.tsv --workers 0", 2, "--workers 0: expected a number of 1 or more"),
        ("train good.tsv --heartbeat-timeout=0", 2, "--heartbeat-timeout 0: expected a number of 0.5 or more"),
        ("train good.tsv --batchsize 5", 2, "unknown option --batchsize. Did you mean --batch-size?"),
        ("train good.tsv --zzz 1", 2, "unknown option --zzz. See 'paceline train --help'"),
        ("train good.tsv --lr -1", 2, "--lr -1: expected a number greater than 0"),
        ("train good.tsv --lr nan", 2, "--lr nan: expected a number greater than 0"),
        ("train good.tsv --l2 -1", 2, "--l2 -1: expected a number of 0 or more"),
        ("train good.tsv --solver proximal-blocks --l1 -1", 2, "--l1 -1: expected a number of 0 or more"),
        ("train good.tsv --schedule cosin --update sgd", 2, "--schedule cosin: expected one of constant, linear"),
        ("train good.tsv --interactions C1:C99", 2, "unknown column 'C99'; the columns are I1, I2"),
        ("train good.tsv --count-cells 99", 2, "Pass --min-count too"),
        ("train good.tsv --min-count 0", 2, "--min-count 0: expected 1 to"),
        (
            "train good.tsv --model ffm --interactions C1:C2",
            2,
            "not an option of --model ffm, which crosses all",
        ),
        ("train nolabel.csv", 2, "Name the label with --label"),
        ("train nolabel.csv --numeric a", 2, "Name the label with --label"),
        ("train some.csv --numeric b --text b", 2, "--text b: --numeric names this column too"),
        ("train some.csv --header perhaps", 2, "--header perhaps: expected one of auto, yes, no"),
        ("train some.csv --max-malformed 2", 2, "--max-malformed 2: expected a fraction from 0 to 1"),
        ("train good.tsv --ignore b", 2, "criteo has no columns to choose. Leave --ignore out"),
        ("train classes.csv", 1, "classes.csv: labels are 0, 1 and 2, expected two: 0 and 1, or -1 and 1"),
        (
            "train onetwo.svm",
            1,
            "onetwo.svm: labels are 1 and 2, expected two: 0 and 1, or -1 and 1",
        ),
        ("train onetwo.svm --positive 3", 2, "labels are 1 and 2, without 3, the positive label"),
        (
            "train onetwo.svm --positive spam",
            2,
            "--positive spam: the labels of this data are numbers",
        ),
        (
            "train onetwo.svm --positive 1 --model softmax",
            2,
            "--positive is not an option of --model softmax, only of lr, fm, ffm",
        ),
        ("train good.tsv --label y --numeric b", 2, "criteo has no columns to choose"),
        ("train good.tsv --format tsv", 2, "format 'tsv' is unknown. Choose one of criteo"),
        ("train good.tsv --stale drop", 2, "expected 'accept'"),
        ("train good.tsv --stale drop:2 --consistency sequential", 2, "no effect under sequential"),
        (
            "train good.tsv --update momentum --l1 1",
            2,
            "momentum has no L1 penalty. Leave --l1 out, or use",
        ),
        ("train good.tsv --save good.tsv", 1, "a file has that name"),
        ("train good.tsv --save good.tsv/model", 1, "good.tsv"),
        ("train good.tsv --snapshot-every often", 2, "expected a time such as 30s"),
        ("train good.tsv --snapshot-every 10s", 2, "--snapshot-dir DIR"),
        ("bench ps --update adam", 2, "expected sgd or ftrl"),
        ("train good.tsv --token-file missing", 2, "--token-file is for a running cluster"),
        ("predict good.tsv good.tsv", 1, "good.tsv is a file, but a Paceline model is a directory"),
        ("inspect good.tsv", 1, "good.tsv is a file, but a Paceline model is a directory"),
        ("serve good.tsv --port 0", 1, "good.tsv is a file, but a Paceline model is a directory"),
        ("worker --scheduler 127.0.0.1:9", 2, "--token-file"),
        ("worker --token-file good.tsv", 2, "no scheduler"),
        ("server --token-file good.tsv", 2, "no scheduler"),
    ],
)
def test_one_sentence(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    status: int,
    message: str,
) -> None:
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    before = sorted(folder.rglob("*"))
    code, text = run(monkeypatch, capsys, *arguments.split())
    assert code == status
    assert text.startswith("paceline: ")
    assert text.count("\n") == 1
    assert message in text
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("predict", "Usage: paceline predict"),
    ],
)
def test_wrong_usage(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["paceline", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    captured = capsys.readouterr()
    assert ended.value.code == 2
    assert message in captured.out + captured.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "locked").mkdir(mode=0o500)
    for place in ("locked", "locked/model"):
        code, text = run(monkeypatch, capsys, "train", "good.tsv", "--save", place)
        assert (code, text.count("\n")) == (1, 1)


def test_ctrl_c_while_modules_are_imported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(words: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "start_fork_server", interrupt)
    assert run(monkeypatch, capsys, "doctor") == (130, "paceline: interrupted\n")


def test_each_signal_has_its_own_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from paceline.launch import doctor

    monkeypatch.setattr(cli, "raise_on_sigterm", lambda: None)
    for error, status in (
        (KeyboardInterrupt, 130),
        (Terminated, 143),
        (Terminated(signal.SIGHUP), 129),
        (OSError(28, "No space left", "/x"), 1),
    ):

        def fail(error: BaseException | type[BaseException] = error) -> None:
            raise error

        monkeypatch.setattr(doctor, "examine", fail)
        code, text = run(monkeypatch, capsys, "doctor")
        assert (code, text.count("\n")) == (status, 1)
