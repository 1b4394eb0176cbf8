from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import PeerError, ProtocolError, StaleEpochError, VersionError
from paceline.transport import HEADER, MAGIC, FrameKind, error_meta, frame_parts, pack_header, unpack_header
from paceline.transport.decoding import error_of
from paceline.transport.frames import frame_bytes, join

u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))


@given(st.tuples(st.integers(0, 255), u16, u16, u32, u32, u32, u64, u32, u64))
def test_an_unpacked_header_equals_the_packed_header(fields: tuple[int, ...]) -> None:
    kind, flags, table, request, epoch, clock, sequence, meta_bytes, body_bytes = fields
    packed = pack_header(
        kind,
        flags=flags,
        table=table,
        request=request,
        epoch=epoch,
        clock=clock,
        sequence=sequence,
        meta_bytes=meta_bytes,
        body_bytes=body_bytes,
    )
    assert len(packed) == 40
    assert unpack_header(b"before" + packed, 6) == (MAGIC, 2, *fields)


def test_the_layout_is_as_documented() -> None:
    packed = pack_header(3, flags=4, table=5, request=6, epoch=7, clock=8, sequence=9, meta_bytes=10, body_bytes=11)
    fields = [packed[a:b] for a, b in zip(OFFSETS, [*OFFSETS[1:], 40], strict=True)]
    assert fields[0] == b"PL"
    assert [int.from_bytes(field, "little") for field in fields[1:]] == [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]


OFFSETS = [0, 2, 3, 4, 6, 8, 12, 16, 20, 28, 32]


def test_invalid_headers_are_named() -> None:
    with pytest.raises(ProtocolError, match=r"b'GET / HTTP/1\.1"):
        unpack_header(b"GET / HTTP/1.1\r\n" + bytes(40))
    with pytest.raises(ProtocolError, match="40 bytes, got 39"):
        unpack_header(bytes(39))
    with pytest.raises(VersionError, match="version 7, but this process has version 2"):
        unpack_header(HEADER.pack(MAGIC, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0))


@given(st.binary(max_size=40), st.lists(st.binary(max_size=20), max_size=4))
def test_parts_are_padded(meta: bytes, body: list[bytes]) -> None:
    frame = join(frame_parts(20, meta=meta, body=body))
    header = unpack_header(frame)
    assert len(frame) == frame_bytes(header)
    assert len(frame) % 8 == 0
    at = 40 + (len(meta) + 7) // 8 * 8
    assert frame[40 : 40 + header.meta_bytes] == meta
    assert frame[at : at + header.body_bytes] == b"".join(body)
    assert not frame[40 + len(meta) : at].strip(b"\0")
    assert not frame[at + header.body_bytes :].strip(b"\0")


def test_sizes_of_arrays_are_counted_in_bytes() -> None:
    header = unpack_header(join(frame_parts(20, body=np.zeros((3, 5), np.float32))))
    assert header.body_bytes == 60
    assert unpack_header(join(frame_parts(20, body=np.zeros((0, 5))))).body_bytes == 0


def test_received_errors_are_raised() -> None:
    with pytest.raises(StaleEpochError, match=r"^epoch 3$"):
        raise error_of(error_meta(StaleEpochError("epoch 3")))
    with pytest.raises(PeerError, match="KeyError: 'x'") as caught:
        raise error_of(error_meta(KeyError("x")))
    assert type(caught.value) is PeerError
    with pytest.raises(ProtocolError, match="cannot be read"):
        raise error_of(b"\xc1")


@pytest.mark.parametrize("name", ["annotations", "OSError", "__doc__", "NoSuchError"])
def test_only_errors_of_paceline_are_raised_by_name(name: str) -> None:
    import msgspec

    with pytest.raises(PeerError, match=name):
        raise error_of(msgspec.msgpack.encode({"error": name, "message": "text"}))


def test_kinds_of_frames_of_the_transport_are_below_16() -> None:
    assert {kind.value for kind in FrameKind} <= set(range(16))
