"""What a rank calls, in a form that others can compare: the same call has the same signature on every rank.

Pure. Every message of a collective, and every slot in shared memory, carries the signature; a rank that sees another
one asks for both calls and raises MismatchError, with both sides' values, on every rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from paceline.errors import MismatchError

_MOST_NUMBERS: Final = 128
"""Of a call's shape: a message's head and a rank's part of a segment have room for some 1.7 KB."""
_SHOWN_NUMBERS: Final = 20


class CollectiveCall(msgspec.Struct, frozen=True, array_like=True):
    """One collective operation as one rank calls it."""

    operation: str
    """``all_reduce``, ``broadcast``, ... as the method of Group is named."""
    dtype: str = ""
    """As NumPy names it (``bfloat16`` too); empty where there is no data (``barrier``)."""
    shape: tuple[int, ...] = ()
    """Of the array that must be the same on every rank."""
    reduction: str = ""
    """``sum``, ``mean``, ...; empty where nothing is reduced."""
    root: int = -1
    """The root's rank in the group; -1 where there is none."""

    @property
    def signature(self) -> int:
        """63 bits that tell calls from one another; never 0."""
        digest = hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1 or 1

    def __str__(self) -> str:
        parts = [f"{self.dtype}{list(self.shape)}"] if self.dtype else []
        parts += [self.reduction] if self.reduction else []
        parts += [f"root={self.root}"] if self.root >= 0 else []
        return f"{self.operation}({', '.join(parts)})"


def shortened(call: CollectiveCall) -> CollectiveCall:
    """Return a call with no more sizes than a message has room for: instead of all, their number, hash and first ones.

    Equal calls stay equal, and different ones different.
    """
    shape = call.shape
    if len(shape) <= _MOST_NUMBERS:
        return call
    digest = hashlib.blake2b(msgspec.msgpack.encode(shape), digest_size=8).hexdigest()
    operation = f"{call.operation} of {len(shape)} sizes with hash {digest}, first "
    return msgspec.structs.replace(call, operation=operation, shape=shape[:_SHOWN_NUMBERS])


def describe_mismatch(calls: Mapping[int, CollectiveCall], group: str, sequence: int) -> MismatchError:
    """Return the error that names the ranks and what each side called, for the group's call number ``sequence``."""
    sides: dict[CollectiveCall, list[int]] = {}
    for rank in sorted(calls):
        sides.setdefault(calls[rank], []).append(rank)
    told = "; ".join(f"{name_ranks(ranks)} called {call}" for call, ranks in sides.items())
    return MismatchError(
        f"the ranks of group {group!r} disagree in call {sequence}: {told}; every rank must make the same calls in the "
        "same order with the same shapes and dtypes, and the group refuses further work"
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks 0, 2 and 5``; long lists are cut."""
    shown = [str(rank) for rank in ranks[:8]]
    if len(ranks) > 8:
        shown.append(f"{len(ranks) - 8} more")
    if len(shown) == 1:
        return f"rank {shown[0]}"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
