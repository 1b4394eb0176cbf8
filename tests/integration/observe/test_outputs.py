"""The outputs of a collector: HTTP, JSON lines and TensorBoard, from a recorder's reports."""

from __future__ import annotations

import json
import os
import socket
import struct
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboardX.proto.event_pb2 import Event  # type: ignore[import-untyped]
from tests.free_ports import free_port

import paceline.torch as pt
from paceline import collectives
from paceline.environment import environment
from paceline.errors import AddressError, UsageError
from paceline.observe import recording
from paceline.observe.outputs import open_outputs
from paceline.observe.web import WebServer


def read_scalars(directory: Path) -> dict[str, float]:
    """Return the last value of each tag in a log directory of TensorBoard."""
    [file] = directory.iterdir()
    data = file.read_bytes()
    found: dict[str, float] = {}
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + size])
        found |= {value.tag: value.simple_value for value in event.summary.value}
        data = data[16 + size :]
    return found


def get(address: str, accept: str = "*/*") -> tuple[int, str]:
    request = urllib.request.Request(address, headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_reports_reach_every_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, board = tmp_path / "metrics.jsonl", tmp_path / "board"
    with open_outputs("test", metrics="0", metrics_file=file, tensorboard=board):
        recorder = recording.start(environment({**os.environ, "RANK": "3", "WORLD_SIZE": "4"}))
        assert recorder is not None
        assert recording.start(environment()) is recorder
        recorder.add("paceline_examples_total", 7)
        recorder.observe("paceline_step_seconds", 0.5)
        address = capsys.readouterr().err.split()[-1]
        recording.stop()
        for _ in range(100):
            status, text = get(address)
            assert status == 200
            if "paceline_examples_total" in text:
                break
        assert 'paceline_examples_total{rank="3"} 7.0' in text
        assert get(address, "application/openmetrics-text")[1].endswith("# EOF\n")
        assert get(address.replace("/metrics", "/other"))[0] == 404
    assert "PACELINE_METRICS" not in os.environ
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines[-1]["metrics"]["paceline_examples_total"] == [{"rank": "3", "value": 7.0}]
    assert lines[-1]["metrics"]["paceline_rank_memory_bytes"][0]["value"] > 1e6
    assert lines[-1]["metrics"]["paceline_rank_last_seen_seconds"] == [{"rank": "3", "value": 0.0}]  # it has ended
    scalars = read_scalars(board)
    assert scalars["paceline_step_seconds/rank_3/mean"] == pytest.approx(0.5)
    assert scalars["paceline_examples_total/rank_3/per_second"] > 0
    assert scalars["paceline_rank_memory_bytes/rank_3"] > 1e6
    with pytest.raises(urllib.error.URLError):
        get(address)


def test_wrong_outputs(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        with pytest.raises(AddressError, match=rf"--metrics {port}: cannot listen on 127.0.0.1:{port}: .* in use"):
            WebServer(str(port), "--metrics")
    for place in ("70000", "port", "host:", "1.5", ""):
        with pytest.raises(UsageError, match="expected a port"):
            WebServer(place, "--metrics")
    with (
        pytest.raises(UsageError, match=r"--metrics-file .*: No such file"),
        open_outputs("test", metrics_file=tmp_path / "none" / "file"),
    ):
        pass


def test_a_full_disk_ends_only_its_output(capsys: pytest.CaptureFixture[str]) -> None:
    with open_outputs("test", metrics_file=Path("/dev/full")) as collector:
        collector.add_event("event")
    assert capsys.readouterr().err == (
        "test: --metrics-file /dev/full: No space left on device. The run continues without this output\n"
    )


def test_collectives_without_a_strategy() -> None:
    """A program that only calls `init` reports its collectives too."""
    with open_outputs("test", metrics="0") as collector:
        address = f"127.0.0.1:{free_port()}"

        def run(rank: int) -> None:
            with collectives.init(rank, 2, address=address) as group:
                group.all_reduce(np.ones(1000, np.float32))

        with ThreadPoolExecutor(2) as ranks:  # both ranks are in this process, so they share its recorder
            list(ranks.map(run, range(2)))
        recording.stop()
        until = time.monotonic() + 20
        while "paceline_collective_seconds" not in collector.samples() and time.monotonic() < until:
            time.sleep(0.01)
    samples = collector.samples()
    assert list(samples["paceline_collective_bytes_total"].values()) == [8000]
    assert [labels[1] for labels in samples["paceline_collective_seconds"]] == ["all_reduce"]


def test_reported_numbers_may_be_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that works without metrics does not fail with them."""
    recorder = recording.Recorder(rank=0, world_size=1)
    monkeypatch.setattr(recording, "recorder", recorder)
    with pt.strategy() as strategy:
        loss = torch.ones((), requires_grad=True) * 0.5
        strategy.report_progress(0.25, loss=loss, score=np.float32(2.0), huge=10**400, text="x", rows=torch.ones(3))
    found = dict(recorder.report().samples["paceline_reported_value"])
    assert found == {("done",): 0.25, ("loss",): 0.5, ("score",): 2.0}
