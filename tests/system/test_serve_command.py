"""``paceline serve`` as a process: its answers, the replacement of the model under load, and its end."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")

from tests.unit.inference.conftest import save_weights
from tests.waiting import join

from .running import Commands


@contextmanager
def serving(model: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-m", "paceline", "serve", str(model), "--port", "0", "--poll", "0.05", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert "until Ctrl-C" in line, line
            yield process, int(line.split(", until")[0].rpartition(":")[2])
        finally:
            process.kill()


def predict(connection: http.client.HTTPConnection, rows: object) -> list[float]:
    connection.request("POST", "/predict", json.dumps(rows))
    answer = connection.getresponse()
    body = answer.read()
    assert answer.status == 200, body
    found: list[float] = json.loads(body)["predictions"]
    return found


def test_a_model_is_replaced_without_a_failed_request(tmp_path: Path) -> None:
    model = save_weights(tmp_path / "model", {1: 1.0})
    seen: set[float] = set()
    ended = threading.Event()

    with serving(model) as (process, port):

        def send_request() -> None:
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
                while not ended.is_set():
                    seen.update(predict(connection, [{"1": 1}]))

        clients = [threading.Thread(target=send_request) for _ in range(2)]
        for client in clients:
            client.start()
        for number in range(2, 5):
            save_weights(model, {1: float(number)})
            deadline = time.monotonic() + 60
            while len(seen) < number and time.monotonic() < deadline:
                time.sleep(0.02)
        ended.set()
        for client in clients:
            join(client)
        assert len(seen) == 4
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_a_port_in_use_and_a_missing_model(paceline: Commands, tmp_path: Path) -> None:
    save_weights(tmp_path / "model", {1: 1.0})
    running = paceline.start("serve", "model", "--port", "0")
    port = running.wait_line("until Ctrl-C").split(", until")[0].rpartition(":")[2]
    second = paceline.run("serve", "model", "--port", port)
    assert second.status == 1
    assert second.err.startswith(f"paceline: cannot serve on 127.0.0.1:{port}: Address already in use. Choose")
    assert second.err.count("\n") == 1
    running.signal(signal.SIGTERM)
    assert running.wait().status == 0
    missing = paceline.run("serve", tmp_path / "no", "--port", "0")
    assert (missing.status, missing.err.count("\n")) == (1, 1)
    assert f"{tmp_path / 'no'} does not exist" in missing.err
