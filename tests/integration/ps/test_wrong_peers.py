"""What only a peer that does not know what it says sends: it is refused, and the server serves the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.errors import StaleEpochError
from paceline.protocol import BoundedDelay, Sequential
from paceline.ps import SGD, messages
from paceline.ps.messages import CALL, PULL, PUSH
from paceline.transport import Hello

from .harness import Cluster, floats, keys_of, random_keys


@pytest.mark.parametrize("timeout_ms", ["soon", "", -1, 1 << 62])
def test_how_long_a_peer_waits_may_be_nonsense(timeout_ms: Any) -> None:
    with Cluster(workers=2, consistency=BoundedDelay(tau=1)) as cluster:
        client = cluster.connect(rank=0)
        table = client.sparse_table("w", update=SGD(lr=1.0))
        served = cluster.nodes[0].served
        assert served is not None
        hello = Hello(role="worker", rank=7, incarnation=1 << 40, extra={"timeout_ms": timeout_ms})
        channel = cluster.transport.connect(served.endpoint, hello)
        channel.send_frame(CALL, request=1, meta=messages.encode(messages.JoinClock(rank=7, clock=0)))
        channel.receive_frame(10)
        channel.send_frame(PULL, request=2, epoch=1, table=table.number, clock=9, body=keys_of(1))  # is held
        channel.send_frame(CALL, request=3, meta=messages.encode(messages.Retire()))
        assert channel.receive_frame(10).header.request in (2, 3)
        channel.close()
        assert table.push_pull(keys_of(1), floats(1)) == -1


def test_a_push_for_another_servers_buckets_is_refused_before_it_is_kept() -> None:
    with Cluster(servers=2, workers=1, replicas=1, consistency=Sequential()) as cluster:
        client = cluster.connect()
        table = client.sparse_table("w", update=SGD(lr=1.0))
        served = cluster.nodes[0].served
        assert served is not None
        hello = Hello(role="worker", rank=7, incarnation=1 << 40)
        channel = cluster.transport.connect(served.endpoint, hello)
        channel.send_frame(CALL, request=1, meta=messages.encode(messages.JoinClock(rank=7, clock=0)))
        channel.receive_frame(10)
        keys = random_keys(np.random.default_rng(0), 100)  # of buckets of both servers
        ones = np.ones(len(keys), np.float32)
        channel.send_frame(PUSH, request=2, epoch=1, sequence=1, table=table.number, body=(keys, ones))
        with pytest.raises(StaleEpochError, match="the map of the cluster has changed"):
            channel.receive_frame(10)
        channel.send_frame(CALL, request=3, meta=messages.encode(messages.Retire()))
        channel.receive_frame(10)
        channel.close()
        table.push(keys, ones, tick=True).wait()
        assert (table.pull(keys) == -1).all()
