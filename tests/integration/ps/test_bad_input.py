"""Each mistake raises the right class of error with a message that names the objects, and changes nothing."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.waiting import in_threads, wait_until

from paceline.errors import (
    ConnectionLostError,
    NonFiniteError,
    PacelineError,
    PeerError,
    ProtocolError,
    StaleEpochError,
    TableMismatchError,
    UsageError,
)
from paceline.protocol import Role, Sequential
from paceline.protocol.jobs import Job, JobSpec
from paceline.ps import SGD, Adagrad, Adam, Client, Constant, messages
from paceline.ps.messages import CALL, NOTICE, PULL, PUSH, PUSH_PULL, RANGE, TICKS
from paceline.transport import Channel, Hello, SocketTransport, frame_parts

from .harness import TOKEN, Cluster, floats, keys_of

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("keys", "grads", "message"),
    [
        ([1.0], [1], "keys of table 'w' are float64: expected uint64"),
        (["a"], [1], "keys of table 'w' are <U1: expected uint64"),
        ([True], [1], "keys of table 'w' are bool: expected uint64"),
        ([2**64], [1], "keys of table 'w' are object: expected uint64"),
        ([3, -4], [1, 1], r"keys of table 'w' hold -4: .*keys.view\(np.uint64\)"),
        ([[1]], [1], r"keys of table 'w' have shape \(1, 1\): expected one dimension"),
        (7, [1], r"keys of table 'w' have shape \(\): expected one dimension"),
        ([1], np.ones(1), r"gradients for table 'w' are float64: expected float32; convert with grads.astype"),
        ([1, 2], [1], r"gradients for table 'w' have shape \(1,\): expected \(2, 1\), one row per key"),
        ([1, 2], [[1, 2]], r"have shape \(1, 2\): expected \(2, 1\)"),
        ([1, 2], [1, NAN], "a push of worker 0 to table 'w' contains nan"),
        ([1, 2], [INF, 1], "a push of worker 0 to table 'w' contains inf"),
        ([1, 2], [1, -INF], "a push of worker 0 to table 'w' contains -inf"),
    ],
)
def test_the_client_refuses_a_bad_push(keys: Any, grads: Any, message: str) -> None:
    grads = grads if isinstance(grads, np.ndarray) else np.array(grads, np.float32)
    with Cluster(servers=2) as cluster:
        client = cluster.connect()
        table = client.sparse_table("w", update=SGD(lr=1.0))
        kind = NonFiniteError if not np.isfinite(grads).all() else UsageError
        for attempt in (table.push, table.push_pull):
            with pytest.raises(kind, match=message):
                attempt(keys, grads, tick=True)
        assert client.clock == 0
        assert len(table) == 0
        assert sum(server.tables["w"].pushes for server in client.statistics()) == 0
        assert table.push_pull([1], floats(1)) == -1


def test_invalid_arguments_of_tables_and_clients() -> None:
    anything: Any
    with Cluster() as cluster:
        client = cluster.connect()
        table = client.sparse_table("w", update=SGD(lr=1.0))
        for anything in ("x", None, 1.5, True, -1, [1], {}):
            shown = re.escape(repr(anything))
            expected = "expected a whole number from"
            attempts: list[tuple[Callable[[], Any], str]] = [
                (lambda: table.begin_pass(anything), rf"begin_pass\({shown}\): {expected} 1"),  # noqa: B023
                (lambda: table.erase_unseen(anything), rf"erase_unseen\({shown}\): {expected} 1 to 62"),  # noqa: B023
                (lambda: table.erase_unseen(1, also=anything), "expected a list of sparse tables of this"),  # noqa: B023
                (lambda: table.set_filters(anything), "filters"),  # noqa: B023
                (lambda: client.sparse_table("v", dim=anything, update=SGD(lr=1.0)), expected),  # noqa: B023
                (lambda: client.dense_table("v", size=anything, update=SGD(lr=1.0)), expected),  # noqa: B023
                (lambda: client.open_table(anything), rf"open_table\({shown}\): expected an element of"),  # noqa: B023
            ]
            if anything is not None:
                attempts.append((lambda: table.begin_pass(2, anything), rf"rows_of={shown}\): {expected} 0"))  # noqa: B023
            if anything != "x":
                attempts.append((lambda: client.save(anything), rf"save\({shown}\): expected the path"))  # noqa: B023
                attempts.append((lambda: client.load(anything), rf"load\({shown}\): expected the path"))  # noqa: B023
            for attempt, message in attempts:
                with pytest.raises(UsageError, match=message):
                    attempt()
        assert client.tables() == [table.spec]
        with pytest.raises(UsageError, match=r"begin_pass\(20261121\): expected a whole number from 1 to 16777216"):
            table.begin_pass(20261121)  # a date
        table.begin_pass(np.int64(1))  # type: ignore[arg-type]
        assert table.erase_unseen(np.int64(1), also=[table]) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (np.zeros((2, 3)), r"out for table 'w' is float64 of shape \(2, 3\): expected .* of 6 elements"),
        (np.zeros(5, np.float32), r"of shape \(5,\): expected a contiguous, writable float32 array of 6 elements"),
        (np.zeros((2, 6), np.float32)[:, ::2], "expected a contiguous"),
        (np.frombuffer(bytes(24), np.float32), "writable"),
        ([0] * 6, "out for table 'w' is a list: expected a NumPy array of float32"),
    ],
)
def test_an_invalid_out_is_rejected(out: Any, message: str) -> None:
    with Cluster() as cluster:
        table = cluster.connect().sparse_table("w", dim=3, update=SGD(lr=1.0))
        with pytest.raises(UsageError, match=message):
            table.pull([1, 2], out)
        with pytest.raises(UsageError, match=message):
            table.push_pull([1, 2], np.ones((2, 3), np.float32), out)
        assert len(table) == 0


def test_mistakes_with_dense_tables_are_rejected() -> None:
    with Cluster(servers=2) as cluster:
        client = cluster.connect()
        table = client.dense_table("d", size=10, update=SGD(lr=1.0))
        ones = np.ones(10, np.float32)
        mistakes: list[tuple[Callable[[], object], str]] = [
            (lambda: table.pull(keys=[10]), "keys of dense table 'd' hold 10: they go from 0 to 9"),
            (lambda: table.push(ones[:1], keys=keys_of(2**64 - 1)), "hold 18446744073709551615: they go from 0 to 9"),
            (lambda: table.push(ones, start=1), r"range \[1, 11\) of dense table 'd': expected one within \[0, 10\)"),
            (lambda: table.push_pull(ones, start=-1), r"range \[-1, 9\) of dense table 'd'"),
            (lambda: table.pull(start=5, stop=4), r"range \[5, 4\)"),
            (lambda: table.pull(start=0, stop=1 << 60), r"range \[0, 1152921504606846976\)"),
            (lambda: table.pull(start=11), r"range \[11, 10\)"),
            (lambda: table.pull(start=1.5), r"range \[1.5, None\) of dense table 'd': expected whole numbers"),  # type: ignore[arg-type]
            (lambda: table.pull(ones, start=1), r"range \[1, 11\)"),
            (lambda: table.pull(ones[:3], start=1, stop=5), r"shape \(3,\): expected .* 4 elements"),
            (lambda: table.push(np.float32(1)), "gradients for table 'd' are a single number"),
            (lambda: table.push(np.ones((2, 2), np.float32)), r"have shape \(2, 2\): expected \(2, 1\)"),
            (lambda: table.push(ones[:3], keys=[1, 2]), r"have shape \(3,\): expected \(2, 1\)"),
            (lambda: table.push_pull(ones[:3], keys=[1, 2]), r"have shape \(3,\): expected \(2, 1\)"),
            (lambda: table.push(np.array([1, NAN], np.float32)), "worker 0 to table 'd' contains nan"),
            (lambda: table.set_update(0.1), "update=0.1: expected an update rule such as"),  # type: ignore[arg-type]
        ]
        for mistake, message in mistakes:
            with pytest.raises(UsageError, match=message):
                mistake()
        assert not table.pull().any()


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda c: c.sparse_table("", update=SGD(lr=1.0)), "1 to 200 printable characters"),
        (lambda c: c.sparse_table("a\nb", update=SGD(lr=1.0)), "printable"),
        (lambda c: c.sparse_table("x" * 201, update=SGD(lr=1.0)), "1 to 200"),
        (lambda c: c.sparse_table(5, update=SGD(lr=1.0)), "table name 5"),
        (lambda c: c.sparse_table("w", dim=0, update=SGD(lr=1.0)), "dim=0.*from 1 to 65536"),
        (lambda c: c.sparse_table("w", dim=2.0, update=SGD(lr=1.0)), "dim=2.0"),
        (lambda c: c.dense_table("d", size=0, update=SGD(lr=1.0)), "size=0.*expected a whole number from 1"),
        (lambda c: c.sparse_table("w", update="sgd"), "update='sgd': expected an update rule"),
        (lambda c: c.sparse_table("w", update=SGD(lr=1.0), initializer=3), "initializer=3"),
        (lambda c: c.sparse_table("w", update=SGD(lr=1.0), seed="x"), "seed='x'"),
    ],
)
def test_an_invalid_declaration_is_rejected(declare: Callable[[Any], object], message: str) -> None:
    with Cluster() as cluster:
        client = cluster.connect()
        with pytest.raises(UsageError, match=message):
            declare(client)
        assert client.tables() == []


def test_a_different_second_declaration_is_rejected() -> None:
    with Cluster(servers=2) as cluster:
        client, other = cluster.connect(), cluster.connect()
        client.sparse_table("w", dim=2, update=SGD(lr=0.5), initializer=Constant(value=1), seed=3)
        start = Constant(value=1)
        again: list[tuple[Callable[[Client], object], str]] = [
            (lambda c: c.sparse_table("w", dim=3, update=SGD(lr=0.5), initializer=start, seed=3), r"sparse\(dim=3, "),
            (lambda c: c.sparse_table("w", dim=2, update=SGD(lr=0.1), initializer=start, seed=3), "lr=0.1"),
            (lambda c: c.sparse_table("w", dim=2, update=Adam(lr=0.5), initializer=start, seed=3), r"Adam\("),
            (lambda c: c.sparse_table("w", dim=2, update=SGD(lr=0.5), seed=3), r"Zeros\(\)"),
            (lambda c: c.sparse_table("w", dim=2, update=SGD(lr=0.5), initializer=start, seed=4), "seed=4"),
            (lambda c: c.dense_table("w", size=2, update=SGD(lr=0.5), initializer=start, seed=3), r"dense\(size=2, "),
        ]
        known = r"exists as sparse\(dim=2, SGD\(lr=0.5, weight_decay=0.0, max.*\), Constant\(value=1\), seed=3\)"
        for declare, message in again:
            for client_or_other in (client, other):
                with pytest.raises(TableMismatchError, match=rf"table 'w' was declared as .*{message}.*{known}"):
                    declare(client_or_other)
        assert len(client.tables()) == 1


def test_another_rule_for_a_table_is_rejected() -> None:
    with Cluster(servers=2) as cluster:
        client = cluster.connect()
        table = client.sparse_table("w", update=Adagrad(lr=1.0))
        message = "table 'w' is updated by Adagrad, and its state belongs to that rule: it cannot become SGD"
        with pytest.raises(UsageError, match=message):
            table.set_update(SGD(lr=1.0))
        assert table.push_pull([1], floats(5)) == pytest.approx(-1)


# Frames that a client would not send.


def exchange(channel: Channel, kind: int, **fields: Any) -> Any:
    channel.send(*frame_parts(kind, request=1, **{"epoch": 1, **fields}))  # the epoch of the first view
    return channel.receive_frame(10)


def call(channel: Channel, message: msgspec.Struct, *body: Any, sequence: int = 0) -> Any:
    frame = exchange(channel, CALL, sequence=sequence, meta=messages.encode(message), body=body)
    return msgspec.msgpack.decode(frame.meta)


KEYS, ONES = np.arange(4, dtype=np.uint64), np.ones(4, np.float32)


@pytest.mark.parametrize("consistency", [Sequential(), None], ids=["sequential", "eventual"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_the_server_also_rejects_bad_pushes(bad: float, consistency: Sequential | None) -> None:
    with Cluster(workers=2, consistency=consistency) as cluster:
        client = cluster.connect(rank=0)
        table = client.sparse_table("w", update=SGD(lr=1.0))
        dense = client.dense_table("d", size=4, update=SGD(lr=1.0))
        channel = cluster.raw()
        call(channel, messages.JoinClock(rank=7, clock=0))
        grads = floats(1, 1, bad, 1)
        with pytest.raises(NonFiniteError, match=f"worker 7 to table 'w' contains {bad}"):
            exchange(channel, PUSH, table=table.number, sequence=1, body=(KEYS, grads))
        with pytest.raises(NonFiniteError, match=f"worker 7 to table 'd' contains {bad}"):
            exchange(channel, PUSH_PULL, flags=RANGE, table=dense.number, sequence=2, body=(keys_of(0, 4), grads))
        call(channel, messages.Retire())
        channel.close()
        assert not client.statistics()[0].tables["w"].pushes
        assert not dense.pull().any()
        assert len(table) == 0


def malformed(sparse: int, dense: int) -> list[tuple[int, dict[str, Any], type[PacelineError], str]]:
    return [
        (PUSH, {"table": 99, "body": (KEYS, ONES)}, UsageError, "server 0 has no table number 99"),
        (PULL, {"table": 99, "body": KEYS}, UsageError, "no table number 99"),
        (PULL, {"table": sparse, "body": bytes(9)}, ProtocolError, "keys of 8 bytes each, got 9"),
        (PUSH, {"table": sparse, "body": bytes(13)}, ProtocolError, r"table 'w' \(sparse\(.* 13 bytes"),
        (
            PUSH,
            {"table": sparse, "body": (KEYS, ONES[:3])},
            ProtocolError,
            "table 'w' .* expected a whole number of keys",
        ),
        (
            PUSH,
            {"table": sparse, "flags": RANGE, "body": (keys_of(0, 4), ONES)},
            ProtocolError,
            "range request to table 'w'",
        ),
        (PULL, {"table": sparse, "flags": RANGE, "body": keys_of(0, 4)}, ProtocolError, "range request to table 'w'"),
        (
            PULL,
            {"table": dense, "flags": RANGE, "body": keys_of(0)},
            ProtocolError,
            "range request to table 'd'.* 8 bytes",
        ),
        (PULL, {"table": dense, "flags": RANGE, "body": keys_of(0, 1, 2)}, ProtocolError, "16 bytes, got 24"),
        (PULL, {"table": dense, "flags": RANGE, "body": keys_of(3, 1)}, UsageError, r"range \[3, 1\)"),
        (PULL, {"table": dense, "flags": RANGE, "body": keys_of(0, 2**63)}, UsageError, r"in \[0, 4\)"),
        (PUSH, {"table": dense, "flags": RANGE, "body": (keys_of(2, 6), ONES)}, UsageError, r"range \[2, 6\)"),
        (PUSH, {"table": dense, "flags": RANGE, "body": (keys_of(0, 3), ONES)}, ProtocolError, "table 'd'"),
        (PUSH, {"table": dense, "body": (KEYS + np.uint64(1), ONES)}, UsageError, "'d' include 4: expected 0 to 3"),
        (PUSH, {"table": dense, "body": (keys_of(2**64 - 1), ONES[:1])}, UsageError, "18446744073709551615"),
        (PULL, {"table": dense, "body": keys_of(0, 2**63)}, UsageError, "include 9223372036854775808"),
        (
            PULL,
            {"table": dense, "clock": 2**32 - 1, "body": KEYS},
            ProtocolError,
            "iteration 4294967295: exp",
        ),
        (77, {}, ProtocolError, "server 0 .* kind 77"),
        (NOTICE, {}, ProtocolError, "frames of kind 26"),
        (CALL, {"meta": b"\xc1"}, ProtocolError, "a control message that cannot be read"),
        (CALL, {"meta": b""}, ProtocolError, "a control message that cannot be read"),
        (CALL, {"meta": messages.encode(messages.GetView())}, ProtocolError, "cannot be read: Invalid value 'GetView'"),
    ]


@pytest.mark.parametrize("consistency", [Sequential(), None], ids=["sequential", "eventual"])
def test_malformed_requests(consistency: Sequential | None, caplog: pytest.LogCaptureFixture) -> None:
    with Cluster(workers=2, consistency=consistency) as cluster:
        client = cluster.connect(rank=0)
        table = client.sparse_table("w", update=SGD(lr=1.0))
        dense = client.dense_table("d", size=4, update=SGD(lr=1.0))
        channel = cluster.raw()
        call(channel, messages.JoinClock(rank=7, clock=0))
        sequence = 0
        for kind, fields, error, message in malformed(table.number, dense.number):
            for clock in (0, 1):  # at an open gate and at a closed gate
                sequence += 1
                with pytest.raises(error, match=message):
                    exchange(channel, kind, **{"sequence": sequence, "clock": clock, **fields})
        calls: list[tuple[msgspec.Struct, bytes, type[PacelineError], str]] = [
            (messages.ReadBucket(table=table.number, bucket=512), b"", ProtocolError, "Expected `int` <= 511"),
            (messages.ReadBucket(table=table.number, bucket=-1), b"", ProtocolError, "Expected `int` >= 0"),
            (messages.ReadBucket(table=0, bucket=0), b"", ProtocolError, "Expected `int` >= 1"),
            (messages.JoinClock(rank=7, clock=2**32 - 1), b"", ProtocolError, "Expected `int` <= 4294967293"),
            (messages.ReadBucket(table=42, bucket=0), b"", UsageError, "no table number 42"),
            (messages.WriteRecords(table=table.number, rows=2), bytes(23), ProtocolError, "2 records of table 'w'"),
            (messages.WriteRecords(table=dense.number, rows=-1), b"", ProtocolError, "Expected `int` >= 0"),
            (messages.Erase(table=table.number), bytes(7), ProtocolError, "8 bytes each, got 7"),
            (messages.Erase(table=dense.number), bytes(8), UsageError, "table 'd' is dense"),
            (
                messages.SetUpdate(table=table.number, update={"kind": "X"}, revision=1),
                b"",
                UsageError,
                "unknown kind 'X'",
            ),
            (
                messages.SetUpdate(table=table.number, update={"kind": "SGD", "lr": -1}, revision=1),
                b"",
                UsageError,
                "lr=-1",
            ),
        ]
        for request, body, error, message in calls:
            with pytest.raises(error, match=message):
                call(channel, request, body, sequence=1)
        assert not caplog.records  # no error was an internal error
        call(channel, messages.Retire())
        channel.close()
        assert not client.statistics()[0].tables["w"].pushes
        assert client.statistics()[0].held == 0
        assert not dense.pull().any()


def test_keys_of_another_server() -> None:
    with Cluster(servers=2) as cluster:
        client = cluster.connect()
        dense = client.dense_table("d", size=1000, update=SGD(lr=1.0))
        every, ones = np.arange(1000, dtype=np.uint64), np.ones(1000, np.float32)
        channel = cluster.raw()
        with pytest.raises(UsageError, match="of dense table 'd' was sent to a server"):
            exchange(channel, PUSH, table=dense.number, sequence=1, body=(every, ones))
        elsewhere = next(b for b in range(500) if client.servers.routes.owners[b] == 1)
        with pytest.raises(StaleEpochError, match="server 0 does not lead all buckets"):
            call(channel, messages.ReadBucket(table=dense.number, bucket=elsewhere))
        channel.close()
        assert not dense.pull().any()


def test_a_bad_request_for_a_later_iteration_affects_only_its_sender() -> None:
    """The request is rejected on arrival. The worker whose tick opens the gate receives no error."""
    with Cluster(workers=2, consistency=Sequential()) as cluster:
        client = cluster.connect(rank=0)
        dense = client.dense_table("d", size=4, update=SGD(lr=1.0))
        channel = cluster.raw()
        call(channel, messages.JoinClock(rank=7, clock=0))
        with pytest.raises(UsageError, match="include 4"):
            exchange(channel, PULL, table=dense.number, clock=1, body=keys_of(1, 4))
        with pytest.raises(UsageError, match="include 9"):
            exchange(channel, PUSH, flags=TICKS, table=dense.number, sequence=1, body=(keys_of(9), ONES[:1]))
        call(channel, messages.Retire())
        dense.push(ONES, tick=True).wait()
        assert (dense.pull() == -1).all()
        channel.close()


def test_malformed_requests_to_the_scheduler(caplog: pytest.LogCaptureFixture) -> None:
    with Cluster() as cluster:
        client = cluster.connect()
        channel = cluster.transport.connect(cluster.scheduler_address, Hello(role="worker"))
        for kind, meta, error, message in [
            (PUSH, b"", ProtocolError, "the scheduler does not support frames of kind 16"),
            (CALL, b"\xc1", ProtocolError, "a control message that cannot be read"),
            (CALL, messages.encode(messages.Retire()), ProtocolError, "cannot be read: Invalid value 'Retire'"),
            (
                CALL,
                msgspec.msgpack.encode({"type": "Register", "node": "x", "role": "boss"}),
                ProtocolError,
                "Invalid enum value 'boss'",
            ),
            (CALL, messages.encode(messages.TakeLease(job=1, wait=False)), PeerError, "job 1"),
            (CALL, messages.encode(messages.JobStatus(job=1)), PeerError, "job 1"),
        ]:
            with pytest.raises(error, match=message):
                exchange(channel, kind, meta=meta)
        job = messages.PostJob(spec=JobSpec(description=b"", files=(1,), epochs=1, assignment="first-come"))
        number = call(channel, job)
        for request in (messages.TakeLease(job=number, wait=True), messages.LeaseDone(job=number, lease=1)):
            with pytest.raises(PeerError, match="not a worker of the cluster"):
                call(channel, request)
        call(channel, messages.Register(node="x", role=Role.OBSERVER))
        assert channel.receive_frame(10).header.kind == NOTICE  # the state of the job that this process has posted
        with pytest.raises(ProtocolError, match="node 'y'"):
            call(channel, messages.Register(node="y", role=Role.OBSERVER))
        channel.close()
        assert not caplog.records
        assert client.tables() == []


# Departures and registrations.


def test_calls_of_a_closed_client_are_errors() -> None:
    with Cluster(servers=2) as cluster:
        client = cluster.connect()
        table = client.sparse_table("w", update=SGD(lr=1.0))
        dense = client.dense_table("d", size=4, update=SGD(lr=1.0))
        ticket = table.push([1, 2, 3], floats(1, 1, 1))
        client.close()
        client.close()
        ticket.wait()  # no error: `close` has completed the push
        attempts: list[Callable[[], object]] = [
            lambda: table.push([1], floats(1)), lambda: table.pull([1]), lambda: dense.push(ONES), dense.pull,
            lambda: len(table), lambda: table.erase([1]), client.tick, client.retire, client.join, client.flush,
            client.statistics, client.tables, lambda: client.sparse_table("v", update=SGD(lr=1.0)),
        ]  # fmt: skip
        for attempt in attempts:
            with pytest.raises(UsageError, match="this client is closed: connect again"):
                attempt()


def test_calls_to_a_dead_server_are_errors() -> None:
    with Cluster(servers=2) as cluster:
        client = cluster.connect(reconnect_s=0.2)
        table = client.sparse_table("w", update=SGD(lr=1.0))
        keys, ones = np.arange(50, dtype=np.uint64), np.ones(50, np.float32)
        table.push(keys, ones).wait()
        cluster.nodes[1].stop()
        message = (
            r"server 1 died: \d+ of 512 buckets of the tables were lost, because they had no replica: start again from "
            "the last saved model"
        )
        for attempt in (lambda: table.push_pull(keys, ones), lambda: table.push(keys, ones), lambda: table.pull(keys)):
            with pytest.raises(ConnectionLostError, match=message):
                attempt()
        client.flush()
        client.tick()
        assert len(client.statistics()) == 1


def test_an_unreachable_but_living_server() -> None:
    with Cluster(servers=2) as cluster:
        client = cluster.connect(timeout_s=0.3, reconnect_s=0.2)
        table = client.sparse_table("w", update=SGD(lr=1.0))
        keys, ones = np.arange(50, dtype=np.uint64), np.ones(50, np.float32)
        table.push(keys, ones).wait()
        cluster.nodes[1].stop_serving()
        message = r"server 1 was lost with its part of the tables \(.*\): start again from the last saved model"
        with pytest.raises(ConnectionLostError, match=message):
            table.push_pull(keys, ones)
        for attempt in (client.flush, client.tick, lambda: table.pull(keys), client.statistics):
            with pytest.raises(ConnectionLostError, match=message):
                attempt()


def test_calls_to_a_dead_scheduler_are_errors() -> None:
    with Cluster(servers=2) as cluster:
        client = cluster.connect(scheduler_reconnect_s=0.2)
        table = client.sparse_table("w", update=SGD(lr=1.0))
        waiting: list[BaseException] = []

        def wait_for_a_job() -> None:
            with pytest.raises(ConnectionLostError) as caught:
                client.link.call(messages.GetJob(after=0), Job)
            waiting.append(caught.value)

        def stop() -> None:
            wait_until(lambda: cluster.served.call(lambda: len(cluster.scheduler.core.jobs._idle)) == 1)
            cluster.stop_scheduler()

        in_threads(wait_for_a_job, stop)
        message = r"the scheduler at .* within 0.2 s"
        assert waiting
        for _ in range(2):
            with pytest.raises(ConnectionLostError, match=message):
                client.tables()
        assert table.push_pull([1], floats(1)) == -1  # the servers are running


def test_an_occupied_rank_is_rejected() -> None:
    with Cluster(workers=2) as cluster:
        first = cluster.connect(rank=1)
        with pytest.raises(UsageError, match=r"worker 1.*node"):
            cluster.connect(rank=1)
        with pytest.raises(UsageError, match="rank is negative"):
            cluster.connect(rank=-1)
        assert cluster.connect().rank == 0
        first.close()
        wait_until(lambda: len(cluster.scheduler.core.cluster.membership.members) == 2)
        assert cluster.connect(rank=1).incarnation != first.incarnation


def test_a_node_is_the_same_member_after_a_second_registration() -> None:
    """The first connection of the node broke before its welcome arrived."""
    with Cluster() as cluster:
        former, newer = cluster.link("node-a"), cluster.link("node-a")
        assert former.state.welcome is not None
        assert newer.state.welcome is not None
        assert former.state.welcome.incarnation == newer.state.welcome.incarnation
        workers = newer.get_view().of_role(Role.WORKER)
        assert [worker.node for worker in workers] == ["node-a"]


def test_a_policy_for_stale_gradients_is_rejected_if_no_gradient_is_stale() -> None:
    settings = messages.ClusterSettings(consistency="sequential")
    settings.check()
    with pytest.raises(UsageError, match=r"policy drop:3 .* sequential"):
        msgspec.structs.replace(settings, stale="drop:3").check()


def test_missing_servers_are_reported() -> None:
    with Cluster(servers=1, expected_servers=2) as cluster:
        with pytest.raises(PeerError, match=r"1 servers have joined within 0.1 s, and the scheduler expects more"):
            cluster.connect(timeout_s=0.1)
        with pytest.raises(PacelineError, match="no process listens"):
            Client.connect(SocketTransport(TOKEN), "unix:///tmp/no-such-scheduler")


# Processes without the token.


def stranger(netloc: str, data: bytes) -> None:
    host, port = netloc.rsplit(":", 1)
    with socket.create_connection((host, int(port)), 5) as connected:
        try:
            connected.sendall(data)
            connected.shutdown(socket.SHUT_WR)
            while connected.recv(1 << 16):
                pass
        except OSError:
            pass  # the server has closed the connection


def test_processes_without_the_token_do_not_affect_a_cluster(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "paceline.transport")  # the transport logs the closed connections
    random = np.random.default_rng(0)
    http = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with Cluster(servers=2, workers=2, consistency=Sequential()) as cluster:
        clients = cluster.connect_all()
        doors = [cluster.served.endpoint.tcp.netloc, *(node.netloc for node in cluster.nodes)]

        def intrude() -> None:
            for _ in range(15):
                for door in doors:
                    stranger(door, http)
                    stranger(door, random.bytes(int(random.integers(1, 5000))))
                    stranger(door, b"")

        def work(client: Client) -> None:
            table = client.sparse_table("w", update=SGD(lr=1.0))
            keys, ones = np.arange(50, dtype=np.uint64), np.ones(50, np.float32)
            for step in range(150):
                assert (table.pull(keys) == -2 * step).all()
                table.push(keys, ones, tick=True)
                client.tables()

        in_threads(intrude, lambda: work(clients[0]), lambda: work(clients[1]))
        wait_until(lambda: all(node.served.listener.num_connections == 2 for node in cluster.nodes if node.served))
