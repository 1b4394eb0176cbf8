from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.random_examples import num_examples

from paceline.transport import Header, Limits, frame_parts
from paceline.transport.frames import join
from paceline.transport.receiving import BUFFER_BYTES, BufferPool, FrameReceiver
from paceline.transport.security.sealing import Seal


class Collector(FrameReceiver):
    """Stores the received frames."""

    def __init__(self, seal: Seal | None = None, *, pool: BufferPool | None = None, is_greeted: bool = True) -> None:
        super().__init__(Limits(), pool or BufferPool())
        self.got: list[tuple[int, bytes, bytes]] = []
        self.failures: list[Exception] = []
        if is_greeted:
            self.allow_application(Limits(), self.keep, seal=seal)

    def keep(self, header: Header, meta: memoryview, body: memoryview) -> None:
        for part in (meta, body):
            assert not part.nbytes or np.frombuffer(part, np.uint8).ctypes.data % 8 == 0
        self.got.append((header.request, bytes(meta), bytes(body)))

    def frame_failed(self, header: Header, error: Exception) -> None:
        raise error

    def stream_failed(self, error: Exception) -> None:
        self.failures.append(error)
        self.stop_receiving()

    def feed(self, data: bytes) -> None:
        view = self.get_buffer(-1)
        size = min(len(view), len(data))
        view[:size] = data[:size]
        self.buffer_updated(size)
        if size < len(data):
            self.feed(data[size:])


sizes = st.one_of(
    st.integers(0, 100),
    st.integers(0, 3 * BUFFER_BYTES),
    st.sampled_from([BUFFER_BYTES - 40, BUFFER_BYTES - 39, BUFFER_BYTES - 48, BUFFER_BYTES]),
)


@num_examples(80)
@given(st.lists(st.tuples(st.integers(0, 30), sizes), max_size=6), st.data(), st.booleans())
def test_frames_are_found_however_the_bytes_arrive(
    lengths: list[tuple[int, int]], data: st.DataObject, is_sealed: bool
) -> None:
    frames = [
        (number, bytes([number]) * meta, bytes([number + 1]) * body) for number, (meta, body) in enumerate(lengths)
    ]
    whole = [join(frame_parts(20, request=n, meta=meta, body=body)) for n, meta, body in frames]
    seal = Seal(bytes(32))
    stream = b"".join(frame + seal.tag((frame,)) if is_sealed else frame for frame in whole)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    receiver = Collector(Seal(bytes(32)) if is_sealed else None)
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        receiver.feed(stream[start:stop])
    assert receiver.got == frames
    assert receiver.failures == []
    assert not receiver.is_within_frame
    assert (receiver.frames_received, receiver.bytes_received) == (len(frames), len(stream))


def test_frames_are_received_byte_by_byte() -> None:
    receiver = Collector()
    for byte in join(frame_parts(20, request=1, meta=b"m", body=b"body")) * 3:
        receiver.feed(bytes([byte]))
    assert receiver.got == [(1, b"m", b"body")] * 3


def test_the_pool_reuses_buffers_and_frees_large_buffers() -> None:
    pool = BufferPool()
    first = pool.take(300_000)
    assert len(first) == 1 << 19
    pool.give(first)
    assert pool.take(400_000) is first
    huge = pool.take((1 << 26) + 1)
    pool.give(huge)
    assert pool.take((1 << 26) + 1) is not huge


def test_an_idle_connection_holds_no_buffer() -> None:
    """Idle connections share one buffer. A connection has its own buffer only while it receives a frame."""
    pool = BufferPool()
    connections = [Collector(pool=pool) for _ in range(100)]
    small, large = join(frame_parts(20, body=bytes(1000))), join(frame_parts(20, body=bytes(2 * BUFFER_BYTES)))
    addresses = set()
    for connection in connections:
        addresses.add(np.frombuffer(connection.get_buffer(-1), np.uint8).ctypes.data)
        connection.feed(small + large + small)
        assert len(connection.got) == 3
    assert len(addresses) == 1
    for connection in connections[:10]:
        connection.feed(small[:100])
    buffers = [connection.get_buffer(-1) for connection in connections[:10]]
    assert len({np.frombuffer(buffer, np.uint8).ctypes.data for buffer in buffers}) == 10
    for connection in connections[:10]:
        connection.feed(small[100:])
        assert len(connection.got) == 4


def test_an_unauthenticated_peer_has_a_small_buffer() -> None:
    stranger = Collector(is_greeted=False)
    assert len(stranger.get_buffer(-1)) == Limits().max_handshake_bytes
    stranger.allow_application(Limits(), stranger.keep)
    body = bytes(range(256)) * 100
    stranger.feed(join(frame_parts(20, body=body)) * 2)
    assert [frame[2] for frame in stranger.got] == [body, body]
    assert len(stranger.get_buffer(-1)) == BUFFER_BYTES
