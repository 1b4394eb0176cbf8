"""Valid frames, and mutations that know the fields of a frame."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec

from paceline.transport import HEADER, MAGIC, PROTOCOL_VERSION, padded

FIELDS = {"flags": 16, "table": 16, "request": 32, "epoch": 32, "clock": 32, "sequence": 64}
"""The fields of a header, and the number of bits of each."""
INTEGERS = (
    0, 1, -1, 2, 3, 7, 8, 63, 64, 127, 128, 255, 256, 511, 512, 1 << 12, 65535, 65536, 65537, (1 << 20) + 1,
    (1 << 31) - 1, 1 << 31, (1 << 32) - 3, (1 << 32) - 2, (1 << 32) - 1, 1 << 32, 1 << 40, (1 << 40) + 1, 1 << 53,
    1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -2, -(1 << 31), -(1 << 63),
)  # fmt: skip
FLOATS = (0.0, -0.0, 1.0, -1.0, float("nan"), float("inf"), float("-inf"), 1e308, 5e-324, 1e39, 0.5)
TEXTS = (
    "",
    "x",
    "x" * 300,
    "x" * 20_000,
    "a\x1b[2J",
    "\0",
    "../up",
    "é\ud7ff",
    "server",
    "sparse",
    "1",
    "nan",
    "snapshot-000001",
)
BYTES = (b"", b"\0", bytes(63), bytes(64), b"\xff" * 64, bytes(65), b"\xff" * 5000)
UNREADABLE = (
    b"", b"\xc1", b"\xff", b"\x91" * 100_000, b"\x81\xa1a" * 50_000, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\x81\xa4type\xa1\xff", b"\xdc\xff\xff",
    b"\xd7\xff" + b"\xff" * 8,
)  # fmt: skip
KEPT = frozenset({"directory"})
"""Fields of messages that stay unchanged: paths, because the listener would write to any path."""


@dataclass(slots=True)
class Frame:
    """A frame before encoding.

    `meta` is an object for msgpack, or bytes that are sent unchanged; `body` is any bytes.
    """

    kind: int
    meta: Any = b""
    body: bytes = b""
    fields: dict[str, int] = field(default_factory=dict)
    magic: int = MAGIC
    version: int = PROTOCOL_VERSION
    more_meta: int = 0
    """The error in the header's length of the meta, then in ``more_body``."""
    more_body: int = 0

    def encode(self) -> bytes:
        """Return the bytes of the frame."""
        meta = encode_meta(self.meta)
        meta_bytes, body_bytes = len(meta) + self.more_meta, len(self.body) + self.more_body
        get = self.fields.get
        header = HEADER.pack(
            self.magic, self.version, self.kind & 255, get("flags", 0), get("table", 0), get("request", 0),
            get("epoch", 0), get("clock", 0), get("sequence", 0), meta_bytes & 0xFFFFFFFF,
            body_bytes & 0xFFFFFFFFFFFFFFFF,
        )  # fmt: skip
        pads = bytes(padded(len(meta)) - len(meta)), bytes(padded(len(self.body)) - len(self.body))
        return b"".join((header, meta, pads[0], self.body, pads[1]))

    @property
    def is_whole(self) -> bool:
        """Whether the lengths in the header are right."""
        return not (self.more_meta or self.more_body) and self.magic == MAGIC and self.version == PROTOCOL_VERSION


def encode_meta(meta: Any) -> bytes:
    """Encode the meta of a frame with msgpack; return bytes unchanged."""
    return meta if isinstance(meta, bytes) else msgspec.msgpack.encode(meta)


