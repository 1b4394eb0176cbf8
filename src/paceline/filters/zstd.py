"""Compress bytes with Zstandard (RFC 8878), using the package zstandard (extra ``paceline[zstd]``)."""

from __future__ import annotations

import dataclasses
import importlib
import threading
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from paceline.errors import UsageError
from paceline.filters.base import ByteFilter, Bytes
from paceline.tables.settings import check_whole

_of_thread = threading.local()
"""Each thread's decompressor, and its compressor for each level. They are kept, because creating them is slow."""


@dataclasses.dataclass(frozen=True)
class Zstd(ByteFilter):
    """Compresses the other filters' output with Zstandard. `level`: 1 (fast) to 19.

    If the result is longer, the original bytes are sent. The result is smaller than that of :class:`Compress`, and the
    filter is faster. Both ends need the package zstandard.
    """

    level: int = 3

    name: ClassVar[str] = "zstd"

    def __post_init__(self) -> None:
        check_whole(self, level=(1, 19))
        _zstandard()

    @override
    def pack(self, data: Bytes) -> Bytes:
        compressors: dict[int, Any] = _of_thread.__dict__.setdefault("compressors", {})
        if self.level not in compressors:
            compressors[self.level] = _zstandard().ZstdCompressor(level=self.level)
        return np.frombuffer(compressors[self.level].compress(data), np.uint8)

    @override
    def unpack(self, data: Bytes, num_bytes: int) -> Bytes:
        zstandard = _zstandard()
        try:
            if zstandard.frame_content_size(data) != num_bytes:  # decompress() allocates this size
                raise ValueError(f"the unpacked size is not {num_bytes} bytes")
            if "decompressor" not in _of_thread.__dict__:
                _of_thread.decompressor = zstandard.ZstdDecompressor()
            return np.frombuffer(_of_thread.decompressor.decompress(data), np.uint8)
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from None


def _zstandard() -> Any:
    try:
        return importlib.import_module("zstandard")
    except ImportError:
        raise UsageError("filter zstd needs zstandard, which is not installed: pip install 'paceline[zstd]'") from None
