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
    shards = EPOCHS * sum(size or 0 for size in snapshot.account.files)
    assert f"snapshot-{snapshot.number:06d}: {done} of {shards} shards done" in finished.err
    result: dict[str, Any] = finished.json
    assert result["examples"] == ROWS * EPOCHS  # each shard once in each epoch, over both runs
    assert result["eval_examples"] == 4_000
    assert result["auc"] == pytest.approx(undisturbed["auc"], abs=0.02)
    assert result["log_loss"] == pytest.approx(undisturbed["log_loss"], abs=0.03)
    assert len(whole_snapshots(folder)) <= 3  # of both runs together
    assert read_newest(folder).manifest.number > snapshot.number


def test_what_is_wrong_is_said_in_a_sentence(paceline: Commands, click_log: tuple[Path, Path], tmp_path: Path) -> None:
    train, evaluation = click_log
    common: list[str | Path] = ["train", train, "--epochs", "16", "-q", "--workers", "1", "--batch-size", "32"]
    paceline.succeed(*common, "--snapshot-every", "10000", "--snapshot-dir", "snaps")
    folder = tmp_path / "snaps"
    assert 2 <= len(whole_snapshots(folder)) <= 3

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
    *before, newest = [path.parent for path in whole_snapshots(folder)]
    part = next(newest.glob("*.safetensors"))
    part.write_bytes(part.read_bytes()[:-1] + b"\x55")
    finished = paceline.succeed(*common, "--resume", folder)
    assert f"{newest.name} is not used, {before[-1].name} is: {part} is damaged: its SHA-256 is" in finished.err
    for each in before:
        part = next(each.glob("*.safetensors"))
        part.write_bytes(part.read_bytes()[:-1])
    assert f"{part} is cut off or was changed" in fail(*common, "--resume", folder)
    for path in whole_snapshots(folder):
        path.unlink()
    assert "holds no whole snapshot to resume from" in fail(*common, "--resume", folder)


@pytest.mark.parametrize("consistency", ["bounded:4", "sequential"])
def test_ctrl_c_while_snapshots_are_taken(
    paceline: Commands, click_log: tuple[Path, Path], tmp_path: Path, consistency: str
) -> None:
    """A snapshot under way is given up; those before are whole, and are gone on from."""
    common: list[str | Path] = ["train", click_log[0], "-q", "--batch-size", "32", "--workers", "1", "--servers", "2"]
    common += ["--replicas", "1", "--consistency", consistency]
    folder = tmp_path / "snaps"
    running = paceline.start(*common, "--epochs", "500", "--snapshot-every", "50ms", "--snapshot-dir", folder)
    wait_until(lambda: len(whole_snapshots(folder)) >= 2, "no snapshots", 40.0)
    running.signal(signal.SIGINT)
    finished = running.wait()
    assert (finished.status, finished.out) == (130, "")
    assert finished.err.splitlines()[-1] == "paceline: interrupted"
    assert [path.parent for path in whole_snapshots(folder)] == sorted(folder.iterdir())
    assert read_newest(folder).manifest.number >= 2


def test_ctrl_c_while_resuming(paceline: Commands, click_log: tuple[Path, Path], tmp_path: Path) -> None:
    common: list[str | Path] = ["train", click_log[0], "-q", "--batch-size", "32", "--workers", "1", "--servers", "2"]
    common += ["--snapshot-every", "10000", "--snapshot-dir", tmp_path / "snaps"]
    paceline.succeed(*common, "--epochs", "8")
    newest = read_newest(tmp_path / "snaps").manifest
    for is_late in (False, True):
        running = paceline.start(*common, "--epochs", "500", "--resume", tmp_path / "snaps")
        if is_late:
            running.wait_line("resuming from")
        else:
            wait_until(lambda it=running: bool(it.children("worker")), "no worker", 40.0)  # type: ignore[misc]
        running.signal(signal.SIGINT)
        finished = running.wait()
        assert (finished.status, finished.out) == (130, "")
        assert finished.err.splitlines()[-1] == "paceline: interrupted"
        assert read_newest(tmp_path / "snaps").manifest.number >= newest.number


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
