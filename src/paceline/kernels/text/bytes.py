"""Functions for the text kernels: loads of bytes and words, searches in a word, and the hash of a feature's bytes.

A *word* is eight bytes of the text as a little-endian number. `byte_at` and `word_at` load one byte and one word
without checking bounds. `low_bytes` and `first_bytes` keep the first bytes of a word and set the other bytes to 0.
`has_control` returns whether a byte of a word is below 32.

A *pattern* is a word in which `repeat_byte` repeats one byte. `first_match` returns the number of bytes before the
first occurrence of the pattern's byte in another word, or 8 if the byte is missing. `first_ending` also stops at a byte
below 32. `digits_of` returns the number that the digits of a word spell, or -1 if a byte is not a digit.

The hash of :mod:`paceline.kernels.hashing` is computed by `hash_start`, `hash_step` for each word, and `hash_finish`.
`hash_span` computes the hash of a part of the text. `as_bits` converts a number to a word.
"""

# ruff: noqa: D103

from __future__ import annotations

from typing import Any

import numpy as np
from numba import config, types
from numba.extending import intrinsic

from paceline.kernels.hashing import (
    FIRST_FINAL_MULTIPLIER,
    LAST_FINAL_MULTIPLIER,
    LENGTH_MULTIPLIER,
    MASK,
    WORD_MULTIPLIER,
    hash_end,
    hash_word,
)
from paceline.kernels.jit import uncounted

_TAB, _RETURN, _SPACE = 9, 13, 32
_ONES, _TOPS, _ZEROS = 0x0101010101010101, 0x8080808080808080, 0x3030303030303030

if config.DISABLE_JIT:  # type: ignore[attr-defined]  # without the JIT: plain Python

    def byte_at(text: Any, at: int) -> int:
        return int(text[at])

    def word_at(text: Any, at: int) -> int:
        return int.from_bytes(text[at : at + 8].tobytes(), "little")

    def low_bytes(word: int, count: int) -> int:
        return word & ((1 << (8 * int(count))) - 1)

    def has_control(word: int) -> bool:
        return any(byte < 32 for byte in word.to_bytes(8, "little"))

    def first_bytes(word: int, count: int) -> int:
        return word & ((1 << (8 * int(count))) - 1)

    def digits_of(word: int, count: int) -> int:
        text = word.to_bytes(8, "little")[:count]
        return int(text) if text.isdigit() else -1

    def repeat_byte(byte: int) -> int:
        return int(byte) * _ONES

    def first_match(word: int, pattern: int) -> int:
        wanted = pattern & 255
        return next((k for k, byte in enumerate(word.to_bytes(8, "little")) if byte == wanted), 8)

    def first_ending(word: int, pattern: int) -> int:
        wanted = pattern & 255
        return next((k for k, byte in enumerate(word.to_bytes(8, "little")) if byte == wanted or byte < 32), 8)

    def as_bits(x: int) -> int:
        return int(x) & MASK

    def hash_start(seed: int, length: int) -> int:
        return int(seed) ^ (int(length) * LENGTH_MULTIPLIER & MASK)

    hash_step, hash_finish = hash_word, hash_end

