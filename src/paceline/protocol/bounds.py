"""Types of message fields with bounds that decoding checks.

The `__post_init__` of a struct checks conditions on several fields.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from msgspec import Meta

from paceline.protocol.buckets import NUM_BYTES

MAX_RANK: Final = 65535
_MAX_NUMBER: Final = 1 << 62
"""Upper bound of received numbers. A number that this process then increments still fits into 64 bits."""

Natural: TypeAlias = Annotated[int, Meta(ge=0)]
Term: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 42)]
"""The number of a takeover by a scheduler. A job number is such a term followed by 20 bits, and stays below 2⁶²."""
Number: TypeAlias = Annotated[int, Meta(ge=0, le=_MAX_NUMBER)]
"""An incarnation, or the number of a view, a job or a lease."""
Rank: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_RANK)]
Version: TypeAlias = Annotated[int, Meta(ge=0, le=2**31)]
BucketMask: TypeAlias = Annotated[bytes, Meta(min_length=NUM_BYTES, max_length=NUM_BYTES)]
"""A set of buckets (:func:`paceline.protocol.buckets.to_bytes`)."""
