"""Filters of keys. Both ends of a connection remember the keys that were sent."""

from .caching import KeyCaching
from .deltas import DeltaKeys
from .numbers import KeyNumbers

__all__ = ["DeltaKeys", "KeyCaching", "KeyNumbers"]
