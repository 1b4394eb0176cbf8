"""A cluster whose roles are started separately, like on several machines."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme

from .running import Commands, Running, parse_json


def start_scheduler(paceline: Commands, *arguments: str | Path) -> tuple[Running, str]:
    """Start a scheduler; return it and its address."""
    scheduler = paceline.start("scheduler", "--port", "0", "--token-file", "token", *arguments)
    found = re.search(r"tcp://([0-9.]+:\d+)", scheduler.wait_line("listening on"))
    assert found is not None
    return scheduler, found.group(1)


def end(scheduler: Running, *roles: Running, is_lost: bool = False) -> None:
    """Send Ctrl-C to the scheduler, and check that every role ends normally."""
    scheduler.signal(signal.SIGINT)
    for role in (scheduler, *roles):
        finished = role.wait(60.0)
        assert finished.status == 0, (role.process.args, finished)
        assert "Traceback" not in finished.err
        assert ("are lost" in finished.err) == is_lost, finished


def speak(address: str, data: bytes) -> bytes:
    """Send bytes to a port; return all replies until it closes the connection."""
    host, port = address.split(":")
    answer = b""
    with socket.create_connection((host, int(port)), 10.0) as connected:
        connected.settimeout(15.0)
        connected.sendall(data)
        try:
            while more := connected.recv(65536):
                answer += more
        except ConnectionResetError:
            pass
    return answer


def train_once(paceline: Commands, *arguments: str, data: tuple[Path, Path]) -> dict[str, Any]:
    """Train one pass and evaluate; return the result."""
    return dict(paceline.succeed("train", data[0], "--epochs", "1", "--eval", data[1], *arguments, "--json", "-q").json)


def test_a_cluster_by_hand(paceline: Commands, click_log: tuple[Path, Path], tmp_path: Path) -> None:
    scheduler, address = start_scheduler(paceline, "--servers", "2", "--workers", "2", "--heartbeat-timeout", "100")
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    joining = ["--scheduler", address, "--token-file", "token"]
    servers = [paceline.start("server", *joining) for _ in range(2)]
    workers = [paceline.start("worker", *joining) for _ in range(2)]
    listening = [re.search(r"tcp://([0-9.:]+)", server.wait_line("listening on")) for server in servers]
    for worker in workers:
        worker.wait_line("joined the cluster")

    long = paceline.start(
        "train", click_log[0], "--epochs", "100000", "--progressive", *joining, "--save", "unfinished"
    )
    long.wait_trains()
    for worker in workers:  # the other training waits for seconds, in which these would use all cores
        worker.signal(signal.SIGSTOP)
    second = paceline.start("train", click_log[0], *joining, "-q")  # not connected for some seconds
    ports = [address, *(found.group(1) for found in listening if found is not None)]
    assert len(ports) == 3
    for port in ports:  # a foreign process is rejected
        assert b"HTTP/1.1 200" not in speak(
            port, b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: curl/8.5.0\r\n\r\n"
        )
        speak(port, os.urandom(5000))
    stranger = paceline.run("worker", "--scheduler", address, "--token-file", token(tmp_path, "wrong"))
    assert (stranger.status, len(stranger.err.splitlines())) == (1, 1)
    assert "token" in stranger.err
    refused = second.wait()
    assert refused.status == 1
    assert "another training uses this cluster" in refused.err
    for worker in workers:
        worker.signal(signal.SIGCONT)
    late = paceline.start("worker", *joining)
    late.wait_line("joined the cluster")
    long.signal(signal.SIGINT)
    finished = long.wait()
    assert finished.status == 130
    assert "the unfinished model is saved in unfinished" in finished.err

    # Workers take the next job. It starts with an empty table, and may have other hyperparameters.
    first = train_once(paceline, *joining, "--lr", "0.03", "--l1", "0.5", data=click_log)
    result = train_once(paceline, *joining, "--save", "model", data=click_log)
    again = train_once(paceline, *joining, data=click_log)
    assert result["examples"] == 12_000
    assert result["auc"] > 0.6
    # The order of the pushes changes the loss by 1e-3, and a second pass over the data by 6e-3.
    assert again["log_loss"] == pytest.approx(result["log_loss"], abs=4e-3)
    assert abs(first["log_loss"] - result["log_loss"]) > 1e-4
    further = train_once(paceline, *joining, "--init-from", "model", data=click_log)
    assert further["num_features"] == result["num_features"]
    # another rule for the same table
    other = paceline.run("train", click_log[0], *joining, "--update", "adagrad", "-q")
    assert (other.status, len(other.err.splitlines())) == (2, 1)
    assert "End the cluster" in other.err
    missing = paceline.run("train", "missing.tsv", *joining)
    assert (missing.status, missing.err) == (1, "paceline: missing.tsv does not exist\n")
    end(scheduler, *servers, *workers, late)
    assert paceline.succeed("predict", "model", click_log[1], "--json").json["auc"] == pytest.approx(result["auc"])


@pytest.mark.thorough
def test_servers_join_and_leave_while_a_sequential_training_runs(
    paceline: Commands, click_log: tuple[Path, Path]
) -> None:
    scheduler, address = start_scheduler(paceline, "--servers", "1", "--workers", "1", "--consistency", "sequential")
    joining = ["--scheduler", address, "--token-file", "token"]
    first, worker = paceline.start("server", *joining), paceline.start("worker", *joining)
    first.wait_line("listening on")
    training = paceline.start(
        "train", click_log[0], "--epochs", "100000", "--progressive", *joining, "--save", "unfinished"
    )
    training.wait_trains()
    second = paceline.start("server", "--join", *joining)
    second.wait_line("listening on")
    first.signal(signal.SIGTERM)
    left = first.wait()
    assert (left.status, "Traceback" in left.err) == (0, False)
    worker.signal(signal.SIGSTOP)
    third = paceline.start("server", "--join", *joining)
    third.wait_line("listening on")
    second.signal(signal.SIGTERM)  # the worker must first report that it retains its pushes
    second.wait_line("moving rows to other servers")
    assert second.process.poll() is None
    worker.signal(signal.SIGCONT)
    left = second.wait()
    assert (left.status, "Traceback" in left.err) == (0, False)
    assert training.process.poll() is None
    training.signal(signal.SIGINT)
    finished = training.wait()
    assert (finished.status, "the unfinished model is saved in unfinished" in finished.err) == (130, True)
    assert 0.6 < paceline.succeed("predict", "unfinished", click_log[1], "--json").json["auc"] < 1.0
    end(scheduler, third, worker)


def test_servers_and_workers_wait_for_a_late_scheduler(paceline: Commands, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    joining: list[str | Path] = ["--scheduler", address, "--token-file", token(tmp_path, "some")]
    roles = [paceline.start("server", *joining), paceline.start("worker", *joining)]
    for role in roles:
        role.wait_line(f"waiting for the scheduler at {address}, at most 60 s")
    scheduler = paceline.start("scheduler", "--port", str(port), "--token-file", token(tmp_path, "some"))
    roles[1].wait_line("joined the cluster")
    joined = paceline.start("server", "--join", *joining)
    joined.wait_line("listening on")
    stranger = paceline.run("server", "--join", *joining[:2], "--token-file", token(tmp_path, "wrong"))
    assert (stranger.status, len(stranger.err.splitlines())) == (1, 1), stranger  # a rejected process does not wait
    assert "token" in stranger.err
    end(scheduler, *roles, joined)
    in_vain = paceline.run("server", "--join", *joining, "--wait", "2.5")
    assert (in_vain.status, len(in_vain.err.splitlines())) == (1, 2), in_vain
    assert f"the scheduler did not answer within 2.5 s: cannot reach tcp://{address}: no process listens" in in_vain.err


def token(folder: Path, text: str) -> Path:
    path = folder / f"token-{text}"
    path.touch(0o600)
    path.write_text(f"{text * 16}\n")
    return path


def test_a_dying_driver_frees_the_workers(paceline: Commands, click_log: tuple[Path, Path]) -> None:
    scheduler, address = start_scheduler(paceline, "--heartbeat-timeout", "1")
    joining = ["--scheduler", address, "--token-file", "token"]
    server, worker = paceline.start("server", *joining), paceline.start("worker", *joining)
    long = paceline.start("train", click_log[0], "--epochs", "100000", "--progressive", *joining)
    long.wait_trains()
    long.kill()
    assert paceline.succeed("train", click_log[0], "--epochs", "1", *joining, "--json", "-q").json["examples"] == 12_000
    long = paceline.start("train", click_log[0], "--epochs", "100000", "--progressive", *joining)
    long.wait_trains()
    server.signal(signal.SIGTERM)  # a leaving server drops its part of the model
    finished = long.wait()
    assert finished.status == 1
    assert "server 0 was lost, and with it a part of the model" in finished.err
    assert server.wait().status == 0
    end(scheduler, is_lost=True)
    assert worker.wait().status in (0, 1)


def test_a_restarted_scheduler(paceline: Commands, click_log: tuple[Path, Path]) -> None:
    scheduler, address = start_scheduler(paceline, "--workers", "2")
    joining = ["--scheduler", address, "--token-file", "token"]
    roles = [paceline.start("server", *joining), *(paceline.start("worker", *joining) for _ in range(2))]
    for role in roles[1:]:
        role.wait_line("joined the cluster")
    training = paceline.start("train", click_log[0], "--epochs", "15", "--progressive", *joining, "--json")
    training.wait_trains()
    scheduler.kill()
    again = ["scheduler", "--port", address.split(":")[1], "--token-file", "token", "--workers", "2"]
    scheduler = paceline.start(*again)
    scheduler.wait_line("listening on")
    refused = paceline.run(*again)  # the table exists already
    assert (refused.status, len(refused.err.splitlines())) == (1, 1), refused
    assert "in use" in refused.err
    finished = training.wait()
    assert finished.status == 0, finished
    assert "paceline: the scheduler died, and another scheduler replaced it" in finished.err
    result = parse_json(finished.out)
    assert (result["examples"], result["lost_workers"]) == (15 * 12_000, 0)
    end(scheduler, *roles)


def make_certificates(folder: Path) -> Callable[[str], list[str | Path]]:
    """Create an authority and certificates for 127.0.0.1; return the options that name them."""

    def make(name: str) -> list[str | Path]:
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1")
        issued.private_key_pem.write_to_path(folder / f"{name}.key")
        issued.cert_chain_pems[0].write_to_path(folder / f"{name}.pem")
        authority.cert_pem.write_to_path(folder / f"{name}-ca.pem")
        return ["--tls-cert", f"{name}.pem", "--tls-key", f"{name}.key", "--tls-ca", f"{name}-ca.pem"]

    return make


def test_tls(paceline: Commands, click_log: tuple[Path, Path], tmp_path: Path) -> None:
    make = make_certificates(tmp_path)
    good, bad = make("good"), make("bad")
    scheduler, address = start_scheduler(paceline, *good)
    joining = ["--scheduler", address, "--token-file", "token"]
    stranger = paceline.run("server", *joining, *bad)
    assert (stranger.status, len(stranger.err.splitlines())) == (1, 1), stranger
    assert "certificate" in stranger.err
    server, worker = paceline.start("server", *joining, *good), paceline.start("worker", *joining, *good)
    trained = paceline.succeed("train", click_log[0], "--epochs", "1", *joining, *good, "--json", "-q")
    assert parse_json(trained.out)["examples"] == 12_000
    end(scheduler, server, worker)


def test_roles_report_missing_services(paceline: Commands, tmp_path: Path) -> None:
    for role in ("server", "worker"):
        unconnected = paceline.run(
            role, "--scheduler", "127.0.0.1:9", "--wait", "0", "--token-file", token(tmp_path, "some")
        )
        assert (unconnected.status, len(unconnected.err.splitlines())) == (1, 1)
        assert "cannot reach tcp://127.0.0.1:9: no process listens there" in unconnected.err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        busy = paceline.run("scheduler", "--port", str(port), "--token-file", token(tmp_path, "some"))
    assert (busy.status, len(busy.err.splitlines())) == (1, 1)
    assert port in busy.err
    assert "in use" in busy.err
