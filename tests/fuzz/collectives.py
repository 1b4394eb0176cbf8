"""Fuzz the store where ranks exchange addresses, and the messages on their connections."""

from __future__ import annotations

import contextlib
import socket
from typing import Any, ClassVar

import msgspec
from tests.memory_transport import MemoryTransport

from paceline.collectives.aborts import Abort
from paceline.collectives.calls import CollectiveCall
from paceline.collectives.network.frames import HEADER, MAGIC, WIRE_VERSION, Heads, MessageKind, Scanner, unpack_abort
from paceline.collectives.network.verdicts import CurrentCall, received, unexpected
from paceline.collectives.p2p.matching import Matching
from paceline.collectives.p2p.pending import ABORT, MESSAGE, Receiving, pack
from paceline.collectives.p2p.progress import READ
from paceline.collectives.p2p.streams import Incoming, Outgoing, deliver
from paceline.errors import PacelineError, ProtocolError
from paceline.meeting.coordinator import NUM_RANKS, CoordinatedStore
from paceline.meeting.network_store import LIMITS, CollectRequest, Replacement, ServedStore, StoreCall, StoreRequest
from paceline.meeting.node import NodeInfo
from paceline.protocol.launchers import (
    LauncherEnd,
    LauncherHeartbeat,
    LauncherRequest,
    Launchers,
    OwnLaunchers,
    RankEnd,
    RankStart,
)
from paceline.protocol.quorum import Coordinator, JoinRequest, LeaveNotice, QuorumReport
from paceline.transport import Address, Endpoint, Hello, Listener

from .listening import Attacker, Episode, FoundError, Line
from .mutations import INTEGERS, TEXTS, UNREADABLE, Frame, tree_of

STORE_KINDS = (*StoreCall, 5, 77)


class StoreEpisode(Episode):
    """The store that rank 0 serves."""

    name = "store"
    weight = 10
    extra: ClassVar[dict[str, int | str]] = {}
    """Fields of the attackers' Hellos."""

    def make_store(self) -> ServedStore:
        """Return the handler of all requests."""
        return ServedStore()

    async def begin(self) -> None:
        transport = MemoryTransport("0123456789abcdef", direct=True, limits=LIMITS)
        self.listener: Listener = await transport.serve(self.make_store(), Hello(role="rank"))
        target = self.listener.endpoint
        self.attackers = [
            Attacker(self.random, self.mutator, transport, target, Hello(role="rank", rank=rank, extra=self.extra))
            for rank in (1, 2)
        ]
        self.honest = Line(transport, target, Hello(role="rank", rank=3))
        self.honest.exchange(StoreCall.SET, meta=msgspec.msgpack.encode(StoreRequest("honest")), body=b"value")

    def feed(self) -> int:
        random = self.random
        key = f"key {random.randrange(30)}"
        kinds = (StoreCall.SET, StoreCall.COLLECT, StoreCall.COLLECT, StoreCall.DELETE, StoreCall.REPLACE)
        kind = random.choice(kinds)
        body = bytes(random.randrange(50)) if kind == StoreCall.SET else b""
        if kind == StoreCall.COLLECT:
            body = msgspec.msgpack.encode(CollectRequest((key,), random.choice((0.0, 1.0))))
        if kind == StoreCall.REPLACE:
            body = msgspec.msgpack.encode(Replacement(random.choice((None, b"")), random.randbytes(3)))
        frame = Frame(kind, tree_of(StoreRequest(key)), body)
        return random.choice(self.attackers).attack(frame, STORE_KINDS)

    def check_now(self) -> None:
        request = msgspec.msgpack.encode(CollectRequest(("honest",), 0.0))
        _, _, value = self.honest.exchange(StoreCall.COLLECT, body=request)
        if msgspec.msgpack.decode(value) != [b"value"]:
            raise FoundError(f"an honest rank read {value!r} from the store")

    async def end(self) -> None:
        self.check_now()
        await self.listener.close()

    def sent(self) -> list[bytes]:
        return [data for attacker in self.attackers for data in attacker.sent]


class CoordinatorEpisode(StoreEpisode):
    """The coordinator of an elastic training, which the first launcher serves."""

    name = "coordinator"
    weight = 5
    extra: ClassVar[dict[str, int | str]] = {NUM_RANKS: 3}

    def make_store(self) -> ServedStore:
        coordinator = Coordinator(range(3), min_ranks=0, max_ranks=3, report_timeout_s=0.01)
        launchers = Launchers(3, timeout_s=0.01, start_by_s=0.0)
        return CoordinatedStore(coordinator, launchers, lambda member: None)

    def feed(self) -> int:
        if self.random.random() < 0.2:
            return super().feed()
        kind = self.random.choice((StoreCall.QUORUM, StoreCall.LAUNCHER))
        body = msgspec.msgpack.encode(self._rank_request() if kind == StoreCall.QUORUM else self._launcher_request())
        return self.random.choice(self.attackers).attack(Frame(kind, b"", body), STORE_KINDS)

    def _rank_request(self) -> Any:
        random = self.random
        member, quorum, step = random.randrange(8), random.randrange(6), random.randrange(4)
        flags = [random.random() < 0.5 for _ in range(3)]
        return random.choice(
            (
                JoinRequest(member, step),
                QuorumReport(member, quorum, step, flags[0], flags[1], flags[2], random.choice((None, step))),
                LeaveNotice(member, step, flags[0]),
            )
        )

    def _launcher_request(self) -> LauncherRequest:
        random = self.random
        node, launcher, number = random.randrange(3), random.randrange(3), random.randrange(8)
        return random.choice(
            (
                RankStart(node, launcher, number, number),
                RankEnd(node, launcher, number, random.random() < 0.5),
                LauncherHeartbeat(node, launcher),
                LauncherEnd(node, launcher),
            )
        )


