"""Encode differences of sorted keys."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from paceline.filters.base import KeyFilter


@dataclasses.dataclass(frozen=True)
class DeltaKeys(KeyFilter):
    """Sorts the keys and sends the differences between neighbours in LEB128, with 7 bits per byte.

    The filter is useful for small keys, which take 1 or 2 bytes each. It saves little for n random 64-bit keys, because
    neighbours differ by about 2^64 / n.
    """

    name: ClassVar[str] = "delta-keys"
