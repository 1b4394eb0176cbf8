"""Filters of keys, and what both ends of a connection remember of keys for them."""

from .caching import KeyCaching
from .deltas import DeltaKeys
from .numbers import KeyNumbers

__all__ = ["DeltaKeys", "KeyCaching", "KeyNumbers"]
