"""Define chains of filters: the valid order of filters, and the format of filtered messages.

A body begins with 16 bytes: the number of keys, the number of values and the size of the keys in bytes (uint32 each),
the form of the keys (a code such as :data:`STORED`), whether the remainder is compressed, and zeros. The remainder is
the keys, padded to 4 bytes, and the values. All numbers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from paceline.errors import ProtocolError, UsageError
from paceline.filters.base import (
    ByteFilter,
    Bytes,
    Filter,
    KeyFilter,
    RowFilter,
    ValueFilter,
    from_description,
    parse_filter,
)
from paceline.filters.calls import num_bytes_of, packed_by, read_values, unpacked_by, write_values
from paceline.filters.keys.caching import DIGEST_BYTES, LEAST_KEYS, KeyCaching, KeyLists, digest_of
from paceline.filters.keys.deltas import DeltaKeys
from paceline.filters.keys.numbers import KeyNumbers, ReceivedNumbers, SentNumbers
from paceline.kernels.filters import decode_deltas, encode_deltas
from paceline.tables.types import Floats, Keys

_HEAD = struct.Struct("<IIIBBxx")
HEAD_BYTES: Final = _HEAD.size

STORED: Final = 1
"""The receiver must store the keys under their digest."""
KNOWN: Final = 2
"""The message has a digest instead of the keys."""
DELTAS: Final = 4
"""The message has the differences of sorted keys."""
RANGE: Final = 8
"""The message has the two bounds of a range instead of the keys."""
NUMBERS: Final = 16
"""The message has numbers instead of the known keys, after the count of known keys."""
_FORMS: Final = (0, STORED, KNOWN, DELTAS, STORED | DELTAS, NUMBERS, STORED | NUMBERS, RANGE)

_Kind = TypeVar("_Kind", bound=Filter)


class KeyMemory:
    """The lists of keys and the keys' numbers of one table, at one end of a connection."""

    def __init__(self, caching: KeyCaching | None, numbering: KeyNumbers | None, *, sends: bool) -> None:
        self.lists = None if caching is None else KeyLists(caching.megabytes << 20)
        self.sent = SentNumbers(numbering.megabytes) if numbering is not None and sends else None
        self.received = ReceivedNumbers(numbering.megabytes) if numbering is not None and not sends else None

    @property
    def num_bytes(self) -> int:
        lists = 0 if self.lists is None else self.lists.num_bytes
        return lists + (0 if self.received is None else self.received.num_bytes)

    def clear(self) -> None:
        for memory in (self.lists, self.sent, self.received):
            if memory is not None:
                memory.clear()


class UnknownKeysError(Exception):
    """The receiver lacks keys that a message refers to, so the sender must send the message again with the keys."""


class Decoded(NamedTuple):
    """A message after decoding."""

    is_range: bool
    keys: Keys
    """The keys, or the two bounds of a range."""
    values: Floats
    """float32 [n * dim]; empty for a pull."""
    body: Bytes
    """The keys followed by the values."""


