"""Replace keys by small numbers after their first use."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from paceline.filters.base import Bytes, KeyFilter
from paceline.kernels.filters import number_keys, read_numbers, renumber
from paceline.tables.settings import check_whole
from paceline.tables.types import Keys

BASE_BYTES = 4
_LEAST_SLOTS = 1 << 10
_MOST_BYTES = 9
"""The size of a new key in a message: a zero byte and the 8 bytes of the key."""


@dataclasses.dataclass(frozen=True)
class KeyNumbers(KeyFilter):
    """Replaces a key by 1 to 4 bytes if this connection has already sent the key; a new key takes 9 bytes.

    Keys are numbered in the order of their first use, so frequent keys get the smallest numbers. Both ends store up to
    `megabytes` of keys. Later keys get no number. The worker needs three times this memory. Both ends clear the numbers
    when the connection or the view changes.
    """

    megabytes: int = 64

    name: ClassVar[str] = "key-numbers"

    def __post_init__(self) -> None:
        check_whole(self, megabytes=(1, 4096))


class SentNumbers:
    """The sender's table: key → the small number assigned to it."""

    num_bytes = 0

    def __init__(self, megabytes: int) -> None:
        self._limit = megabytes << 17
        self.clear()

    def clear(self) -> None:
        self._state = np.array([0, self._limit], np.int64)
        self._keys, self._numbers = np.zeros(_LEAST_SLOTS, np.uint64), np.zeros(_LEAST_SLOTS, np.uint32)

    def encode(self, keys: Keys) -> Bytes:
        """Return the count of known keys (uint32), followed by the encoded keys."""
        most = min(int(self._state[0]) + len(keys), self._limit)
        if 2 * most > len(self._keys):
            size = 1 << (3 * most).bit_length()
            grown_keys, grown_numbers = np.zeros(size, np.uint64), np.zeros(size, np.uint32)
            renumber(self._keys, self._numbers, grown_keys, grown_numbers)
            self._keys, self._numbers = grown_keys, grown_numbers
        out = np.empty(BASE_BYTES + _MOST_BYTES * len(keys), np.uint8)
        out[:BASE_BYTES].view(np.uint32)[0] = self._state[0]
        return out[: BASE_BYTES + number_keys(keys, self._keys, self._numbers, self._state, out[BASE_BYTES:])]


class ReceivedNumbers:
    """The receiver's memory: the key of each number."""

    def __init__(self, megabytes: int) -> None:
        self._limit = megabytes << 17
        self.clear()

    @property
    def num_bytes(self) -> int:
        return self._keys.nbytes

    def clear(self) -> None:
        self._state = np.array([0, self._limit], np.int64)
        self._keys: Keys = np.zeros(0, np.uint64)

    def follows(self, data: Bytes) -> bool:
        return len(data) >= BASE_BYTES and int(data[:BASE_BYTES].view(np.uint32)[0]) == int(self._state[0])

    def decode(self, data: Bytes, out: Keys) -> bool:
        """Decode keys (uint64 [n]). Return False if the data is invalid."""
        most = min(int(self._state[0]) + len(out), self._limit)
        if most > len(self._keys):
            grown = np.zeros(min(2 * most, self._limit), np.uint64)
            grown[: len(self._keys)] = self._keys
            self._keys = grown
        num_read: int = read_numbers(data[BASE_BYTES:], self._keys, self._state, out)
        return num_read == len(data) - BASE_BYTES