class OwnLaunchersEpisode(CoordinatorEpisode):
    """The coordinator of ranks that are their own launchers."""

    name = "own-launchers"
    extra: ClassVar[dict[str, int | str]] = {NUM_RANKS: 0}

    def make_store(self) -> ServedStore:
        coordinator = Coordinator(min_ranks=0, max_ranks=3, report_timeout_s=0.01, num_places=2, start_timeout_s=0.01)
        return CoordinatedStore(coordinator, OwnLaunchers(timeout_s=0.01), lambda member: None)


CALL = CollectiveCall("all_reduce", "float32", (4, 5), "sum")
PLACE = CurrentCall("world", 0, CALL, 3)


class HeadsEpisode(Episode):
    """A rank's reads from a link after a failed call."""

    name = "heads"
    weight = 26

    async def begin(self) -> None:
        self.scanner = Scanner()
        self.last: list[bytes] = []

    def feed(self) -> int:
        data = self._stream()
        self.last = [*self.last[-3:], data]
        with contextlib.suppress(ProtocolError):
            at = 0
            while at < len(data):  # in pieces, like from a socket
                step = self.random.choice((len(data), len(data), 1, 40))
                self.scanner.feed(data[at : at + step])
                at += step
            while self.scanner.frames:
                self._take(self.scanner.frames.popleft())
            if self.random.random() < 0.9:
                return 1
        self.scanner = Scanner(self.random.choice((0, 0, 5)))
        return 1

    def _take(self, frame: Any) -> None:
        abort = unpack_abort(frame) if frame.header.kind == MessageKind.ABORT else unexpected(PLACE, 1, frame)
        received(PLACE, abort).error("world")

    def _stream(self) -> bytes:
        random = self.random
        if random.random() < 0.1:
            return self._node_info()
        if random.random() < 0.5:
            kind, sequence, nbytes = MessageKind.DATA, 3, 8
            text = msgspec.msgpack.encode(CALL)
            body = bytes(8)
            if random.random() < 0.3:
                return Heads(CALL, 3).head(8) + body
        else:
            abort = Abort(random.choice(("mismatch", "lost", "error")), "why", (1,), {0: CALL, 1: CALL}, 3)
            kind, sequence, nbytes, text, body = MessageKind.ABORT, 3, 0, msgspec.msgpack.encode(abort), b""
        tree = msgspec.msgpack.decode(text)
        if random.random() < 0.7:
            frame = Frame(0, tree)
            self.mutator.alter_tree(frame)
            text = frame.meta if isinstance(frame.meta, bytes) else msgspec.msgpack.encode(frame.meta)
        if random.random() < 0.1:
            text = random.choice(UNREADABLE)
        values = [MAGIC, WIRE_VERSION, int(kind), len(text), sequence, CALL.signature, nbytes]
        if random.random() < 0.3:
            at, bits = random.choice(((0, 16), (1, 8), (2, 8), (3, 32), (4, 64), (5, 64), (6, 64)))
            values[at] = random.choice(INTEGERS) & ((1 << bits) - 1)
        stream = HEADER.pack(*values) + text + bytes(-len(text) % 16) + body
        return stream[: random.randrange(len(stream))] if random.random() < 0.1 else stream

    def _node_info(self) -> bytes:
        """Read the description of a node, like from the store. Returns no bytes to feed."""
        endpoint = Endpoint(Address.parse("tcp://127.0.0.1:5"), None, "host", "listener")
        frame = Frame(0, tree_of(NodeInfo("id", endpoint, 7, "memory")))
        self.mutator.alter_tree(frame)
        data = frame.meta if isinstance(frame.meta, bytes) else msgspec.msgpack.encode(frame.meta)
        with contextlib.suppress(PacelineError):
            NodeInfo.decode(data)
        return b""

    def check_now(self) -> None:
        scanner = Scanner()
        scanner.feed(Heads(CALL, 3).head(0))
        if unexpected(PLACE, 1, scanner.frames.popleft()).kind != "mismatch":
            raise FoundError("the listener has stopped reading messages")

    async def end(self) -> None:
        self.check_now()

    def sent(self) -> list[bytes]:
        return self.last


