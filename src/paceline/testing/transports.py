"""Check the behaviour of a transport, in the manner of trio's ``check_one_way_stream``.

:func:`check_transport` runs all checks, each on a new transport; ``CHECKS`` contains them by name, for one test each.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import numpy as np

from paceline.errors import (
    AddressError,
    AuthenticationError,
    ConnectionLostError,
    DeadlineError,
    PacelineError,
    PeerError,
    ProtocolError,
    StaleEpochError,
)
from paceline.testing.group_arrays import expect
from paceline.testing.opened_checks import OPENED_CHECKS
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
    MakeTransport,
    Setting,
)
from paceline.transport import Channel, Hello, frame_parts, pack_header

__all__ = ["CHECKS", "CLOSE", "ECHO", "SILENT", "EchoHandler", "MakeTransport", "check_transport"]

_TOKEN = "the-token-of-the-conformance-suite"


def check_echo(setting: Setting) -> None:
    """Bodies of every size and alignment return, with all fields of the header, at an aligned address."""
    channel = setting.connect()
    random = np.random.default_rng(0)
    for size in (0, 1, 7, 8, 64, 4056, 4057, 12_288, 65_537, 262_104, 262_105, 1_200_003, 6_400_000):
        body = random.integers(0, 256, size, np.uint8)
        meta = bytes(size % 11)
        fields = {"table": 3, "request": size, "epoch": 5, "clock": 6, "sequence": 2**63 + 1}
        channel.send(*frame_parts(ECHO, meta=meta, body=body, **fields))
        frame = channel.receive_frame(TIMEOUT_S)
        assert frame.header[2:9] == (ANSWER, 1, 3, size, 5, 6, 2**63 + 1), frame.header
        assert frame.meta == meta
        assert bytes(frame.body) == body.tobytes()
        into = np.zeros(size, np.uint8)
        channel.send(*frame_parts(ECHO, body=(body[: size // 3], body[size // 3 :])))
        assert channel.receive(into, TIMEOUT_S).body_bytes == size
        assert np.array_equal(into, body)
    floats = random.random((100, 16)).astype(np.float32)
    got = np.empty_like(floats)
    channel.send(*frame_parts(ECHO, body=floats))
    channel.receive(got, TIMEOUT_S)
    assert np.array_equal(got, floats)
    statistics = channel.statistics()
    assert 27 <= statistics.frames_sent <= 28  # a transport may also count the handshake's frame
    assert 27 <= statistics.frames_received <= 29


def check_unexpected_answers(setting: Setting) -> None:
    """Answers with shorter bodies, metadata or several parts are received correctly; longer bodies are rejected."""
    channel = setting.connect()
    into = np.zeros(100_000, np.uint8)
    for size, meta in ((10, b""), (99_999, b"m"), (100_000, b"meta"), (0, b"12345678"), (100_000, b"")):
        channel.send(*frame_parts(ECHO, meta=meta, body=np.full(size, 7, np.uint8)))
        channel.send(*frame_parts(ECHO, request=1))
        header = channel.receive(into, TIMEOUT_S)
        assert (header.body_bytes, channel.last_meta) == (size, meta)
        assert (into[:size] == 7).all()
        into[:] = 0
        assert channel.receive_header(TIMEOUT_S).request == 1
    channel.send(*frame_parts(ECHO, meta=b"skipped", body=bytes(13)))
    channel.send(*frame_parts(ECHO, body=np.arange(5)))
    assert channel.receive_header(TIMEOUT_S).body_bytes == 13
    assert channel.receive_header(TIMEOUT_S).body_bytes == 40
    parts = np.zeros(2, np.int64), np.zeros(3, np.int64)
    for part in parts:
        channel.receive_into(part)
    assert np.concatenate(parts).tolist() == [0, 1, 2, 3, 4]
    channel.send(*frame_parts(ECHO, body=bytes(17)))
    expect(ProtocolError, lambda: channel.receive(into[:16], TIMEOUT_S))


def check_pipelining(setting: Setting) -> None:
    """Many frames in flight are answered in order."""
    channel = setting.connect()
    sizes = [(7919 * number) % 3000 for number in range(300)] + [300_000, 5, 700_000, 0]
    for number, size in enumerate(sizes):
        channel.send(*frame_parts(ECHO, request=number, body=np.full(size, number % 256, np.uint8)))
    for number, size in enumerate(sizes):
        frame = channel.receive_frame(TIMEOUT_S)
        assert (frame.header.request, frame.header.body_bytes) == (number, size)
        assert bytes(frame.body) == bytes([number % 256]) * size


def check_many_clients(setting: Setting) -> None:
    """Clients are independent of each other; the server distinguishes them."""
    channels = [setting.connect(rank) for rank in range(20)]
    for rank, channel in enumerate(channels):
        channel.send(*frame_parts(ECHO, request=rank, body=np.full(1000 * rank, rank, np.uint8)))
    for rank, channel in reversed(list(enumerate(channels))):
        frame = channel.receive_frame(TIMEOUT_S)
        assert frame.header.request == rank
        assert bytes(frame.body) == bytes([rank]) * 1000 * rank
        assert channel.peer.role == "server"
    hellos = setting.served.call(lambda: [peer.hello for peer in setting.handler.peers])
    assert sorted(hello.rank for hello in hellos) == list(range(20))
    assert {(hello.role, hello.incarnation) for hello in hellos} == {("worker", 7)}
    assert setting.served.listener.num_connections == 20
    setting.served.call(lambda: setting.served.listener.set_hello(Hello(role="server", rank=3, incarnation=9)))
    assert (setting.connect().peer.rank, channels[0].peer.rank) == (3, 0)


def check_over_long(setting: Setting) -> None:
    """A frame that claims 2^60 bytes closes its sender's connection without allocating memory."""
    for lengths in ({"body_bytes": 1 << 60}, {"meta_bytes": (1 << 32) - 1}, {"body_bytes": (1 << 64) - 1}):
        bystander = setting.connect(1)
        channel = setting.connect()
        channel.send(pack_header(ECHO, **lengths))
        _check_refused(channel)
        _check_alive(bystander)


