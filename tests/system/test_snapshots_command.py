"""``paceline train --snapshot-every`` and ``--resume``: the cluster is killed, and another cluster continues."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.waiting import wait_until

from paceline.launch import LocalCluster
from paceline.models.stored import find_version
from paceline.ps.client import snapshot_loading
from paceline.ps.client.connection import ServerConnection
from paceline.ps.messages import ClusterSettings
from paceline.ps.snapshot_messages import LoadState
from paceline.storage.snapshot_directory import read_newest
from paceline.training.driver import TrainOutput, run_training
from paceline.training.options import SnapshotPlan, TrainOptions
from paceline.training.planning import plan_training
from paceline.training.train import Training

from .running import Commands, Running

pytestmark = pytest.mark.usefixtures("warm_clusters")

ROWS = 12_000
EPOCHS = 8
UNDISTURBED = {"auc": 0.718, "log_loss": 0.501}
"""The measured metrics of an uninterrupted training with either consistency. The tolerance is 0.001."""
EPOCHS_TAKEN = 12


def complete_snapshots(folder: Path) -> list[Path]:
    return sorted(folder.glob("snapshot-*/manifest.json"))


def kill_all(running: Running) -> None:
    """Kill the driver and all processes of its cluster, like a power failure."""
    processes = [child for role in ("scheduler", "server", "worker") for child in running.children(role)]
    running.process.send_signal(signal.SIGSTOP)  # stop the process first, so it cannot notify another process
    for process in processes:
        process.kill()
    running.kill()


@pytest.mark.parametrize("consistency", [pytest.param("bounded:2", marks=pytest.mark.thorough), "sequential"])
def test_another_cluster_continues_after_a_kill_of_all_processes(
    paceline: Commands, click_log: tuple[Path, Path], tmp_path: Path, consistency: str
) -> None:
    train, evaluation = click_log
    common: list[str | Path] = ["train", train, "--eval", evaluation, "--epochs", str(EPOCHS), "--json", "-q"]
    common += ["--batch-size", "64", "--consistency", consistency]
    folder = tmp_path / "model-snapshots"
    running = paceline.start(*common, "--servers", "2", "--workers", "2", "--save", "model", "--snapshot-every", "8000")
    wait_until(lambda: len(complete_snapshots(folder)) >= 2, "no snapshots", 40.0)
    kill_all(running)
    for left in Path(paceline.environment["TMPDIR"]).iterdir():  # no process could remove it
        shutil.rmtree(left)

    snapshot = read_newest(folder).manifest
    assert snapshot.account is not None
    done = sum(int.from_bytes(entry.shards, "little").bit_count() for entry in snapshot.account.done)
    examples = int(snapshot.account.progress["examples"])
    assert 0 < examples < ROWS * EPOCHS
    assert done > 0
    assert (snapshot.iteration is not None) == (consistency == "sequential")

    finished = paceline.succeed(
        *common, "--servers", "3", "--workers", "1", "--save", "model", "--resume", folder, "--snapshot-every", "8000"
    )
    shards = EPOCHS * sum(size or 0 for size in snapshot.account.files)
    assert f"snapshot-{snapshot.number:06d}: {done} of {shards} shards done" in finished.err
    result: dict[str, Any] = finished.json
    assert result["examples"] == ROWS * EPOCHS  # each shard is counted once per epoch in both runs together
    assert result["eval_examples"] == 4_000
    assert result["auc"] == pytest.approx(UNDISTURBED["auc"], abs=0.02)
    assert result["log_loss"] == pytest.approx(UNDISTURBED["log_loss"], abs=0.03)
    assert len(complete_snapshots(folder)) <= 3  # the sum of both runs
    assert read_newest(folder).manifest.number > snapshot.number


@pytest.fixture(scope="module")
def taken(click_log: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two or three snapshots, of a short training on the log."""
    folder = tmp_path_factory.mktemp("taken") / "snaps"
    run_training(
        TrainOptions(
            data=[click_log[0]],
            epochs=EPOCHS_TAKEN,
            batch_size=64,
            snapshots=SnapshotPlan(directory=folder, examples=4_000),
        ),
        ClusterSettings(consistency="bounded:4"),
        output=TrainOutput(quiet=True),
    )
    assert 2 <= len(complete_snapshots(folder)) <= 3
    return folder


