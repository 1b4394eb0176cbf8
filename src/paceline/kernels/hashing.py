"""Hashes in NumPy and plain Python: the hash of a key, and the hash of a feature's bytes, which is its key.

**Keys.** :func:`mix` computes the hash that :mod:`.index` uses. The upper bits of the hash are the key's bucket.

**Bytes.** A feature's key is a 64-bit hash of its bytes. The hash starts from a seed that differs by field (for
example, the hash of the column's name), so equal values in two columns are different features. Saved models contain
these keys, so the hash must never change (tests compare it with fixed values). All arithmetic is modulo 2^64::

    h = seed ^ (length * 0x9E3779B97F4A7C15)
    for each 8 bytes, little-endian, the last word padded with zeros:
        h = (h ^ word) * 0xBF58476D1CE4E5B9;  h ^= h >> 32
    h *= 0x94D049BB133111EB;  h ^= h >> 29
    h *= 0xD6E8FEB86659FD93;  h ^= h >> 32

Every step is a bijection, so two values of up to eight bytes and of one length never collide within a
field. The multipliers come from SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) and from rrmxmx
(Evensen, 2018).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MASK = (1 << 64) - 1
LENGTH_MULTIPLIER = 0x9E3779B97F4A7C15
WORD_MULTIPLIER = 0xBF58476D1CE4E5B9
FIRST_FINAL_MULTIPLIER = 0x94D049BB133111EB
LAST_FINAL_MULTIPLIER = 0xD6E8FEB86659FD93


def mix(keys: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """Return the hash of each key, computed by the final step (finalizer) of splitmix64."""
    h: npt.NDArray[np.uint64] = np.atleast_1d(np.asarray(keys, np.uint64)).copy()
    h = (h ^ (h >> np.uint64(30))) * np.uint64(WORD_MULTIPLIER)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(FIRST_FINAL_MULTIPLIER)
    h ^= h >> np.uint64(31)
    return h


def hash_bytes(data: bytes, seed: int) -> int:
    """Return the key of the feature with the bytes `data`, in the field with this `seed`."""
    h = seed ^ (len(data) * LENGTH_MULTIPLIER & MASK)
    for at in range(0, len(data), 8):
        h = hash_word(h, int.from_bytes(data[at : at + 8], "little"))
    return hash_end(h)


def hash_word(h: int, word: int) -> int:
    """Return the state of a hash after eight more bytes, the integer `word`."""
    h = (h ^ word) * WORD_MULTIPLIER & MASK
    return h ^ (h >> 32)


def hash_end(h: int) -> int:
    """Return the key for the final state of a hash. Every bit of the state affects every bit of the key."""
    h = h * FIRST_FINAL_MULTIPLIER & MASK
    h ^= h >> 29
    h = h * LAST_FINAL_MULTIPLIER & MASK
    return h ^ (h >> 32)


def name_seed(name: str) -> int:
    """Return the seed of a named column: the hash of its name. It is also the key of a numeric column."""
    return hash_bytes(name.encode("utf-8"), 0)


def field_of(name: str) -> int:
    """Return the number of the field with this name: the lower 32 bits of the hash of the name."""
    return name_seed(name) & 0xFFFFFFFF
