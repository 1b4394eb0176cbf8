"""Describe the collective call that a rank makes, so that the ranks can check that their calls are equal. Pure.

Every message of a collective, and every slot in shared memory, contains the signature (a hash) of the sender's call. If
a rank receives a signature that differs from its own, the ranks exchange their calls, and every rank raises
MismatchError with the different calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

import msgspec

from paceline.errors import MismatchError, name_ranks

_MOST_NUMBERS: Final = 128
"""The maximum number of sizes in a call, because a call must fit into about 1.7 KB of a message or shared segment."""
_SHOWN_NUMBERS: Final = 20


class CollectiveCall(msgspec.Struct, frozen=True, array_like=True):
    """One rank's call of a collective operation."""

    operation: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    """The numbers that must be equal on all ranks: the array's shape and the sizes of its parts."""
    reduction: str = ""
    root: int = -1

    @property
    def signature(self) -> int:
        """A hash of the call in 63 bits; never 0."""
        digest = hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1 or 1

    def __str__(self) -> str:
        parts = [f"{self.dtype}{list(self.shape)}"] if self.dtype else []
        parts += [self.reduction] if self.reduction else []
        parts += [f"root={self.root}"] if self.root >= 0 else []
        return f"{self.operation}({', '.join(parts)})"


def shorten(call: CollectiveCall) -> CollectiveCall:
    """Replace a long list of sizes in a call by its length, its hash and its first sizes.

    The shortened calls of two ranks are equal only if their sizes are equal.
    """
    shape = call.shape
    if len(shape) <= _MOST_NUMBERS:
        return call
    digest = hashlib.blake2b(msgspec.msgpack.encode(shape), digest_size=8).hexdigest()
    operation = f"{call.operation} of {len(shape)} sizes with hash {digest}, first "
    return msgspec.structs.replace(call, operation=operation, shape=shape[:_SHOWN_NUMBERS])


def describe_mismatch(calls: Mapping[int, CollectiveCall], group: str, sequence: int) -> MismatchError:
    sides: dict[CollectiveCall, list[int]] = {}
    for rank in sorted(calls):
        sides.setdefault(calls[rank], []).append(rank)
    sides_text = "; ".join(f"{name_ranks(ranks)} called {call}" for call, ranks in sides.items())
    return MismatchError(
        f"the ranks of group {group!r} disagree in call {sequence}: {sides_text}; every rank must make the same calls "
        "in the same order with the same shapes and dtypes, and the group refuses further work"
    )