def tree_of(message: Any) -> Any:
    """Return a message as lists, dictionaries and plain values, which can be altered."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message))


class Mutator:
    """Changes valid frames into invalid frames, with one source of random numbers."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._kept: list[Frame] = []

    def vary(self, frame: Frame, kinds: Sequence[int]) -> list[Frame]:
        """Return the frames to send in place of a frame; `kinds` are the kinds that the listener accepts."""
        random = self._random
        choice = random.random()
        if choice < 0.3:
            frames = [frame]
        elif choice < 0.34:
            frames = [frame, frame]
        elif choice < 0.38:  # the frame is sent later, after other frames
            self._kept.append(frame)
            frames = []
        else:
            for _ in range(1 if random.random() < 0.7 else random.randint(2, 4)):
                self._alter(frame, kinds)
            frames = [frame]
        if self._kept and random.random() < 0.1:
            frames.append(self._kept.pop(random.randrange(len(self._kept))))
        del self._kept[:-20]
        return frames

    def _alter(self, frame: Frame, kinds: Sequence[int]) -> None:
        random = self._random
        alterations: list[tuple[int, Callable[[], None]]] = [(4, lambda: self._alter_field(frame))]
        if not isinstance(frame.meta, bytes):
            alterations.append((14, lambda: self.alter_tree(frame)))
            if not _holds_kept(frame.meta):
                alterations.append((3, lambda: self._alter_meta(frame)))
        alterations.append((8 if frame.body else 2, lambda: self.alter_body(frame)))
        alterations.append((1, lambda: self._alter_lengths(frame)))
        if not _holds_kept(frame.meta):
            alterations.append((1, lambda: self._alter_kind(frame, kinds)))
        weights = [weight for weight, _ in alterations]
        random.choices([alter for _, alter in alterations], weights)[0]()

    def _alter_kind(self, frame: Frame, kinds: Sequence[int]) -> None:
        frame.kind = self._random.choice(kinds) if self._random.random() < 0.7 else self._random.randrange(256)

    def _alter_field(self, frame: Frame) -> None:
        name = self._random.choice(list(FIELDS))
        value = (
            frame.fields.get(name, 0) + self._random.choice((-1, 1))
            if self._random.random() < 0.3
            else (self._random.choice(INTEGERS))
        )
        frame.fields[name] = value & ((1 << FIELDS[name]) - 1)

    def _alter_lengths(self, frame: Frame) -> None:
        random = self._random
        match random.randrange(5):
            case 0:
                frame.more_meta = random.choice((-1, 1, 8, 1 << 16, 1 << 26, (1 << 32) - 1))
            case 1:
                frame.more_body = random.choice((-8, 1, 8, 1 << 18, 1 << 29, 1 << 30, 1 << 40, (1 << 64) - 8))
            case 2:
                frame.magic ^= 1 << random.randrange(16)
            case 3:
                frame.version = random.randrange(256)
            case _:
                frame.more_meta, frame.more_body = -len(encode_meta(frame.meta)), random.randrange(1 << 12)

    def _alter_meta(self, frame: Frame) -> None:
        random = self._random
        data = bytearray(encode_meta(frame.meta))
        match random.randrange(4):
            case 0:
                frame.meta = random.choice(UNREADABLE)
                return
            case 1:
                del data[random.randrange(len(data) + 1) :]
            case 2:
                data += random.randbytes(random.randrange(1, 20))
            case _:
                for _ in range(random.randint(1, 3)):
                    if data:
                        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        frame.meta = bytes(data)

    def alter_body(self, frame: Frame) -> None:
        random = self._random
        body = bytearray(frame.body)
        match random.randrange(6):
            case 0:
                del body[random.randrange(len(body) + 1) :]
            case 1:
                body += random.randbytes(random.choice((1, 4, 8, 12, 64, 4096)))
            case 2:
                body += body * random.choice((1, 2, 7))
            case 3:
                body = bytearray(random.randbytes(random.choice((0, 7, 8, 16, 24, 100))))
            case 4:
                del body[: random.choice((1, 4, 8, 16))]
            case _:
                at = 8 * random.randrange(len(body) // 8 + 1)
                value = random.choice(INTEGERS) & ((1 << 64) - 1)
                body[at : at + 8] = value.to_bytes(8, "little")
        frame.body = bytes(body)

    def alter_tree(self, frame: Frame) -> None:
        places = list(_places(frame.meta))
        if not places:
            frame.meta = self.other(frame.meta)
            return
        holder, key = self._random.choice(places)
        if self._random.random() < 0.3 and self._alter_holder(holder, key):
            return
        holder[key] = self.other(holder[key])

    def _alter_holder(self, holder: Any, key: Any) -> bool:
        """Add, remove or duplicate a field."""
        random = self._random
        if isinstance(holder, dict):
            match random.randrange(3):
                case 0:
                    del holder[key]
                case 1:
                    holder[random.choice(TEXTS)] = self.other(holder[key])
                case _:
                    holder[random.choice(list(holder))] = holder[key]
            return True
        match random.randrange(5):
            case 0:
                del holder[key:]
            case 1:
                holder.insert(key, copy.deepcopy(holder[key]))
            case 2:
                holder.extend([copy.deepcopy(holder[key])] * random.choice((1, 10, 600)))
            case 3:
                holder.reverse()
            case _:
                holder.append(random.choice(INTEGERS))
        return True

    def other(self, value: Any) -> Any:
        """Return a replacement of a value, usually of the same type."""
        random = self._random
        if random.random() < 0.15:
            deep: Any = 0
            for _ in range(50):
                deep = [deep]
            return random.choice((None, True, [], {}, "text", b"bytes", 0, -1, 1.5, deep))
        match value:
            case bool():
                return not value
            case int():
                near = value + random.choice((-1, 1))
                return near if -(1 << 63) <= near < 1 << 64 and random.random() < 0.2 else random.choice(INTEGERS)
            case float():
                return random.choice(FLOATS)
            case str():
                return random.choice(TEXTS)
            case bytes():
                if random.random() < 0.5 and value:
                    altered = bytearray(value)
                    altered[random.randrange(len(altered))] ^= 1 << random.randrange(8)
                    return bytes(altered)
                return random.choice(BYTES)
            case _:
                return random.choice((None, [], {}, 0, "x", -1, [[]], [None], random.choice(INTEGERS)))


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    members = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in members:
        if key not in KEPT:
            yield tree, key
            yield from _places(value)


def _holds_kept(tree: Any) -> bool:
    return isinstance(tree, dict) and not KEPT.isdisjoint(tree)
