"""Compress bytes with zlib."""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from paceline.filters.base import ByteFilter, Bytes
from paceline.tables.settings import check_whole

_PIECE_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Compress(ByteFilter):
    """Compresses the other filters' output with zlib (RFC 1950). `level`: 1 (fast) to 9.

    If the result is longer, the original bytes are sent. Compression is useful after :class:`Quantize`, where many
    values are zero, and after :class:`DeltaKeys`. Hashed keys and float32 values are hardly compressible.
    """

    level: int = 1

    name: ClassVar[str] = "compress"

    def __post_init__(self) -> None:
        check_whole(self, level=(1, 9))

    @override
    def pack(self, data: Bytes) -> Bytes:
        given: Any = data  # Any, because mypy accepts arrays as buffers only from Python 3.12 on
        return np.frombuffer(zlib.compress(given, self.level), np.uint8)

    @override
    def unpack(self, data: Bytes, num_bytes: int) -> Bytes:
        inflater, out, at = zlib.decompressobj(), np.empty(num_bytes, np.uint8), 0
        try:
            for start in range(0, len(data), _PIECE_BYTES):  # in pieces, because a whole copy would double the memory
                given: Any = data[start : start + _PIECE_BYTES]
                piece = inflater.decompress(given, num_bytes - at + 1)  # + 1, because a limit of 0 would mean no limit
                out[at : at + len(piece)] = np.frombuffer(piece, np.uint8)[: num_bytes - at]
                at += len(piece)
                if at > num_bytes or inflater.unused_data:
                    break
        except zlib.error as error:
            raise ValueError(str(error)) from None
        if at != num_bytes or inflater.unused_data or not inflater.eof:
            raise ValueError(f"the unpacked size is not {num_bytes} bytes")
        return out
