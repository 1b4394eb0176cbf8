"""Fuzz a parameter server as a client, as another server, and as a target of its connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from tests.memory_transport import MemoryTransport
from tests.reference import kernels as reference

from paceline.protocol import (
    Accept,
    BoundedDelay,
    Consistency,
    DelayCompensate,
    Eventual,
    Member,
    Role,
    Sequential,
    StalePolicy,
)
from paceline.protocol.buckets import bucket_set, to_bytes
from paceline.protocol.chains import ChainGroup
from paceline.ps import SGD, Adagrad, Adam, Server, UpdateRule, Zeros, messages, snapshot_messages
from paceline.ps.messages import (
    ACK,
    CALL,
    CLOCKS,
    FORWARD,
    FORWARDED,
    NOTICE,
    PING,
    PONG,
    PULL,
    PUSH,
    PUSH_PULL,
    RANGE,
    READY,
    STATE,
    STATE_TAKEN,
    SYNCED,
    TICK,
    TICKS,
    VALUES,
)
from paceline.storage.format import StoredPart
from paceline.tables.settings import to_fields
from paceline.transport import FrameKind, Handler, Header, Hello, Listener, Peer, padded

from .listening import Attacker, Episode, FoundError, Line
from .mutations import Frame, tree_of

KINDS = (
    PUSH, PULL, PUSH_PULL, TICK, ACK, VALUES, CALL, NOTICE, SYNCED, FORWARD, FORWARDED, STATE, STATE_TAKEN, READY,
    CLOCKS, PING, PONG, FrameKind.ERROR, FrameKind.HELLO, 77,
)  # fmt: skip
"""The kinds that a server knows, and unknown kinds."""

SERVER, NEIGHBOUR, WORKER, HONEST, JOINED = 1, 2, 3, 1001, 1002  # incarnations
OWN_BUCKETS = range(128)  # buckets whose chain has only this server
CHAINS: dict[tuple[tuple[int, ...], int | None], range] = {
    ((SERVER,), None): OWN_BUCKETS,
    ((SERVER, NEIGHBOUR), None): range(128, 256),
    ((NEIGHBOUR, SERVER), None): range(256, 384),
    ((NEIGHBOUR,), SERVER): range(384, 448),
    ((SERVER,), NEIGHBOUR): range(448, 512),
}
"""A view's members, the server that is being filled, and their buckets."""


def _spec(name: str, rule: UpdateRule, **fields: Any) -> messages.TableSpec:
    kind = "dense" if "size" in fields else "sparse"
    update, initializer = to_fields(rule), to_fields(Zeros())
    return messages.TableSpec(name=name, kind=kind, update=update, initializer=initializer, **fields)


def table_of(number: int, spec: messages.TableSpec) -> messages.KnownTable:
    return messages.KnownTable(number=number, declared=spec, spec=spec)


SPECS = {
    3: _spec("s", Adagrad(lr=0.5), dim=2),
    4: _spec("d", SGD(lr=1.0), size=1000),
    5: _spec("w", Adam(lr=0.1), dim=9),
}
OWN_SPARSE, OWN_DENSE, OWN_JOINED = 40001, 40002, 40003
"""The tables of honest workers. No mutation makes these numbers."""
OWN = {
    OWN_SPARSE: _spec("hs", SGD(lr=1.0)),
    OWN_DENSE: _spec("hd", SGD(lr=1.0), size=5120),
    OWN_JOINED: _spec("hj", SGD(lr=1.0)),
}
RECORD_WORDS = {3: 4, 4: 1, 5: 28}


def keys_in(buckets: range, count: int) -> npt.NDArray[np.uint64]:
    """Return sparse keys of some buckets."""
    random = np.random.default_rng(1)
    chosen = random.integers(buckets.start, buckets.stop, count, np.uint64)
    return reference.unmix((chosen << np.uint64(55)) | random.integers(0, 1 << 55, count, np.uint64))


