"""Processes that are interrupted, killed and stopped while a training runs."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest
from tests.waiting import wait_until

from .running import PROMPT_S, Commands, Running, parse_json

LONG = ["--epochs", "100000"]
"""More passes than any test completes."""


def start(paceline: Commands, click_log: tuple[Path, Path], *arguments: str) -> Running:
    """Start a training with 2 workers, and wait until it has printed losses."""
    running = paceline.start("train", click_log[0], "--workers", "2", "--progressive", *arguments)
    running.wait_trains()
    return running


def sentences(text: str) -> list[str]:
    """Return the printed settings and messages, without the progressive losses and the quality of the model."""
    notices = ("since last", "(chosen on", "may have learned nothing")
    lines = [line for line in text.splitlines() if not any(other in line for other in notices)]
    return [line for line in lines if line.strip(" 0123456789.,%-")]


def test_an_interrupted_training_saves_the_model(
    paceline: Commands, click_log: tuple[Path, Path], tmp_path: Path
) -> None:
    running = start(paceline, click_log, *LONG, "--save", "model", "--consistency", "sequential")
    running.signal(signal.SIGINT)
    finished = running.wait()
    assert finished.status == 130
    assert finished.out == ""
    assert sentences(finished.err) == ["paceline: the unfinished model is saved in model", "paceline: interrupted"]
    assert json.loads((tmp_path / "model" / "manifest.json").read_text())["model"]["finished"] is False
    assert paceline.succeed("predict", "model", click_log[1], "--json").json["auc"] > 0.6


def test_sigterm_during_a_training(paceline: Commands, click_log: tuple[Path, Path]) -> None:
    running = start(paceline, click_log, *LONG)
    running.signal(signal.SIGTERM)
    finished = running.wait()
    assert (finished.status, sentences(finished.err)) == (143, ["paceline: ended by a signal"])


@pytest.mark.thorough
def test_interrupted_while_processes_start(paceline_spawned: Commands, click_log: tuple[Path, Path]) -> None:
    running = paceline_spawned.start("train", click_log[0], *LONG, "--save", "model")
    wait_until(lambda: len(psutil.Process(running.process.pid).children(recursive=True)) > 1, "no process was started")
    running.signal(signal.SIGINT)
    finished = running.wait()
    assert (finished.status, sentences(finished.err)) == (130, ["paceline: interrupted"])


@pytest.mark.thorough
def test_killing_the_parent_ends_the_other_processes(paceline_spawned: Commands, click_log: tuple[Path, Path]) -> None:
    """The fixture also checks that the temporary files are removed."""
    running = start(paceline_spawned, click_log, *LONG, "--servers", "2")
    children = psutil.Process(running.process.pid).children(recursive=True)
    assert len(children) == 6  # scheduler, servers, workers, and the process that they are forked from
    running.process.kill()
    _, alive = psutil.wait_procs(children, timeout=PROMPT_S)
    assert alive == []
    running.kill()


def test_a_killed_worker(paceline: Commands, click_log: tuple[Path, Path]) -> None:
    """The other workers read the shards of the killed worker again. Each example is counted once per epoch."""
    running = start(paceline, click_log, "--epochs", "8", "--eval", str(click_log[1]), "--json")
    running.children("worker")[1].kill()
    finished = running.wait()
    assert finished.status == 0, finished
    result = parse_json(finished.out)
    assert result["lost_workers"] == 1
    assert result["examples"] == 8 * 12_000
    assert result["eval_examples"] == 4_000
    assert len(sentences(finished.err)) == 1
    assert "a worker died" in finished.err


@pytest.mark.thorough
def test_a_killed_worker_of_a_sequential_training(paceline: Commands, click_log: tuple[Path, Path]) -> None:
    running = start(paceline, click_log, "--epochs", "20", "--consistency", "sequential", "--json")
    running.children("worker")[0].kill()
    result = parse_json(running.wait().out)
    assert (result["lost_workers"], result["examples"]) == (1, 20 * 12_000)


def test_a_stopped_worker_is_declared_dead(paceline: Commands, click_log: tuple[Path, Path]) -> None:
    """A stopped worker that resumes during the training ends."""
    running = start(paceline, click_log, *LONG, "--heartbeat-timeout", "1", "--consistency", "sequential")
    stopped = running.children("worker")[0]
    stopped.suspend()
    running.wait_line("a worker died")
    stopped.resume()
    running.wait_line("declared dead")
    stopped.wait(PROMPT_S)
    running.signal(signal.SIGINT)
    assert running.wait().status == 130


@pytest.mark.thorough
def test_a_training_does_not_wait_for_a_stopped_worker(paceline: Commands, click_log: tuple[Path, Path]) -> None:
    running = start(paceline, click_log, "--epochs", "25", "--heartbeat-timeout", "1", "--json")
    running.children("worker")[0].suspend()
    finished = running.wait(PROMPT_S)
    assert finished.status == 0, finished
    assert parse_json(finished.out)["examples"] == 25 * 12_000


def test_a_killed_server(paceline: Commands, click_log: tuple[Path, Path], tmp_path: Path) -> None:
    running = start(paceline, click_log, *LONG, "--servers", "2", "--save", "model", "--heartbeat-timeout", "60")
    running.children("server")[-1].kill()
    finished = running.wait(PROMPT_S)
    assert finished.status == 1
    (sentence,) = sentences(finished.err)
    assert sentence.startswith("paceline: server 1 was killed by SIGKILL")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("consistency", [pytest.param("bounded:4", marks=pytest.mark.thorough), "sequential"])
def test_a_killed_server_with_replicas(paceline: Commands, click_log: tuple[Path, Path], consistency: str) -> None:
    """The other server serves the rows of the killed server, and the training ends normally."""
    options = ["--servers", "2", "--replicas", "1", "--eval", str(click_log[1]), "--json", "--consistency", consistency]
    running = start(paceline, click_log, "--epochs", "8", *options)
    message = "a server died"
    running.children("server")[-1].kill()
    running.wait_line(message)
    finished = running.wait()
    assert finished.status == 0, finished
    result = parse_json(finished.out)
    assert (result["examples"], result["lost_workers"], result["eval_examples"]) == (8 * 12_000, 0, 4_000)
    assert [sentence.startswith(f"paceline: {message}") for sentence in sentences(finished.err)] == [True]


@pytest.mark.parametrize("consistency", [pytest.param("bounded:4", marks=pytest.mark.thorough), "sequential"])
def test_a_killed_scheduler(paceline: Commands, click_log: tuple[Path, Path], consistency: str) -> None:
    """Another scheduler replaces the killed scheduler, twice. Each example is counted once per epoch."""
    running = start(
        paceline, click_log, "--epochs", "15", "--eval", str(click_log[1]), "--json", "--consistency", consistency
    )
    (scheduler,) = running.children("scheduler")
    scheduler.kill()
    running.wait_line("the scheduler died")
    (scheduler,) = running.children("scheduler")
    scheduler.kill()
    finished = running.wait()
    assert finished.status == 0, finished
    result = parse_json(finished.out)
    assert result["examples"] == 15 * 12_000
    assert (result["lost_workers"], result["eval_examples"]) == (0, 4_000)
    assert [sentence.startswith("paceline: the scheduler died") for sentence in sentences(finished.err)] == [True] * 2


@pytest.mark.thorough
def test_a_repeatedly_killed_scheduler(paceline: Commands, click_log: tuple[Path, Path]) -> None:
    running = start(paceline, click_log, *LONG)
    for _ in range(6):
        wait_until(lambda: len(running.children("scheduler")) == 1, "no scheduler")
        (scheduler,) = running.children("scheduler")
        scheduler.kill()
        scheduler.wait()
    finished = running.wait(PROMPT_S)
    assert finished.status == 1
    assert "paceline: scheduler was killed by SIGKILL" in finished.err


def test_a_failure_never_replaces_a_finished_model(
    paceline: Commands, click_log: tuple[Path, Path], tmp_path: Path
) -> None:
    paceline.succeed("train", click_log[0], "--epochs", "1", "--workers", "1", "--save", "model", "-q")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    running = start(paceline, click_log, *LONG, "--save", "model")
    for worker in running.children("worker"):
        worker.kill()
    finished = running.wait()
    assert finished.status == 1
    assert "paceline: all workers have died" in finished.err
    assert "the unfinished model is saved in model-unfinished" in finished.err
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before
    assert paceline.succeed("predict", "model-unfinished", click_log[1], "--json").json["examples"] == 4_000
