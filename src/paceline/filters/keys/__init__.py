"""Filters of keys, and memory for sent keys at both ends of a connection."""

from .caching import KeyCaching
from .deltas import DeltaKeys
from .numbers import KeyNumbers

__all__ = ["DeltaKeys", "KeyCaching", "KeyNumbers"]
