from __future__ import annotations

import numpy as np
import pytest

import paceline
from paceline.errors import AddressError, UsageError

pytestmark = pytest.mark.usefixtures("warm_clusters")


def test_joins_a_running_cluster() -> None:
    with paceline.local_cluster() as cluster, paceline.connect(cluster.scheduler, token=cluster.token) as client:
        table = client.sparse_table("w", dim=1, update=paceline.SGD(lr=1.0))
        table.push(np.array([5], np.uint64), np.ones((1, 1), np.float32)).wait()
        assert table.pull(np.array([5], np.uint64)).tolist() == [[-1.0]]
        assert client.role == "worker"


def test_finds_the_cluster_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with paceline.local_cluster() as cluster:
        monkeypatch.setenv("PACELINE_SCHEDULER", cluster.scheduler)
        monkeypatch.setenv("PACELINE_TOKEN", cluster.token)
        with paceline.connect(observer=True) as client:
            assert client.role == "observer"


def test_missing_settings_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_SCHEDULER", raising=False)
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    with pytest.raises(UsageError, match="PACELINE_SCHEDULER"):
        paceline.connect()


def test_no_scheduler_listens() -> None:
    with pytest.raises(AddressError, match="no process listens there"):
        paceline.connect("127.0.0.1:1", token="a token for tests")
