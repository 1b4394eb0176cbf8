"""``paceline run --timeline``: the steps of all processes in one file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from tests.chrome_traces import check_chrome
from tests.warm.processes import RANKS

from .running import Commands

_LOOP = """
import sys
import torch
import paceline.torch as pt
strategy = pt.strategy()
model = torch.nn.Linear(8, 1)
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
loader = torch.utils.data.DataLoader(data, batch_size=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = strategy.prepare(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
"""


@pytest.fixture
def loop(paceline: Commands, tmp_path: Path) -> Commands:
    """Run commands with the script ``loop.py``, whose ranks are forked from a process that has imported torch."""
    (tmp_path / "loop.py").write_text(_LOOP)
    paceline.environment[RANKS] = "torch"
    return paceline


def test_the_timeline_has_the_steps_of_ranks_and_servers(loop: Commands, tmp_path: Path) -> None:
    strategy = ["--strategy", "parameter-server", "--servers", "2", "--nproc-per-node", "2"]
    finished = loop.succeed("run", *strategy, "--timeline", "t.json", "--timeline-steps", "2:5", "loop.py")
    assert "t.json has the timeline of steps 2 to 4" in finished.err
    trace = check_chrome(tmp_path / "t.json")
    assert set(trace.processes.values()) == {"rank 0", "rank 1", "scheduler", "server 0", "server 1"}
    spans = Counter((process, row, span["name"]) for process, row, span in trace.spans())
    for rank in ("rank 0", "rank 1"):
        assert [spans[rank, "main thread", f"step {number}"] for number in range(1, 6)] == [0, 1, 1, 1, 0]
        assert spans[rank, "main thread", "backward"] == 3
        assert spans[rank, "requests to server 1", "push"] >= 3
    assert spans["server 0", "main thread", "push"] >= 4
    assert trace.num_flows >= 8
    assert {event["name"] for event in trace.kinds["C"]} == {"bytes", "staleness"}


def test_a_loop_that_ends_before_the_steps_and_the_format_of_perfetto(loop: Commands, tmp_path: Path) -> None:
    finished = loop.succeed("run", "--nproc-per-node", "2", "--timeline", "t.pftrace", "loop.py")
    assert "the last operations, because the training loop did not reach step 10" in finished.err
    content = (tmp_path / "t.pftrace").read_bytes()
    assert content.count(b"all_reduce") >= 16
    assert b"rank 1" in content


def test_the_operators_of_the_profiler(loop: Commands, tmp_path: Path) -> None:
    finished = loop.succeed("run", "--timeline", "t.json", "--timeline-steps", "2:5", "--timeline-operators", "loop.py")
    assert "t.json has the timeline of steps 2 to 4" in finished.err
    spans = list(check_chrome(tmp_path / "t.json").spans())
    steps = {span["name"]: span for _, _, span in spans if span["name"].startswith("step ")}
    linear = [span for _, row, span in spans if (row, span["name"]) == ("torch.profiler, thread 1", "aten::linear")]
    for number, operator in zip((2, 3, 4), linear, strict=True):
        step = steps[f"step {number}"]
        assert step["ts"] <= operator["ts"] < operator["ts"] + operator["dur"] <= step["ts"] + step["dur"]
    assert any(span["name"].startswith("Optimizer.step") for _, _, span in spans)


def test_the_profile_of_the_script_itself(loop: Commands, tmp_path: Path) -> None:
    profiled = _LOOP.replace("for x, y in loader:", "for x, y in recorded(loader):")
    (tmp_path / "profiled.py").write_text(
        "import torch\n"
        "def recorded(loader):\n"
        "    with torch.profiler.profile():\n"
        "        for batch in loader:\n"
        "            with torch.profiler.record_function('my range'):\n"
        "                yield batch\n" + profiled
    )
    options = ["--timeline", "t.json", "--timeline-steps", "2:5", "--timeline-operators"]
    loop.succeed("run", *options, "profiled.py")
    names = Counter(span["name"] for _, _, span in check_chrome(tmp_path / "t.json").spans())
    assert 3 <= names["my range"] <= 5
    assert 3 <= names["aten::linear"] <= 5


def test_the_timeline_of_a_click_model(paceline: Commands, click_log: tuple[Path, Path], tmp_path: Path) -> None:
    options: list[str | Path] = ["--workers", "2", "--servers", "2", "--timeline", "t.json", "--timeline-steps", "1:4"]
    finished = paceline.succeed("train", click_log[0], "--batch-size", "32", *options)
    assert "t.json has the timeline of steps 1 to 3" in finished.err
    trace = check_chrome(tmp_path / "t.json")
    processes = {"driver", "scheduler", "server 0", "server 1", "worker 0", "worker 1"}
    assert set(trace.processes.values()) == processes
    spans = Counter((process, span["name"]) for process, _, span in trace.spans())
    for worker in ("worker 0", "worker 1"):
        assert [spans[worker, f"step {number}"] for number in range(5)] == [0, 1, 1, 1, 0]
        assert spans[worker, "compute"] >= 2
        assert spans[worker, "push"] >= 2
    assert spans["server 1", "push"] >= 2
    assert trace.num_flows >= 4


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--timeline", "no/t.json"], "--timeline no/t.json: No such file or directory"),
        (["--timeline-steps", "1:2"], "--timeline-steps 1:2: needs a file. Pass --timeline FILE too"),
        (["--timeline-operators"], "--timeline-operators: needs a file. Pass --timeline FILE too"),
        (["--timeline", "t.json", "--timeline-steps", "7"], "--timeline-steps 7: expected the first step"),
    ],
)
def test_bad_input(words: list[str], expected: str, loop: Commands) -> None:
    finished = loop.run("run", *words, "loop.py")
    assert finished.status == 2
    assert finished.err.startswith(f"paceline: {expected}")
    assert finished.err.count("\n") == 1