class FilterChain:
    """Filters in the order of their use by a sender. They are immutable. Their state is in :class:`KeyMemory`."""

    def __init__(self, filters: Sequence[Filter] = ()) -> None:
        if not isinstance(filters, (list, tuple)):
            raise UsageError(f"filters={filters!r}: expected a list of filters such as [paceline.Quantize(bits=8)]")
        self.filters = tuple(filters)
        for chosen in self.filters:
            _check(chosen)
        stages = [chosen.stage for chosen in self.filters]
        if stages != sorted(stages) or len({chosen.name for chosen in self.filters}) < len(stages):
            raise UsageError(f"filters {self}: expected each filter once, in the order: rows, keys, values, bytes")
        self.rows = tuple(chosen for chosen in self.filters if isinstance(chosen, RowFilter))
        self.values = self._only(ValueFilter)  # type: ignore[type-abstract]
        self.bytes = self._only(ByteFilter)  # type: ignore[type-abstract]
        self.caching = self._only(KeyCaching)
        self.sorts = self._only(DeltaKeys) is not None
        """Whether keys must be sorted."""
        self.numbering = self._only(KeyNumbers)
        if self.sorts and self.numbering is not None:
            raise UsageError(f"filters {self}: delta-keys and key-numbers do the same. Choose one")

    def _only(self, kind: type[_Kind]) -> _Kind | None:  # a chain has at most one filter of each kind
        found = [chosen for chosen in self.filters if isinstance(chosen, kind)]
        if len(found) > 1:
            raise UsageError(f"filters {self}: {found[0].name} and {found[1].name} do the same. Choose one")
        return found[0] if found else None

    def __str__(self) -> str:
        return ",".join(map(str, self.filters))

    def __bool__(self) -> bool:
        return bool(self.filters)

    def memory(self, *, sends: bool) -> KeyMemory | None:
        if self.caching is None and self.numbering is None:
            return None
        return KeyMemory(self.caching, self.numbering, sends=sends)

    def describe(self) -> list[dict[str, Any]]:
        return [chosen.describe() for chosen in self.filters]

    def encode(
        self,
        keys: Keys,
        values: Floats,
        seed: int | None,
        memory: KeyMemory | None,
        *,
        is_range: bool = False,
        read: Floats | None = None,
    ) -> Bytes:
        """Return the body for keys (or the bounds of a range) and values (float32 [n * dim], empty for a pull).

        `memory` mirrors the keys known to the receiver. Row filters apply earlier, before a push is split. If there is
        a value filter and `read` is given, `read` gets the values as the receiver will decode them.
        """
        form, written = (RANGE, keys.view(np.uint8)) if is_range else self._write_keys(keys, memory)
        key_bytes = len(written)
        body = np.empty(HEAD_BYTES + (key_bytes + 3 & -4) + num_bytes_of(self.values, len(values)), np.uint8)
        at = HEAD_BYTES + key_bytes
        body[HEAD_BYTES:at] = written
        start = at + 3 & -4
        body[at:start] = 0
        write_values(self.values, values, seed, body[start:])
        if read is not None and self.values is not None:
            read_values(self.values, body[start:], read)
        return self._packed(body, len(keys), len(values), key_bytes, form)

    def _write_keys(self, keys: Keys, memory: KeyMemory | None) -> tuple[int, Bytes]:
        form, lists = 0, None if memory is None else memory.lists
        if lists is not None and len(keys) >= LEAST_KEYS:
            digest = digest_of(keys)
            if digest in lists:
                lists.use(digest)
                return KNOWN, np.frombuffer(digest, np.uint8)
            lists.add(digest, len(keys))
            form = STORED
        if memory is not None and memory.sent is not None:
            return form | NUMBERS, memory.sent.encode(keys)
        if self.sorts:
            out = np.empty(10 * len(keys), np.uint8)
            return form | DELTAS, out[: encode_deltas(keys, out)]
        return form, keys.view(np.uint8)

    def decode(self, body: Bytes, memory: KeyMemory | None, max_bytes: int) -> Decoded:
        """Return the content of a body.

        Raises UnknownKeysError. Raises ProtocolError if other filters wrote the body, or if its content exceeds
        `max_bytes`.
        """
        num_keys, num_values, key_bytes, form, is_packed = self._head(body)
        least = 0 if form == KNOWN else num_keys  # a digest; otherwise each key takes at least one byte
        most = 10 * num_keys + DIGEST_BYTES
        if form not in _FORMS or 8 * num_keys + 4 * num_values > max_bytes or not least <= key_bytes <= most:
            raise _malformed(
                f"{num_keys} keys in {key_bytes} bytes (encoding {form}), {num_values} values; expected a known "
                f"encoding, {least} to {most} bytes of keys, and at most {max_bytes} bytes after decoding"
            )
        start = key_bytes + 3 & -4
        remainder = self._unpacked(body[HEAD_BYTES:], is_packed, start + num_bytes_of(self.values, num_values))
        decoded = np.empty(8 * num_keys + 4 * num_values, np.uint8)
        keys, values = decoded[: 8 * num_keys].view(np.uint64), decoded[8 * num_keys :].view(np.float32)
        self._read_keys(remainder[:key_bytes], form, keys, memory)
        read_values(self.values, remainder[start:], values)
        return Decoded(form == RANGE, keys, values, decoded)

    def _read_keys(self, written: Bytes, form: int, keys: Keys, memory: KeyMemory | None) -> None:
        lists = None if memory is None else memory.lists
        if form == KNOWN:
            known = written.tobytes()
            if lists is None or known not in lists:
                raise UnknownKeysError
            known_keys = lists.use(known)
            if len(known_keys) != len(keys):
                raise _malformed(f"{len(keys)} keys, but their digest stands for {len(known_keys)}")
            keys[:] = known_keys
            return
        if form & NUMBERS:
            received = None if memory is None else memory.received
            if received is None or not received.follows(written):
                raise UnknownKeysError
            if not received.decode(written, keys):
                raise _malformed(f"{len(keys)} keys as numbers are not {len(written)} bytes long")
        elif form & DELTAS:
            if decode_deltas(written, keys) != len(written):
                raise _malformed(f"{len(keys)} keys as differences are not {len(written)} bytes long")
        elif len(written) != keys.nbytes or (form == RANGE and len(keys) != 2):
            raise _malformed(f"{len(keys)} keys in {len(written)} bytes")
        else:
            keys.view(np.uint8)[:] = written
        if form & STORED and lists is not None:
            lists.add(digest_of(keys), len(keys), keys.copy())

    def encode_values(self, values: Floats, seed: int) -> Bytes:
        body = np.empty(HEAD_BYTES + num_bytes_of(self.values, len(values)), np.uint8)
        write_values(self.values, values, seed, body[HEAD_BYTES:])
        return self._packed(body, 0, len(values), 0, 0)

    def decode_values(self, body: Bytes, out: Floats) -> None:
        num_keys, num_values, key_bytes, form, is_packed = self._head(body)
        if num_keys or key_bytes or form or num_values != len(out):
            raise _malformed(f"{num_values} values instead of the requested {len(out)}")
        data = self._unpacked(body[HEAD_BYTES:], is_packed, num_bytes_of(self.values, num_values))
        read_values(self.values, data, out)

    def _packed(self, body: Bytes, num_keys: int, num_values: int, key_bytes: int, form: int) -> Bytes:
        is_packed = False
        if self.bytes is not None:
            packed = packed_by(self.bytes, body[HEAD_BYTES:])
            if HEAD_BYTES + len(packed) < len(body):
                body = np.concatenate([body[:HEAD_BYTES], packed])
                is_packed = True
        head: Any = body
        _HEAD.pack_into(head, 0, num_keys, num_values, key_bytes, form, is_packed)
        return body

    def _head(self, body: Bytes) -> tuple[int, int, int, int, int]:
        if len(body) < HEAD_BYTES:
            raise _malformed(f"{len(body)} bytes")
        head: Any = body
        return _HEAD.unpack_from(head)

    def _unpacked(self, data: Bytes, is_packed: int, num_bytes: int) -> Bytes:
        if is_packed and self.bytes is not None:
            try:
                data = unpacked_by(self.bytes, data, num_bytes)
            except UsageError:  # the filter itself failed, so the message is not necessarily malformed
                raise
            except ValueError as error:
                raise _malformed(str(error)) from None
            if not data.flags.writeable:  # kernels need a writable array
                data = data.copy()
        if len(data) != num_bytes:
            raise _malformed(f"{len(data)} bytes after the head, expected {num_bytes}")
        return data


