"""Check the connections that a transport's client opens in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import numpy as np

from paceline.errors import AddressError, AuthenticationError, PacelineError, PeerError, StaleEpochError
from paceline.testing.serving import serve_in_thread
from paceline.testing.transport_setting import (
    ANSWER,
    CLOSE,
    ECHO,
    FAIL,
    FAIL_INTERNALLY,
    SILENT,
    TIMEOUT_S,
    EchoHandler,
    Setting,
)
from paceline.transport import Frame, FrameKind, Handler, Header, Hello, Peer, error_of, frame_parts

_HELLO = Hello(role="worker", rank=3, incarnation=8)


class Inbox(Handler):
    """Records every frame and every end of a connection, in one event loop's thread."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.peers: list[Peer] = []
        self.ends: list[tuple[Peer, Exception | None]] = []
        self._changed = asyncio.Event()

    def frame_received(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        self.frames.append(Frame(header, bytes(meta), memoryview(bytearray(body))))
        self.peers.append(peer)
        self._changed.set()

    def disconnected(self, peer: Peer, reason: Exception | None) -> None:
        self.ends.append((peer, reason))
        self._changed.set()

    async def wait_frames(self, number: int) -> list[Frame]:
        """Wait for `number` frames; remove and return all recorded frames."""
        await self._wait(lambda: len(self.frames) >= number)
        frames, self.frames = self.frames, []
        return frames

    async def wait_end(self) -> Exception | None:
        """Wait for the connection to end once, and return the reason."""
        await self._wait(lambda: bool(self.ends))
        await asyncio.sleep(0.02)  # time for a second report, which would be an error
        assert len(self.ends) == 1
        return self.ends[0][1]

    async def _wait(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), TIMEOUT_S)


def check_opened_echo(setting: Setting) -> None:
    """Frames of every size return in order and unchanged, in a separate event loop and in the server's event loop."""
    asyncio.run(_check_opened_echo(setting))
    _run_with_server(setting, _check_opened_echo(setting))


def check_opened_both_ways(setting: Setting) -> None:
    """Large frames that both ends send concurrently do not wait for each other."""
    asyncio.run(_check_opened_both_ways(setting))
    _run_with_server(setting, _check_opened_both_ways(setting))


def check_opened_errors(setting: Setting) -> None:
    """A handler's error arrives as an ERROR frame with the request's header; the connection stays open."""
    asyncio.run(_check_opened_errors(setting))


def check_opened_closing(setting: Setting) -> None:
    """After a close by either end, each end is notified once; earlier frames are still sent."""
    asyncio.run(_check_opened_closing(setting))


def check_opened_refusals(setting: Setting) -> None:
    """A wrong token and a closed port raise different errors; the handler is not called."""
    with serve_in_thread(EchoHandler(), setting.transport) as other:
        closed_endpoint = other.endpoint.tcp
    asyncio.run(_check_opened_refusals(setting, closed_endpoint))


def _run_with_server(setting: Setting, check: Coroutine[None, None, None]) -> None:
    asyncio.run_coroutine_threadsafe(check, setting.served.loop).result(3 * TIMEOUT_S)


async def _open(setting: Setting, inbox: Inbox) -> Peer:
    return await setting.transport.open(inbox, setting.served.endpoint, _HELLO, timeout_s=TIMEOUT_S)


def _served_peer(setting: Setting) -> Peer:
    """Return the server's newest peer; the server may register it slightly later."""
    setting.handler.wait_until(lambda: bool(setting.handler.peers))
    return setting.handler.peers[-1]


