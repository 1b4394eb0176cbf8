"""``--metrics``, ``--metrics-file`` and ``--tensorboard`` of ``paceline run``, ``train`` and ``scheduler``."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse
from tests.free_ports import two_free_ports
from tests.waiting import wait_until
from tests.warm.processes import RANKS

from paceline.observe.top import fetch_state
from paceline.temporary import remove_abandoned

from .running import Commands, Running

SCRIPT = """
import sys, time
from pathlib import Path
import torch
from torch import nn
import paceline.torch as pt
strategy = pt.strategy()
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(160, 8), torch.randn(160, 1))
loader = torch.utils.data.DataLoader(data, batch_size=8)
model, optimizer = nn.Linear(8, 1), None
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = strategy.prepare(model, optimizer, loader)
for number, (inputs, targets) in enumerate(loader):
    optimizer.zero_grad()
    begun = Path(f"begun{number}")
    if strategy.rank == 0:
        begun.touch()
    else:  # be late, also if the machine has stalled rank 0
        while not begun.exists():
            time.sleep(0.001)
        time.sleep(0.05)
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    strategy.report_progress(loss=loss.item())
if len(sys.argv) > 1 and strategy.is_main:
    print("trained", flush=True)
    while not Path(sys.argv[1]).exists():
        time.sleep(0.01)
strategy.barrier()
strategy.close()
"""


def read_lines(file: Path) -> dict[str, dict[tuple[str, ...], Any]]:
    """Return the last line of a metrics file: values by name and labels, and for histograms their counts."""
    last = json.loads(file.read_text().splitlines()[-1])
    found: dict[str, dict[tuple[str, ...], Any]] = {}
    for name, entries in last["metrics"].items():
        for entry in entries:
            labels = tuple(value for key, value in entry.items() if key not in ("value", "sum", "count", "buckets"))
            found.setdefault(name, {})[labels] = entry.get("value", entry.get("count"))
    return found


def scrape(running: Running) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the values that a running command serves."""
    with urllib.request.urlopen(running.wait_line("metrics at ").split()[-1], timeout=30) as answer:
        text = answer.read().decode()
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in parse(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_the_report_names_the_rank_that_failed(paceline: Commands, tmp_path: Path) -> None:
    script, report = tmp_path / "fails.py", tmp_path / "report.html"
    script.write_text("import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(60)\n")
    assert paceline.run("run", "--nproc-per-node", "2", "--report", report, script).status == 137
    assert "rank 1 was killed by SIGKILL" in report.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["all-reduce", "parameter-server"])
def test_metrics_of_a_run(paceline: Commands, script: Path, tmp_path: Path, strategy: str) -> None:
    file, done, report = tmp_path / "metrics.jsonl", tmp_path / "done", tmp_path / "report.html"
    run: list[str | Path] = [
        "run",
        "--strategy",
        strategy,
        "--nproc-per-node",
        "2",
        "--metrics",
        "0",
        "--metrics-file",
        file,
    ]
    paceline.environment[RANKS] = "torch"
    running = paceline.start(*run, "--dashboard", "0", "--report", report, script, done)
    running.wait_line("trained")
    for rank in ("0", "1"):
        wait_value(running, "paceline_examples_total", (rank,), 80)
    if strategy == "parameter-server":
        wait_value(running, "paceline_members", ("workers",), 2)
    page = running.wait_line("dashboard at ").split()[-1]
    wait_until(lambda: len(fetch_state(page).get("ranks", ())) == 2, "the ranks are not on the dashboard")
    shown = paceline.succeed("top", page).out
    assert "paceline run --strategy" in shown
    assert re.findall(r"^ +(\d) +.* [MG]B +\d+ s", shown, re.MULTILINE) == ["0", "1"]
    done.touch()
    assert running.wait().status == 0
    assert '"has_ended":true' in report.read_text()
    found = read_lines(file)
    assert found["paceline_examples_total"] == {("0",): 80, ("1",): 80}
    assert found["paceline_step_seconds"] == {("0",): 10, ("1",): 10}
    seconds = found["paceline_step_phase_seconds_total"]
    assert seconds["1", "forward"] >= 0.5  # the pauses of rank 1
    assert sum(seconds["0", phase] for phase in ("communication", "optimizer")) > 0.1  # rank 0 waits for rank 1
    # Other processes may delay both ranks, so compare the waits with measured times.
    waits = found["paceline_wait_seconds_total"]
    assert 0.1 < waits["0", "1"] < 1.5 * sum(seconds["1", phase] for phase in ("data", "forward", "backward"))
    assert waits.get(("1", "0"), 0.0) < waits["0", "1"] / 2
    assert found["paceline_reported_value"]["0", "loss"] > 0
    if strategy == "all-reduce":
        assert found["paceline_collective_seconds"]["0", "all_reduce", "shared"] >= 10
        assert "paceline_server_rows" not in found
    else:
        [(server, table)] = found["paceline_server_rows"]
        assert server == "0"
        assert found["paceline_server_pushes_total"][server, table] >= 20
        assert found["paceline_table_request_seconds"]["1", "push"] >= 10
        assert found["paceline_members"] == {("servers",): 1, ("workers",): 0}  # both ranks have left
        assert found["paceline_staleness_pushes"][server, table] >= 20
        assert found["paceline_server_memory_bytes"][server,] > 1e6