class _NoProgress:
    """A fake of the selector's loop. The sender calls the stream directly."""

    def watch(self, watched: Any, events: int) -> None:
        pass

    def unwatch(self, watched: Any) -> None:
        pass


class PointToPointEpisode(Episode):
    """Both ends of the streams of messages between ranks."""

    name = "point-to-point"
    weight = 26

    async def begin(self) -> None:
        self.matching = Matching(1 << 20)
        self.last: list[bytes] = []
        self.sockets: list[socket.socket] = []
        self.incoming, self.peer_end = self._incoming(1)
        self.honest, self.honest_end = self._incoming(2)
        self.outgoing: Outgoing | None = None

    def _incoming(self, source: int) -> tuple[Incoming, socket.socket]:
        own_end, peer_end = self._pair()
        return Incoming(source, 0, own_end, self.matching, _NoProgress(), self), peer_end  # type: ignore[arg-type]

    def _pair(self) -> tuple[socket.socket, socket.socket]:
        pair = socket.socketpair()
        for connection in pair:
            connection.setblocking(False)
        self.sockets += pair
        return pair

    def abort_received(self, abort: object) -> None:
        """See :class:`Ends`. A group would end; the episode opens other connections."""
        self.failed(None)
        self.outgoing = None

    def failed(self, error: Exception | None) -> None:
        """See :meth:`abort_received`."""
        self.incoming_lost(self.incoming, error)

    def incoming_lost(self, incoming: Incoming, error: Exception | None) -> None:
        """Drop a connection like the group, and open another connection."""
        if incoming is self.honest:
            raise FoundError(f"an honest rank's connection was given up: {error}")
        if incoming.message is not None:
            self.matching.drop(incoming.message)
        incoming.connected.close()
        self.peer_end.close()
        self.incoming, self.peer_end = self._incoming(1)

    def feed(self) -> int:
        random = self.random
        if random.random() < 0.2:
            self._complain()
            return 1
        data = self._message()
        self.last = [*self.last[-3:], data]
        with contextlib.suppress(OSError):
            self.peer_end.send(data)
        self.incoming.ready(READ)
        if random.random() < 0.3:
            self._receive(random.choice((1, 1, None)), random.randrange(4), random.choice((0, 4, 40)), "what")
            self.incoming.resume()
        return 1

    def _message(self) -> bytes:
        random = self.random
        size = random.choice((0, 4, 40))
        values = [MESSAGE, random.randrange(4), size]
        if random.random() < 0.2:
            at, bits = random.choice(((0, 8), (1, 64), (2, 64), (2, 64)))
            values[at] = random.choice(INTEGERS) & ((1 << bits) - 1)
        label = random.choice(("what", "what", "other", ""))
        tag = values[1] - (1 << 64) if values[1] >= 1 << 63 else values[1]
        data = pack(values[0], tag, values[2], label) + random.randbytes(size)
        if random.random() < 0.05:
            data = data[: random.randrange(1, len(data))]
        if random.random() < 0.05:
            altered = bytearray(data)
            altered[random.randrange(min(len(altered), 72))] ^= 1 << random.randrange(8)
            data = bytes(altered)
        return data

    def _receive(self, source: int | None, tag: int, size: int, label: str) -> bytearray:
        buffer = bytearray(size)
        receiving = Receiving(self, memoryview(buffer), source, tag, label)  # type: ignore[arg-type]
        message = self.matching.post(receiving.posted)
        if message is not None and message.is_complete:
            deliver(message, 0, self)
        return buffer

    def _complain(self) -> None:
        """Answer a sender with an invalid final message."""
        random = self.random
        if self.outgoing is None:
            own_end, self.complainer = self._pair()
            self.outgoing = Outgoing(1, _NoProgress(), self)  # type: ignore[arg-type]
            self.outgoing.attach(own_end)
        text = random.choice(TEXTS).encode()
        size = len(text) if random.random() < 0.7 else random.choice(INTEGERS) & ((1 << 64) - 1)
        data = pack(random.choice((ABORT, ABORT, MESSAGE, 9)), 0, size, "") + text
        with contextlib.suppress(OSError):
            self.complainer.send(data if random.random() < 0.8 else data[: random.randrange(len(data))])
        self.outgoing.ready(READ)
        if self.outgoing is not None and len(self.outgoing._answer) > 1 << 21:
            raise FoundError("a final message is buffered without a limit")

    def outgoing_lost(self, outgoing: Outgoing, error: Exception | None) -> None:
        self.outgoing = None

    def check_now(self) -> None:
        for source, label in ((2, "honest"),):
            buffer = self._receive(source, 1 << 40, 16, label)
            self.honest_end.send(pack(MESSAGE, 1 << 40, 16, label) + b"0123456789abcdef")
            self.honest.ready(READ)
            if buffer != b"0123456789abcdef":
                raise FoundError(f"an honest rank's message came as {bytes(buffer)!r}")

    async def end(self) -> None:
        self.check_now()
        for opened in self.sockets:
            opened.close()

    def sent(self) -> list[bytes]:
        return self.last
