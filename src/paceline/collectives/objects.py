"""Send Python objects through collectives, encoded with msgpack. The ranks exchange the encoded sizes first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from paceline.errors import ProtocolError, UsageError
from paceline.transport import read_meta


class ArrayGroup(Protocol):
    """A group that sends arrays."""

    @property
    def rank(self) -> int: ...

    def broadcast(self, array: Any, /, *, root: int) -> Any: ...

    def all_gather(self, array: Any, /, *, sizes: Sequence[int]) -> Any: ...

    def gather(self, array: Any, /, *, root: int, sizes: Sequence[int]) -> Any: ...

    def gather_sizes(self, array: Any, /) -> Sequence[int]: ...


def broadcast(group: ArrayGroup, value: Any, root: int) -> Any:
    is_root = group.rank == root
    data = _encode(value) if is_root else np.empty(0, np.uint8)
    size = group.broadcast(np.array([data.size], np.int64), root=root)
    if size[0] < 0:
        raise ProtocolError(f"rank {root} sent {size[0]} as the size of its object in bytes")
    return _decode(group.broadcast(data if is_root else np.empty(int(size[0]), np.uint8), root=root))


def all_gather(group: ArrayGroup, value: Any) -> list[Any]:
    data = _encode(value)
    sizes = group.gather_sizes(data)
    return _decode_all(group.all_gather(data, sizes=sizes), sizes)


def gather(group: ArrayGroup, value: Any, root: int) -> list[Any] | None:
    data = _encode(value)
    sizes = group.gather_sizes(data)
    gathered = group.gather(data, root=root, sizes=sizes)
    return None if gathered is None else _decode_all(gathered, sizes)


def _encode(value: Any) -> Any:
    try:
        return np.frombuffer(bytearray(msgspec.msgpack.encode(value)), np.uint8)
    except (TypeError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"cannot send this object ({error}); pass numbers, strings, bytes, or lists and dicts with such values"
        ) from None


def _decode_all(data: Any, sizes: Sequence[int]) -> list[Any]:
    ends = np.cumsum(sizes)
    return [_decode(data[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def _decode(data: Any) -> Any:
    return read_meta(data.tobytes(), Any, "an object of another rank")
