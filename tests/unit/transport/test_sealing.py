from __future__ import annotations

import hmac

import pytest

from paceline.transport.security.sealing import PIECE_BYTES, TAG_BYTES, Seal, derive_seals

KEY = bytes(range(32))


def test_a_tag_is_the_hmac_of_the_frame_and_the_number() -> None:
    seal = Seal(KEY)
    for number, parts in enumerate([(b"header", b"body"), (b"",), (bytes(3 * PIECE_BYTES),)]):
        text = number.to_bytes(8, "little") + b"".join(parts)
        assert seal.tag(parts) == hmac.digest(KEY, text, "sha256")[:16]


def test_the_tag_of_the_protocol_version_is_unchanged() -> None:
    """Keys are derived by HKDF (RFC 5869). The protocol paceline/2 fixes these bytes."""
    seals = derive_seals("the token", b"n" * 64, b"transcript", connecting=True)
    prk = hmac.digest(b"n" * 64, b"the token", "sha256")
    first = hmac.digest(prk, b"transcript\x01", "sha256")
    second = hmac.digest(prk, first + b"transcript\x02", "sha256")
    tag = seals.sending.tag((b"frame",))
    assert tag == Seal(first).tag((b"frame",))
    assert tag.hex() == "dc76cfbbf242dc20d40a81a85a045de1"
    assert seals.receiving.tag((b"frame",)) == Seal(second).tag((b"frame",))


@pytest.mark.parametrize("fault", ["altered", "replayed", "reordered", "dropped", "of another connection"])
def test_every_fault_of_a_frame_is_detected(fault: str) -> None:
    sending, receiving = Seal(KEY), Seal(KEY)
    frames = [(frame, sending.tag((frame,))) for frame in (b"first", b"second", b"third")]
    order = {"replayed": [0, 0], "reordered": [1], "dropped": [0, 2]}.get(fault, [0])
    if fault == "altered":
        frames[0] = (b"firsT", frames[0][1])
    elif fault == "of another connection":
        receiving = Seal(KEY[::-1])
    fitted = []
    for index in order:
        frame, tag = frames[index]
        receiving.update(frame)
        fitted.append(receiving.matches(tag))
    assert fitted == [True] * (len(order) - 1) + [False]


def test_a_tag_with_one_wrong_bit_is_rejected() -> None:
    right = Seal(KEY).tag((b"frame",))
    number = int.from_bytes(right, "little")
    altered = [(number ^ 1 << bit).to_bytes(TAG_BYTES, "little") for bit in range(8 * TAG_BYTES)]
    fitting = []
    for tag in (right, *altered, right[:-1], right + b"\0", b""):
        receiving = Seal(KEY)
        receiving.update(b"frame")
        if receiving.matches(tag):
            fitting.append(tag)
    assert fitting == [right]