@pytest.mark.slow
def test_metrics_of_a_training(paceline: Commands, click_log: tuple[Path, Path], tmp_path: Path) -> None:
    file, board = tmp_path / "metrics.jsonl", tmp_path / "board"
    train: list[str | Path] = [
        "train",
        click_log[0],
        "--epochs",
        "2",
        "--workers",
        "2",
        "--metrics-file",
        file,
        "--tensorboard",
        board,
    ]
    result = paceline.succeed(*train, "--filters", "key-caching,zstd", "--json", "-q").json
    found = read_lines(file)
    examples = result["examples"]
    assert found["paceline_training_examples_total"] == {(): examples}
    assert sum(found["paceline_examples_total"].values()) == examples
    phases = {phase for _, phase in found["paceline_step_phase_seconds_total"]}
    assert phases >= {"data", "compute", "communication"}
    assert 0 < found["paceline_training_loss"][()] < 1
    assert found["paceline_training_done_ratio"] == {(): 1.0}
    filtered = {form: value for (rank, _, form), value in found["paceline_filter_bytes_total"].items() if rank == "0"}
    assert 0 < filtered["sent"] < filtered["plain"]
    assert os.listdir(board)


@pytest.mark.slow
def test_the_first_launcher_has_the_metrics_of_all(paceline: Commands, script: Path, tmp_path: Path) -> None:
    command: list[str | Path] = ["run", "--nnodes", "2", "--strategy", "parameter-server", "--servers", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(two_free_ports())]
    paceline.environment.update({"PACELINE_TOKEN": "a token for tests", RANKS: "torch"})
    files = [tmp_path / f"node{node}.jsonl" for node in range(2)]
    nodes = [
        paceline.start(*command, "--node-rank", str(node), "--metrics-file", file, script)
        for node, file in enumerate(files)
    ]
    assert [node.wait().status for node in nodes] == [0, 0]
    first, second = map(read_lines, files)
    assert set(first["paceline_server_memory_bytes"]) == {("0",), ("1",)}
    assert "paceline_server_memory_bytes" not in second
    assert first["paceline_examples_total"] == {("0",): 80, ("1",): 80}
    assert second["paceline_examples_total"] == {("1",): 80}


@pytest.mark.slow
def test_metrics_of_a_cluster(paceline: Commands, click_log: tuple[Path, Path], tmp_path: Path) -> None:
    token = tmp_path / "token"
    arguments: list[str | Path] = [
        "scheduler",
        "--port",
        "0",
        "--servers",
        "2",
        "--replicas",
        "1",
        "--token-file",
        token,
    ]
    scheduler = paceline.start(*arguments, "--metrics", "0")
    address = scheduler.wait_line("listening on ").split()[-1]
    joining: list[str | Path] = ["--scheduler", address.removeprefix("tcp://"), "--token-file", token]
    servers = [paceline.start("server", *joining) for _ in range(2)]
    servers[1].wait_line("listening on ")
    wait_value(scheduler, "paceline_members", ("servers",), 2)
    assert scrape(scheduler)["paceline_failovers_total"] == {(): 0}
    worker = paceline.start("worker", *joining)
    worker.wait_line("joined the cluster")
    paceline.succeed("train", click_log[0], *joining, "--epochs", "1", "-q")
    wait_value(scheduler, "paceline_examples_total", ("0",), 12_000)
    servers[1].kill()
    wait_value(scheduler, "paceline_members", ("servers",), 1)
    wait_value(scheduler, "paceline_failovers_total", (), 1)
    scheduler.signal(signal.SIGINT)
    assert scheduler.wait().status == 0
    assert servers[0].wait().status == 0
    assert worker.wait().status == 0
    remove_abandoned(Path(paceline.environment["TMPDIR"]))  # of the killed server


def wait_value(running: Running, name: str, labels: tuple[str, ...], expected: float) -> None:
    until = time.monotonic() + 60
    while (found := scrape(running).get(name, {}).get(labels)) != expected:
        assert time.monotonic() < until, (name, found)
        time.sleep(0.1)


def test_a_port_in_use(paceline: Commands, script: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        failed = paceline.run("run", "--metrics", str(port), script)
    assert failed.status == 1
    assert failed.err.count("\n") == 1
    assert f"--metrics {port}: cannot listen on 127.0.0.1:{port}: Address already in use" in failed.err
