"""Differences of sorted keys."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from paceline.filters.base import KeyFilter


@dataclasses.dataclass(frozen=True)
class DeltaKeys(KeyFilter):
    """Keys are sorted, and their differences sent in as many bytes as they need (LEB128), 7 bits in each.

    It pays where keys are small numbers: 1 or 2 bytes each. n hashes of 64 bits still differ by 2^64 / n.
    """

    name: ClassVar[str] = "delta-keys"
    ns_per_value: ClassVar[float] = 60.0
