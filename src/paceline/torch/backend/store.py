"""An adapter from stores of ``torch.distributed`` to :class:`Store`."""

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
"""Prefix of every value: FileStore and TCPStore treat an empty value as missing."""


class TorchStore(Store):
    """Keys under ``prefix`` in a c10d store; closing removes this rank's keys.

    A c10d store raises RuntimeError and its subclasses.
    """

    place = "torch.distributed"

    def __init__(self, store: CStore, prefix: str) -> None:
        self._store = store
        self._prefix = f"{prefix}/"
        self._own: set[str] = set()

    @override
    def set(self, key: str, value: bytes) -> None:
        text = _text(value)
        try:
            found = self._store.compare_set(self._prefix + key, "", text)
        except RuntimeError as error:
            raise _lost(key, error) from error
        if found not in (b"", text.encode()):
            raise written_twice(key)
        self._own.add(key)

    @override
    def collect(self, keys: Sequence[str], deadline: float) -> list[bytes | None]:
        """Poll, because c10d writes two warnings to standard error for every wait that times out."""
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
            except RuntimeError:  # the store's server has ended, so the keys are lost too
                break
        self._own.clear()


def _text(value: bytes) -> str:
    """Return bytes as hexadecimal digits: c10d sends values as UTF-8 text."""
    return _SET.decode() + value.hex()


def _value(text: bytes) -> bytes:
    return bytes.fromhex(text[len(_SET) :].decode())


def _lost(key: str, error: Exception) -> ConnectionLostError:
    return ConnectionLostError(f"the store of torch.distributed failed for {key!r}: {error}")
