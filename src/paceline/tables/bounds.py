"""Limits of the fields in tables' messages and manifests, similar to :mod:`paceline.protocol.bounds`."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from msgspec import Meta

from paceline.protocol import NUM_BUCKETS

MAX_CLOCK: Final = 2**32 - 3
"""The largest clock (iteration number). A frame's header has 32 bits for a clock, and the next clock must fit too."""
MAX_TABLES: Final = 65535
"""The largest number of tables. A frame's header has 16 bits for the number of a table, and 0 means no table."""
MAX_WORDS: Final = 1 << 20
"""The maximum number of float32 numbers in a record (the values and the state of a key)."""

MAX_PASSES: Final = 62
"""The maximum number of passes over the data after which a row without a push is erased. The index stores a row's last
pass in 6 bits, which repeat after 63 passes.
"""
MAX_PASS: Final = 1 << 24
"""The largest number of a pass over the data. Records store it as float32, which is exact up to this number."""

Word: TypeAlias = Annotated[int, Meta(ge=0)]
"""A hash of 64 bits."""
Clock: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_CLOCK)]
TableNumber: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_TABLES)]
Words: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_WORDS)]
Bucket: TypeAlias = Annotated[int, Meta(ge=0, le=NUM_BUCKETS - 1)]
PassNumber: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_PASS)]
"""The number of a pass over the data; 0 means no pass."""
NumPasses: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_PASSES)]
Operation: TypeAlias = Annotated[str, Meta(pattern=r"^(push|write|erase)\Z")]
NonFinitePolicy: TypeAlias = Annotated[str, Meta(pattern=r"^(refuse|count)\Z")]
Sha256: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
