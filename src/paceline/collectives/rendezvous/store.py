"""Where ranks leave word for one another before they are connected: keys and values, each written once.

`rendezvous` finds the store that all ranks of a program share; `_network_store` is the one that rank 0 serves.
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

from paceline.collectives.calls import name_ranks
from paceline.errors import AuthenticationError, DeadlineError, RankLostError, UsageError

_SEAL_BYTES: Final = 32
_FIRST_LOOK_S: Final = 1.0
_LOOK_S: Final = 3.0
"""How often one who waits for others looks whether they still live."""


class Store(ABC):
    """A few small values under readable keys, seen by every rank. For several threads at once."""

    server_rank: int | None = None
    """The rank that serves it, if it is one that does: when it ends the store is lost."""

    @abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Write a value, once. The same value may be set again; another one raises UsageError."""

    @abstractmethod
    def get(self, key: str, deadline: float) -> bytes:
        """Wait until a key is set and return its value.

        ``deadline`` is by ``time.monotonic``; one that has passed asks without waiting. Raises DeadlineError.
        """

    def collect(self, keys: Sequence[str], deadline: float) -> list[bytes | None]:
        """Wait until all these keys are set and return their values; ``None`` for those that are not set in time.

        Stores that are asked over a network do so with a number of messages that does not grow with that of the keys.
        """
        values: list[bytes | None] = []
        for key in keys:
            try:
                values.append(self.get(key, deadline))
            except DeadlineError:
                values.append(None)
        return values

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove a key, if it is there."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the store. Idempotent."""


class MemoryStore(Store):
    """A store for the threads of one process. There is nothing to close: it lives as long as somebody holds it."""

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
    def get(self, key: str, deadline: float) -> bytes:
        start = time.monotonic()
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, max(deadline - start, 0.0)):
                raise never_set(key, "", time.monotonic() - start)
            return self._values[key]

    @override
    def delete(self, key: str) -> None:
        with self._changed:
            self._values.pop(key, None)

    @override
    def close(self) -> None:
        """There is nothing to let go of."""


class PrefixStore(Store):
    """The part of another store whose keys begin with ``prefix`` and a slash; closing it leaves the other open."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = f"{prefix}/"
        self.server_rank = store.server_rank

    @override
    def set(self, key: str, value: bytes) -> None:
        self._store.set(self._prefix + key, value)

    @override
    def get(self, key: str, deadline: float) -> bytes:
        return self._store.get(self._prefix + key, deadline)

    @override
    def collect(self, keys: Sequence[str], deadline: float) -> list[bytes | None]:
        return self._store.collect([self._prefix + key for key in keys], deadline)

    @override
    def delete(self, key: str) -> None:
        self._store.delete(self._prefix + key)

    @override
    def close(self) -> None:
        """The other store stays open."""


class SealedStore(Store):
    """Another store whose values only holders of the program's token can write; closing it closes the other.

    For stores that let everybody in. A value goes with its HMAC, which covers the key too. What is there can be read
    and removed by all, so no secret may be put there.
    """

    def __init__(self, store: Store, token: str) -> None:
        self._store = store
        self._token = token.encode()
        self.server_rank = store.server_rank

    @override
    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, self._seal(key, value) + value)

    @override
    def get(self, key: str, deadline: float) -> bytes:
        """Raises AuthenticationError for what was not sealed with this token."""
        return self._opened(key, self._store.get(key, deadline))

    @override
    def collect(self, keys: Sequence[str], deadline: float) -> list[bytes | None]:
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
                f"{key!r} in the store was written by a process that does not hold this program's token; set "
                "PACELINE_TOKEN to the same secret on every rank, or on none if all are of one user on one machine"
            )
        return value

    def _seal(self, key: str, value: bytes) -> bytes:
        name = key.encode()
        return hmac.digest(self._token, len(name).to_bytes(4, "big") + name + value, "sha256")


Look: TypeAlias = Callable[[Sequence[int]], None]
"""Is told from time to time whom a rank waits for, and raises what is to end the wait: some of them have ended."""


def exchange(
    store: Store, rank: int, size: int, value: bytes, deadline: float, *, what: str, look: Look | None = None
) -> list[bytes]:
    """Leave this rank's value, and return those of all ranks, in rank order.

    ``what`` says in words what the ranks come to; it is the key as well, so it must differ from exchange to exchange
    of one store. Raises RankLostError that names the ranks that did not come.
    """
    start = time.monotonic()
    keys = {other: f"{what}/rank {other}" for other in range(size)}
    store.set(keys.pop(rank), value)
    found, missing = await_all(store, keys, deadline, look)
    if missing:
        waited = time.monotonic() - start
        raise RankLostError(
            f"{name_ranks(missing)} of {size} did not come to {what} within {round(waited, 2):g} s; check that every "
            "rank was started, with the same rendezvous and world size, and that none has ended",
            missing,
        )
    found[rank] = value
    return [found[other] for other in range(size)]


def await_all(
    store: Store, keys: Mapping[int, str], deadline: float, look: Look | None
) -> tuple[dict[int, bytes], tuple[int, ...]]:
    """Wait for a key of each of some ranks; return the values, and the ranks whose keys are not set in time.

    A rank whose key was seen and is gone again is among these only if nobody else is: it had come, and gave up.
    """
    seen: set[int] = set()
    looks_at = math.inf if look is None else time.monotonic() + _FIRST_LOOK_S
    while keys:
        values = dict(zip(keys, store.collect(list(keys.values()), min(deadline, looks_at)), strict=True))
        found = {rank: value for rank, value in values.items() if value is not None}
        seen |= found.keys()
        missing = tuple(keys.keys() - found.keys())
        if not missing or look is None or time.monotonic() >= deadline:
            return found, tuple(sorted(keys.keys() - seen)) or tuple(sorted(missing))
        look(missing)
        looks_at = time.monotonic() + _LOOK_S
    return {}, ()


def written_twice(key: str) -> UsageError:
    """Return the error for another value under a key that is set."""
    return UsageError(
        f"{key!r} is set already, to another value; two ranks have the same number, or two programs the same rendezvous"
    )


def never_set(key: str, where: str, waited_s: float) -> DeadlineError:
    """Return the error for a key that nobody has set; ``where`` is the store's address, if it has one."""
    at = f" in the store at {where}" if where else ""
    return DeadlineError(
        f"nobody has set {key!r}{at} within {round(waited_s, 2):g} s: the rank that should was not started, waits "
        "elsewhere or has ended"
    )