def check_garbage(setting: Setting) -> None:
    """Invalid bytes and reserved kinds of frame close only the connection that sent them."""
    random = np.random.default_rng(1)
    http = b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n"
    for garbage in (http, random.bytes(5000), pack_header(2)):
        bystander = setting.connect(1)
        channel = setting.connect()
        _check_alive(channel)
        channel.send(garbage)
        _check_refused(channel)
        _check_alive(bystander)
    setting.handler.wait_until(lambda: len(setting.handler.reasons) == 3)
    assert all(isinstance(reason, ProtocolError) for reason in setting.handler.reasons)


def check_closing(setting: Setting) -> None:
    """Each end detects that the other has closed, between frames and inside one."""
    handler = setting.handler
    channel = setting.connect()
    _check_alive(channel)
    assert not channel.has_ended()
    channel.close()
    channel.close()
    assert channel.has_ended()
    handler.wait_until(lambda: handler.reasons == [None])
    closed = channel
    expect(ConnectionLostError, lambda: closed.send(*frame_parts(ECHO)))
    expect(ConnectionLostError, lambda: closed.receive_header(TIMEOUT_S))

    channel = setting.connect()
    channel.send(pack_header(ECHO, body_bytes=300_000), bytes(100))
    channel.close()
    handler.wait_until(lambda: len(handler.reasons) == 2)
    assert isinstance(handler.reasons[1], ConnectionLostError)

    channel = setting.connect()
    channel.send(*frame_parts(CLOSE))
    assert channel.poll(TIMEOUT_S)
    expect(ConnectionLostError, lambda: channel.receive_header(TIMEOUT_S))
    assert channel.has_ended()
    handler.wait_until(lambda: len(handler.reasons) == 3)
    assert setting.served.listener.num_connections == 0


def check_closing_wakes(setting: Setting) -> None:
    """A thread that waits on a channel wakes when another thread closes it."""
    channel = setting.connect()
    errors: list[Exception] = []

    def wait() -> None:
        try:
            channel.receive_header(TIMEOUT_S)
        except PacelineError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    channel.send(*frame_parts(SILENT))
    setting.handler.wait_until(lambda: setting.handler.num_frames == 1)
    channel.close()
    thread.join(TIMEOUT_S)
    assert isinstance(errors[0], ConnectionLostError)


