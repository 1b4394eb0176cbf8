"""Errors that ``paceline run`` detects before it starts a process: the message is one sentence, the status is 2."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from paceline import cli

_CLUSTER = {"server": ["127.0.0.1:7001"], "worker": ["127.0.0.1:7002", "127.0.0.1:7003"]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a script that must not be run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "raise_on_sigterm", lambda: None)
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    (tmp_path / "s.py").write_text("open('ran', 'w')")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("open('ran', 'w')")
    (tmp_path / "file").write_text("")
    (tmp_path / "c.json").write_text(json.dumps(_CLUSTER))
    (tmp_path / "workers.json").write_text(json.dumps({"worker": _CLUSTER["worker"]}))
    return tmp_path


def refused(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str) -> str:
    """Check that the command fails with status 2 and runs no script; return its standard error."""
    monkeypatch.setattr(sys, "argv", ["paceline", "run", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    captured = capsys.readouterr()
    assert (captured.out, ended.value.code) == ("", 2), captured
    assert not (folder / "ran").exists()
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("missing.py", "no script missing.py"),
        ("package", "is a folder without a __main__.py"),
        ("-m missing", "no module missing"),
        ("-m package.missing", "no module package.missing"),
        ("-m s.py", "no module s.py"),
        ("--strategy x s.py", "--strategy x: expected one of one-device, "),
        ("--nproc-per-node 0 s.py", "--nproc-per-node 0: expected 1 or more"),
        ("--nnodes 0 s.py", "--nnodes 0: expected 1 or more"),
        (f"--nproc-per-node {10**20} s.py", f"--nproc-per-node {10**20}: expected at most 1,000,000"),
        (f"--on slurm --nnodes {10**11} --dry-run s.py", f"--nnodes {10**11}: expected at most 1,000,000"),
        (f"--strategy parameter-server --servers {10**11} s.py", f"--servers {10**11}: expected at most 1,000,000"),
        ("--nnodes 2 --node-rank 2 --master-addr h s.py", "--node-rank 2: there are 2 nodes"),
        ("--nnodes 2 s.py", "pass --master-addr"),
        ("--nnodes 2 --master-addr 127.0.0.1 s.py", "Set PACELINE_TOKEN to the same secret"),
        ("--master-port 65535 s.py", "expected a port from 1 to 65534"),
        ("--master-addr 192.0.2.1 s.py", "pass --master-port too"),
        ("--threads 0 s.py", "--threads 0"),
        ("--strategy parameter-server --servers 0 s.py", "0 servers: expected 1 or more"),
        ("--strategy all-reduce --servers 1 s.py", "has no servers"),
        ("--strategy all-reduce --stale drop:2 s.py", "Leave --stale drop:2 out"),
        ("--strategy all-reduce --heartbeat-timeout 5 s.py", "no servers. Leave --heartbeat-timeout 5 out"),
        ("--strategy parameter-server --stale drop:2 s.py", "drop:2 has no effect under sequential"),
        ("--strategy parameter-server --consistency x s.py", "--consistency x: expected"),
        ("--strategy all-reduce --replicas 2 s.py", "Leave --replicas 2 out"),
        ("--strategy parameter-server --replicas 1 s.py", "a row and its replicas need 2 servers"),
        ("--servers 2 --replicas 2 s.py", "a row and its replicas need 3 servers"),
        ("--strategy mirrored --nproc-per-node 2 s.py", "strategy mirrored runs in one process"),
        ("--log-dir file/x s.py", "--log-dir file/x: cannot create this folder"),
        ("--log-dir file s.py", "--log-dir file: cannot create this folder"),
        ("--job worker s.py", "--job worker is for --cluster"),
        ("--cluster c.json s.py", "pass --job server|worker and --index N"),
        ("--cluster c.json --job ps --index 0 s.py", "--job ps: expected one of server, worker"),
        ("--cluster c.json --job worker --index 2 s.py", "expected a number from 0 to 1"),
        ("--cluster workers.json --job server --index 0", "the cluster has 0 of that job"),
        ("--cluster c.json --job server --index 0 s.py", "runs no script"),
        ("--cluster c.json --job worker --index 0", "no script"),
        ("--cluster c.json --job worker --index 0 --servers 2 s.py", "Leave --servers out"),
        ("--cluster c.json --job worker --index 0 s.py", "Set PACELINE_TOKEN"),
        ("--cluster missing.json --job worker --index 0 s.py", "cannot read it: No such file"),
        ("--cluster workers.json --job worker --index 0 --strategy hybrid s.py", "expected 1 or more"),
    ],
)
def test_wrong_usage(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    error = refused(folder, monkeypatch, capsys, arguments)
    assert message in error
    assert error.startswith("paceline: ")
    assert error.count("\n") == 1


def test_ports_in_use(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", "a token for tests")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error = refused(folder, monkeypatch, capsys, f"--master-port {port} s.py")
        assert f"--master-port or MASTER_PORT: cannot listen on 127.0.0.1:{port}: the port is in use" in error
        (folder / "c.json").write_text(json.dumps({"server": [f"127.0.0.1:{port}"], "worker": ["127.0.0.1:7002"]}))
        error = refused(folder, monkeypatch, capsys, "--cluster c.json --job server --index 0")
        assert f"server 0 of c.json: cannot listen on 127.0.0.1:{port}: the port is in use" in error
