"""Receivers reject invalid sizes, counts and kinds from peers and files, and change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from paceline.errors import PacelineError, PeerError, ProtocolError, UsageError
from paceline.protocol import NUM_BUCKETS
from paceline.protocol.buckets import ALL, to_bytes
from paceline.ps import SGD, Adagrad, Client, messages
from paceline.ps.messages import ACK, CHECK, CLOCKS, FORWARD, RESULT, STATE, VALUES, TableSpec
from paceline.tables.initializers import Zeros
from paceline.tables.settings import to_fields
from paceline.testing import serve_in_thread
from paceline.transport import Channel, FrameKind, Handler, Header, Hello, Peer, frame_parts

from .harness import Cluster, floats, keys_of

SPEC: dict[str, Any] = {
    "name": "t", "kind": "sparse", "dim": 1, "size": 0, "update": to_fields(SGD(lr=1.0)),
    "initializer": to_fields(Zeros()), "seed": 0,
}  # fmt: skip
NO_TABLES: list[tuple[dict[str, Any], str]] = [
    ({"kind": "dense", "dim": 0, "size": 50_000_000}, "has dim=0: expected a whole number from 1 to 65536"),
    ({"kind": "dense", "dim": 2, "size": 10}, "dense table 't' has dim=2"),
    ({"kind": "dense", "size": 0}, "dense table 't' has size=0: expected a positive whole number"),
    ({"kind": "dense", "size": -5}, "size=-5"),
    ({"kind": "dense", "size": 2**62}, "size=4611686018427387904"),
    ({"dim": 65537}, "dim=65537"),
    ({"dim": -1}, "dim=-1"),
    ({"size": 3}, "sparse table 't' has size=3"),
    ({"kind": "dence", "size": 3}, "is of kind 'dence': expected 'sparse' or 'dense'"),
    ({"name": ""}, "expected 1 to 200 printable characters"),
    ({"name": "a\x1b[2J"}, "printable"),
    ({"name": "x" * 10_000}, "printable"),
    ({"update": {"kind": "Magic"}}, "unknown kind 'Magic'"),
    ({"update": {"kind": "SGD", "lr": "fast"}}, "lr='fast'"),
    ({"initializer": {}}, "unknown kind None"),
]


def raw_call(channel: Channel, kind: str, **fields: Any) -> Any:
    channel.send(*frame_parts(messages.CALL, request=1, meta=msgspec.msgpack.encode({"type": kind, **fields})))
    return msgspec.msgpack.decode(channel.receive_frame(10).meta)


@pytest.mark.parametrize(("wrong", "message"), NO_TABLES)
def test_a_spec_without_a_table(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TableSpec(**{**SPEC, **wrong})
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.json.decode(msgspec.json.encode({**SPEC, **wrong}), type=TableSpec)


def test_servers_and_scheduler_refuse_such_a_table() -> None:
    with Cluster() as cluster:
        client = cluster.connect()
        table = client.sparse_table("w", update=SGD(lr=1.0))
        table.push(keys_of(5), floats(1)).wait()
        server = cluster.raw()
        scheduler = cluster.transport.connect(cluster.scheduler_address, Hello(role="worker"))
        for wrong, message in NO_TABLES:
            with pytest.raises(ProtocolError, match=message):
                raw_call(server, "CreateTable", table={"number": 9, "declared": {**SPEC, **wrong}, "spec": SPEC})
            with pytest.raises(ProtocolError, match=message):
                raw_call(scheduler, "DeclareTable", spec={**SPEC, **wrong})
        for number in (0, -1, 65536):
            with pytest.raises(ProtocolError, match="number"):
                raw_call(server, "CreateTable", table={"number": number, "declared": SPEC, "spec": SPEC})
        for meta in (b"\x81\xa4type\xa1\xff", b"\x81\xa4type" + b"\x81\xa1a" * 100_000):
            for channel in (server, scheduler):  # not UTF-8; too deeply nested
                channel.send(*frame_parts(messages.CALL, request=2, meta=meta))
                with pytest.raises(ProtocolError, match="cannot be read"):
                    channel.receive_frame(10)
        server.close()
        scheduler.close()
        assert [spec.name for spec in client.tables()] == ["w"]
        assert table.pull(keys_of(5)) == -1


# Frames between servers.


@contextmanager
def between_servers() -> Iterator[tuple[Client, Channel, int, int]]:
    """Yield a client, a channel like the channel of another server, and the numbers of a sparse and a dense table."""
    with Cluster() as cluster:
        client = cluster.connect()
        sparse = client.sparse_table("s", dim=2, update=Adagrad(lr=1.0))
        dense = client.dense_table("d", size=1000, update=SGD(lr=1.0))
        sparse.push(keys_of(1, 2, 3), np.ones((3, 2), np.float32)).wait()
        served = cluster.nodes[0].served
        assert served is not None
        channel = cluster.transport.connect(served.endpoint, Hello(role="server", rank=1, incarnation=1 << 40))
        channel.send(*frame_parts(CLOCKS, meta=messages.encode(messages.ClocksInfo((), (), 0, 0))))
        yield client, channel, sparse.number, dense.number
        channel.close()
        assert not dense.pull().any()
        assert (sparse.pull(keys_of(1, 2, 3)) == -1).all()
        assert len(sparse) == 3


def refused(channel: Channel, kind: int, meta: Any, body: bytes, message: str) -> None:
    channel.send(*frame_parts(kind, request=3, epoch=1, sequence=1, meta=msgspec.msgpack.encode(meta), body=body))
    with pytest.raises(PacelineError, match=message):
        channel.receive_frame(10)


def test_malformed_forwarded_pushes(caplog: pytest.LogCaptureFixture) -> None:
    with between_servers() as (_, channel, sparse, dense):
        every = to_bytes(ALL)
        keys, ones = np.arange(500, dtype=np.uint64).tobytes(), np.ones(500, np.float32).tobytes()
        few = np.arange(2, dtype=np.uint64).tobytes()
        whole = (0, 1000, every)
        wrong: list[tuple[str, bytes, list[Any], bytes, str]] = [
            ("push", every, [[dense, 500, 2]], keys + ones[:8], "2 float32: expected 500"),
            ("push", every, [[sparse, 2, 2]], few + ones[:8], "expected 4 for its keys"),
            ("push", every, [[sparse, 2, 4]], few + ones[:8], "a body of 24 bytes: expected 32"),
            ("push", every, [[dense, 0, 2, whole]], ones[:8], "expected 1000 for its keys"),
            ("push", every, [[dense, 0, 2, (0, 1002, every)]], ones[:8], r"range \[0, 1002\)"),
            ("push", every, [[dense, 0, 2, (5, 3, every)]], ones[:8], "has keys or one range"),
            ("push", every, [[dense, 2, 2, whole]], few + ones[:8], "has keys or one range"),
            ("push", every, [[dense, 0, 2, (-1, 3, every)]], ones[:8], "cannot be read: Expected `int` >= 0"),
            ("push", every, [[dense, 0, 2, (0, 2, b"")]], ones[:8], "cannot be read: Expected `bytes` of length"),
            ("push", every, [[dense, -1, 2]], b"", "cannot be read: Expected `int` >= 0"),
            ("push", every, [[sparse, 0, 2, whole]], ones[:8], "sparse table 's'"),
            ("push", every, [[99, 1, 1]], keys[:16], "no table number 99"),
            ("push", every, [[dense, 1, 1]], keys_of(2**63).tobytes() + bytes(8), "include 9223372036854775808"),
            ("push", bytes(64), [[sparse, 2, 4]], few + ones[:16], "keys outside its announced buckets"),
            ("push", bytes(63), [], b"", "cannot be read"),
            ("write", every, [[sparse, 2, 4]], few + ones[:16], "expected 8 for its keys"),
            ("write", every, [[dense, 0, 2, whole]], ones[:8], "expected keys"),
            ("erase", every, [[sparse, 2, 2]], few + ones[:8], "expected 0 for its keys"),
            ("erase", every, [[dense, 2, 0]], few, "dense"),
            ("no such operation", every, [[sparse, 2, 0]], few, "cannot be read"),
        ]
        for operation, buckets, pieces, body, message in wrong:
            refused(channel, FORWARD, [1 << 39, operation, buckets, pieces], body, message)
        assert not caplog.records  # no error was an internal error


def test_malformed_buckets(caplog: pytest.LogCaptureFixture) -> None:
    with between_servers() as (_, channel, sparse, dense):
        few, ones = np.arange(2, dtype=np.uint64).tobytes(), np.ones(8, np.float32).tobytes()
        wrong: list[tuple[int, list[Any], list[Any], bytes, str]] = [
            (NUM_BUCKETS, [], [], b"", "cannot be read: Expected `int` <= 511"),
            (-1, [], [], b"", "cannot be read"),
            (0, [[1, 1, bytes(3)]], [], b"", "cannot be read"),
            (0, [[-1, 1, bytes(64)]], [], b"", "cannot be read"),
            (0, [], [[dense, 2, 3]], few + ones[:16], "has 3 float32 for 2 records of 1"),
            (0, [], [[dense, 0, 2, (0, 2, to_bytes(1))]], ones[:8], "one piece of each table"),
            (0, [], [[dense, 2, 2], [dense, 2, 2]], 2 * (few + ones[:8]), "one piece of each table"),
            (3, [], [[sparse, 2, 8]], few + ones, "contain keys of other buckets"),
            (0, [], [[99, 2, 8]], few + ones, "no table number 99"),
        ]
        for bucket, known, pieces, body, message in wrong:
            refused(channel, STATE, [bucket, 0, known, pieces], body, message)
        assert not caplog.records


def test_malformed_comparisons(caplog: pytest.LogCaptureFixture) -> None:
    with between_servers() as (_, channel, _, _):
        wrong: list[Any] = [
            [512, 0, [], []],
            [0, -1, [], []],
            [0, 0, [[-1, 0]], []],
            [0, 0, [], [[0, 1, 1]]],
            [0, 0, []],
        ]
        for meta in wrong:
            refused(channel, CHECK, meta, b"", "cannot be read")
        assert not caplog.records


def test_malformed_clocks(caplog: pytest.LogCaptureFixture) -> None:
    with between_servers() as (_, channel, _, _):
        wrong: list[Any] = [
            [[[0, SPEC, SPEC]], [], 0, 0],
            [[[1 << 16, SPEC, SPEC]], [], 0, 0],
            [[[7, SPEC, {**SPEC, "dim": 0}]], [], 0, 0],
            [[], [[1, 1, 2**32, True]], 0, 0],
            [[], [[-1, 1, 0, True]], 0, 0],
            [[], [], -1, 0],
            [[], [], 0, -1],
        ]
        for meta in wrong:
            refused(channel, CLOCKS, meta, b"", "cannot be read")
        assert not caplog.records


# Replies of a server.


class Answering(Handler):
    """Reply to every frame with a frame of the given kind, size and meta."""

    def __init__(self, kind: int, num_bytes: int, meta: bytes) -> None:
        self.kind, self.num_bytes, self.meta = kind, num_bytes, meta

    def frame_received(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        peer.send(*frame_parts(self.kind, request=header.request, meta=self.meta, body=bytes(self.num_bytes)))


@contextmanager
def answered_by(handler: Handler) -> Iterator[Client]:
    """Yield a client of a server with this handler, and with a table `w`."""
    with Cluster() as cluster:
        client = cluster.connect()
        client.sparse_table("w", update=SGD(lr=1.0))
        [connection] = client.servers.connections
        with serve_in_thread(handler, cluster.transport) as served:
            connection.channel.close()
            connection.channel = cluster.transport.connect(served.endpoint, Hello(role="worker"), timeout_s=5.0)
            yield client
            connection.channel.close()


@pytest.mark.parametrize(
    ("kind", "num_bytes"),
    [(VALUES, 0), (VALUES, 4), (VALUES, 12), (ACK, 0), (ACK, 8), (RESULT, 8), (FrameKind.ERROR, 0)],
)
def test_incomplete_values_are_rejected(kind: int, num_bytes: int) -> None:
    with answered_by(Answering(kind, num_bytes, b"")) as client, pytest.raises(PeerError):
        client.sparse_table("w", update=SGD(lr=1.0)).pull(keys_of(1, 2))


@pytest.mark.parametrize("meta", [b"", b"\xc1", b"\xa1x", b"\x05", b"\xff"])
def test_a_reply_has_the_type_of_the_call(meta: bytes) -> None:
    with (
        answered_by(Answering(RESULT, 0, meta)) as client,
        pytest.raises(PeerError, match=r"an answer of server 0 that cannot be read"),
    ):
        client.statistics()


def test_a_wrong_number_of_records_is_rejected(tmp_path: Path) -> None:
    with (
        answered_by(Answering(RESULT, 8, b"\x05")) as client,
        pytest.raises(PeerError, match="has 8 bytes for 5 rows of 1 float32"),
    ):
        client.save(tmp_path / "model")