def check_deadlines(setting: Setting) -> None:
    """A wait ends at its timeout; the channel stays usable if no frame had begun."""
    channel = setting.connect()
    into = np.zeros(64, np.uint8)
    waits: tuple[Callable[[], object], ...] = (
        lambda: channel.receive_header(0.05),
        lambda: channel.receive(into, 0.05),
        lambda: channel.receive_frame(0.05),
    )
    for wait in waits:
        channel.send(*frame_parts(SILENT))
        start = time.monotonic()
        expect(DeadlineError, wait)
        assert 0.04 <= time.monotonic() - start < 2.0
        assert not channel.poll(0.01)
        _check_alive(channel)


def check_errors(setting: Setting) -> None:
    """An exception of the handler is raised at the client, and the connection stays open."""
    channel = setting.connect()
    into = np.zeros(50_000, np.uint8)
    receives: tuple[Callable[[], object], ...] = (
        lambda: channel.receive_header(TIMEOUT_S),
        lambda: channel.receive(into, TIMEOUT_S),
        lambda: channel.receive(into[:50], TIMEOUT_S),
        lambda: channel.receive_frame(TIMEOUT_S),
    )
    for number, receive in enumerate(receives):
        channel.send(*frame_parts(FAIL, request=number, body=into))
        channel.send(*frame_parts(ECHO, request=100, body=into))
        error = expect(StaleEpochError, receive)
        assert "epoch 3" in str(error)
        assert channel.last_header is not None
        assert channel.last_header.request == number
        assert channel.receive(into, TIMEOUT_S).request == 100
        channel.send(*frame_parts(FAIL_INTERNALLY))
        error = expect(PeerError, receive)
        assert "KeyError" in str(error)
        _check_alive(channel)


def check_refusals(setting: Setting) -> None:
    """A wrong token and a closed port raise different errors; other clients continue."""
    bystander = setting.connect()
    intruder = setting.make("another token for tests")
    endpoint = setting.served.endpoint
    error = expect(AuthenticationError, lambda: intruder.connect(endpoint, Hello(role="worker")))
    assert "refused the token" in str(error)
    _check_alive(bystander)
    with serve_in_thread(EchoHandler(), setting.transport) as other:
        closed_endpoint = other.endpoint
    expect(
        AddressError, lambda: setting.transport.connect(closed_endpoint.tcp, Hello(role="worker"), timeout_s=TIMEOUT_S)
    )
    assert len(setting.handler.peers) == 1


CHECKS: Mapping[str, Callable[[Setting], None]] = {
    check.__name__: check
    for check in (
        check_echo,
        check_unexpected_answers,
        check_pipelining,
        check_many_clients,
        check_over_long,
        check_garbage,
        check_closing,
        check_closing_wakes,
        check_deadlines,
        check_errors,
        check_refusals,
        *OPENED_CHECKS,
    )
}
"""The checks by name."""


def check_transport(make: MakeTransport, *, only: str | None = None, unix: bool = True) -> None:
    """Check that a transport behaves as `paceline.transport.base` documents; raise AssertionError otherwise.

    ``only`` selects one check of ``CHECKS``, and another name is a KeyError; ``unix=False`` excludes Unix sockets.
    """
    for name in CHECKS if only is None else [only]:
        check = CHECKS[name]
        transport = make(_TOKEN)
        handler = EchoHandler()
        with serve_in_thread(handler, transport, hello=Hello(role="server", name="echo"), unix=unix) as served:
            setting = Setting(make, transport, handler, served)
            try:
                check(setting)
            finally:
                setting.close()


def _check_alive(channel: Channel) -> None:
    channel.send(*frame_parts(ECHO, request=77, body=b"alive"))
    frame = channel.receive_frame(TIMEOUT_S)
    assert (frame.header.request, bytes(frame.body)) == (77, b"alive")


def _check_refused(channel: Channel) -> None:
    # The server sends the reason, but the system may discard it, because the server closes with unread bytes.
    expect((ProtocolError, ConnectionLostError), lambda: channel.receive_header(TIMEOUT_S))
