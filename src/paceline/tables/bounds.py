"""Limits of the fields in tables' messages and manifests, similar to :mod:`paceline.protocol.bounds`."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from msgspec import Meta

from paceline.protocol import NUM_BUCKETS

MAX_CLOCK: Final = 2**32 - 3
"""Clocks have 32 bits in a frame's header, and every iteration has a successor."""
MAX_TABLES: Final = 65535
"""Numbers of tables have 16 bits in a frame's header, and 0 means no table."""
MAX_WORDS: Final = 1 << 20
"""Number of float32 in a record, which has the values and the state of a key."""

MAX_PASSES: Final = 62
"""Marks of passes repeat after 63 passes."""
MAX_PASS: Final = 1 << 24
"""Rows store the pass as float32, which is exact up to this number."""

Word: TypeAlias = Annotated[int, Meta(ge=0)]
"""A hash of 64 bits."""
Clock: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_CLOCK)]
TableNumber: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_TABLES)]
Words: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_WORDS)]
Bucket: TypeAlias = Annotated[int, Meta(ge=0, le=NUM_BUCKETS - 1)]
PassNumber: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_PASS)]
"""The number of a pass; 0 means no pass."""
NumPasses: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_PASSES)]
Operation: TypeAlias = Annotated[str, Meta(pattern=r"^(push|write|erase)\Z")]
NonFinitePolicy: TypeAlias = Annotated[str, Meta(pattern=r"^(refuse|count)\Z")]
Sha256: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
