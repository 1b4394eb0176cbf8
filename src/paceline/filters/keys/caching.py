"""Replace lists of keys by digests after the first use (Li et al., OSDI 2014, section 3.6)."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any, ClassVar, TypeAlias

import numpy as np

from paceline.filters.base import KeyFilter
from paceline.kernels.filters import digest
from paceline.tables.settings import check_whole
from paceline.tables.types import Keys

DIGEST_BYTES = 16
LEAST_KEYS = 4
"""The filter replaces only lists of at least this length."""

Digest: TypeAlias = bytes


@dataclasses.dataclass(frozen=True)
class KeyCaching(KeyFilter):
    """Replaces a list of keys by a digest of 16 bytes if this connection has already sent the list.

    Both ends store up to `megabytes` of a table's keys, and then evict the least recently used list. The server may
    evict more lists. If it needs one of them, it requests the keys again. Both ends clear their lists when the
    connection or the view changes.
    """

    megabytes: int = 64

    name: ClassVar[str] = "key-caching"

    def __post_init__(self) -> None:
        check_whole(self, megabytes=(1, 4096))


def digest_of(keys: Keys) -> Digest:
    out = np.empty(2, np.uint64)
    digest(keys, out)
    return out.tobytes()


class KeyLists:
    """Lists of keys, found by digest. The receiver stores the keys. The sender stores only the digests.

    Both ends evict in the same order, because they process the same lists.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[Digest, tuple[int, Any]] = OrderedDict()

    def __contains__(self, known: Digest) -> bool:
        return known in self._entries

    def use(self, known: Digest) -> Any:
        """Mark a digest as used. Return its value. Raises KeyError."""
        self._entries.move_to_end(known)
        return self._entries[known][1]

    def add(self, new: Digest, num_keys: int, value: Any = None) -> None:
        if new in self._entries:
            self._entries.move_to_end(new)
            return
        self._entries[new] = num_keys, value
        self.num_bytes += 8 * num_keys
        while self.num_bytes > self.max_bytes:
            self.num_bytes -= 8 * self._entries.popitem(last=False)[1][0]

    def clear(self) -> None:
        self._entries.clear()
        self.num_bytes = 0
