"""Exchange small values between unconnected ranks: keys and values, each written once.

`rendezvous` finds the store of a program; `network_store` contains rank 0's store.
"""

from __future__ import annotations

import hmac
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from typing_extensions import override

from paceline.errors import AuthenticationError, DeadlineError, RankLostError, UsageError, name_ranks

_SEAL_BYTES: Final = 32
_FIRST_CHECK_S: Final = 1.0
_CHECK_INTERVAL_S: Final = 3.0
"""Interval at which a waiting rank checks that the other ranks are alive."""


class Store(ABC):
    """A few small values under readable keys, shared by all ranks. Thread-safe."""

    server_rank: int | None = None
    """The rank that serves the store, if any. The store is lost when this rank ends."""
    place = ""
    """The store's address, for errors."""

    @abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Write a value. The same value may be set again; a different value raises UsageError."""

    @abstractmethod
    def collect(self, keys: Sequence[str], deadline: float) -> list[bytes | None]:
        """Wait until all these keys are set and return their values; ``None`` for keys not set in time.

        ``deadline`` is a time of ``time.monotonic``; a past deadline does not wait.
        """

    def get(self, key: str, deadline: float) -> bytes:
        """Wait until a key is set and return its value. Raises DeadlineError."""
        start = time.monotonic()
        value = self.collect([key], deadline)[0]
        if value is None:
            at = f" in the store at {self.place}" if self.place else ""
            raise DeadlineError(
                f"{key!r}{at} was not set within {round(time.monotonic() - start, 2):g} s; check that its rank was "
                "started, has not ended and does not wait for another call"
            )
        return value

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove a key, if it exists."""

    @abstractmethod
    def close(self) -> None:
        """Release the store. Idempotent."""


class MemoryStore(Store):
    """A store for the threads of one process; closing has no effect."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    @override
    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            if self._values.setdefault(key, value) != value:
                raise written_twice(key)
            self._changed.notify_all()

    @override
    def collect(self, keys: Sequence[str], deadline: float) -> list[bytes | None]:
        with self._changed:
            self._changed.wait_for(lambda: self._values.keys() >= set(keys), max(deadline - time.monotonic(), 0.0))
            return [self._values.get(key) for key in keys]

    @override
    def delete(self, key: str) -> None:
        with self._changed:
            self._values.pop(key, None)

    @override
    def close(self) -> None:
        """Do nothing."""


class PrefixStore(Store):
    """The keys of another store that begin with ``prefix`` and a slash; closing leaves the other store open."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = f"{prefix}/"
        self.server_rank, self.place = store.server_rank, store.place

    @override
    def set(self, key: str, value: bytes) -> None:
        self._store.set(self._prefix + key, value)

    @override
    def collect(self, keys: Sequence[str], deadline: float) -> list[bytes | None]:
        return self._store.collect([self._prefix + key for key in keys], deadline)

    @override
    def delete(self, key: str) -> None:
        self._store.delete(self._prefix + key)

    @override
    def close(self) -> None:
        """Leave the other store open."""


class SealedStore(Store):
    """A store that only holders of the program's token can write to; closing it closes the underlying store.

    Each value is stored with an HMAC over key and value. Everyone can read and remove values, so store no secrets.
    """

    def __init__(self, store: Store, token: str) -> None:
        self._store = store
        self._token = token.encode()
        self.server_rank, self.place = store.server_rank, store.place

    @override
    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, self._seal(key, value) + value)

    @override
    def collect(self, keys: Sequence[str], deadline: float) -> list[bytes | None]:
        """Raise AuthenticationError for values written without this token."""
        found = self._store.collect(keys, deadline)
        return [None if value is None else self._opened(key, value) for key, value in zip(keys, found, strict=True)]

    @override
    def delete(self, key: str) -> None:
        self._store.delete(key)

    @override
    def close(self) -> None:
        self._store.close()

    def _opened(self, key: str, found: bytes) -> bytes:
        seal, value = found[:_SEAL_BYTES], found[_SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._seal(key, value)):
            raise AuthenticationError(
                f"{key!r} in the store was written by a process without this program's token; set PACELINE_TOKEN to "
                "the same secret on every rank, or on none if all ranks are of one user on one machine"
            )
        return value

    def _seal(self, key: str, value: bytes) -> bytes:
        name = key.encode()
        return hmac.digest(self._token, len(name).to_bytes(4, "big") + name + value, "sha256")


RankCheck: TypeAlias = Callable[[Sequence[int]], None]
"""Periodic check of awaited ranks; raises an error to end the wait, for instance for ended ranks."""


def exchange(
    store: Store,
    rank: int,
    size: int,
    value: bytes,
    deadline: float,
    *,
    description: str,
    check: RankCheck | None = None,
) -> list[bytes]:
    """Publish this rank's value, and return the values of all ranks, in rank order.

    ``description`` names the exchange in error messages and is its unique key in the store. Raises RankLostError with
    the missing ranks.
    """
    start = time.monotonic()
    keys = {other: f"{description}/rank {other}" for other in range(size)}
    store.set(keys.pop(rank), value)
    found, missing = await_all(store, keys, deadline, check)
    if missing:
        waited = time.monotonic() - start
        raise RankLostError(
            f"{name_ranks(missing)} of {size} did not come to {description} within {round(waited, 2):g} s; check that "
            "every rank was started, with the same rendezvous and world size, and that none has ended",
            missing,
        )
    found[rank] = value
    return [found[other] for other in range(size)]


def await_all(
    store: Store, keys: Mapping[int, str], deadline: float, check: RankCheck | None
) -> tuple[dict[int, bytes], tuple[int, ...]]:
    """Wait for one key of each rank; return the values, and the ranks whose keys are not set in time.

    A rank that deleted its key has given up. Such a rank is reported only if no other rank is missing.
    """
    seen: set[int] = set()
    next_check = math.inf if check is None else time.monotonic() + _FIRST_CHECK_S
    while keys:
        values = dict(zip(keys, store.collect(list(keys.values()), min(deadline, next_check)), strict=True))
        found = {rank: value for rank, value in values.items() if value is not None}
        seen |= found.keys()
        missing = tuple(keys.keys() - found.keys())
        if not missing or check is None or time.monotonic() >= deadline:
            return found, tuple(sorted(keys.keys() - seen)) or tuple(sorted(missing))
        check(missing)
        next_check = time.monotonic() + _CHECK_INTERVAL_S
    return {}, ()


def written_twice(key: str) -> UsageError:
    return UsageError(
        f"{key!r} is already set to another value; two ranks have the same number, or two programs the same rendezvous"
    )
