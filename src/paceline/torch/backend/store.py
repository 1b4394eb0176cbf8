"""A store of ``torch.distributed`` as one of ours."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from torch._C._distributed_c10d import Store as CStore
from typing_extensions import override

from paceline.errors import ConnectionLostError
from paceline.meeting.store import Store, written_twice
from paceline.transport.backoff import Backoff

_FIRST_PAUSE_S: Final = 0.0005
_PAUSE_S: Final = 0.05
_PAUSE_A_KEY_S: Final = 0.001
_SET: Final = b"="
"""Before every value: FileStore and TCPStore cannot tell an empty value from one that is not there."""


class TorchStore(Store):
    """Keys under ``prefix`` in a c10d store; what this rank has set is removed when it is closed.

    Its errors are RuntimeErrors of several kinds, the plain one included.
    """

    place = "torch.distributed"

    def __init__(self, store: CStore, prefix: str) -> None:
        self._store = store
        self._prefix = f"{prefix}/"
        self._own: set[str] = set()

    @override
    def set(self, key: str, value: bytes) -> None:
        wanted = _text(value)
        try:
            found = self._store.compare_set(self._prefix + key, "", wanted)
        except RuntimeError as error:
            raise _lost(key, error) from error
        if found not in (b"", wanted.encode()):
            raise written_twice(key)
        self._own.add(key)

    @override
    def collect(self, keys: Sequence[str], deadline: float) -> list[bytes | None]:
        """Look from time to time: c10d writes two warnings to standard error for every wait that is cut short."""
        places = [self._prefix + key for key in keys]
        longest = max(_PAUSE_S, len(keys) * _PAUSE_A_KEY_S)
        backoff = Backoff(_FIRST_PAUSE_S, longest)
        try:
            while not self._store.check(places):
                left = deadline - time.monotonic()
                if left <= 0:
                    return [self._found(place) for place in places]
                time.sleep(backoff.next_s(left))
            return [_value(text) for text in self._store.multi_get(places)]
        except RuntimeError as error:
            raise _lost(keys[0], error) from error

    def _found(self, place: str) -> bytes | None:
        return _value(self._store.get(place)) if self._store.check([place]) else None

    @override
    def delete(self, key: str) -> None:
        self._own.discard(key)
        self._store.delete_key(self._prefix + key)

    @override
    def close(self) -> None:
        for key in sorted(self._own):
            try:
                self.delete(key)
            except RuntimeError:  # whoever serves the store has gone, and the keys with it
                break
        self._own.clear()


def _text(value: bytes) -> str:
    """c10d takes text; it is UTF-8 on the way, so bytes are written as hexadecimal digits."""
    return _SET.decode() + value.hex()


def _value(text: bytes) -> bytes:
    return bytes.fromhex(text[len(_SET) :].decode())


def _lost(key: str, error: Exception) -> ConnectionLostError:
    return ConnectionLostError(f"the store of torch.distributed cannot be asked for {key!r}: {error}")
