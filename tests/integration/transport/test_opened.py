"""Connections that an event loop opens: cases outside the conformance suite."""

from __future__ import annotations

import asyncio
import shutil
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.memory_transport import MemoryTransport

from paceline.errors import (
    AddressError,
    AuthenticationError,
    ConnectionLostError,
    DeadlineError,
    PacelineError,
    PeerError,
    ProtocolError,
    UsageError,
    VersionError,
)
from paceline.testing import EchoHandler, serve_in_thread
from paceline.testing.opened_checks import Inbox
from paceline.testing.transports import ECHO, SILENT
from paceline.transport import (
    FIRST_APPLICATION_KIND,
    HEADER,
    MAGIC,
    TLS,
    Address,
    Endpoint,
    FrameKind,
    Handler,
    Header,
    Hello,
    Limits,
    Peer,
    SocketTransport,
    Transport,
    frame_parts,
    host_identity,
    pack_header,
    unpack_header,
)
from paceline.transport.frames import join
from paceline.transport.opening import dial
from paceline.transport.security.authentication import Challenge
from paceline.transport.streams import welcome_stream

TOKEN = "the-token-of-tests"
SERVER = Hello(role="server", rank=1)
WORKER = Hello(role="worker", rank=4)


@pytest.fixture(params=["sockets", "memory"])
def either(request: pytest.FixtureRequest) -> Transport:
    return SocketTransport(TOKEN) if request.param == "sockets" else MemoryTransport(TOKEN)


class Talkative(EchoHandler):
    """A handler that sends first, and then closes the connection on request."""

    def __init__(self, *, hangs_up: bool = False) -> None:
        super().__init__()
        self._hangs_up = hangs_up

    def connected(self, peer: Peer) -> None:
        super().connected(peer)
        for number in range(20):
            peer.send(*frame_parts(ECHO, request=number, meta=b"news", body=np.full(number * 5000, number, np.uint8)))
        if self._hangs_up:
            peer.close()


