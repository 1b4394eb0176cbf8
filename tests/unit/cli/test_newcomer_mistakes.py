"""Typical mistakes of new users: each message is one sentence with the option or file, the value and the remedy."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import cli, collectives, torch
from paceline.data import open_dataset
from paceline.models.registry import make_model

COMMANDS = [
    # Command, exit status, and texts of the message: option or file, value, remedy.
    ("trian clicks.csv", 2, ["'trian'", "Did you mean 'train'?"]),
    ("train click.csv", 1, ["click.csv does not exist"]),
    ("train *.parquet", 1, ["*.parquet: no file matches"]),
    ("train folder", 1, ["folder is a folder", "folder/*"]),
    ("train empty.csv", 1, ["empty.csv is empty", "no line"]),
    ("train header.csv", 1, ["header.csv has one line, 'click,site,age'", "no row"]),
    ("train clicks.csv.gz", 1, ["clicks.csv.gz", "is not a gzip file", "Rename it"]),
    ("train clicks.csv --eval clicks.tsv", 1, ["clicks.tsv looks like criteo", "clicks.csv looks like csv"]),
    ("train clicks.csv --label clik", 2, ["--label clik", "click, site, age"]),
    ("train clicks.csv --categorical sit", 2, ["--categorical sit", "click, site, age"]),
    ("train clicks.csv --numeric site", 1, ["'site' is not a finite number", "--numeric, --categorical"]),
    ("train texts.csv --label label", 1, ["labels are text0, text1", "--positive"]),
    ("train clicks.csv --format cvs", 2, ["'cvs'", "Choose one of criteo"]),
    ("train clicks.csv --epohcs 3", 2, ["unknown option --epohcs", "Did you mean --epochs?"]),
    ("train clicks.csv --learning-rate 1", 2, ["unknown option --learning-rate", "Did you mean --lr?"]),
    ("train clicks.csv --epochs three", 2, ["--epochs three", "expected a whole number"]),
    ("train clicks.csv --epochs", 2, ["--epochs", "the value is missing", "--epochs VALUE"]),
    ("train clicks.csv --lr 0", 2, ["--lr 0", "expected a number greater than 0"]),
    ("train clicks.csv --model logistic", 2, ["--model logistic: expected one of lr, fm"]),
    ("train clicks.csv --dim 8", 2, ["--dim", "--model lr", "only of fm, ffm"]),
    ("train clicks.csv --update ADAM", 2, ["update rule 'ADAM'", "expected one of ftrl, sgd"]),
    ("train clicks.csv --schedule cosine", 2, ["--schedule", "ftrl has no such rate", "another --update"]),
    ("train clicks.csv --servers 0", 2, ["--servers 0", "expected a number of 1 or more"]),
    ("train clicks.csv --replicas 1", 2, ["--replicas 1 with --servers 1", "need 2 servers", "lower replicas"]),
    ("train clicks.csv --consistency async", 2, ["--consistency async", "'bounded:N'"]),
    ("train clicks.csv --memory-limit 8gigs", 2, ["--memory-limit 8gigs", "such as 512M"]),
    ("train clicks.csv --filters gzip", 2, ["filter 'gzip'", "expected one of", "zstd"]),
    ("train clicks.csv --save folder", 1, ["folder", "it contains other files", "an empty or new directory"]),
    ("train clicks.csv --scheduler 127.0.0.1:9", 2, ["no token", "--token-file FILE", "PACELINE_TOKEN"]),
    ("predict folder clicks.csv", 1, ["folder holds no model", "no manifest.json"]),
    ("worker --scheduler 127.0.0.1:9 --token-file no.txt", 2, ["token from no.txt", "No such file"]),
    ("run train.py", 2, ["no script train.py"]),
    ("run clicks.csv", 2, ["clicks.csv is not a Python script", "ass a script", "'paceline train'"]),
    ("run notes", 2, ["notes is not a Python script", "ass a script"]),
    ("run --nproc 2 script.py", 2, ["unknown option --nproc", "--nproc-per-node"]),
    ("server --scheduler 127.0.0.1 --wait 60", 2, ["--scheduler", "'127.0.0.1' is not an address"]),
    ("run --strategy ps script.py", 2, ["--strategy ps: expected one of one-device"]),
    ("explain train.py", 2, ["no script train.py"]),
    ("explain --nodes 2 script.py", 2, ["--nodes 2", "--link, such as 10Gbit"]),
    ("explain --nodes 2 --link 0Gbit script.py", 2, ["--link 0Gbit", "such as 10Gbit"]),
    ("explain --link 1Gbit script.py", 2, ["--link 1Gbit", "one node has no network link", "--nodes N"]),
    ("explain --nproc-per-node 5000 script.py", 2, ["--nproc-per-node 5000", "this machine, which has"]),
    ("compare --strategies ring script.py", 2, ["--strategies ring: expected one of one-device"]),
    ("compare --strategies all-reduce:eventual script.py", 2, ["all-reduce has no servers", "Leave :eventual out"]),
    ("simulate --model lenet", 2, ["--model lenet", "resnet50, resnet101, vgg16"]),
    ("simulate --nodes 1", 2, ["--nodes 1", "such as 8, 2,8,32 or 2..512"]),
    ("run --strategy auto --nnodes 2 script.py", 2, ["--strategy auto", "Leave --nnodes 2 out", "paceline explain"]),
    ("coordinator --max-ranks 2", 2, ["--min-ranks is missing", "--min-ranks 1"]),
    ("coordinator --min-ranks 0", 2, ["--min-ranks 0", "expected 1 or more"]),
    ("coordinator --min-ranks 3 --max-ranks 2", 2, ["--max-ranks 2", "--min-ranks (3) or more"]),
    ("coordinator --min-ranks 1 --balance", 2, ["--balance", "--global-batch N"]),
    ("coordinator --min-ranks 1 --host 0.0.0.0", 2, ["0.0.0.0:7338", "PACELINE_TOKEN"]),
    ("run --nproc-per-node 0 script.py", 2, ["--nproc-per-node 0", "expected 1 or more"]),
]

CALLS: list[tuple[Callable[[], Any], type[Exception], list[str]]] = [
    (lambda: paceline.load("model"), paceline.ModelError, ["model does not exist"]),
    (lambda: open_dataset(["click.csv"]), paceline.DataError, ["click.csv does not exist"]),
    (lambda: paceline.FTRL(alpha=-1), paceline.UsageError, ["FTRL(alpha=-1)", "expected a number greater than 0"]),
    (lambda: paceline.local_cluster(servers=0), paceline.UsageError, ["servers=0", "at least 1 server"]),
    (lambda: make_model("fm", hidden=(8,)), paceline.UsageError, ["--hidden", "--model fm", "only of deepfm, dcn"]),
]


_SCHEDULER, _TOKEN = "PACELINE_SCHEDULER=h:1", "PACELINE_TOKEN=0123456789abcdef"
VARIABLES: list[tuple[str, Callable[[], Any], list[str]]] = [
    # Variables, a call that reads them, and texts of the message: variable, value, remedy.
    ("RANK=1", torch.strategy, ["the rank is 1", "set both RANK and WORLD_SIZE"]),
    ("WORLD_SIZE=2", torch.AllReduce, ["the world size is 2", "set both RANK and WORLD_SIZE"]),
    ("RANK=0 WORLD_SIZE=2 MASTER_PORT=7 MASTER_ADDR=a..b", collectives.init, ["MASTER_ADDR", "'a..b'"]),
    ("RANK=x", lambda: paceline.local_cluster(servers=1), ["RANK is 'x'", "a whole number"]),
    ("PACELINE_STRATEGY=typo", torch.strategy, ["PACELINE_STRATEGY='typo'", "one-device, mirrored"]),
    ("PACELINE_ALGORITHM=typo", collectives.init, ["PACELINE_ALGORITHM", "'typo'", "ring"]),
    ("PACELINE_FILTERS=gzip", torch.AllReduce, ["PACELINE_FILTERS", "'gzip'", "zstd"]),
    ("PACELINE_FILTERS=compress", torch.AllReduce, ["PACELINE_FILTERS", "compress:1"]),
    ("PACELINE_PULL_FILTERS=gzip", torch.ParameterServer, ["PACELINE_PULL_FILTERS", "'gzip'", "zstd"]),
    ("PACELINE_REPLICAS=0", torch.Mirrored, ["PACELINE_REPLICAS=0", "from 1 up"]),
    ("PACELINE_SNAPSHOT_DIR=d PACELINE_SNAPSHOT_EVERY=5x", torch.strategy, ["PACELINE_SNAPSHOT_EVERY='5x'", "5m or"]),
    ("PACELINE_SNAPSHOT_DIR=d PACELINE_STRATEGY=mirrored", torch.strategy, ["PACELINE_SNAPSHOT_DIR='d'", "mirrored"]),
    (f"PACELINE_SCHEDULER=h {_TOKEN}", paceline.connect, ["PACELINE_SCHEDULER", "'h'", "host:port"]),
    (f"PACELINE_SCHEDULER=h {_TOKEN}", torch.ParameterServer, ["PACELINE_SCHEDULER", "'h'", "host:port"]),
    (f"{_SCHEDULER} PACELINE_TOKEN=short", paceline.connect, ["PACELINE_TOKEN", "5 characters", "16"]),
    (f"{_SCHEDULER} PACELINE_TOKEN=short", torch.ParameterServer, ["PACELINE_TOKEN", "5 characters", "16"]),
    (f"{_SCHEDULER} {_TOKEN} PACELINE_TLS_CA=no.pem", paceline.connect, ["PACELINE_TLS_CA=no.pem", "no such file"]),
    ("", lambda: torch.strategy(global_batch=8), ["option global_batch", "--min-ranks N"]),
    ("", lambda: torch.strategy(elastic=True), ["elastic=True", "--min-ranks N", "PACELINE_COORDINATOR"]),
    ("PACELINE_COORDINATOR=h", torch.strategy, ["PACELINE_COORDINATOR", "'h'", "host:port"]),
    ("PACELINE_COORDINATOR=h:0", torch.strategy, ["PACELINE_COORDINATOR", "'h:0'", "from 1 up"]),
    ("PACELINE_COORDINATOR=h:1", torch.strategy, ["h:1", "PACELINE_TOKEN"]),
    ("PACELINE_COORDINATOR=h:1", torch.AllReduce, ["AllReduce()", "PACELINE_COORDINATOR", "strategy()"]),
    ("PACELINE_COORDINATOR=h:1", lambda: torch.strategy("sharded", elastic=True), ["elastic=True", "strategy sharded"]),
    ("PACELINE_COORDINATOR=h:1 PACELINE_STRATEGY=sharded", torch.strategy, ["PACELINE_COORDINATOR=h:1", "all-reduce"]),
    ("", lambda: torch.strategy(devise="cpu"), ["option devise", "device, seed"]),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    monkeypatch.setattr(cli, "raise_on_sigterm", lambda: None)
    rows = "click,site,age\n" + "1,a,30\n0,b,40\n" * 50
    for name, text in (
        ("clicks.csv", rows),
        ("clicks.csv.gz", rows),
        ("clicks.tsv", "\t".join(["1", *["5"] * 13, *["68fd1e64"] * 26]) + "\n"),
        ("empty.csv", ""),
        ("notes", "not a script"),
        ("script.py", ""),
        ("header.csv", "click,site,age\n"),
        ("texts.csv", "label,site\n" + "".join(f"text{i},b\n" for i in range(60))),
    ):
        (tmp_path / name).write_text(text)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    return tmp_path


def run(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    monkeypatch.setattr(sys, "argv", ["paceline", *command.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    captured = capsys.readouterr()
    assert captured.out == ""
    return ended.value.code, captured.err


@pytest.mark.parametrize(("command", "status", "texts"), COMMANDS)
def test_commands(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    status: int,
    texts: list[str],
) -> None:
    code, message = run(command, monkeypatch, capsys)
    assert (code, message.count("\n")) == (status, 1), message
    assert message.startswith("paceline: ")
    assert [text for text in texts if text not in message] == [], message


@pytest.mark.parametrize(("call", "kind", "texts"), CALLS)
def test_calls(folder: Path, call: Callable[[], Any], kind: type[Exception], texts: list[str]) -> None:
    with pytest.raises(kind) as raised:
        call()
    message = str(raised.value)
    assert [text for text in texts if text not in message] == [], message


@pytest.mark.parametrize(("variables", "call", "texts"), VARIABLES)
def test_variables(
    folder: Path, monkeypatch: pytest.MonkeyPatch, variables: str, call: Callable[[], Any], texts: list[str]
) -> None:
    set_variables(variables, monkeypatch)
    with pytest.raises(paceline.UsageError) as raised:
        call()
    message = str(raised.value)
    assert [text for text in texts if text not in message] == [], message
    assert "__init__" not in message


@pytest.mark.parametrize(
    ("variables", "texts"),
    [
        ("PET_NODE_RANK=1", ["PET_NODE_RANK is 1", "PET_NNODES is missing"]),
        ("PET_NPROC_PER_NODE=0", ["PET_NPROC_PER_NODE is '0'"]),
        ("PET_NNODES=0", ["PET_NNODES is '0'"]),
        ("PET_NNODES=2", ["2 nodes", "PET_MASTER_ADDR"]),
        ("PET_NNODES=2 PET_NODE_RANK=2 PET_MASTER_ADDR=h", ["2 nodes", "PET_NODE_RANK"]),
        ("PET_NNODES=1 PET_NPROC_PER_NODE=2", ["--min-ranks 3", "2 ranks"]),
        ("PET_NPROC_PER_NODE=2", ["--min-ranks 3", "2 ranks"]),
        ("PACELINE_TLS_KEY=no.pem", ["PACELINE_TLS_KEY=no.pem"]),
        ("PET_NPROC_PER_NODE=3 PACELINE_COORDINATOR=h:1", ["PACELINE_COORDINATOR=h:1", "--min-ranks", "Unset"]),
    ],
)
def test_variables_of_run(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variables: str,
    texts: list[str],
) -> None:
    set_variables(variables, monkeypatch)
    code, message = run("run --strategy all-reduce --min-ranks 3 script.py", monkeypatch, capsys)
    assert (code, message.count("\n")) == (2, 1), message
    assert [text for text in texts if text not in message] == [], message
    assert not {"--nnodes", "--nproc-per-node"} & set(message.split()), message


def set_variables(variables: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))


@pytest.mark.parametrize(
    "command",
    [
        "scheduler --port 0",
        "server --wait 0",
        "worker --wait 0",
        "coordinator --min-ranks 1",
        "train --scheduler x:1 x.tsv",
    ],
)
def test_every_command_reads_the_variables_of_tls(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (folder / "x.t").write_text("1 1:1\n")
    set_variables(f"PACELINE_TOKEN={'x' * 16} PACELINE_SCHEDULER=127.0.0.1:1 PACELINE_TLS_KEY=no.pem", monkeypatch)
    code, message = run(command, monkeypatch, capsys)
    assert (code, message.count("\n")) == (2, 1), message
    assert "PACELINE_TLS_KEY=no.pem" in message


@pytest.mark.parametrize("command", ["scheduler --token-file token", "coordinator --min-ranks 1"])
def test_a_port_in_use(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, message = run(f"{command} --port {port} --host 127.0.0.1", monkeypatch, capsys)
    assert (code, message.count("\n")) == (1, 1), message
    assert f"127.0.0.1:{port}" in message


def test_options_after_the_script(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.py").write_text("")
    monkeypatch.setattr(sys, "argv", ["paceline", "run", "train.py", "--nproc-per-node", "2"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "--nproc-per-node after train.py is an argument of the script" in capfd.readouterr().err
