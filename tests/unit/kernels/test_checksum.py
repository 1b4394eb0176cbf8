"""The checksum of blocks of data."""

from __future__ import annotations

import numpy as np
import pytest
from tests.reference.checksum import reference_xxh64

from paceline.kernels.checksum import xxh64


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0xEF46DB3751D8E999),
        (b"abc", 0x44BC2CF5AD770999),
        (b"Nobody inspects the spammish repetition", 0xFBCEA83C8A378BF1),
    ],
)
def test_the_reference_is_xxh64(data: bytes, expected: int) -> None:
    """Digests that the reference implementation of XXH64 computes."""
    assert reference_xxh64(data) == expected


@pytest.mark.parametrize("num_words", [4, 8, 64, 1000])
def test_the_kernel_equals_the_reference(num_words: int) -> None:
    words = np.random.default_rng(num_words).integers(0, 2**64, num_words, dtype=np.uint64)
    assert int(xxh64(words)) == reference_xxh64(words.tobytes())


def test_every_changed_bit_changes_the_digest() -> None:
    words = np.zeros(8, np.uint64)
    seen = {int(xxh64(words))}
    for at in range(8):
        for bit in range(64):
            words[at] = np.uint64(1) << np.uint64(bit)
            seen.add(int(xxh64(words)))
        words[at] = 0
    assert len(seen) == 1 + 8 * 64