else:

    @intrinsic
    def byte_at(typing_context: Any, text: Any, at: Any) -> Any:
        """Return ``text[at]`` as an int64. `at` is not checked, and must not be negative."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            array = context.make_array(signature.args[0])(context, builder, arguments[0])
            byte = builder.load(builder.gep(array.data, [arguments[1]]))
            return builder.zext(byte, context.get_value_type(types.int64))

        return types.int64(text, types.int64), generate

    @intrinsic
    def word_at(typing_context: Any, text: Any, at: Any) -> Any:
        """Return the eight bytes from ``text[at]`` on as one word. `at` needs no alignment."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            array = context.make_array(signature.args[0])(context, builder, arguments[0])
            pointer = builder.gep(array.data, [arguments[1]])
            word = context.get_value_type(types.uint64)
            return builder.load(builder.bitcast(pointer, word.as_pointer()), align=1)

        return types.uint64(text, types.int64), generate

    @uncounted(inline="never")
    def low_bytes(word, count):  # type: ignore[no-untyped-def]
        return word & ((np.uint64(1) << np.uint64(8 * count)) - np.uint64(1))

    @uncounted()
    def has_control(word):  # type: ignore[no-untyped-def]
        # From "Bit Twiddling Hacks": a test whether any byte is below 32.
        below = word - np.uint64(0x2020202020202020)
        return (below & ~word & np.uint64(0x8080808080808080)) != np.uint64(0)

    def _count_zeros(typing_context: Any, word: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.cttz(arguments[0], context.get_constant(types.boolean, False))

        return types.uint64(types.uint64), generate

    _trailing_zeros: Any = intrinsic(_count_zeros)

    @uncounted()
    def first_bytes(word, count):  # type: ignore[no-untyped-def]
        unwanted = np.uint64(64) - np.uint64(count) * np.uint64(8)
        return (word << unwanted) >> unwanted

    @uncounted()
    def digits_of(word, count):  # type: ignore[no-untyped-def]
        # Lemire, "Quickly parsing eight digits", 2018: fill the word with zeros before the digits, then combine the
        # digits by three multiplications.
        unwanted = np.uint64(64) - np.uint64(count) * np.uint64(8)
        digits = (word << unwanted) ^ np.uint64(_ZEROS)
        if unwanted > 0:
            digits ^= np.uint64(_ZEROS) >> (np.uint64(64) - unwanted)
        if ((digits + np.uint64(0x7676767676767676)) | digits) & np.uint64(_TOPS):
            return np.int64(-1)
        digits = (digits * np.uint64(10)) + (digits >> np.uint64(8))
        low = (digits & np.uint64(0x000000FF000000FF)) * np.uint64(0x000F424000000064)
        high = ((digits >> np.uint64(16)) & np.uint64(0x000000FF000000FF)) * np.uint64(0x0000271000000001)
        return np.int64((low + high) >> np.uint64(32))

    @uncounted()
    def repeat_byte(byte):  # type: ignore[no-untyped-def]
        return np.uint64(byte) * np.uint64(_ONES)

    @uncounted()
    def first_match(word, pattern):  # type: ignore[no-untyped-def]
        # From "Bit Twiddling Hacks": find the lowest zero byte. Higher bytes may be reported as zero by mistake.
        other = word ^ pattern
        zeros = (other - np.uint64(_ONES)) & ~other & np.uint64(_TOPS)
        return np.int64(_trailing_zeros(zeros) >> np.uint64(3))

    @uncounted()
    def first_ending(word, pattern):  # type: ignore[no-untyped-def]
        other = word ^ pattern
        zeros = (other - np.uint64(_ONES)) & ~other
        controls = (word - np.uint64(0x2020202020202020)) & ~word
        return np.int64(_trailing_zeros((zeros | controls) & np.uint64(_TOPS)) >> np.uint64(3))

    @uncounted()
    def as_bits(x):  # type: ignore[no-untyped-def]
        return np.uint64(x)

    @uncounted()
    def hash_start(seed, length):  # type: ignore[no-untyped-def]
        return seed ^ (np.uint64(length) * np.uint64(LENGTH_MULTIPLIER))

    @uncounted()
    def hash_step(h, word):  # type: ignore[no-untyped-def]
        h = (h ^ word) * np.uint64(WORD_MULTIPLIER)
        return h ^ (h >> np.uint64(32))

    @uncounted()
    def hash_finish(h):  # type: ignore[no-untyped-def]
        h *= np.uint64(FIRST_FINAL_MULTIPLIER)
        h ^= h >> np.uint64(29)
        h *= np.uint64(LAST_FINAL_MULTIPLIER)
        return h ^ (h >> np.uint64(32))


@uncounted()
def skip_blanks(text, at):  # type: ignore[no-untyped-def]
    """Return the first position from `at` on that is not a space, tab or carriage return."""
    byte = byte_at(text, at)
    while byte in (_SPACE, _TAB, _RETURN):
        at += 1
        byte = byte_at(text, at)
    return at


@uncounted()
def hash_span(text, start, stop, seed):  # type: ignore[no-untyped-def]
    """Return the hash of ``text[start:stop]``. The kernel loads, but does not use, up to seven bytes after `stop`."""
    h = hash_start(seed, stop - start)
    at = start
    while at + 8 <= stop:
        h = hash_step(h, word_at(text, at))
        at += 8
    if at < stop:
        h = hash_step(h, low_bytes(word_at(text, at), stop - at))
    return hash_finish(h)


@uncounted()
def class_of(text, at, stop, classes):  # type: ignore[no-untyped-def]
    """Return the index of the word ``text[at:stop]`` in `classes`, or -1 if it is missing.

    Blanks around the word are ignored. `classes` (uint64) has the hashes of words.
    """
    while at < stop and byte_at(text, at) in (9, 10, 13, 32):
        at += 1
    while at < stop and byte_at(text, stop - 1) in (9, 10, 13, 32):
        stop -= 1
    word = hash_span(text, at, stop, np.uint64(0))
    for k in range(classes.shape[0]):
        if classes[k] == word:
            return k
    return -1


@uncounted()
def category_end(text, start, stop):  # type: ignore[no-untyped-def]
    """Return the end of the category ``text[start:stop]`` without a final ``.0``.

    The rule is that of :func:`paceline.kernels.text.values.category_text`.
    """
    if stop - start < 3 or byte_at(text, stop - 1) != 48 or byte_at(text, stop - 2) != 46:
        return stop
    first = start + 1 if byte_at(text, start) == 45 else start
    for k in range(first, stop - 2):
        if not 48 <= byte_at(text, k) <= 57:
            return stop
    return stop - 2 if first < stop - 2 else stop


@uncounted()
def trim_blanks(text, at, stop):  # type: ignore[no-untyped-def]
    """Return the start and the end of ``text[at:stop]`` without the blanks around it."""
    while at < stop and byte_at(text, at) == 32:
        at += 1
    while at < stop and byte_at(text, stop - 1) == 32:
        stop -= 1
    return at, stop


@uncounted()
def _letter_end(text, at, stop):  # type: ignore[no-untyped-def]
    """Return the position after the letter at `at`, or `at` if there is no letter."""
    if at == stop:
        return at
    byte = byte_at(text, at)
    if 97 <= (byte | 32) <= 122:
        return at + 1
    if byte < 0xC3 or (byte == 0xE2 and at + 1 < stop and byte_at(text, at + 1) == 0x80):
        return at
    at += 1
    while at < stop and 0x80 <= byte_at(text, at) < 0xC0:
        at += 1
    return at


@uncounted()
def hash_words(text, at, stop, seed, words, count):  # type: ignore[no-untyped-def]
    """Append the keys of all words in ``text[at:stop]`` to the first `count` keys of `words`. Return the new count."""
    while at < stop:
        first, after = at, _letter_end(text, at, stop)
        while after > at:
            at, after = after, _letter_end(text, after, stop)
        if at == first:
            at += 1
            continue
        h, word = hash_start(seed, at - first), as_bits(0)
        for k in range(at - first):
            byte = byte_at(text, first + k)
            word |= as_bits((byte | 32 if byte < 128 else byte) << (8 * (k & 7)))
            if (k & 7) == 7 or first + k + 1 == at:
                h, word = hash_step(h, word), as_bits(0)
        words[count] = hash_finish(h)
        count += 1
    return count
