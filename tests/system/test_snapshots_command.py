"""``paceline train --snapshot-every`` and ``--resume``: the whole cluster is killed, and another one goes on."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from paceline.ps.snapshots import read_newest

from .running import Commands, Running, wait_until

ROWS = 12_000
EPOCHS = 12


def whole_snapshots(folder: Path) -> list[Path]:
    return sorted(folder.glob("snapshot-*/manifest.json"))


def kill_all(running: Running) -> None:
    """End the driver and its whole cluster at once, as when the machine loses power."""
    processes = [child for role in ("scheduler", "server", "worker") for child in running.children(role)]
    running.process.send_signal(signal.SIGSTOP)  # so that it cannot tell anybody
    for process in processes:
        process.kill()
    running.kill()


@pytest.mark.parametrize("consistency", ["bounded:2", "sequential"])
def test_the_whole_cluster_is_killed_and_another_goes_on(
    paceline: Commands, click_log: tuple[Path, Path], tmp_path: Path, consistency: str
) -> None:
    train, evaluation = click_log
    common: list[str | Path] = ["train", train, "--eval", evaluation, "--epochs", str(EPOCHS), "--json", "-q"]
    common += ["--batch-size", "32", "--consistency", consistency]
    undisturbed = paceline.succeed(*common, "--servers", "2", "--workers", "2").json
    folder = tmp_path / "model-snapshots"
    running = paceline.start(
        *common, "--servers", "2", "--workers", "2", "--save", "model", "--snapshot-every", "20000"
    )
    wait_until(lambda: len(whole_snapshots(folder)) >= 2, "no snapshots", 40.0)
    kill_all(running)
    for left in Path(paceline.environment["TMPDIR"]).iterdir():  # nobody was left to do it
        shutil.rmtree(left)

    snapshot = read_newest(folder).manifest
    assert snapshot.account is not None
    done = sum(int.from_bytes(each.shards, "little").bit_count() for each in snapshot.account.done)
    examples = int(snapshot.account.progress["examples"])
    assert 0 < examples < ROWS * EPOCHS
    assert done > 0
    assert (snapshot.iteration is not None) == (consistency == "sequential")

    finished = paceline.succeed(
        *common, "--servers", "3", "--workers", "1", "--save", "model", "--resume", folder, "--snapshot-every", "100ms"
    )
    assert f"snapshot-{snapshot.number:06d}: {done} of" in finished.err
    result: dict[str, Any] = finished.json
    assert result["examples"] == ROWS * EPOCHS  # each shard once in each epoch, over both runs
    assert result["eval_examples"] == 4_000
    assert result["auc"] == pytest.approx(undisturbed["auc"], abs=0.02)
    assert result["log_loss"] == pytest.approx(undisturbed["log_loss"], abs=0.03)
    assert len(whole_snapshots(folder)) <= 3  # of both runs together
    assert read_newest(folder).manifest.number > snapshot.number


def test_what_is_wrong_is_said_in_a_sentence(paceline: Commands, click_log: tuple[Path, Path], tmp_path: Path) -> None:
    train, evaluation = click_log
    common: list[str | Path] = ["train", train, "--epochs", "8", "-q", "--workers", "1", "--batch-size", "32"]
    paceline.succeed(*common, "--snapshot-every", "10000", "--snapshot-dir", "snaps")
    folder = tmp_path / "snaps"
    assert 1 <= len(whole_snapshots(folder)) <= 3

    def fail(*arguments: str | Path) -> str:
        finished = paceline.run(*arguments)
        assert finished.status != 0
        assert finished.out == ""
        assert finished.err.count("\n") == 1, finished.err
        return finished.err

    other = fail("train", evaluation, *common[2:], "--resume", folder)
    assert "file 1 was train.tsv of" in other
    assert "resume with the same files" in other
    two = fail("train", train, evaluation, *common[2:], "--resume", folder)
    assert "1 files, and 2 are given" in two
    rule = fail(*common, "--update", "sgd", "--resume", folder)
    assert "sparse(dim=1, FTRL(" in rule
    assert "sparse(dim=1, SGD(" in rule
    assert "holds no whole snapshot" in fail(*common, "--resume", "nowhere")
    assert "expected a time such as 30s" in fail(*common, "--snapshot-every", "often")
    assert "--snapshot-dir DIR" in fail(*common, "--snapshot-every", "10s")

    # Damage: the newest one is named with its checksum, and the one before is used.
    newest = whole_snapshots(folder)[-1].parent
    part = next(newest.glob("*.safetensors"))
    part.write_bytes(part.read_bytes()[:-1] + b"\x55")
    finished = paceline.run(*common, "--resume", folder)
    if len(whole_snapshots(folder)) > 1:
        assert finished.status == 0, finished.err
        assert f"{part} is damaged: its SHA-256 is" in finished.err
    else:
        assert finished.status != 0


def test_no_place_for_snapshots(paceline: Commands, click_log: tuple[Path, Path], tmp_path: Path) -> None:
    """Training goes on, and ends well; a sentence each time."""
    (tmp_path / "file").write_text("")
    finished = paceline.succeed(
        *("train", click_log[0], "--epochs", "8", "-q", "--workers", "1", "--batch-size", "32", "--json"),
        *("--snapshot-every", "10000", "--snapshot-dir", "file/snaps"),
    )
    assert finished.json["examples"] == 8 * ROWS
    lines = finished.err.splitlines()
    assert len(lines) >= 2
    assert all("was not taken: cannot write in" in line and "the training goes on" in line for line in lines)
