"""``paceline explain``, ``paceline compare`` and ``paceline run --strategy auto``, with stored costs of the machine."""

from __future__ import annotations

import platform
import signal
import statistics
import urllib.request

import msgspec
import pytest

from paceline.environment import num_cores
from paceline.planning.calibration import StoredMachine, folder
from paceline.planning.links import PAYLOAD, Curve, Machine, StrategyCost
from paceline.strategies.profile import ModelProfile, read_record
from paceline.version import __version__

from .running import Commands, Finished, parse_json

RANKS = min(2, num_cores())
LIMIT_S = 180.0
CHOICES = ("fastest strategy with the result of one device: ", "uncertain: ")
"""The beginning of the reason for a choice, on an idle machine and on a busy one."""
SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import paceline.torch as pt

num_batches = int(sys.argv[1])
torch.manual_seed(0)
x = torch.randn(8 * num_batches, 16)
model = nn.Sequential(nn.Embedding(100, 4), nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
keys = torch.randint(0, 7, (8 * num_batches, 16))
strategy = pt.strategy()
model, optimizer, loader = strategy.prepare(
    model, torch.optim.Adam(model.parameters()), DataLoader(TensorDataset(keys, x[:, :1]), 8)
)
for _ in range(20):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    strategy.print("an epoch has ended")
    strategy.save("checkpoint")
print("the script has ended")
"""


@pytest.fixture
def commands(paceline: Commands, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Commands in a folder with a script, for a user whose machine is already measured."""
    home = paceline.folder / "home"
    monkeypatch.setenv("HOME", str(home))
    paceline.environment["HOME"] = str(home)
    folder().mkdir(parents=True)
    for ranks in {1, RANKS}:
        machine = Machine(
            num_cores=num_cores(),
            ranks_per_node=ranks,
            all_reduce=Curve(((1024, 1e-4), (1 << 20, 1e-3))),
            socket_s_per_byte=1e-9,
            costs={"parameter-server": StrategyCost(step_s=0.5)},
        )
        stored = StoredMachine(version=__version__, host=platform.node(), machine=machine)
        (folder() / f"machine-{num_cores()}-cores-{ranks}-ranks.json").write_bytes(msgspec.json.encode(stored))
    (paceline.folder / "train.py").write_text(SCRIPT)
    return paceline


def measure(commands: Commands, *words: str) -> Finished:
    """Run a command that measures the script up to four times, which takes long on a busy machine."""
    finished = commands.start(*words).wait(LIMIT_S)
    assert finished.status == 0, finished
    return finished


def test_profile(commands: Commands) -> None:
    """The measured layers have their parameters, times and rows. The script writes nothing, and ends early."""
    directory = commands.folder / "profile" / "0"
    (commands.folder / "profile" / "other").mkdir(parents=True)  # not a copy of this program, so nothing waits for it
    commands.environment["PACELINE_PROFILE"] = str(directory)
    finished = commands.succeed("run", "--strategy", "one-device", "train.py", "100")
    assert finished.out == ""
    assert not (commands.folder / "checkpoint").exists()
    assert sorted(path.name for path in directory.iterdir()) == ["profile.json", "started"]
    profile = read_record(directory / "profile.json", ModelProfile)
    assert [layer.name for layer in profile.layers] == ["0", "2", "4"]
    assert [layer.parameter_bytes for layer in profile.layers] == [1600, 8320, 132]
    assert [layer.num_parameters for layer in profile.layers] == [1, 2, 2]
    assert (profile.layers[0].touched_rows, profile.layers[0].num_rows, profile.layers[0].row_bytes) == (7, 100, 0)
    assert [layer.output_bytes for layer in profile.layers] == [8 * 64 * 4, 8 * 32 * 4, 8 * 4]
    assert all(layer.forward_s > 0 and layer.backward_s > 0 and layer.activation_bytes for layer in profile.layers)
    assert profile.batch_size == 8
    assert profile.optimizer_bytes >= 2 * profile.parameter_bytes
    assert min(profile.update_s, profile.program_s) > 0
    assert len(profile.steps_s) >= 12
    median_s = statistics.median(profile.steps_s)
    assert 0.3 * median_s < profile.compute_s < 3 * median_s


def test_explain(commands: Commands) -> None:
    one_rank_each = ["--nodes", "2", "--nproc-per-node", "1", "--link", "1Gbit"]  # so the script is measured once
    finished = measure(commands, "explain", *one_rank_each, "train.py", "100")
    lines = finished.out.splitlines()
    assert lines[0].split()[:3] == ["strategy", "servers", "step"]
    labels = {line.split()[0] for line in lines[1:] if line}
    assert {"one-device", "all-reduce", "parameter-server:sequential", "parameter-server:eventual*"} <= labels
    assert any(line.startswith(CHOICES) for line in lines)
    assert any("Embedding '0': a step uses 7.00% of the rows" in line for line in lines)
    assert "an epoch has ended" not in finished.out
    assert not (commands.folder / "checkpoint").exists()


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_compare_and_explain(commands: Commands) -> None:
    strategies = "all-reduce,parameter-server:eventual"
    words = ["compare", "--json", "--steps", "12", "--strategies", strategies, "--report", "page.html"]
    words += ["train.py", "100"]
    found = [parse_json(f"{line}\n") for line in measure(commands, *words).out.splitlines()]
    assert [line["strategy"] for line in found] == strategies.split(",")
    for line in found:
        assert line["error"] == pytest.approx(line["predicted_s"] / line["measured_s"] - 1)
        assert len(line["losses"]) == 12
        assert RANKS == 1 or line["step_bytes"] == pytest.approx(2 * 10052, rel=0.25)
    assert [line["staleness"] is None for line in found] == [True, False]
    assert "Loss against time" in (commands.folder / "page.html").read_text()
    link = ["--nodes", "4", "--link", "1Gbit", "--latency", "20us"]
    of_nodes = measure(commands, "explain", "--json", *link, "train.py", "100").json
    assert of_nodes["link"] == pytest.approx(
        {"bytes_per_s": 1.25e8 * PAYLOAD, "latency_s": 2e-5, "processor_s_per_byte": 0.0}
    )
    assert {line["measured_s"] for line in of_nodes["strategies"]} == {None}
    assert {(line["strategy"], line["separate_servers"]) for line in of_nodes["strategies"]} > {
        ("parameter-server:bounded:4", True),
        ("parameter-server:bounded:4", False),
    }
    explained = measure(commands, "explain", "--json", "train.py", "100").json
    measured = {line["strategy"]: line["measured_s"] for line in explained["strategies"]}
    assert [measured[line["strategy"]] for line in found] == [line["measured_s"] for line in found]
    assert measured["sharded"] is None


def test_the_page_of_a_simulation_is_served_until_ctrl_c(paceline: Commands) -> None:
    running = paceline.start("simulate", "--nodes", "2,4", "--dashboard")
    address = running.wait_line("dashboard at").split(" at ")[1].split(". ")[0]
    with urllib.request.urlopen(address, timeout=20) as answer:
        assert b"Efficiency by nodes" in answer.read()
    running.signal(signal.SIGINT)
    assert running.wait().status == 0


@pytest.mark.thorough
def test_measured_strategies_are_shown_before_an_error(commands: Commands) -> None:
    """The script fails under the second strategy."""
    script = SCRIPT.replace(
        "num_batches =", "assert __import__('os').environ['PACELINE_STRATEGY'] != 'sharded'\nnum_batches ="
    )
    (commands.folder / "train.py").write_text(script)
    words = [
        "compare",
        "--steps",
        "12",
        "--strategies",
        "all-reduce,sharded",
        "--report",
        "page.html",
        "train.py",
        "100",
    ]
    finished = commands.run(*words)
    assert finished.status != 0
    assert "train.py failed under sharded with status 1: AssertionError" in finished.err
    assert any(line.startswith("all-reduce ") for line in finished.out.splitlines())
    assert "Loss against time" in (commands.folder / "page.html").read_text()


@pytest.mark.thorough
def test_compare_to_a_target_loss(commands: Commands) -> None:
    """All ranks end two steps after the first one that has ten losses of at most 1,000 on average."""
    words = ["compare", "--json", "--target-loss", "1000", "--strategies", "all-reduce", "train.py", "100"]
    (found,) = [parse_json(f"{line}\n") for line in measure(commands, *words).out.splitlines()]
    assert len(found["losses"]) == 12
    assert found["reached"][1] == 10 * 8 * RANKS


@pytest.mark.thorough
def test_automatic_strategy(commands: Commands) -> None:
    """Servers are slow on the stored machine. The script then runs to its end, and writes its checkpoint."""
    finished = measure(commands, "run", "--strategy", "auto", "--nproc-per-node", str(RANKS), "train.py", "30")
    assert "the script has ended" in finished.out
    starts = tuple(f"paceline run: {choice}" for choice in CHOICES)
    reason = next(line for line in finished.err.splitlines() if line.startswith(starts))
    assert "device: parameter-server" not in reason
    assert "Chosen: parameter-server" not in reason
    assert (commands.folder / "checkpoint").exists()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("print('no strategy')", "script.py ended before its steps could be measured. A script must train on a loader"),
        ("import sys; sys.exit('no data')", "script.py failed with status 1: no data"),
        pytest.param(
            SCRIPT.replace("range(20)", "range(1)"),
            "script.py ended before its steps could be measured",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_scripts_that_cannot_be_measured(commands: Commands, script: str, message: str) -> None:
    (commands.folder / "script.py").write_text(script)
    finished = commands.run("explain", "script.py", "2")
    assert finished.status != 0
    assert finished.err.splitlines() == [finished.err.strip()]
    assert finished.err.startswith(f"paceline: {message}")
