"""Fuzz both sides of the handshake, with and without the token."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
from tests.memory_transport import MemoryChannel, MemoryTransport

from paceline.errors import PacelineError, ProtocolError
from paceline.transport import Address, FrameKind, Handler, Header, Hello, Listener, Peer, frame_parts
from paceline.transport.client_handshake import ClientHandshake
from paceline.transport.security.authentication import prove
from paceline.transport.security.server_handshake import ServerHandshake

from .listening import Episode, FoundError, Line
from .mutations import UNREADABLE, Frame

TOKEN = "0123456789abcdef"
WHERE = Address.parse("memory://x")


class _Echo(Handler):
    def frame_received(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        peer.send(*frame_parts(header.kind, request=header.request))


class HandshakeEpisode(Episode):
    """Send altered messages to both state machines of the handshake, and to a listener."""

    name = "handshake"
    weight = 12

    async def begin(self) -> None:
        self.transport = MemoryTransport(TOKEN, direct=True)
        self.listener: Listener = await self.transport.serve(_Echo(), Hello(role="server"))
        self.honest = Line(self.transport, self.listener.endpoint, Hello(role="worker"))
        self.last: list[bytes] = []

    def feed(self) -> int:
        choice = self.random.random()
        token = TOKEN if self.random.random() < 0.9 else "another-token-of-16"
        if choice < 0.4:
            self._to_client(token)
        elif choice < 0.8:
            self._to_server(token)
        else:
            self._to_listener(token)
        return 1

    def _altered(self, meta: bytes) -> bytes:
        """Return a message, usually altered."""
        random = self.random
        if random.random() < 0.1:
            meta = random.choice(UNREADABLE)
        elif random.random() < 0.8:
            frame = Frame(0, msgspec.msgpack.decode(meta))
            self.mutator.alter_tree(frame)
            with contextlib.suppress(PacelineError, UnicodeDecodeError, msgspec.MsgspecError):
                self._alter_inside(frame)
            meta = frame.meta if isinstance(frame.meta, bytes) else msgspec.msgpack.encode(frame.meta)
        self.last = [*self.last[-3:], meta]
        return meta

    def _alter_inside(self, frame: Frame) -> None:
        """Alter a field that the proof covers."""
        if isinstance(frame.meta, dict) and self.random.random() < 0.5:
            for name in ("hello", "view"):
                if isinstance(frame.meta.get(name), bytes) and frame.meta[name]:
                    inner = Frame(0, msgspec.msgpack.decode(frame.meta[name]))
                    self.mutator.alter_tree(inner)
                    frame.meta[name] = msgspec.msgpack.encode(inner.meta)

    def _prove_again(self, meta: bytes, label: str, *before: bytes) -> bytes:
        """Let the proof cover the changed fields, like a peer with the token."""
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, RecursionError, MemoryError):
            given = msgspec.msgpack.decode(meta)
            given["proof"] = prove(TOKEN, label, *before, given["hello"], given["view"])
            return msgspec.msgpack.encode(given)
        return meta

    def _to_client(self, token: str) -> None:
        reception = ServerHandshake(token, Hello(role="server", extra={"a": 1}), "listener")
        greeting = ClientHandshake(WHERE, TOKEN, Hello(role="worker"), listener="")
        with contextlib.suppress(PacelineError):
            challenge = reception.challenge()
            answer = greeting.answer(self._altered(challenge) if self.random.random() < 0.3 else challenge, b"")
            reception.receive_hello(answer)
            welcome = self._altered(reception.welcome(b""))
            if self.random.random() < 0.7:
                welcome = self._prove_again(welcome, "server", *reception._transcript)
            greeting.finish(welcome)

    def _to_server(self, token: str) -> None:
        reception = ServerHandshake(TOKEN, Hello(role="server"), "listener")
        greeting = ClientHandshake(WHERE, token, Hello(role="worker", name="n", extra={"timeout_ms": 5}))
        with contextlib.suppress(PacelineError):
            reception.receive_hello(self._hello(reception, greeting))
            reception.welcome(b"")
            reception.identify()

    def _hello(self, reception: ServerHandshake, greeting: ClientHandshake) -> bytes:
        hello = self._altered(greeting.answer(reception.challenge(), b""))
        if self.random.random() < 0.7:
            with contextlib.suppress(KeyError, TypeError, ValueError, RecursionError, MemoryError):
                nonce = msgspec.msgpack.decode(hello)["nonce"]
                hello = self._prove_again(hello, "client", nonce, reception._nonce)
        return hello

    def _to_listener(self, token: str) -> None:
        channel = MemoryChannel(WHERE, self.transport._limits, self.transport._find(self.listener.endpoint))
        frame = channel.receive_frame(1.0)
        greeting = ClientHandshake(WHERE, token, Hello(role="worker"))
        meta = self._altered(greeting.answer(frame.meta, b"memory"))
        for varied in self.mutator.vary(Frame(FrameKind.HELLO, meta), tuple(FrameKind)):
            with contextlib.suppress(ProtocolError):
                channel._pipe.receive(varied.encode())
        channel.close()

    def check_now(self) -> None:
        header, _, _ = self.honest.exchange(99, request=7)
        if header.request != 7:
            raise FoundError("an honest client got another answer")
        if self.listener.num_connections > 1:
            raise FoundError(f"{self.listener.num_connections} connections are left of one")

    async def end(self) -> None:
        self.check_now()
        await self.listener.close()

    def sent(self) -> list[Any]:
        return self.last
