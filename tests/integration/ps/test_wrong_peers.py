"""Messages of faulty peers are rejected, and the server continues to serve other clients."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from paceline.errors import PeerError, ProtocolError, StaleEpochError, UsageError
from paceline.protocol import BoundedDelay, Sequential
from paceline.ps import SGD, messages
from paceline.ps.messages import CALL, CLOCKS, PULL, PUSH, SYNCED, TICK, TICKS
from paceline.ps.scheduler.processes import own_host
from paceline.ps.scheduler.runtime import Tables
from paceline.transport import Hello, frame_parts

from .harness import Cluster, floats, keys_of, random_keys


@pytest.mark.parametrize("timeout_ms", ["soon", "", -1, 1 << 62])
def test_invalid_timeouts_of_a_peer_are_handled(timeout_ms: Any) -> None:
    with Cluster(workers=2, consistency=BoundedDelay(tau=1)) as cluster:
        client = cluster.connect(rank=0)
        table = client.sparse_table("w", update=SGD(lr=1.0))
        channel = cluster.raw(timeout_ms=timeout_ms)
        channel.send(*frame_parts(CALL, request=1, meta=messages.encode(messages.JoinClock(rank=7, clock=0))))
        channel.receive_frame(10)
        channel.send(*frame_parts(PULL, request=2, epoch=1, table=table.number, clock=9, body=keys_of(1)))  # waits
        channel.send(*frame_parts(CALL, request=3, meta=messages.encode(messages.Retire())))
        assert channel.receive_frame(10).header.request in (2, 3)
        channel.close()
        assert table.push_pull(keys_of(1), floats(1)) == -1


def test_a_push_for_another_servers_buckets_is_rejected_before_it_is_stored() -> None:
    with Cluster(servers=2, workers=1, replicas=1, consistency=Sequential()) as cluster:
        client = cluster.connect()
        table = client.sparse_table("w", update=SGD(lr=1.0))
        channel = cluster.raw()
        channel.send(*frame_parts(CALL, request=1, meta=messages.encode(messages.JoinClock(rank=7, clock=0))))
        channel.receive_frame(10)
        keys = random_keys(np.random.default_rng(0), 100)  # buckets of both servers
        ones = np.ones(len(keys), np.float32)
        channel.send(*frame_parts(PUSH, request=2, epoch=1, sequence=1, table=table.number, body=(keys, ones)))
        with pytest.raises(StaleEpochError, match="the view of the cluster has changed"):
            channel.receive_frame(10)
        channel.send(*frame_parts(CALL, request=3, meta=messages.encode(messages.Retire())))
        channel.receive_frame(10)
        channel.close()
        table.push(keys, ones, tick=True).wait()
        assert (table.pull(keys) == -1).all()


@pytest.mark.parametrize("incarnation", [0, -1])
def test_pushes_of_a_process_without_membership_are_rejected(incarnation: int) -> None:
    """The sums of iterations use incarnation 0. A push of incarnation 0 would be mistaken for a repeated sum."""
    with Cluster(servers=2, replicas=1, consistency=Sequential()) as cluster:
        client = cluster.connect()
        table = client.dense_table("d", size=1000, update=SGD(lr=1.0))
        served = cluster.nodes[0].served
        assert served is not None
        channel = cluster.transport.connect(served.endpoint, Hello(role="worker", incarnation=incarnation))
        for bucket in range(500):
            body = (keys_of(bucket), floats(1))
            channel.send(*frame_parts(PUSH, request=2, epoch=1, sequence=100, table=table.number, body=body))
            with pytest.raises(PeerError):
                channel.receive_frame(10)
        channel.send(*frame_parts(CALL, request=1, meta=messages.encode(messages.JoinClock(rank=7, clock=0))))
        with pytest.raises(PeerError, match="is not a member of the cluster"):
            channel.receive_frame(10)
        channel.close()
        table.push(np.ones(1000, np.float32), tick=True).wait()
        assert (table.pull() == -1).all()


def test_a_tick_over_a_million_iterations_is_rejected() -> None:
    """Otherwise the server would complete each iteration separately, and do nothing else for minutes."""
    with Cluster(workers=1, consistency=Sequential()) as cluster:
        client = cluster.connect(rank=0)
        table = client.sparse_table("w", update=SGD(lr=1.0))
        table.push(keys_of(5), floats(1), tick=True).wait()
        channel = cluster.raw()
        far = 1 << 30

        def refused(kind: int, **fields: Any) -> None:
            channel.send(*frame_parts(kind, request=1, **{"epoch": 1, **fields}))
            with pytest.raises(ProtocolError, match="at most 65536"):
                channel.receive_frame(10)

        refused(CALL, meta=messages.encode(messages.JoinClock(rank=7, clock=far)))
        channel.send(*frame_parts(CALL, request=1, meta=messages.encode(messages.JoinClock(rank=7, clock=0))))
        channel.receive_frame(10)
        client.retire()  # only this worker takes part now
        refused(TICK, clock=far)
        refused(SYNCED, clock=far, sequence=7, flags=1)
        refused(PUSH, clock=far, sequence=1, flags=TICKS, table=table.number, body=(keys_of(1), floats(1)))
        channel.send(*frame_parts(CALL, request=3, meta=messages.encode(messages.Retire())))
        channel.receive_frame(10)
        channel.close()
        client.join()
        assert table.push_pull(keys_of(5), floats(1), tick=True) == -2


def test_a_server_does_not_report_a_worker_far_ahead() -> None:
    with Cluster(
        servers=2, expected_servers=3, consistency=Sequential()
    ) as cluster:  # the server is not yet the primary of a bucket
        served = cluster.nodes[0].served
        assert served is not None
        cluster.nodes[0].call(lambda: cluster.nodes[0].server.joined(Hello(role="server", incarnation=1), 9.0))
        channel = cluster.transport.connect(served.endpoint, Hello(role="server", rank=1, incarnation=1 << 40))
        info = messages.ClocksInfo((), ((9, 0, 1 << 31, True),), 0, 5)
        channel.send(*frame_parts(CLOCKS, request=1, meta=messages.encode(info)))
        with pytest.raises(ProtocolError, match="in iteration 2147483648 and another in 5"):
            channel.receive_frame(10)
        channel.close()


REGISTER: dict[str, Any] = {"type": "Register", "node": "n", "role": "worker"}
ADDRESS: dict[str, Any] = {"scheme": "tcp", "host": "127.0.0.1", "port": 1}
JOB: dict[str, Any] = {"type": "PostJob", "description": b"", "files": [1], "epochs": 1, "assignment": "strided"}


@pytest.mark.parametrize(
    "message",
    [
        {**REGISTER, "address": {"tcp": {**ADDRESS, "host": "x" * 300}}},
        {**REGISTER, "address": {"tcp": {**ADDRESS, "host": "a..b"}}},
        {**REGISTER, "address": {"tcp": {**ADDRESS, "host": "a\0b"}}},
        {**REGISTER, "address": {"tcp": {**ADDRESS, "port": 1 << 40}}},
        {**REGISTER, "address": {"tcp": {**ADDRESS, "scheme": "smtp"}}},
        {**REGISTER, "process": [own_host(), 1 << 40, 1]},
        {**REGISTER, "rank": 1 << 40},
        {**JOB, "files": [1 << 50]},
        {**JOB, "files": [0], "epochs": 1 << 50},
        {**JOB, "files": [1 << 20], "epochs": 1 << 20},
        {**JOB, "files": [-1]},
        {**JOB, "epochs": -1},
        {**JOB, "assignment": "at random"},
        {"type": "FileEnded", "job": 1, "file": 0, "num_shards": 1 << 50},
    ],
    ids=str,
)
def test_the_scheduler_rejects_harmful_messages(message: dict[str, Any]) -> None:
    with Cluster() as cluster:
        client = cluster.connect()
        channel = cluster.transport.connect(cluster.scheduler_address, Hello(role="worker"))
        channel.send(*frame_parts(CALL, request=1, meta=msgspec.msgpack.encode(message)))
        with pytest.raises(ProtocolError, match="cannot be read"):
            channel.receive_frame(10)
        channel.close()
        assert client.tables() == []


def test_the_number_of_tables_is_limited() -> None:
    tables = Tables()
    spec = messages.TableSpec(name="t", kind="sparse", update={"kind": "SGD", "lr": 1.0}, initializer={"kind": "Zeros"})
    tables.restore([messages.KnownTable(number=65535, declared=spec, spec=spec)])
    assert tables.declare(spec).number == 65535
    with pytest.raises(UsageError, match="at most 65535 tables"):
        tables.declare(msgspec.structs.replace(spec, name="another"))