def test_errors_are_one_sentence(paceline: Commands, click_log: tuple[Path, Path], taken: Path, tmp_path: Path) -> None:
    """Errors that a cluster's processes detect. ``test_cli_wrong_usage.py`` has errors that the command detects."""
    train, evaluation = click_log
    folder = shutil.copytree(taken, tmp_path / "snaps")
    common: list[str | Path] = ["train", train, "--epochs", str(EPOCHS_TAKEN), "-q", "--workers", "1"]
    common += ["--batch-size", "64"]

    def fail(*arguments: str | Path) -> str:
        finished = paceline.run(*arguments)
        assert finished.status != 0
        assert finished.out == ""
        assert finished.err.count("\n") == 1, finished.err
        return finished.err

    other = fail("train", evaluation, *common[2:], "--resume", folder)
    assert "file 1 of its training was train.tsv" in other
    assert "Resume with the same files" in other
    rule = fail(*common, "--update", "sgd", "--resume", folder)
    assert "sparse(dim=1, FTRL(" in rule
    assert "sparse(dim=1, SGD(" in rule

    fewer = paceline.succeed("train", train, "--epochs", "1", *common[4:], "--resume", folder)
    assert "no examples remained" in fewer.err
    assert " has all examples of 1 epochs. Pass a larger --epochs" in fewer.err

    # Damage: the newest snapshot is named with its checksum, and the previous one is used.
    *before, newest = [path.parent for path in complete_snapshots(folder)]
    part = next(newest.glob("*.safetensors"))
    part.write_bytes(part.read_bytes()[:-1] + b"\x55")
    finished = paceline.succeed(*common, "--resume", folder)
    message = rf"{newest.name} .*{before[-1].name} .*: {re.escape(str(part))} is damaged: its SHA-256 is"
    assert len(re.findall(message, finished.err)) == 1
    for snapshot in before:
        part = next(snapshot.glob("*.safetensors"))
        part.write_bytes(part.read_bytes()[:-1])
    cut = fail(*common, "--resume", folder)
    assert "holds no complete snapshot to resume from" in cut
    assert f"{part} is truncated or was changed" in cut


@pytest.mark.parametrize("consistency", [pytest.param("bounded:4", marks=pytest.mark.thorough), "sequential"])
def test_ctrl_c_while_snapshots_are_taken(
    paceline: Commands, click_log: tuple[Path, Path], tmp_path: Path, consistency: str
) -> None:
    """An unfinished snapshot is abandoned.

    The earlier snapshots are complete, and a training can continue from them.
    """
    common: list[str | Path] = ["train", click_log[0], "-q", "--batch-size", "32", "--workers", "1", "--servers", "2"]
    common += ["--replicas", "1", "--consistency", consistency]
    folder = tmp_path / "snaps"
    running = paceline.start(*common, "--epochs", "500", "--snapshot-every", "50ms", "--snapshot-dir", folder)
    wait_until(lambda: len(complete_snapshots(folder)) >= 2, "no snapshots", 40.0)
    running.signal(signal.SIGINT)
    finished = running.wait()
    assert (finished.status, finished.out) == (130, "")
    assert finished.err.splitlines()[-1] == "paceline: interrupted"
    assert [path.parent for path in complete_snapshots(folder)] == sorted(folder.iterdir())
    assert read_newest(folder).manifest.number >= 2


def test_ctrl_c_while_resuming(
    click_log: tuple[Path, Path], taken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal arrives while a server still reads its part, and takes effect immediately, not after the load."""
    polls: list[int] = []
    printed: list[str] = []
    load_state = snapshot_loading.load_state

    def interrupt(connection: ServerConnection) -> LoadState:
        polls.append(connection.rank)
        if len(polls) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        state = load_state(connection)
        return msgspec.structs.replace(state, done=state.done and len(polls) > 100)  # reading this part takes a while

    monkeypatch.setattr(snapshot_loading, "load_state", interrupt)
    options = TrainOptions(data=[click_log[0]], epochs=EPOCHS_TAKEN, resume=taken, save=tmp_path / "model")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with LocalCluster.start(ClusterSettings(num_servers=2)) as cluster, cluster.connect(observer=True) as client:
            plan = plan_training(options)
            training = Training(options, plan, client, num_workers=1, processes=cluster, warn=printed.append)
            with pytest.raises(KeyboardInterrupt):
                training.run()
    finally:
        signal.signal(signal.SIGINT, before)
    assert 1 <= len(polls) <= 2  # the command has polled each server once
    assert printed == []
    assert not (tmp_path / "model").exists()


def test_the_newest_snapshot_is_a_model(paceline: Commands, click_log: tuple[Path, Path], taken: Path) -> None:
    newest = read_newest(taken).manifest
    assert find_version(taken) == f"snapshot-{newest.number:06d}"
    found = paceline.succeed("predict", taken, click_log[1], "--json").json
    assert found["auc"] > 0.6
    rows = sum(table.rows for table in newest.tables)
    shown = paceline.succeed("inspect", taken, "--json").json
    assert (shown["finished"], shown["tables"][0]["features"]) == (False, rows - 1)


def test_failed_snapshots_are_reported(paceline: Commands, click_log: tuple[Path, Path], tmp_path: Path) -> None:
    """The training continues and succeeds. Each failed attempt prints a message."""
    (tmp_path / "file").write_text("")
    finished = paceline.succeed(
        *("train", click_log[0], "--epochs", "8", "-q", "--workers", "1", "--batch-size", "64", "--json"),
        *("--snapshot-every", "10000", "--snapshot-dir", "file/snaps"),
    )
    assert finished.json["examples"] == 8 * ROWS
    lines = finished.err.splitlines()
    assert len(lines) >= 2
    assert all("was not taken: cannot write in" in line and "the training continues" in line for line in lines)
