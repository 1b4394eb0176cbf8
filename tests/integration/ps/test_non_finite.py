"""Infinities and NaN from overflows, writes or loads are rejected or counted."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.waiting import in_threads, wait_until

from paceline.errors import NonFiniteError, PacelineError, UsageError
from paceline.protocol import BoundedDelay, Consistency, DelayCompensate, Eventual, Sequential
from paceline.ps import SGD, Adagrad, Client, Constant, DenseTable, SparseTable
from paceline.ps.client.records import read_records, write_records
from paceline.ps.client.snapshot_loading import load_snapshot
from paceline.ps.client.snapshots import SnapshotCoordinator
from paceline.storage.snapshot_directory import read_newest
from paceline.tables.rules import UpdateRule

from .harness import Cluster, Floats, Keys, ServerNode, floats, keys_of, statistics_of

HUGE = 3e38


class Table:
    """A table of either kind, by keys."""

    def __init__(self, client: Client, kind: str, update: UpdateRule | None = None) -> None:
        rule = SGD(lr=1.0) if update is None else update
        self.client = client
        self.table: SparseTable | DenseTable
        if kind == "sparse":
            self.table = client.sparse_table("w", update=rule)
        else:
            self.table = client.dense_table("w", size=1000, update=rule)

    def push(self, keys: Keys, *gradients: float, tick: bool = False) -> None:
        if isinstance(self.table, SparseTable):
            self.table.push(keys, floats(*gradients), tick=tick).wait()
        else:
            first, last = int(keys[0]), int(keys[-1])
            is_run = last - first == len(keys) - 1
            place: dict[str, Any] = {"start": first} if is_run else {"keys": keys}
            self.table.push(floats(*gradients), tick=tick, **place).wait()

    def pull(self, keys: Keys) -> list[float]:
        if isinstance(self.table, SparseTable):
            return list(map(float, self.table.pull(keys).ravel()))
        return list(map(float, self.table.pull(keys=keys)))

    def rows(self) -> dict[int, list[float]]:
        rows: dict[int, list[float]] = {}
        for keys, records in read_records(self.client, self.table.spec):
            rows |= dict(zip(keys.tolist(), records.tolist(), strict=True))
        return rows

    def write(self, keys: Keys, records: Floats) -> None:
        write_records(self.client, self.table.spec, keys, records.reshape(len(keys), 1))

    def num_non_finite(self) -> int:
        return sum(server.non_finite for server in statistics_of(self.client, "w"))


def assert_replicas_equal(cluster: Cluster) -> None:
    """Compare the rows of all servers bit by bit."""

    def rows(node: ServerNode) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        part = node.server.tables.by_number[1].part
        for bucket in range(512):
            keys, records = part.read_bucket(bucket)
            found |= {key: record.tobytes() for key, record in zip(keys.tolist(), records, strict=True)}
        return found

    first, second = (node.call(partial(rows, node)) for node in cluster.nodes)
    assert first == second


@pytest.mark.parametrize("replicas", [0, 1])
@pytest.mark.parametrize("kind", ["sparse", "dense"])
@pytest.mark.parametrize(
    "consistency", [pytest.param(Eventual(), marks=pytest.mark.thorough), BoundedDelay(tau=2)], ids=str
)
def test_an_overflowing_push_changes_nothing(consistency: Consistency, kind: str, replicas: int) -> None:
    with Cluster(servers=1 + replicas, replicas=replicas, consistency=consistency) as cluster:
        table = Table(cluster.connect(rank=0), kind)
        table.push(keys_of(5, 6), -HUGE, 1)
        before = table.rows()
        expected = r"a push of worker 0 to server \d makes inf in the row of 5 of table 'w'"
        with pytest.raises(NonFiniteError, match=expected):
            table.push(keys_of(5), -HUGE)
        assert table.rows() == before
        assert table.num_non_finite() == 1
        table.push(keys_of(5, 6), HUGE, 1)  # the client can continue
        assert table.pull(keys_of(5, 6)) == [0, -2]
        if replicas:
            assert_replicas_equal(cluster)


def test_the_rows_are_named() -> None:
    with Cluster() as cluster:
        table = Table(cluster.connect(rank=0), "sparse", Adagrad(lr=1.0))
        with pytest.raises(NonFiniteError, match="makes inf in the rows of 0, 1, 2, 3, 4 and 3 more of table 'w'"):
            table.push(keys_of(*range(9)), *[1e30] * 8, 1)
        assert table.rows() == {}


def test_a_rejected_push_may_be_resent() -> None:
    with Cluster() as cluster:
        table = Table(cluster.connect(rank=0), "sparse", Adagrad(lr=1.0))
        for _ in range(2):
            with pytest.raises(NonFiniteError):
                table.push(keys_of(1), 1e20)
        table.push(keys_of(1), 1e3)
        assert table.pull(keys_of(1)) == [-1]


@pytest.mark.parametrize("kind", ["sparse", "dense"])
@pytest.mark.parametrize("replicas", [0, 1])
def test_an_overflowing_sum_is_refused_and_the_workers_are_reported(replicas: int, kind: str) -> None:
    with Cluster(servers=1 + replicas, replicas=replicas, workers=2, consistency=Sequential()) as cluster:
        tables = [Table(client, kind) for client in cluster.connect_all()]
        key = keys_of(3)

        def step(table: Table, gradient: float) -> list[float]:
            table.push(key, gradient, tick=True)
            return table.pull(key)

        def is_refused(table: Table) -> None:
            with pytest.raises(NonFiniteError, match=r"the sum of the gradients of iteration 1 on server .* holds inf"):
                step(table, HUGE)

        assert in_threads(*[lambda table=table: step(table, 1.0) for table in tables]) == [[-2], [-2]]
        in_threads(*[lambda table=table: is_refused(table) for table in tables])
        assert tables[0].pull(key) == [-2]
        assert tables[0].num_non_finite() == 1
        assert in_threads(*[lambda table=table: step(table, 1.0) for table in tables]) == [[-4], [-4]]
        if replicas:
            wait_until(lambda: all(not node.server.core.replication.pushes.num_pending for node in cluster.nodes))
            assert_replicas_equal(cluster)


def test_with_count_overflowing_pushes_are_applied_and_counted() -> None:
    with Cluster(servers=2, replicas=1, non_finite="count") as cluster:
        table = Table(cluster.connect(rank=0), "sparse")
        for _ in range(2):
            table.push(keys_of(5), -HUGE)
        assert table.pull(keys_of(5)) == [np.inf]
        table.push(keys_of(6), 1)
        assert table.num_non_finite() == 1
        table.write(keys_of(8), floats(np.nan))
        assert np.isnan(table.pull(keys_of(8))).all()
        assert table.num_non_finite() == 2
        assert_replicas_equal(cluster)


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_non_finite_records_are_not_written(kind: str) -> None:
    with Cluster() as cluster:
        table = Table(cluster.connect(rank=0), kind)
        keys, records = np.arange(20, dtype=np.uint64), np.ones(20, np.float32)
        table.write(keys, records)
        records[3:] = np.nan
        expected = "write of worker 0 to server 0 holds nan in the rows of 3, 4, 5, 6, 7 and 12 more of table 'w'"
        with pytest.raises(NonFiniteError, match=expected):
            table.write(keys, records)
        assert table.pull(keys) == [1] * 20


def test_an_overflowing_compensated_gradient_is_refused() -> None:
    with Cluster(workers=2, consistency=BoundedDelay(tau=4), stale=DelayCompensate(strength=1.0)) as cluster:
        a, b = (Table(client, "sparse") for client in cluster.connect_all())
        a.pull(keys_of(1))
        b.push(keys_of(1), 1e3)
        with pytest.raises(NonFiniteError, match="a push of worker 0 to server 0 holds -inf"):
            a.push(keys_of(1), 1e19)  # the gradient's square times the change exceeds the largest float32
        assert a.pull(keys_of(1)) == [-1e3]


def test_a_non_finite_row_does_not_affect_other_rows() -> None:
    with Cluster() as cluster:
        table = Table(cluster.connect(rank=0), "sparse")
        node = cluster.nodes[0]
        table.push(keys_of(1), 1)
        part = node.server.tables.by_number[1].part
        # an earlier version permitted this record
        node.call(lambda: part.write_records(keys_of(1), floats(np.inf).reshape(1, 1)))
        table.push(keys_of(2), 1)
        with pytest.raises(NonFiniteError, match="makes nan in the row of 1 "):
            table.push(keys_of(1, 2), 1, 1)
        assert table.pull(keys_of(2)) == [-1]


def test_fills_are_applied_unchanged_and_counted() -> None:
    with Cluster(servers=2, replicas=1, non_finite="count") as cluster:
        table = Table(cluster.connect(rank=0), "sparse")
        table.write(keys_of(8), floats(np.inf))
        node = ServerNode(cluster, None, cluster._stack, extra=True)
        cluster.nodes.append(node)
        node.join()
        cluster.nodes[0].stop()
        wait_until(lambda: bool(node.server.tables.by_number) and node.server.tables.by_number[1].non_finite == 1)
        assert table.pull(keys_of(8)) == [np.inf]


@pytest.mark.parametrize("policy", ["refuse", "count"])
def test_a_non_finite_snapshot_is_rejected_or_counted(tmp_path: Path, policy: str) -> None:
    with Cluster(non_finite="count") as cluster:
        client = cluster.connect(rank=0)
        Table(client, "sparse").write(keys_of(1, 2), floats(np.inf, 1))
        coordinator = SnapshotCoordinator(client, tmp_path)
        coordinator.begin()
        wait_until(lambda: coordinator.poll() is not None)
        coordinator.close()
    with Cluster(non_finite=policy) as cluster:
        client = cluster.connect(rank=0)
        if policy == "refuse":
            with pytest.raises(PacelineError, match=r"the snapshot in .* holds inf in the row of 1 of table 'w'"):
                load_snapshot(client, read_newest(tmp_path))
        else:
            load_snapshot(client, read_newest(tmp_path))
            assert Table(client, "sparse").num_non_finite() == 1


def test_non_finite_initial_values_are_rejected_or_counted() -> None:
    with Cluster() as cluster:
        client = cluster.connect(rank=0)
        table: Any = client.sparse_table("w", update=SGD(lr=1e30), initializer=Constant(value=1e30))
        with pytest.raises(NonFiniteError):
            table.push(keys_of(1), floats(1e10)).wait()
        assert table.pull(keys_of(1)) == np.float32(1e30)


@pytest.mark.parametrize("make", [lambda: Constant(value=1e39), lambda: SGD(lr=1e39)])
def test_settings_infinite_in_float32_are_refused(make: Any) -> None:
    with pytest.raises(UsageError, match="expected a number"):
        make()


def test_a_wrong_policy_is_refused() -> None:
    with pytest.raises(UsageError, match="non_finite='ignore': expected 'refuse' or 'count'"):
        Cluster(non_finite="ignore")