class Honest:
    """An honest worker with its own tables and their expected values."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._keys = keys_in(OWN_BUCKETS, 40)
        self._counts = np.zeros(40, np.float32)
        self._dense = np.zeros(1280, np.float32)  # the buckets of OWN_BUCKETS
        self._sequence = 0

    def work(self) -> None:
        """Push to both tables, and check the read values."""
        self._sequence += 2
        ones = np.ones(40, np.float32)
        self._line.exchange(
            PUSH, table=OWN_SPARSE, request=1, epoch=self.epoch, sequence=self._sequence,
            body=(self._keys, ones),
        )  # fmt: skip
        self._counts += 1
        grads = np.arange(1280, dtype=np.float32)
        span = np.array([0, 1280], np.uint64)
        self._line.exchange(
            PUSH, flags=RANGE, table=OWN_DENSE, request=2, epoch=self.epoch, sequence=self._sequence + 1,
            body=(span, grads),
        )  # fmt: skip
        self._dense += grads
        _, _, rows = self._line.exchange(PULL, table=OWN_SPARSE, request=3, epoch=self.epoch, body=self._keys)
        _, _, values = self._line.exchange(PULL, flags=RANGE, table=OWN_DENSE, request=4, epoch=self.epoch, body=span)
        if (np.frombuffer(rows, np.float32) != -self._counts).any():
            raise FoundError("an honest worker's sparse rows are wrong")
        if (np.frombuffer(values, np.float32) != -self._dense).any():
            raise FoundError("an honest worker's dense values are wrong")

    epoch = 1


class Joined:
    """An honest worker that takes part in the iterations. It waits for other workers, so its values arrive later."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._clock = 0
        self._keys = keys_in(OWN_BUCKETS, 5)
        line.exchange(CALL, request=1, meta=messages.encode(messages.JoinClock(rank=2, clock=0)))
        self._expected: dict[int, float] = {}

    def iterate(self) -> None:
        """Push in one iteration, and request the values in the next."""
        if self._clock >= 50:
            return
        self._line.send(
            Frame(
                PUSH,
                body=self._keys.tobytes() + np.ones(5, np.float32).tobytes(),
                fields={
                    "flags": TICKS,
                    "table": OWN_JOINED,
                    "epoch": 1,
                    "clock": self._clock,
                    "sequence": self._clock + 1,
                },
            ).encode()
        )
        self._clock += 1
        fields = {"table": OWN_JOINED, "request": self._clock, "epoch": 1, "clock": self._clock}
        self._line.send(Frame(PULL, body=self._keys.tobytes(), fields=fields).encode())
        self._expected[self._clock] = -float(self._clock)
        self.check()

    def check(self) -> None:
        """Handle received frames."""
        for header, _, body in self._line.answers():
            if header.kind == VALUES:
                values = np.frombuffer(body, np.float32)
                # Other workers may have delayed the read, so later pushes of this worker may have been applied.
                if not (values <= self._expected.pop(header.request)).all() or (values < -self._clock).any():
                    raise FoundError(f"a worker read {values} in iteration {header.request}")
            elif header.kind == FrameKind.ERROR:
                raise FoundError(f"a worker of the iterations was refused: {header}")

    def finish(self) -> None:
        """Check that all requested values have arrived."""
        self.check()
        if self._expected:
            raise FoundError(f"a worker still waits for iterations {sorted(self._expected)}")


