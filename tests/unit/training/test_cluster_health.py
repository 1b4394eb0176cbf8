"""The messages of a training about waiting and lost workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from paceline.protocol.jobs import JobState
from paceline.training.cluster_health import ClusterHealth


def state(lost_workers: int = 0, **fields: Any) -> JobState:
    common: dict[str, Any] = {"progress": {}, "seconds": 0.0, "lost_workers": lost_workers, "num_reports": 0, **fields}
    return JobState(done=0, total=4, finished=False, failed=None, **common)


def test_waiting_for_workers_is_reported_once() -> None:
    messages: list[str] = []
    client: Any = SimpleNamespace(
        link=SimpleNamespace(num_replacements=0), servers=SimpleNamespace(routes=SimpleNamespace(server_ranks=()))
    )
    health = ClusterHealth(client, None, messages.append, patience_s=0.0)
    patient = ClusterHealth(client, None, messages.append, patience_s=60.0)
    for missing_workers in ((), (1,), (1,), (0, 1)):
        for monitor in (health, patient):
            monitor.check_workers(state(num_workers=2, busy_ranks=missing_workers))
    for sentence, workers in zip(messages, ("worker 1 ", "workers 0, 1 "), strict=True):
        assert sentence.startswith(workers)
        assert "still busy" in sentence
    health.check_workers(state(num_workers=0))
    assert "no worker" in messages[-1]


def test_lost_workers_are_reported_while_other_workers_continue() -> None:
    messages: list[str] = []
    client: Any = SimpleNamespace(
        link=SimpleNamespace(num_replacements=0), servers=SimpleNamespace(routes=SimpleNamespace(server_ranks=()))
    )
    health = ClusterHealth(client, None, messages.append)
    for num_lost, num_workers in ((1, 2), (2, 1), (2, 1), (3, 0)):
        health.report_lost_workers("train", state(num_workers=num_workers, lost_workers=num_lost))
    assert [line.split(",")[0] for line in messages] == ["a worker died: 2 continue", "a worker died: 1 continues"]
    assert health.num_lost_workers == 3
