"""Consistency with real clients: when workers wait, and the sums of an iteration's gradients."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.waiting import in_threads, wait_until

from paceline.errors import DeadlineError, PeerError, UsageError
from paceline.protocol import BoundedDelay, Eventual, Sequential
from paceline.ps import FTRL, SGD, Adagrad, Adam, Client, DenseTable, Momentum, SparseTable, UpdateRule, messages

from .harness import Cluster, Floats, floats, keys_of, random_keys

RULES: list[UpdateRule] = [
    SGD(lr=0.05),
    Momentum(lr=0.02, nesterov=True),
    Adagrad(lr=0.1),
    Adam(lr=0.05),
    FTRL(alpha=0.2, l1=0.01, l2=0.1),
]
NUM_WORKERS, NUM_ITERATIONS, BATCH = 4, 6, 10
NUM_FEATURES = 40


class Regression:
    """Least squares. The workers take turns with the batches, and gradients depend on the pulled values."""

    def __init__(self, dense: bool) -> None:
        random = np.random.default_rng(7)
        self.dense = dense
        self.keys = np.arange(NUM_FEATURES, dtype=np.uint64) if dense else random_keys(random, NUM_FEATURES - 2)
        shape = (NUM_ITERATIONS, NUM_WORKERS, BATCH, NUM_FEATURES)
        present = random.random(shape) < 0.3
        self.x = (present * random.uniform(0.5, 1.5, shape)).astype(np.float32)
        truth = random.uniform(1, 2, NUM_FEATURES)
        self.y = (self.x @ truth).astype(np.float32)

    def table(self, client: Client, rule: UpdateRule) -> SparseTable | DenseTable:
        if self.dense:
            return client.dense_table("w", size=NUM_FEATURES, update=rule)
        return client.sparse_table("w", update=rule)

    def step(self, table: SparseTable | DenseTable, iteration: int, workers: slice, scale: float) -> None:
        """Push the gradient of some workers' batches and end the iteration."""
        x = self.x[iteration, workers].reshape(-1, NUM_FEATURES)
        y = self.y[iteration, workers].reshape(-1)
        columns = np.flatnonzero(x.any(axis=0))
        if isinstance(table, DenseTable):
            weights = table.pull()
            gradient = x.T @ (x @ weights - y)
            table.push((gradient * np.float32(scale / BATCH)).astype(np.float32), tick=True)
            return
        weights = table.pull(self.keys[columns]).ravel()
        gradient = x[:, columns].T @ (x[:, columns] @ weights - y)
        table.push(self.keys[columns], (gradient * np.float32(scale / BATCH)).astype(np.float32), tick=True)

    def train(self, rule: UpdateRule, *, workers: int, servers: int, aggregate: str, jitter: int) -> Floats:
        """Return the weights after all iterations."""
        share, scale = NUM_WORKERS // workers, 1.0
        if aggregate == "mean" and workers == 1:
            scale = 1 / NUM_WORKERS
        consistency = Sequential(aggregate="mean" if aggregate == "mean" else "sum")
        with Cluster(servers=servers, workers=workers, consistency=consistency) as cluster:
            clients = cluster.connect_all()
            observer = cluster.connect(observer=True)

            def work(rank: int) -> None:
                random = np.random.default_rng([jitter, rank])
                table = self.table(clients[rank], rule)
                for iteration in range(NUM_ITERATIONS):
                    time.sleep(random.exponential(3e-4))
                    self.step(table, iteration, slice(share * rank, share * (rank + 1)), scale)
                clients[rank].close()  # the first worker to finish leaves before the last iteration is complete

            in_threads(*[lambda rank=rank: work(rank) for rank in range(workers)])
            wait_until(lambda: not cluster.num_counted())
            table = self.table(observer, rule)
            return table.pull() if isinstance(table, DenseTable) else table.pull(self.keys).ravel()


