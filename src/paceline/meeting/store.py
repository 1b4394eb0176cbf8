"""The store with which ranks exchange small values before they are connected. Each key is written once.

The module `rendezvous` finds the store of a program, and `network_store` contains the store that rank 0 serves.
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
"""The interval at which a waiting rank checks that the other ranks are alive."""


class Store(ABC):
    """A store of a few small values under text keys. All ranks share the store. Thread-safe."""

    server_rank: int | None = None
    """The rank that serves the store; None if no rank does. The store is lost when this rank ends."""
    place = ""
    """The address of the store, for error messages."""

    @abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Set the value of a key. Raises UsageError if the key already has a different value."""

    @abstractmethod
    def collect(self, keys: Sequence[str], deadline: float) -> list[bytes | None]:
        """Wait until all keys are set, and return their values. The value of a key that is not set in time is None.

        ``deadline`` is a time of ``time.monotonic``. If it has passed, the method does not wait.
        """

    def find(self, key: str) -> bytes | None:
        """Return the value of a key, or None if the key is not set."""
        return self.collect([key], time.monotonic())[0]

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
        """Close this rank's access to the store. Idempotent."""


class MemoryStore(Store):
    """A store for the threads of one process. :meth:`close` has no effect."""

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
        """Do nothing, because other threads may still use the store."""


class PrefixStore(Store):
    """A view of another store: the keys that begin with ``prefix`` and a slash.

    :meth:`close` has no effect.
    """

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
        """Do nothing: the underlying store stays open."""


class SealedStore(Store):
    """A store that rejects values from processes without the program's token. Closing it closes the underlying store.

    Each value is stored with an HMAC of its key and value. Other processes can read and remove values, so values must
    not be secret.
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
        """Collect values like :meth:`Store.collect`. Raises AuthenticationError for a value with a wrong HMAC."""
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
"""A function that a waiting rank calls periodically with the missing ranks. It raises an error to end the wait, for
example if a missing rank has ended.
"""


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
    """Publish this rank's value, and return the values of all ranks, in the order of ranks.

    ``description`` must be unique: it is part of the keys in the store, and names the exchange in error messages.
    Raises RankLostError if ranks are missing at the deadline.
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
    """Wait for one key of each rank. Return the values, and the ranks whose keys were not set in time.

    If the key of a rank was set and then deleted, the rank has given up. Such a rank is returned only if no other rank
    is missing.
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
