"""Errors on the wire."""

from __future__ import annotations

import msgspec

from paceline.errors import PeerError, ProtocolError, UsageError, printable
from paceline.transport import error_meta, error_of


def test_an_error_keeps_the_class_and_the_lines() -> None:
    error = error_of(error_meta(UsageError("one sentence\nand another")))
    assert type(error) is UsageError
    assert str(error) == "one sentence\nand another"


def test_reports_have_no_control_characters() -> None:
    meta = msgspec.msgpack.encode({"error": "\x1b]0;title\x07", "message": "\x1b[2J\r\u202e" + "!" * 1_000_000})
    error = error_of(meta)
    assert type(error) is PeerError
    assert str(error).startswith(r"\x1b]0;title\x07: \x1b[2J\r\u202e!!")
    assert len(str(error)) < 2200


def test_invalid_reports_are_rejected() -> None:
    for meta in (b"", b"\xc1", msgspec.msgpack.encode({"error": 1, "message": ""})):
        assert type(error_of(meta)) is ProtocolError


def test_printable() -> None:
    assert printable("grüße", 5) == "grüße"
    assert printable("a\x00b\ud800", 40) == r"a\x00b\ud800"
    assert printable("abcdef", 5) == "abcd…"
