"""The messages of a training about its workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from paceline.protocol.jobs import JobState
from paceline.training.cluster_health import ClusterHealth


def state(lost_workers: int = 0, **fields: Any) -> JobState:
    rest: dict[str, Any] = {"progress": {}, "seconds": 0.0, "lost_workers": lost_workers, "num_reports": 0, **fields}
    return JobState(done=0, total=4, finished=False, failed=None, **rest)


def test_that_a_job_waits_for_workers_is_reported_once() -> None:
    said: list[str] = []
    client: Any = SimpleNamespace(
        link=SimpleNamespace(num_replacements=0), servers=SimpleNamespace(routes=SimpleNamespace(server_ranks=()))
    )
    health = ClusterHealth(client, None, said.append, patience_s=0.0)
    patient = ClusterHealth(client, None, said.append, patience_s=60.0)
    for awaited in ((), (1,), (1,), (0, 1)):
        for each in (health, patient):
            each.check_workers(state(num_workers=2, busy_ranks=awaited))
    for sentence, workers in zip(said, ("worker 1 ", "workers 0, 1 "), strict=True):
        assert sentence.startswith(workers)
        assert "still busy" in sentence
    health.check_workers(state(num_workers=0))
    assert "no worker" in said[-1]


def test_lost_workers_are_reported_while_other_workers_continue() -> None:
    said: list[str] = []
    client: Any = SimpleNamespace(
        link=SimpleNamespace(num_replacements=0), servers=SimpleNamespace(routes=SimpleNamespace(server_ranks=()))
    )
    health = ClusterHealth(client, None, said.append)
    for num_lost, num_workers in ((1, 2), (2, 1), (2, 1), (3, 0)):
        health.report_lost_workers("train", state(num_workers=num_workers, lost_workers=num_lost))
    assert [each.split(",")[0] for each in said] == ["a worker died: 2 continue", "a worker died: 1 continues"]
    assert health.num_lost_workers == 3