@pytest.mark.parametrize(
    ("rule", "dense"),
    [
        pytest.param(
            *(rule, dense),
            marks=[pytest.mark.thorough] * (dense != isinstance(rule, Momentum | Adam)),
            id=f"{type(rule).__name__}-{'dense' if dense else 'sparse'}",
        )
        for rule in RULES
        for dense in (False, True)
    ],
)
def test_sequential_training_equals_one_process_with_the_joined_batch(rule: UpdateRule, dense: bool) -> None:
    regression = Regression(dense)
    alone = regression.train(rule, workers=1, servers=1, aggregate="sum", jitter=0)
    first = regression.train(rule, workers=NUM_WORKERS, servers=2, aggregate="sum", jitter=1)
    second = regression.train(rule, workers=NUM_WORKERS, servers=2, aggregate="sum", jitter=2)
    other = regression.train(rule, workers=NUM_WORKERS, servers=3, aggregate="sum", jitter=3)
    assert np.abs(alone).max() > 0.2
    np.testing.assert_allclose(first, alone, rtol=1e-6, atol=1e-6)
    assert np.array_equal(first.view(np.uint32), second.view(np.uint32))
    assert np.array_equal(first.view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_mean_of_the_workers(dense: bool) -> None:
    regression = Regression(dense)
    rule = Adagrad(lr=0.1)
    alone = regression.train(rule, workers=1, servers=1, aggregate="mean", jitter=0)
    mean = regression.train(rule, workers=NUM_WORKERS, servers=2, aggregate="mean", jitter=1)
    np.testing.assert_allclose(mean, alone, rtol=1e-6, atol=1e-6)


def test_an_iteration_of_several_pushes_is_one_step() -> None:
    """Several workers push keys and ranges. Each element makes one Adagrad step."""
    with Cluster(servers=2, workers=2, consistency=Sequential()) as cluster:
        clients = cluster.connect_all()
        tables = [client.dense_table("d", size=1000, update=Adagrad(lr=1.0)) for client in clients]
        ones = np.ones(1000, np.float32)
        tables[0].push(ones[:600])
        tables[0].push(ones[:3], keys=keys_of(0, 999, 500))
        tables[1].push(ones[:700], start=300)
        assert not tables[0].pull().any()  # this iteration has no visible effect
        assert not tables[1].push_pull(ones[:1], start=5).any()
        clients[0].tick()
        tables[1].push(ones[:1], start=7, tick=True)
        assert tables[0].pull() == pytest.approx(-ones)
        histograms = [server.tables["d"].staleness for server in clients[0].statistics()]
        assert all(sum(histogram) == histogram[0] > 0 for histogram in histograms)


@pytest.mark.parametrize("tau", [0, 1, 3])
@pytest.mark.parametrize("servers", [1, 2])
def test_bounded_delay_admits_no_worker_early(tau: int, servers: int) -> None:
    workers, iterations = 3, 25
    finished = [0] * workers
    spread = [0]
    with Cluster(servers=servers, workers=workers, consistency=BoundedDelay(tau=tau)) as cluster:
        clients = cluster.connect_all()

        def work(rank: int) -> None:
            random = np.random.default_rng(rank)
            table = clients[rank].sparse_table("w", update=SGD(lr=1.0))
            keys = keys_of(1, 2, 3, 4, 5, 6, 7, 8)
            for iteration in range(iterations):
                table.pull(keys)
                least = min(finished)
                assert least >= iteration - tau, (rank, iteration, finished)
                spread[0] = max(spread[0], iteration - least)
                if random.random() < 0.2 * rank:
                    time.sleep(1e-3)
                finished[rank] = iteration + 1  # before the server can receive the request
                table.push(keys, np.ones(8, np.float32), tick=True)
            clients[rank].retire()

        in_threads(*[lambda rank=rank: work(rank) for rank in range(workers)])
        table = clients[0].sparse_table("w", update=SGD(lr=1.0))
        assert (table.pull(keys_of(1, 5)) == -workers * iterations).all()
    assert spread[0] <= tau


@pytest.mark.parametrize("tau", [0, 2])
def test_the_gate_opens_with_the_expected_tick(tau: int) -> None:
    with Cluster(servers=2, workers=2, consistency=BoundedDelay(tau=tau)) as cluster:
        fast, slow = cluster.connect_all()
        table = fast.dense_table("d", size=1000, update=SGD(lr=1.0))
        slow_table = slow.dense_table("d", size=1000, update=SGD(lr=1.0))
        for _ in range(tau):
            table.pull()
            fast.tick()
        table.pull()
        ticket = table.push_pull_async(np.ones(1000, np.float32), tick=True)
        wait_until(lambda: sum(server.held for server in slow.statistics()) == 2)
        assert not ticket.done()
        slow_table.push(np.ones(1000, np.float32)).wait()
        assert not ticket.done()
        slow.tick()
        slow.flush()
        assert (ticket.result() == -2).all()
        assert sum(server.held for server in slow.statistics()) == 0


def test_eventual_never_waits() -> None:
    with Cluster(servers=2, workers=3, consistency=Eventual()) as cluster:
        fast, _ = cluster.connect(), cluster.connect()  # the third worker never joins
        table = fast.sparse_table("w", update=SGD(lr=1.0))
        for step in range(50):
            assert (table.pull([1, 2, 3]) == -step).all()
            table.push([1, 2, 3], floats(1, 1, 1), tick=True)
        assert table.pull([1])[0, 0] == -50


@pytest.mark.parametrize("consistency", [Sequential(), BoundedDelay(tau=0)], ids=str)
def test_retire_and_join_again(consistency: Sequential | BoundedDelay) -> None:
    with Cluster(servers=2, workers=2, consistency=consistency) as cluster:
        stays, rests = cluster.connect_all()
        table, other = (client.sparse_table("w", update=SGD(lr=1.0)) for client in (stays, rests))
        keys, ones = np.arange(50, dtype=np.uint64), np.ones(50, np.float32)
        other.push(keys, ones, tick=True)
        rests.retire()
        rests.retire()  # a second call has no effect
        for step in range(3):
            table.pull(keys)
            table.push(keys, ones, tick=True)
            assert (table.pull(keys) == -2 - step).all()
        other.push(keys, ones).wait()  # applied immediately, like the push of an observer
        assert (other.pull(keys) == -5).all()
        with pytest.raises(UsageError, match=r"retired.*join"):
            rests.tick()
        with pytest.raises(UsageError, match=r"retired.*join"):
            other.push(keys, ones, tick=True)
        assert rests.clock == 1
        rests.join()
        assert rests.clock == stays.clock == 3
        table.push(keys, ones, tick=True)
        ticket = table.pull_async(keys)
        wait_until(lambda: sum(server.held for server in rests.statistics()) == 2)  # the worker takes part again
        assert not ticket.done()
        other.push(keys, ones, tick=True).wait()
        assert (ticket.result() == -7).all()
        if isinstance(consistency, Sequential):  # a push without a tick belongs to the next tick of its worker
            other.push(keys, ones).wait()
            rests.retire()
            table.push(keys, ones, tick=True)
            assert (table.pull(keys) == -8).all()


@pytest.mark.parametrize("death", ["close", "kill"])
@pytest.mark.parametrize("consistency", [Sequential(), BoundedDelay(tau=1)], ids=str)
def test_a_leaving_worker_opens_the_gate(consistency: Sequential | BoundedDelay, death: str) -> None:
    with Cluster(servers=2, workers=2, consistency=consistency) as cluster:
        lives, goes = cluster.connect_all()
        table, other = (client.sparse_table("w", update=SGD(lr=1.0)) for client in (lives, goes))
        keys, ones = np.arange(50, dtype=np.uint64), np.ones(50, np.float32)
        other.push(keys, ones, tick=True).wait()
        other.push(keys, 4 * ones).wait()  # a push of an iteration that the worker does not finish
        table.push(keys, ones, tick=True)
        table.push(keys, ones, tick=True)
        table.push(keys, ones, tick=True)
        ticket = table.pull_async(keys)
        observer = cluster.connect(observer=True)
        wait_until(lambda: sum(server.held for server in observer.statistics()) == 2)
        if death == "close":
            goes.close()
        else:
            cluster.kill(goes)
        expected = -4 if isinstance(consistency, Sequential) else -8
        assert (ticket.result() == expected).all()
        for _ in range(5):  # no worker waits
            table.push_pull(keys, ones, tick=True)


def test_a_worker_is_removed_if_it_dies_while_waiting() -> None:
    with Cluster(workers=2, consistency=Sequential()) as cluster:
        lives, goes = cluster.connect_all()
        table, other = (client.sparse_table("w", update=SGD(lr=1.0)) for client in (lives, goes))
        goes.tick()
        other.pull_async(keys_of(1))
        wait_until(lambda: lives.statistics()[0].held == 1)
        cluster.kill(goes)
        wait_until(lambda: lives.statistics()[0].held == 0)
        lives.tick()
        assert table.pull(keys_of(1)) == 0


def test_a_silent_worker_is_expelled_and_notified() -> None:
    with Cluster(workers=2, consistency=Sequential(), heartbeat_timeout_s=0.8) as cluster:
        notices: list[object] = []
        lives = cluster.connect(rank=0)
        silent = cluster.connect(rank=1, on_notice=notices.append)
        table, other = (client.sparse_table("w", update=SGD(lr=1.0)) for client in (lives, silent))
        other.push(keys_of(1), floats(8)).wait()
        silent.link.state.heartbeat_s = 1000.0  # like a stopped process
        table.push(keys_of(1), floats(1), tick=True)
        assert table.pull(keys_of(1)) == -1  # after the worker was declared dead
        wait_until(lambda: any(isinstance(notice, messages.Expelled) for notice in notices))
        with pytest.raises(PeerError, match=r"declared dead.*connect again"):
            other.push(keys_of(1), floats(1)).wait()
        with pytest.raises(PeerError, match="declared dead"):
            other.pull(keys_of(1))
        with pytest.raises(PeerError, match="declared dead"):
            silent.join()
        assert table.pull(keys_of(1)) == -1


@pytest.mark.parametrize("consistency", [Sequential(), BoundedDelay(tau=0)], ids=str)
def test_the_deadline_at_the_gate_names_the_missing_workers(consistency: Sequential | BoundedDelay) -> None:
    with Cluster(servers=2, workers=3, consistency=consistency) as cluster:
        waits = cluster.connect(rank=0, timeout_s=0.2)
        other_clients = [cluster.connect(rank=rank) for rank in (1, 2)]
        other_clients[0].tick()
        table = waits.sparse_table("w", update=SGD(lr=1.0))
        waits.tick()
        message = (
            rf"worker 0 waited 0.2 s to begin iteration 1 under {consistency} consistency: server [01] still waits for "
            "worker 2$"
        )
        with pytest.raises(DeadlineError, match=message):
            table.pull(np.arange(20, dtype=np.uint64))
        waits.flush()  # the other server's failure belongs to the same ticket, and is not reported again
        other_clients[1].tick()
        other_clients[1].flush()
        assert not table.pull(keys_of(1)).any()


def test_the_deadline_names_missing_workers() -> None:
    with Cluster(workers=3, consistency=Sequential()) as cluster:
        waits, other = cluster.connect(rank=0, timeout_s=0.2), cluster.connect(rank=1)
        table = waits.sparse_table("w", update=SGD(lr=1.0))
        waits.tick()
        message = "server 0 still waits for worker 1 and 1 worker that has not joined yet"
        with pytest.raises(DeadlineError, match=message):
            table.pull(keys_of(1))
        other.tick()
        with pytest.raises(DeadlineError, match="waits for 1 worker that has not joined yet"):
            table.pull(keys_of(1))


def test_a_late_worker_starts_at_the_current_iteration() -> None:
    with Cluster(servers=2, workers=1, consistency=Sequential()) as cluster:
        first = cluster.connect()
        table = first.sparse_table("w", update=SGD(lr=1.0))
        for _ in range(7):
            table.push([1], floats(1), tick=True)
        late = cluster.connect()
        assert late.clock == 7
        other = late.sparse_table("w", update=SGD(lr=1.0))
        assert other.pull([1]) == -7
        ticket = table.push_pull_async([1], floats(1), tick=True)
        wait_until(lambda: sum(server.held for server in late.statistics()) == 1)
        other.push([1], floats(1), tick=True)
        assert ticket.result() == -9


def test_pulls_of_later_iterations_wait_as_the_consistency_requires() -> None:
    with Cluster(workers=1, consistency=BoundedDelay(tau=1)) as cluster:
        client = cluster.connect()
        table = client.sparse_table("w", update=SGD(lr=1.0))
        ticket = table.pull_async([1], ahead=1)
        table.push([1], floats(1), tick=True)
        assert ticket.result() == 0
        wrong: Any
        with pytest.raises(UsageError, match=r"ahead=2: under bounded:1 consistency"):
            table.pull_async([1], ahead=2)
        for wrong in (-1, None, 0.0, "x", []):
            with pytest.raises(UsageError, match=re.escape(f"ahead={wrong!r}: expected a whole number from 0")):
                table.pull_async([1], ahead=wrong)


def test_observers_read_and_write_without_delay_and_outside_of_iterations() -> None:
    with Cluster(workers=1, consistency=Sequential()) as cluster:
        client, observer = cluster.connect(), cluster.connect(observer=True)
        table, other = (connection.sparse_table("w", update=SGD(lr=1.0)) for connection in (client, observer))
        table.push([1], floats(1)).wait()
        other.push([1], floats(2)).wait()
        assert other.pull([1]) == table.pull([1]) == -2
        client.tick()
        assert table.pull([1]) == -3
        for refused in (observer.tick, observer.join, lambda: other.push([1], floats(1), tick=True)):
            with pytest.raises(UsageError, match="observer"):
                refused()
        assert table.pull([1]) == -3


def test_a_client_used_from_several_threads() -> None:
    with Cluster(servers=2) as cluster:
        client = cluster.connect()
        table = client.sparse_table("w", dim=2, update=SGD(lr=1.0))
        dense = client.dense_table("d", size=500, update=SGD(lr=1.0))
        keys, ones = np.arange(40, dtype=np.uint64), np.ones((40, 2), np.float32)
        shared = table.pull_async(keys)
        barrier = threading.Barrier(6)

        def work(number: int) -> None:
            barrier.wait()
            assert not shared.result().any()  # several threads wait for one ticket
            tickets = []
            for step in range(40):
                own_keys = keys + np.uint64(1000 * number)
                tickets.append(table.push(own_keys, ones))
                tickets.append(dense.push(np.ones(500, np.float32)))
                if step % 5 == number % 5:
                    assert (table.pull(own_keys) == -(step + 1)).all()
                    client.statistics()
            for ticket in tickets:
                ticket.wait()

        in_threads(*[lambda number=number: work(number) for number in range(6)])
        assert (dense.pull() == -240).all()
        assert len(table) == 240


def test_no_worker_waits_for_a_worker_dead_before_joining() -> None:
    with Cluster(servers=1, workers=2, consistency=Sequential()) as cluster:
        client = cluster.connect()
        other = cluster.link()  # this worker registers, and dies before it joins the iterations
        cluster.lose(other)
        table = client.sparse_table("w", dim=1, update=SGD(lr=1.0))
        table.push(np.array([1], np.uint64), np.ones((1, 1), np.float32), tick=True)
        assert table.pull(np.array([1], np.uint64)).tolist() == [[-1.0]]
