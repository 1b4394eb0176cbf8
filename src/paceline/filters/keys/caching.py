"""A list of keys that the server has seen goes as its digest (Li et al., OSDI 2014, section 3.6)."""

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
"""Shorter lists are not worth a digest."""

Digest: TypeAlias = bytes


@dataclasses.dataclass(frozen=True)
class KeyCaching(KeyFilter):
    """16 bytes for a list of keys that was sent before on this connection, for a push or a pull.

    Both ends remember the lists of a table until their keys take `megabytes`, and then forget those that were not used
    for longest. The server may forget more: then it says so, and is sent the keys. All is forgotten when the connection
    or the map of the cluster changes.
    """

    megabytes: int = 64

    name: ClassVar[str] = "key-caching"
    ns_per_value: ClassVar[float] = 4.0

    def __post_init__(self) -> None:
        check_whole(self, megabytes=(1, 4096))


def digest_of(keys: Keys) -> Digest:
    """Return the digest of a list of keys."""
    out = np.empty(2, np.uint64)
    digest(keys, out)
    return out.tobytes()


class KeyLists:
    """Lists of keys by digest, on either end: the receiver has the keys, the sender knows only that it does.

    Both forget in the same order, since both are told of the same lists.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[Digest, tuple[int, Any]] = OrderedDict()

    def __contains__(self, known: Digest) -> bool:
        return known in self._entries

    def use(self, known: Digest) -> Any:
        """Return what was kept with a digest, which was used now; KeyError if it is not known."""
        self._entries.move_to_end(known)
        return self._entries[known][1]

    def add(self, new: Digest, num_keys: int, kept: Any = None) -> None:
        """Remember a list of so many keys."""
        if new in self._entries:
            self._entries.move_to_end(new)
            return
        self._entries[new] = num_keys, kept
        self.num_bytes += 8 * num_keys
        while self.num_bytes > self.max_bytes:
            self.num_bytes -= 8 * self._entries.popitem(last=False)[1][0]

    def clear(self) -> None:
        """Forget all."""
        self._entries.clear()
        self.num_bytes = 0