class Neighbour(Handler):
    """The successor in a chain: it accepts forwarded frames and sends arbitrary replies."""

    def __init__(self) -> None:
        self.peer: Peer | None = None
        self.requests = [1]

    def connected(self, peer: Peer) -> None:
        self.peer = peer

    def frame_received(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        if header.kind in (FORWARD, STATE):
            self.requests = [*self.requests[-20:], header.request]

    def disconnected(self, peer: Peer, reason: Exception | None) -> None:
        if self.peer is peer:
            self.peer = None


class ServerEpisode(Episode):
    """Abstract base. A subclass sets the consistency of the cluster."""

    consistency: ClassVar[Consistency]
    stale: ClassVar[StalePolicy] = Accept()
    weight = 6

    async def begin(self) -> None:
        self.transport = MemoryTransport("0123456789abcdef", direct=True)
        self.server = Server(
            messages.ClusterSettings(
                num_servers=2, consistency=str(self.consistency), stale=str(self.stale), replicas=1
            ),
            transport=self.transport,
            fail=self.failures.append,
        )
        self.neighbour = Neighbour()
        self.listeners: list[Listener] = [
            await self.transport.serve(self.server, Hello(role="server")),
            await self.transport.serve(self.neighbour, Hello(role="server", rank=1)),
        ]
        self.server.joined(Hello(role="server", rank=0, incarnation=SERVER), 5.0)
        self.version = 0
        self.change_view(CHAINS, WORKER, HONEST, JOINED)
        await self._turn()
        target = self.listeners[0].endpoint
        worker = Hello(role="worker", rank=7, incarnation=WORKER, extra={"timeout_ms": 5000})
        server = Hello(role="server", rank=1, incarnation=NEIGHBOUR)
        self.worker = Attacker(self.random, self.mutator, self.transport, target, worker)
        self.source = Attacker(self.random, self.mutator, self.transport, target, server)
        self.source.first = Frame(CLOCKS, tree_of(messages.ClocksInfo((), (), 0, 0))).encode()
        honest = Line(self.transport, target, Hello(role="worker", rank=1, incarnation=HONEST))
        for number, spec in (SPECS | OWN).items():
            honest.exchange(CALL, request=1, meta=messages.encode(messages.CreateTable(table=table_of(number, spec))))
        self.honest = Honest(honest)
        self.joined = Joined(
            Line(
                self.transport,
                target,
                Hello(role="worker", rank=2, incarnation=JOINED, extra={"timeout_ms": 600_000}),
            )
        )
        self.sequence = 0
        self.clock = 0

    def change_view(self, chains: dict[tuple[tuple[int, ...], int | None], range], *workers: int) -> None:
        """Let the scheduler publish another view."""
        self.version += 1
        members = [self._member("server", number, number - 1) for number in (SERVER, NEIGHBOUR)]
        members += [self._member("worker", number, number) for number in workers]
        groups = [
            ChainGroup(chain, filling, to_bytes(bucket_set(buckets))) for (chain, filling), buckets in chains.items()
        ]
        self.server.view_changed(
            messages.View(
                epoch=self.version,
                term=1,
                version=self.version,
                members=tuple(members),
                groups=tuple(groups),
                last_incarnation=1 << 63,
            )
        )

    def _member(self, role: str, incarnation: int, rank: int) -> Member:
        endpoint = self.listeners[rank].endpoint if role == "server" else None
        return Member(node=f"{role}-{rank}", role=Role(role), rank=rank, incarnation=incarnation, address=endpoint)

    async def _turn(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    def feed(self) -> int:
        choice = self.random.random()
        if choice < 0.6:
            return self.worker.attack(self.random.choice(CLIENT_FRAMES)(self), KINDS)
        if choice < 0.9:
            return self.source.attack(self.random.choice(SERVER_FRAMES)(self), KINDS)
        peer = self.neighbour.peer
        if peer is None:
            return 0
        frames = self.mutator.vary(self._answer(), KINDS)
        for frame in frames:
            peer.send(frame.encode())
        return len(frames)

    def check_now(self) -> None:
        self.honest.work()
        self.joined.iterate()

    async def end(self) -> None:
        self.check_now()
        self.change_view({((SERVER,), None): range(512)}, HONEST, JOINED)
        self.honest.epoch = self.version
        await self._turn()
        self.honest.work()
        self.server.close()
        for listener in self.listeners:
            await listener.close()
        await self._turn()

    def sent(self) -> list[bytes]:
        return [*self.worker.sent, b"(server)", *self.source.sent]

    # Valid frames.

    def header(self, **more: int) -> dict[str, int]:
        self.sequence += 1
        return {
            "request": self.random.randrange(1, 1000), "epoch": self.version, "clock": self.clock,
            "sequence": self.sequence, **more,
        }  # fmt: skip

    def keys(self, buckets: range, count: int | None = None) -> npt.NDArray[np.uint64]:
        pool = KEY_POOLS[buckets]
        return pool[: self.random.randrange(len(pool)) if count is None else count]

    def push(self) -> Frame:
        table = self.random.choice((3, 5))
        keys = self.keys(self.random.choice((OWN_BUCKETS, CHAINS[(SERVER, NEIGHBOUR), None])))
        grads = np.ones(len(keys) * SPECS[table].dim, np.float32)
        flags = self.random.choice((0, 0, TICKS))
        frame = Frame(
            self.random.choice((PUSH, PUSH_PULL)), body=keys.tobytes() + grads.tobytes(),
            fields=self.header(table=table, flags=flags),
        )  # fmt: skip
        self.clock += flags & TICKS
        return frame

    def pull(self) -> Frame:
        table = self.random.choice((3, 5))
        clock = self.clock + self.random.choice((0, 0, 0, 1))
        return Frame(PULL, body=self.keys(OWN_BUCKETS).tobytes(), fields=self.header(table=table, clock=clock))

    def dense_range(self) -> Frame:
        start = self.random.randrange(200)
        stop = start + self.random.randrange(50)
        body = np.array([start, stop], np.uint64).tobytes()
        kind = self.random.choice((PULL, PUSH, PUSH_PULL))
        if kind != PULL:
            body += np.ones(stop - start, np.float32).tobytes()
        return Frame(kind, body=body, fields=self.header(table=4, flags=RANGE))

    def dense_keys(self) -> Frame:
        keys = np.arange(self.random.randrange(200), dtype=np.uint64)
        body = keys.tobytes() + np.ones(len(keys), np.float32).tobytes()
        return Frame(PUSH, body=body, fields=self.header(table=4))

    def tick(self) -> Frame:
        frame = Frame(TICK, fields=self.header())
        self.clock += 1
        return frame

    def synced(self) -> Frame:
        return Frame(SYNCED, fields={"epoch": self.version, "clock": self.clock, "sequence": 7, "flags": 1})

    def call(self) -> Frame:
        random = self.random
        table = random.choice((3, 4, 5))
        keys = self.keys(OWN_BUCKETS, 8) if table != 4 else np.arange(8, dtype=np.uint64)
        calls: list[tuple[Any, bytes]] = [
            (messages.CreateTable(table=table_of(random.choice((3, 4, 5)), SPECS[random.choice((3, 4, 5))])), b""),
            (messages.CreateTable(table=table_of(random.randrange(6, 12), SPECS[random.choice((3, 4, 5))])), b""),
            (messages.JoinClock(rank=7, clock=self.clock), b""),
            (messages.Retire(), b""),
            (messages.ReadBucket(table=table, bucket=random.randrange(512)), b""),
            (
                messages.WriteRecords(table=table, rows=8),
                keys.tobytes() + np.ones(8 * RECORD_WORDS[table], np.float32).tobytes(),
            ),
            (messages.SetUpdate(table=3, update=to_fields(Adagrad(lr=0.25)), revision=1), b""),
            (messages.SetUpdate(table=5, update=to_fields(Adam(lr=0.25)), revision=1), b""),
            (messages.Erase(table=random.choice((3, 5))), self.keys(OWN_BUCKETS, 4).tobytes()),
            (messages.GetStatistics(), b""),
        ]
        message, body = random.choice(calls)
        return Frame(CALL, tree_of(message), body, {"request": random.randrange(1, 1000)})

    def snapshot(self) -> Frame:
        random = self.random
        number = random.randrange(1, 4)
        part = StoredPart(
            file=f"snapshot-{number:06d}/s0-t3-00000.safetensors", table="s", buckets=(1, 2), rows=(3, 4), words=4,
            num_bytes=4096, sha256="0" * 64,
        )  # fmt: skip
        calls: list[Any] = [
            snapshot_messages.TakeSnapshot(
                number=number, directory=str(self.folder), folder=f"snapshot-{number:06d}", tables=(3, 4, 5),
                buckets=to_bytes(bucket_set(OWN_BUCKETS)), complete=(1,),
                boundary=random.choice((None, self.clock + 1)),
            ),
            snapshot_messages.GetSnapshotState(directory=str(self.folder), number=number),
            snapshot_messages.DropSnapshot(directory=str(self.folder), number=number),
            snapshot_messages.LoadParts(
                version=self.version, table=3, directory=str(self.folder), parts=(part,),
                buckets=(to_bytes(bucket_set((1, 2))),),
            ),
            snapshot_messages.GetLoadState(),
        ]  # fmt: skip
        weights = (1, 4, 2, 1, 4)
        return Frame(CALL, tree_of(random.choices(calls, weights)[0]), b"", {"request": random.randrange(1, 1000)})

    # Between servers.

    def _pieces(self, buckets: range, words: dict[int, int]) -> tuple[list[messages.PieceInfo], bytes]:
        infos, body = [], b""
        for table in self.random.sample((3, 5), self.random.randrange(1, 3)):
            keys = self.keys(buckets, 6)
            floats = np.ones(len(keys) * words[table], np.float32).tobytes()
            infos.append(messages.PieceInfo(table, len(keys), len(floats) // 4))
            body += keys.tobytes() + floats + bytes(padded(len(floats)) - len(floats))
        return infos, body

    def forward(self) -> Frame:
        buckets = self.random.choice((CHAINS[(NEIGHBOUR, SERVER), None], CHAINS[(NEIGHBOUR,), SERVER]))
        operation = self.random.choice(("push", "push", "write", "erase"))
        words = {"push": {3: 2, 5: 9}, "write": RECORD_WORDS, "erase": {3: 0, 5: 0}}[operation]
        infos, body = self._pieces(buckets, words)
        mask = to_bytes(bucket_set(buckets))
        if operation == "push" and self.random.random() < 0.3:
            floats = 256 if buckets.start == 256 else 128
            infos, body = [messages.PieceInfo(4, 0, floats, (0, 1000, mask))], np.ones(floats, np.float32).tobytes()
        info = messages.ForwardInfo(self.random.choice((0, 9)), operation, mask, tuple(infos))
        return Frame(FORWARD, tree_of(info), body, self.header(clock=0))

    def state(self) -> Frame:
        bucket = self.random.choice((384, 385, 447, 1))
        infos, body = self._pieces(range(bucket, bucket + 1), RECORD_WORDS)
        info = messages.StateInfo(
            bucket, self.random.getrandbits(64), ((9, self.sequence, to_bytes(1 << bucket)),), tuple(infos)
        )
        return Frame(STATE, tree_of(info), body, self.header(clock=0))

    def clocks(self) -> Frame:
        tables = tuple((number, spec, spec, 0) for number, spec in SPECS.items())
        info = messages.ClocksInfo(tables, ((9, 2, 3, True), (10, 4, 2, False)), 0, 2, ((0, 3, 1),))
        return Frame(CLOCKS, tree_of(info))

    def ready(self) -> Frame:
        return Frame(self.random.choice((READY, PING)), fields={"epoch": self.version})

    def _answer(self) -> Frame:
        request = self.random.choice(self.neighbour.requests)
        kind = self.random.choice((FORWARDED, FORWARDED, STATE_TAKEN, PONG, FrameKind.ERROR))
        meta = tree_of({"error": "UsageError", "message": "no"}) if kind == FrameKind.ERROR else b""
        return Frame(kind, meta, fields={"request": request})


KEY_POOLS = {
    buckets: keys_in(buckets, 30) for buckets in [*CHAINS.values(), *(range(b, b + 1) for b in (1, 384, 385, 447))]
}
_Build = Callable[[Any], Frame]
_S = ServerEpisode
CLIENT_FRAMES: list[_Build] = [
    _S.push, _S.push, _S.push, _S.pull, _S.pull, _S.dense_range, _S.dense_range, _S.dense_keys, _S.tick, _S.synced,
    *[_S.call] * 10, _S.snapshot,
]  # fmt: skip
SERVER_FRAMES: list[_Build] = [*[_S.forward] * 4, *[_S.state] * 3, _S.clocks, _S.clocks, _S.ready]


class EventualServer(ServerEpisode):
    """A server with eventual consistency."""

    name = "server-eventual"
    consistency = Eventual()
    stale = DelayCompensate(strength=0.5)


class BoundedServer(ServerEpisode):
    """A server with bounded delay."""

    name = "server-bounded"
    consistency = BoundedDelay(tau=2)


class SequentialServer(ServerEpisode):
    """A server with sequential consistency."""

    name = "server-sequential"
    consistency = Sequential()