async def _check_opened_echo(setting: Setting) -> None:
    inbox = Inbox()
    peer = await _open(setting, inbox)
    assert (peer.hello.role, peer.hello.name) == ("server", "echo")
    assert peer.hello.paceline
    assert peer.address
    hello = _served_peer(setting).hello
    assert (hello.rank, hello.incarnation) == (3, 8)
    random = np.random.default_rng(0)
    sizes = [0, 1, 7, 8, 64, 65_537, 262_104, 262_105, 1_200_003, 6_400_000, *range(200), 300_000, 5]
    bodies = [random.integers(0, 256, size, np.uint8) for size in sizes]
    for number, body in enumerate(bodies):
        parts = (body[: len(body) // 3], body[len(body) // 3 :])
        peer.send(
            *frame_parts(
                ECHO, table=3, request=number, epoch=5, clock=6, sequence=2**63, meta=bytes(number % 11), body=parts
            )
        )
    for number, (frame, body) in enumerate(zip(await inbox.wait_frames(len(sizes)), bodies, strict=True)):
        assert frame.header[2:9] == (ANSWER, 1, 3, number, 5, 6, 2**63), frame.header
        assert frame.meta == bytes(number % 11)
        assert bytes(frame.body) == body.tobytes()
    assert all(known is peer for known in inbox.peers)
    assert peer.write_backlog_bytes == 0
    assert peer.statistics().frames_sent == len(sizes)
    peer.close()
    assert await inbox.wait_end() is None


async def _check_opened_both_ways(setting: Setting) -> None:
    inbox = Inbox()
    peer = await _open(setting, inbox)
    server_peer = _served_peer(setting)
    body = np.random.default_rng(1).integers(0, 256, 16 << 20, np.uint8)

    def send_back() -> None:
        for number in range(2):
            server_peer.send(*frame_parts(ANSWER, request=100 + number, body=body))

    setting.served.loop.call_soon_threadsafe(send_back)
    for number in range(2):
        peer.send(*frame_parts(ECHO, request=number, body=body))
    frames = await inbox.wait_frames(4)
    requests = [frame.header.request for frame in frames]
    assert [request for request in requests if request < 100] == [0, 1]
    assert [request for request in requests if request >= 100] == [100, 101]
    assert all(np.array_equal(np.frombuffer(frame.body, np.uint8), body) for frame in frames)
    peer.close()
    await inbox.wait_end()


async def _check_opened_errors(setting: Setting) -> None:
    inbox = Inbox()
    peer = await _open(setting, inbox)
    for number in range(2):
        peer.send(*frame_parts(FAIL, request=number, sequence=7, body=bytes(300_000)))
        peer.send(*frame_parts(FAIL_INTERNALLY, request=100))
        peer.send(*frame_parts(ECHO, request=200, body=b"alive"))
        failed, broken, alive = await inbox.wait_frames(3)
        assert (failed.header.kind, failed.header.request, failed.header.sequence) == (FrameKind.ERROR, number, 7)
        error = error_of(failed.meta)
        assert isinstance(error, StaleEpochError)
        assert "epoch 3" in str(error)
        assert isinstance(error_of(broken.meta), PeerError)
        assert "KeyError" in str(error_of(broken.meta))
        assert bytes(alive.body) == b"alive"
    peer.close()
    await inbox.wait_end()


async def _check_opened_closing(setting: Setting) -> None:
    handler = setting.handler
    inbox = Inbox()
    peer = await _open(setting, inbox)
    peer.send(*frame_parts(CLOSE))
    await inbox.wait_end()
    assert inbox.ends[0][0] is peer
    peer.send(*frame_parts(SILENT))  # no error, although the other end is closed
    peer.close()
    assert len(inbox.ends) == 1

    inbox = Inbox()
    peer = await _open(setting, inbox)
    for _ in range(3):
        peer.send(*frame_parts(SILENT, body=bytes(5_000_000)))
    peer.close()
    peer.close()
    assert await inbox.wait_end() is None
    handler.wait_until(lambda: handler.num_frames == 4 and len(handler.reasons) == 2)
    assert handler.reasons[1] is None

    inbox = Inbox()
    peer = await _open(setting, inbox)
    peer.abort()
    peer.abort()
    peer.send(*frame_parts(SILENT))
    assert await inbox.wait_end() is None
    handler.wait_until(lambda: len(handler.reasons) == 3)
    assert handler.num_frames == 4


async def _check_opened_refusals(setting: Setting, closed_endpoint: object) -> None:
    inbox = Inbox()
    peer = await _open(setting, inbox)
    other_inbox = Inbox()
    intruder = setting.make("another token for tests")
    error = await _failure(intruder.open(other_inbox, setting.served.endpoint, _HELLO, timeout_s=TIMEOUT_S))
    assert isinstance(error, AuthenticationError), error
    assert "refused the token" in str(error)
    error = await _failure(setting.transport.open(other_inbox, str(closed_endpoint), _HELLO, timeout_s=TIMEOUT_S))
    assert isinstance(error, AddressError), error
    peer.send(*frame_parts(ECHO, body=b"alive"))
    assert bytes((await inbox.wait_frames(1))[0].body) == b"alive"
    assert len(setting.handler.peers) == 1
    assert not other_inbox.ends
    peer.close()
    await inbox.wait_end()


async def _failure(opening: Coroutine[None, None, Peer]) -> PacelineError:
    try:
        await opening
    except PacelineError as error:
        return error
    raise AssertionError("expected opening to fail, but it succeeded")


OPENED_CHECKS: tuple[Callable[[Setting], None], ...] = (
    check_opened_echo,
    check_opened_both_ways,
    check_opened_errors,
    check_opened_closing,
    check_opened_refusals,
)
