"""The progress in the status of a TrainJob: what is sent, how often, and failures of the server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.kubeflow import StatusServer

from paceline.environment import Environment, environment
from paceline.observe.kubeflow import KubeflowStatus


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StatusServer]:
    server = StatusServer(tmp_path)
    yield server
    server.close()


def test_the_newest_progress_is_sent_with_the_current_token(
    server: StatusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.observe.kubeflow._EVERY_S", 0.5)
    warnings: list[str] = []
    with KubeflowStatus(environment(server.variables), warnings.append) as status:
        status.update(0.25, {"loss": 0.123456789, "currentEpoch": 1, "nothing": None})
        first = server.wait(1)
        assert first["progressPercentage"] == 25
        assert "estimatedRemainingSeconds" not in first
        assert server.metrics() == {"loss": "0.123457", "currentEpoch": "1"}
        server.token.write_text("second token\n")  # Kubernetes replaces tokens
        time.sleep(0.1)
        for done in (0.3, 0.5):
            status.update(done)
        status.update(metrics={"loss": 0.1})
        second = server.wait(2)
        assert second["progressPercentage"] == 50
        assert "estimatedRemainingSeconds" in second
        assert server.metrics() == {"loss": "0.1", "currentEpoch": "1"}
        status.update(1.0)
    assert server.received[-1]["progressPercentage"] == 100
    assert len(server.received) == 3
    assert server.times_s[1] - server.times_s[0] > 0.4
    assert warnings == []


def test_the_remaining_time_counts_from_the_first_progress(
    server: StatusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed training begins with a finished part."""
    monkeypatch.setattr("paceline.observe.kubeflow._EVERY_S", 0.1)
    times = iter([100.0, 160.0])
    monkeypatch.setattr("paceline.observe.kubeflow.time", SimpleNamespace(monotonic=lambda: next(times)))
    status = KubeflowStatus(environment(server.variables), pytest.fail)
    status.update(0.5)
    status.update(0.8)
    status.close()
    assert server.received[-1]["estimatedRemainingSeconds"] == 40


@pytest.mark.parametrize("fault", ["status", "token", "certificate", "url"])
def test_a_failing_server_causes_one_warning(
    server: StatusServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr("paceline.observe.kubeflow._EVERY_S", 0.05)
    if fault == "status":
        server.status = 503
    elif fault == "token":
        server.token.unlink()
    elif fault == "certificate":
        (tmp_path / "ca.crt").write_text("no certificate")
    else:
        server.variables["KUBEFLOW_TRAINER_STATUS_URL"] = "no address"
    warnings: list[str] = []
    with KubeflowStatus(environment(server.variables), warnings.append) as status:
        for number in range(5):
            status.update(number / 5)
            time.sleep(0.06)
    assert len(warnings) == 1
    assert "The training continues" in warnings[0]


def test_a_server_that_does_not_answer_delays_the_end_only_a_little(
    server: StatusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.observe.kubeflow._TIMEOUT_S", 0.2)
    server.answers.clear()
    warnings: list[str] = []
    begin_s = time.monotonic()
    with KubeflowStatus(environment(server.variables), warnings.append) as status:
        status.update(0.5)
        assert time.monotonic() - begin_s < 5.0
        server.wait(1)
    assert time.monotonic() - begin_s < 8.0


def test_nothing_is_sent_outside_of_kubeflow() -> None:
    before = threading.active_count()
    status = KubeflowStatus(Environment(), pytest.fail)
    status.update(0.5, {"loss": 1.0})
    assert threading.active_count() == before
    status.close()
