"""Register types with msgspec before values of these types are decoded."""

from __future__ import annotations

import os
import threading
from typing import Any, TypeVar

import msgspec

_lock = threading.Lock()
_known: set[Any] = set()
_Kind = TypeVar("_Kind")

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def register_type(kind: _Kind) -> _Kind:
    """Register a type with msgspec and return it. The caller must do this before it first decodes the type.

    At the first use of a type, msgspec collects the fields of the type. If two threads do this at the same time, the
    process crashes (msgspec 0.22). This function does it under a lock.
    """
    if kind not in _known:
        with _lock:
            msgspec.msgpack.Decoder(kind)
            _known.add(kind)
    return kind
