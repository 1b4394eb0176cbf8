"""What the kernels of :mod:`paceline.kernels.text` are made of: bytes and words at a position, and the hash.

`byte_at` and `word_at` load one and eight bytes, and check no bounds; `low_bytes` keeps the first bytes of a word,
`has_control` says whether one of them is below 32. The hash of :mod:`paceline.kernels.text_reference` is
`hash_start`, `hash_step` for each word (`as_bits` of a number), `hash_finish`; `hash_span` is all of it. Words are
little-endian, as on every platform that Numba supports.
"""

# ruff: noqa: D103

from __future__ import annotations

from typing import Any

import numpy as np
from numba import config, types
from numba.extending import intrinsic

from paceline.kernels import text_reference as reference
from paceline.kernels.jit import njit

if config.DISABLE_JIT:  # type: ignore[attr-defined]  # for coverage: the same loops on Python's integers

    def byte_at(text: Any, at: int) -> int:
        return int(text[at])

    def word_at(text: Any, at: int) -> int:
        return int.from_bytes(text[at : at + 8].tobytes(), "little")

    def low_bytes(word: int, count: int) -> int:
        return word & ((1 << (8 * int(count))) - 1)

    def has_control(word: int) -> bool:
        return any(byte < 32 for byte in word.to_bytes(8, "little"))

    def as_bits(x: int) -> int:
        return int(x) & reference.MASK

    def hash_start(seed: int, length: int) -> int:
        return int(seed) ^ (int(length) * reference.LENGTH_MULTIPLIER & reference.MASK)

    hash_step, hash_finish = reference.hash_word, reference.hash_end

else:

    @intrinsic
    def byte_at(typing_context: Any, text: Any, at: Any) -> Any:
        """``text[at]`` as an int64, with no bounds check and no wrap-around of negative positions."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            array = context.make_array(signature.args[0])(context, builder, arguments[0])
            byte = builder.load(builder.gep(array.data, [arguments[1]]))
            return builder.zext(byte, context.get_value_type(types.int64))

        return types.int64(text, types.int64), generate

    @intrinsic
    def word_at(typing_context: Any, text: Any, at: Any) -> Any:
        """The eight bytes from ``text[at]``, loaded at once; they need no alignment."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            array = context.make_array(signature.args[0])(context, builder, arguments[0])
            pointer = builder.gep(array.data, [arguments[1]])
            word = context.get_value_type(types.uint64)
            return builder.load(builder.bitcast(pointer, word.as_pointer()), align=1)

        return types.uint64(text, types.int64), generate

    @njit(inline="never")
    def low_bytes(word, count):  # type: ignore[no-untyped-def]
        return word & ((np.uint64(1) << np.uint64(8 * count)) - np.uint64(1))

    @njit()
    def has_control(word):  # type: ignore[no-untyped-def]
        # "Bit Twiddling Hacks": is there a byte below 32?
        below = word - np.uint64(0x2020202020202020)
        return (below & ~word & np.uint64(0x8080808080808080)) != np.uint64(0)

    @njit()
    def as_bits(x):  # type: ignore[no-untyped-def]
        return np.uint64(x)

    @njit()
    def hash_start(seed, length):  # type: ignore[no-untyped-def]
        return seed ^ (np.uint64(length) * np.uint64(reference.LENGTH_MULTIPLIER))

    @njit()
    def hash_step(h, word):  # type: ignore[no-untyped-def]
        h = (h ^ word) * np.uint64(reference.WORD_MULTIPLIER)
        return h ^ (h >> np.uint64(32))

    @njit()
    def hash_finish(h):  # type: ignore[no-untyped-def]
        h *= np.uint64(reference.FIRST_FINAL_MULTIPLIER)
        h ^= h >> np.uint64(29)
        h *= np.uint64(reference.LAST_FINAL_MULTIPLIER)
        return h ^ (h >> np.uint64(32))


@njit()
def hash_span(text, start, stop, seed):  # type: ignore[no-untyped-def]
    """The hash of ``text[start:stop]``; loads up to seven bytes behind `stop`."""
    h = hash_start(seed, stop - start)
    at = start
    while at + 8 <= stop:
        h = hash_step(h, word_at(text, at))
        at += 8
    if at < stop:
        h = hash_step(h, low_bytes(word_at(text, at), stop - at))
    return hash_finish(h)
