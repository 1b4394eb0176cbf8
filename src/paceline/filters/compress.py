"""General compression."""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any, ClassVar, cast

import numpy as np
from typing_extensions import override

from paceline.errors import UsageError
from paceline.filters.base import ByteFilter, Bytes


@dataclasses.dataclass(frozen=True)
class Compress(ByteFilter):
    """What the other filters have left, by zlib (RFC 1950), where that is shorter. `level`: 1 (fast) to 9.

    It pays behind :class:`Quantize`, where many values are zero, and behind :class:`DeltaKeys`; hashed keys and float32
    hardly shrink.
    """

    level: int = 1

    name: ClassVar[str] = "compress"
    ns_per_value: ClassVar[float] = 20.0

    def __post_init__(self) -> None:
        if not isinstance(self.level, int) or isinstance(self.level, bool) or not 1 <= self.level <= 9:
            raise UsageError(f"Compress(level={self.level!r}): expected a whole number from 1 to 9")

    @override
    def pack(self, data: Bytes) -> Bytes:
        given: Any = data  # that an array is a buffer, its type says only from Python 3.12 on
        return np.frombuffer(zlib.compress(given, self.level), np.uint8)

    @override
    def unpack(self, data: Bytes, num_bytes: int) -> Bytes:
        inflater, given = zlib.decompressobj(), cast("Any", data)
        try:
            found = inflater.decompress(given, num_bytes)
        except zlib.error as error:
            raise ValueError(str(error)) from None
        if len(found) != num_bytes or inflater.unconsumed_tail or inflater.unused_data:
            raise ValueError(f"they unpack to another size than {num_bytes} bytes")
        return np.frombuffer(found, np.uint8)
