"""The bounds of what messages and manifests hold. They stand at the fields, so that decoding a struct checks it.

What a peer or a file says is held to them where it arrives, whoever reads it; what depends on several fields is in the
struct's ``__post_init__``.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from msgspec import Meta

from paceline.protocol import NUM_BUCKETS
from paceline.protocol.buckets import NUM_BYTES

MAX_CLOCK: Final = 2**32 - 3
"""The last iteration: clocks are 32 bits in a frame's header, and every iteration has one behind it."""
MAX_TABLES: Final = 65535
"""Of one cluster: numbers are 16 bits in a frame's header, and 0 stands for no table."""
MAX_WORDS: Final = 1 << 20
"""Of a record, in float32: the values and the state of a key."""

MAX_PASSES: Final = 62
"""For so many passes over the data at most it is known that a row was not pushed: marks of passes go round (63)."""
MAX_PASS: Final = 1 << 24
"""The last pass over the data: it goes beside rows as float32, which holds whole numbers up to here exactly."""
MAX_RANK: Final = 65535
"""Of a server or worker."""
_MAX_NUMBER: Final = 1 << 62
"""Of what is counted on from what a peer says: there is room above it."""

Natural: TypeAlias = Annotated[int, Meta(ge=0)]
Word: TypeAlias = Annotated[int, Meta(ge=0)]
"""A hash of 64 bits."""
Term: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 42)]
"""There is room below 2⁶² for the numbers of a term's jobs."""
Number: TypeAlias = Annotated[int, Meta(ge=0, le=_MAX_NUMBER)]
"""An incarnation, or the number of a view, a job or a lease."""
Rank: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_RANK)]
Version: TypeAlias = Annotated[int, Meta(ge=0, le=2**31)]
Clock: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_CLOCK)]
TableNumber: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_TABLES)]
Words: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_WORDS)]
Bucket: TypeAlias = Annotated[int, Meta(ge=0, le=NUM_BUCKETS - 1)]
PassNumber: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_PASS)]
"""0 where no pass is meant."""
NumPasses: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_PASSES)]
BucketMask: TypeAlias = Annotated[bytes, Meta(min_length=NUM_BYTES, max_length=NUM_BYTES)]
"""A set of buckets (:func:`paceline.protocol.buckets.to_bytes`)."""
Role: TypeAlias = Annotated[str, Meta(pattern=r"^(server|worker|observer)\Z")]
Operation: TypeAlias = Annotated[str, Meta(pattern=r"^(push|write|erase)\Z")]
NonFinitePolicy: TypeAlias = Annotated[str, Meta(pattern=r"^(refuse|count)\Z")]
Sha256: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