def _check(given: Any) -> None:
    if not isinstance(given, Filter):
        raise UsageError(f"filters: got {given!r}, expected filters such as paceline.Quantize(bits=8)")
    if not hasattr(given, "__dataclass_fields__"):
        raise UsageError(
            f"filter {given.name!r}: its class is not a dataclass. Write @dataclasses.dataclass(frozen=True) above it"
        )
    if isinstance(given, KeyFilter) and not isinstance(given, (KeyCaching, KeyNumbers, DeltaKeys)):
        raise UsageError(
            f"filter {given.name!r} is a key filter, but only key-caching, key-numbers and delta-keys can be. Derive "
            "your own from RowFilter, ValueFilter or ByteFilter"
        )


def _malformed(detail: str) -> ProtocolError:
    return ProtocolError(f"a filtered message does not match its filters: {detail}")


def from_descriptions(described: Sequence[dict[str, Any]]) -> FilterChain:
    return FilterChain([from_description(entry) for entry in described])


def chain_of(filters: Sequence[Filter] | str) -> FilterChain:
    return parse_filters(filters) if isinstance(filters, str) else FilterChain(filters)


def parse_filters(text: str) -> FilterChain:
    """Parse a chain from a text such as ``key-caching,quantize:8,compress``; ``none`` means no filters."""
    if text.strip() == "none":
        return FilterChain()
    return FilterChain([parse_filter(entry) for entry in text.split(",") if entry.strip()])