@contextmanager
def fake_server(*words: bytes) -> Iterator[str]:
    """Yield the address of a server that sends these byte strings and closes the connection.

    It sends each string after the first when it has received bytes.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening:
        where = f"127.0.0.1:{listening.getsockname()[1]}"

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for word in words:
                writer.write(word)
                await reader.read(1 << 16)
            writer.close()

        with _in_thread(lambda: asyncio.start_server(talk, sock=listening)):
            yield where


@contextmanager
def _in_thread(start: Callable[[], Awaitable[asyncio.Server]]) -> Iterator[None]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def begin() -> asyncio.Server:
        return await start()

    async def end(server: asyncio.Server) -> None:
        server.close()
        await server.wait_closed()
        await asyncio.sleep(0.01)

    server = asyncio.run_coroutine_threadsafe(begin(), loop).result(10)
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(end(server), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


def open_and_close(transport: Transport, target: Endpoint | Address | str, timeout_s: float = 10.0) -> None:
    async def run() -> None:
        inbox = Inbox()
        try:
            peer = await transport.open(inbox, target, SERVER, timeout_s=timeout_s)
        except Exception:
            assert not inbox.ends
            raise
        peer.send(*frame_parts(ECHO, body=b"hello"))
        assert bytes((await inbox.wait_frames(1))[0].body) == b"hello"
        peer.close()
        await inbox.wait_end()

    asyncio.run(run())


def test_the_connection_is_ready_before_the_first_frame(either: Transport) -> None:
    known: list[Peer] = []

    class Knowing(Inbox):
        def frame_received(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
            assert known == [peer]
            super().frame_received(peer, header, meta, body)

    async def run() -> None:
        inbox = Knowing()
        known.append(await either.open(inbox, served.endpoint, SERVER))
        for number, frame in enumerate(await inbox.wait_frames(20)):
            assert (frame.header.request, frame.meta) == (number, b"news")
            assert bytes(frame.body) == bytes([number]) * number * 5000
        known[0].close()
        assert await inbox.wait_end() is None

    with serve_in_thread(Talkative(), either) as served:
        asyncio.run(run())


def test_a_connection_lost_while_it_is_opened_is_reported_once(either: Transport) -> None:
    async def run() -> int:
        inbox = Inbox()
        try:
            await either.open(inbox, served.endpoint, SERVER)
        except ConnectionLostError:
            await asyncio.sleep(0.01)
            assert not inbox.ends
            assert not inbox.frames
            return 0
        await inbox.wait_end()
        return 1

    with serve_in_thread(Talkative(hangs_up=True), either) as served:
        for _ in range(20):
            asyncio.run(run())


def test_a_full_backlog_at_both_ends_is_sent_finally() -> None:
    transport = SocketTransport(TOKEN, limits=Limits(max_backlog_bytes=1 << 20))

    async def run() -> None:
        inbox = Inbox()
        peer = await transport.open(inbox, served.endpoint, SERVER)
        body = bytes(1 << 20)
        for number in range(60):  # far more than the limits of both ends and the system's buffers
            peer.send(*frame_parts(ECHO, request=number, body=body))
        assert peer.write_backlog_bytes > 30 << 20
        frames = await inbox.wait_frames(60)
        assert [frame.header.request for frame in frames] == list(range(60))
        assert peer.write_backlog_bytes == 0
        peer.close()
        await inbox.wait_end()

    with serve_in_thread(EchoHandler(), transport) as served:
        asyncio.run(run())


def test_a_failing_handler_ends_the_connection(either: Transport, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Inbox):
        def frame_received(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
            raise KeyError("a bug")

    async def run() -> None:
        inbox = Failing()
        peer = await either.open(inbox, served.endpoint, SERVER)
        peer.send(*frame_parts(ECHO))
        peer.send(*frame_parts(ECHO))
        reason = await inbox.wait_end()
        assert isinstance(reason, KeyError)
        assert "failed on a frame of kind 32" in caplog.text

    handler = EchoHandler()
    with serve_in_thread(handler, either) as served:
        asyncio.run(run())
        handler.wait_until(lambda: len(handler.reasons) == 1)


def test_the_server_rejects_invalid_frames_with_the_reason(either: Transport) -> None:
    async def run(garbage: bytes) -> None:
        inbox = Inbox()
        peer = await either.open(inbox, served.endpoint, SERVER)
        peer.send(garbage)
        reason = await inbox.wait_end()
        assert isinstance(reason, ProtocolError)
        assert not inbox.frames

    with serve_in_thread(EchoHandler(), either) as served:
        asyncio.run(run(b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n"))
        asyncio.run(run(pack_header(FrameKind.ERROR)))


def test_only_the_server_may_send_errors(either: Transport) -> None:
    async def run() -> None:
        peer = await either.open(Inbox(), served.endpoint, SERVER)
        with pytest.raises(UsageError, match="accept"):
            peer.send_error(unpack_header(pack_header(ECHO)), UsageError("no"))
        peer.abort()

    with serve_in_thread(EchoHandler(), either) as served:
        asyncio.run(run())


@pytest.mark.parametrize("kind", [int(FrameKind.WELCOME), FIRST_APPLICATION_KIND - 1, 200])
def test_forbidden_frames_of_a_server(kind: int) -> None:
    class Rude(EchoHandler):
        def frame_received(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
            peer.send(pack_header(kind, body_bytes=(1 << 60) if kind == 200 else 0))

    async def run() -> None:
        inbox = Inbox()
        peer = await transport.open(inbox, served.endpoint, SERVER)
        peer.send(*frame_parts(SILENT))
        assert isinstance(await inbox.wait_end(), ProtocolError)

    transport = SocketTransport(TOKEN)
    with serve_in_thread(Rude(), transport) as served:
        asyncio.run(run())


_CHALLENGE_META = msgspec.msgpack.encode(Challenge(bytes(32)))
_CHALLENGE = (
    pack_header(FrameKind.CHALLENGE, meta_bytes=len(_CHALLENGE_META))
    + _CHALLENGE_META
    + bytes(-len(_CHALLENGE_META) % 8)
)


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        ((), ConnectionLostError, "TLS"),
        ((b"220 mail.example.org ESMTP, and what follows it\r\n",), ProtocolError, "not a Paceline server"),
        ((HEADER.pack(MAGIC, 9, FrameKind.CHALLENGE, *[0] * 8),), VersionError, "version 9"),
        ((pack_header(FrameKind.WELCOME),), ProtocolError, "40 bytes during the handshake, but CHALLENGE was"),
        ((pack_header(FrameKind.CHALLENGE, body_bytes=5000),), ProtocolError, "claims 5040 bytes"),
        ((pack_header(FrameKind.CHALLENGE, meta_bytes=8) + b"\xc1" * 8,), ProtocolError, "cannot be read"),
        ((_CHALLENGE,), ConnectionLostError, "was closed"),
        ((_CHALLENGE, _CHALLENGE), ProtocolError, "WELCOME was expected"),
    ],
    ids=["nothing", "smtp", "version", "welcome", "long", "garbled", "challenge", "twice"],
)
def test_addresses_without_a_server(words: tuple[bytes, ...], kind: type[Exception], message: str) -> None:
    with fake_server(*words) as where, pytest.raises(kind, match=message):
        open_and_close(SocketTransport(TOKEN), where)


def connect_and_close(transport: SocketTransport, where: str) -> None:
    transport.connect(where, SERVER).close()


def refusal(error: str, kind: FrameKind = FrameKind.REFUSED) -> bytes:
    message = "\x1b]0;title\x07\x1b[2J\nfake line: all is well" + "!" * 1000
    return join(frame_parts(kind, meta=msgspec.msgpack.encode({"error": error, "message": message})))


_ESCAPED = r"an unauthenticated peer reported UsageError: '\\x1b\]0;title\\x07\\x1b\[2J\\nfake line: all is well!+…'"


@pytest.mark.parametrize("reach", [open_and_close, connect_and_close])
@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        ((refusal("UsageError"),), ConnectionLostError, _ESCAPED),
        ((refusal("UsageError", FrameKind.ERROR),), ConnectionLostError, _ESCAPED),
        ((refusal("VersionError"),), ConnectionLostError, r"an unauthenticated peer reported VersionError"),
        (
            (refusal("AuthenticationError"),),
            ConnectionLostError,
            "peer reported AuthenticationError",
        ),
        ((refusal("\x1b[2J" * 99),), ConnectionLostError, r"reported \\x1b\[2J\\x1b.*…: '"),
        ((pack_header(FrameKind.REFUSED, meta_bytes=8) + b"\xc1" * 8,), ConnectionLostError, r"reported \?: ''"),
        ((_CHALLENGE, refusal("UsageError")), ConnectionLostError, _ESCAPED),
        ((_CHALLENGE, refusal("AuthenticationError")), AuthenticationError, "check the address"),
        ((_CHALLENGE, pack_header(FrameKind.REFUSED, body_bytes=5000)), ProtocolError, "5040 bytes"),
    ],
)
def test_text_of_an_unauthenticated_peer_is_marked_and_escaped(
    reach: Callable[[SocketTransport, str], None], words: tuple[bytes, ...], kind: type[Exception], message: str
) -> None:
    with fake_server(*words) as where, pytest.raises(PacelineError, match=message) as caught:
        reach(SocketTransport(TOKEN), where)
    assert type(caught.value) is kind
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


def test_an_unproved_client_cannot_report_errors() -> None:
    own_end, peer_end = socket.socketpair()
    with peer_end:
        peer_end.sendall(refusal("UsageError"))
        with pytest.raises(ProtocolError, match="got a frame of kind 4 before the handshake"):
            welcome_stream(own_end, TOKEN, SERVER, 5)


def test_a_peer_of_another_version_receives_the_own_version() -> None:
    async def run() -> None:
        received = asyncio.get_running_loop().create_future()

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(HEADER.pack(MAGIC, 9, FrameKind.CHALLENGE, *[0] * 8))
            received.set_result(await reader.readexactly(40))
            writer.close()

        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(VersionError):
            await SocketTransport(TOKEN).open(Inbox(), f"127.0.0.1:{port}", SERVER)
        assert unpack_header(await received).kind == FrameKind.HELLO
        server.close()
        await server.wait_closed()

    asyncio.run(run())


def test_a_missing_listener_and_a_silent_listener_are_reported() -> None:
    transport = SocketTransport(TOKEN)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        where = f"127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(DeadlineError, match=r"within 0\.1 s before its first frame"):
            open_and_close(transport, where, 0.1)
    for target in (where, "unix://@paceline-no-such-name", "unix:///no/such/path"):
        with pytest.raises(AddressError, match="no process listens"):
            open_and_close(transport, target)
    with pytest.raises(AddressError, match="not known"):
        open_and_close(transport, "no-such-host.invalid:1")


def test_an_endpoint_without_a_unix_socket_is_reached_by_tcp() -> None:
    transport = SocketTransport(TOKEN)
    with serve_in_thread(EchoHandler(), transport) as served:
        missing = Endpoint(served.endpoint.tcp, Address.parse("unix://@paceline-no-such-name"), host_identity())
        open_and_close(transport, missing)


def test_opening_can_be_cancelled() -> None:
    async def run(where: str) -> None:
        inbox = Inbox()
        opening = asyncio.ensure_future(SocketTransport(TOKEN).open(inbox, where, SERVER))
        await asyncio.sleep(0.05)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await asyncio.sleep(0.01)
        assert not inbox.ends

    with socket.create_server(("127.0.0.1", 0)) as mute:
        asyncio.run(run(f"127.0.0.1:{mute.getsockname()[1]}"))


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="this system has no Unix sockets")
def test_opening_waits_for_a_full_queue_of_a_unix_socket() -> None:
    place = Address.parse("unix://@paceline-test-full-queue")

    async def run(listening: socket.socket, waiting: list[socket.socket]) -> None:
        with pytest.raises(DeadlineError):
            await dial(place, 0.05)
        dialing = asyncio.ensure_future(dial(place, 10))
        await asyncio.sleep(0.05)
        assert not dialing.done()
        waiting.append(listening.accept()[0])
        (await dialing).close()

    waiting: list[socket.socket] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(place.unix_name)
        listening.listen(0)
        while True:
            client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            client.setblocking(False)
            waiting.append(client)
            try:
                client.connect(place.unix_name)
            except BlockingIOError:
                break
        asyncio.run(run(listening, waiting))
    for future in waiting:
        future.close()


@pytest.mark.parametrize("server", ["misnamed", "foreign", "foreign_but_trusting"])
def test_a_servers_wrong_certificate(certificates: dict[str, TLS], server: str) -> None:
    serving = SocketTransport(TOKEN, tls=certificates[server])
    with (
        serve_in_thread(EchoHandler(), serving) as served,
        pytest.raises(AuthenticationError, match=r"no TLS connection to the server at tcp://127.*Check"),
    ):
        open_and_close(SocketTransport(TOKEN, tls=certificates["ours"]), served.endpoint)


@pytest.mark.parametrize("client", ["bare", "foreign_but_trusting"])
def test_a_clients_wrong_certificate(certificates: dict[str, TLS], client: str) -> None:
    serving = SocketTransport(TOKEN, tls=certificates["ours"])
    with (
        serve_in_thread(EchoHandler(), serving) as served,
        pytest.raises(AuthenticationError, match="not trust this process's certificate"),
    ):
        open_and_close(SocketTransport(TOKEN, tls=certificates[client]), served.endpoint)


def test_tls_on_one_side_only(certificates: dict[str, TLS]) -> None:
    encrypted, plain = SocketTransport(TOKEN, tls=certificates["ours"]), SocketTransport(TOKEN)
    with serve_in_thread(EchoHandler(), encrypted) as served, pytest.raises(PeerError, match="TLS"):
        open_and_close(plain, served.endpoint.tcp, 0.3)
    with serve_in_thread(EchoHandler(), plain) as served, pytest.raises(PeerError, match="TLS"):
        open_and_close(encrypted, served.endpoint.tcp)
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(DeadlineError, match=r"TLS handshake in 0\.1 s"):
        open_and_close(encrypted, f"127.0.0.1:{mute.getsockname()[1]}", 0.1)


def test_a_server_serves_and_opens_with_one_handler(either: Transport) -> None:
    """Three servers in one loop form a chain.

    The first two servers forward the request, and the last server replies through the chain.
    """

    class Link(Handler):
        def __init__(self) -> None:
            self.onward: Peer | None = None
            self.queried: Peer | None = None

        def frame_received(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
            if peer is self.onward:
                assert self.queried is not None
                self.queried.send(*frame_parts(32, request=header.request, body=bytes(body)))
            elif self.onward is not None:
                self.queried = peer
                self.onward.send(*frame_parts(ECHO, request=header.request, body=bytes(body)))
            else:
                peer.send(*frame_parts(32, request=header.request, body=bytes(body)))

    async def run() -> None:
        links = [Link() for _ in range(3)]
        listeners = [await either.serve(link, Hello(role="server", rank=rank)) for rank, link in enumerate(links)]
        for link, listener in zip(links, listeners[1:], strict=False):
            link.onward = await either.open(link, listener.endpoint, SERVER)
        inbox = Inbox()
        peer = await either.open(inbox, listeners[0].endpoint, WORKER)
        for number in range(50):
            peer.send(*frame_parts(ECHO, request=number, body=bytes(number * 10_000)))
        frames = await inbox.wait_frames(50)
        assert [(frame.header.request, len(frame.body)) for frame in frames] == [(n, n * 10_000) for n in range(50)]
        peer.close()
        for link in links:
            if link.onward is not None:
                link.onward.close()
        for opened in listeners:
            await opened.close()

    asyncio.run(run())


def test_tls_files_are_read_once(certificates: dict[str, TLS], tmp_path: Path) -> None:
    assert certificates["ours"].cert is not None
    assert certificates["ours"].ca is not None
    tls = TLS(cert=tmp_path / "cert.pem", ca=tmp_path / "ca.pem")
    shutil.copy(certificates["ours"].cert, tmp_path / "cert.pem")
    shutil.copy(certificates["ours"].ca, tmp_path / "ca.pem")
    transport = SocketTransport(TOKEN, tls=tls)
    with serve_in_thread(EchoHandler(), transport) as served:
        for file in tmp_path.iterdir():
            file.unlink()
        open_and_close(transport, str(served.endpoint.tcp))
        connect_and_close(transport, str(served.endpoint.tcp))
    with pytest.raises(UsageError, match=r"ca\.pem"):
        SocketTransport(TOKEN, tls=tls)
