"""Kernels of message filters: digests of key lists, differences of sorted keys, and quantization to a few bits.

The reference implementations are in ``tests/reference/filters.py``.
"""

from __future__ import annotations

import numpy as np

from .index import mix
from .jit import njit

BLOCK = 256
"""The number of consecutive values that are quantized with one scale (a *block*)."""

_GOLDEN, _SALT = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)
_U7, _U40, _U127, _U128 = np.uint64(7), np.uint64(40), np.uint64(127), np.uint64(128)
_MAX_SHIFT = np.uint64(63)
_UNIT = np.float32(2.0**-24)
_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)


@njit(cache=True, nogil=True)
def digest(keys, out):  # type: ignore[no-untyped-def]
    """Write a 128-bit digest of a list of keys (uint64 [n]) to `out` (uint64 [2]). It depends on the order of keys.

    Each half of the digest is a sum over the keys: a hash of key and position. Two different lists have equal digests
    with probability 2**-128. An attacker can construct different lists with equal digests.
    """
    first, second, position = np.uint64(len(keys)), _SALT, np.uint64(0)
    for i in range(len(keys)):
        position += _GOLDEN
        hashed = mix(keys[i] + position)
        first += hashed
        second += mix(hashed ^ _SALT)
    out[0] = mix(first)
    out[1] = mix(second)


@njit(cache=True, nogil=True)
def encode_deltas(keys, out):  # type: ignore[no-untyped-def]
    """Write the differences of ascending keys (uint64 [n]) to `out` (uint8 [10 n]), and return the number of bytes.

    A difference is written in LEB128: each byte contains seven bits of the number, the low bits first. The eighth bit
    is set if more bytes of the number follow.
    """
    at = 0
    former = np.uint64(0)
    for i in range(len(keys)):
        rest = keys[i] - former
        former = keys[i]
        while rest > _U127:
            out[at] = (rest & _U127) | _U128
            rest >>= _U7
            at += 1
        out[at] = rest
        at += 1
    return at


@njit(cache=True, nogil=True)
def decode_deltas(data, out):  # type: ignore[no-untyped-def]
    """Decode the output of :func:`encode_deltas` (uint8 [m]) into `out` (uint64 [n]).

    Return the number of bytes read, or -1 if the bytes are invalid.
    """
    at = 0
    key = np.uint64(0)
    for i in range(len(out)):
        shift = np.uint64(0)
        while True:
            if at == len(data) or shift > _MAX_SHIFT:
                return -1
            byte = np.uint64(data[at])
            at += 1
            key += (byte & _U127) << shift
            shift += _U7
            if byte < _U128:
                break
        out[i] = key
    return at


@njit(cache=True, nogil=True)
def number_keys(keys, slot_keys, slot_numbers, state, out):  # type: ignore[no-untyped-def]
    """Write keys (uint64 [n]) as short numbers to `out` (uint8, up to 9 bytes per key). Return the number of bytes.

    A key that already has a number is written as its number (LEB128). Another key is written as a zero byte and the
    whole key. It then gets the next number, as long as there are free numbers. The first number is 1. `slot_keys`
    uint64 and `slot_numbers` uint32 (0 in a free slot) are the hash table of the keys' numbers; its size is a power of
    two. `state` int64 [2] has the count of used numbers and the largest allowed number.
    """
    mask = np.uint64(len(slot_keys) - 1)
    count, at = state[0], 0
    for i in range(len(keys)):
        key = keys[i]
        slot = np.int64(mix(key) & mask)
        while slot_numbers[slot] != 0 and slot_keys[slot] != key:
            slot = np.int64(np.uint64(slot + 1) & mask)
        number = np.uint64(slot_numbers[slot])
        if number == 0:
            if count < state[1]:
                count += 1
                slot_keys[slot] = key
                slot_numbers[slot] = count
            out[at] = 0
            for j in range(8):
                out[at + 1 + j] = (key >> np.uint64(8 * j)) & np.uint64(255)
            at += 9
            continue
        while number > _U127:
            out[at] = (number & _U127) | _U128
            number >>= _U7
            at += 1
        out[at] = number
        at += 1
    state[0] = count
    return at


@njit(cache=True, nogil=True)
def renumber(slot_keys, slot_numbers, new_keys, new_numbers):  # type: ignore[no-untyped-def]
    """Copy the hash table of :func:`number_keys` to a larger table. The caller fills the larger table with zeros."""
    mask = np.uint64(len(new_keys) - 1)
    for i in range(len(slot_keys)):
        if slot_numbers[i] != 0:
            slot = np.int64(mix(slot_keys[i]) & mask)
            while new_numbers[slot] != 0:
                slot = np.int64(np.uint64(slot + 1) & mask)
            new_keys[slot] = slot_keys[i]
            new_numbers[slot] = slot_numbers[i]


@njit(cache=True, nogil=True)
def read_numbers(data, known, state, out):  # type: ignore[no-untyped-def]
    """Decode the output of :func:`number_keys` (uint8 [m]) into `out` (uint64 [n]).

    ``known[i]`` (uint64) is the key with number i, from 1 on. `known` must have room for new keys. :func:`number_keys`
    describes `state`. Return the number of bytes read. For invalid bytes return -1, and leave `state` unchanged.
    """
    count, at = state[0], 0
    for i in range(len(out)):
        number, shift = np.uint64(0), np.uint64(0)
        while True:
            if at == len(data) or shift > _MAX_SHIFT:
                return -1
            byte = np.uint64(data[at])
            at += 1
            number += (byte & _U127) << shift
            shift += _U7
            if byte < _U128:
                break
        if number != 0:
            if number > np.uint64(count):
                return -1
            out[i] = known[np.int64(number) - 1]
            continue
        if len(data) - at < 8:
            return -1
        key = np.uint64(0)
        for j in range(8):
            key |= np.uint64(data[at + j]) << np.uint64(8 * j)
        at += 8
        out[i] = key
        if count < state[1]:
            known[count] = key
            count += 1
    state[0] = count
    return at


@njit(cache=True, nogil=True, error_model="numpy")
def quantize(values, bits, half, seed, scales, codes):  # type: ignore[no-untyped-def]
    """Quantize values (float32 [n]) to `bits` bits. Each value is rounded up or down at random.

    The probabilities are chosen so that the mean of the rounded value is the exact value. `half` is half of the largest
    code: 127, 7, 1 or 0.5 for 8, 4, 2 or 1 bit. The results are the `codes` (uint8 [ceil(n * bits / 8)]) and the
    `scales` (float32 [ceil(n / BLOCK)]): the largest magnitude of each block, or NaN if it is not finite. `seed` is
    uint64.
    """
    codes[:] = 0
    for block in range(len(scales)):
        start, stop = block * BLOCK, min((block + 1) * BLOCK, len(values))
        top, nothing = _ZERO, _ZERO
        for i in range(start, stop):
            top = max(top, abs(values[i]))
            nothing += values[i] * _ZERO
        if nothing != _ZERO:
            top = np.float32(np.nan)
        scales[block] = top
        if not top > _ZERO:
            continue
        for i in range(start, stop):
            exact = (values[i] / top + _ONE) * half
            code = np.floor(exact)
            chance = np.float32(mix(seed + np.uint64(i) * _GOLDEN) >> _U40) * _UNIT
            if chance < exact - code:
                code += _ONE
            at = i * bits
            codes[at >> 3] |= np.uint8(np.uint8(code) << np.uint8(at & 7))


@njit(cache=True, nogil=True, error_model="numpy")
def quantize_nearest(values, bits, half, scales, codes):  # type: ignore[no-untyped-def]
    """Quantize values by rounding to the nearest code, for senders that add the rounding error to their next message.

    :func:`quantize` describes the arguments. With 1 and 2 bits, the scale of a block is the mean magnitude of the
    values that do not become zero. This minimizes the error of the block. With 2 bits, values up to 0.7 of the block's
    mean magnitude become zero (Li et al., "Ternary weight networks", 2016). With 1 bit, no value becomes zero
    (Karimireddy et al., ICML 2019). The norm of a block's error is at most the norm of the block.
    """
    codes[:] = 0
    for block in range(len(scales)):
        start, stop = block * BLOCK, min((block + 1) * BLOCK, len(values))
        top, total = _ZERO, 0.0
        for i in range(start, stop):
            top = max(top, abs(values[i]))
            total += np.float64(abs(values[i]))
        is_finite, threshold = np.isfinite(total), _ZERO
        if bits <= 2 and is_finite:
            if bits == 2:
                threshold = np.float32(0.7 * total / (stop - start))
            total, count = 0.0, 0
            for i in range(start, stop):
                if abs(values[i]) >= threshold:
                    total += np.float64(abs(values[i]))
                    count += 1
            top = np.float32(total / count)
        if not is_finite:
            top = np.float32(np.nan)
        scales[block] = top
        if not top > _ZERO:
            continue
        for i in range(start, stop):
            if bits > 2:
                code = np.floor((values[i] / top + _ONE) * half + _HALF)
            elif abs(values[i]) < threshold:
                code = half
            else:
                code = half + half if values[i] >= _ZERO else _ZERO
            at = i * bits
            codes[at >> 3] |= np.uint8(np.uint8(code) << np.uint8(at & 7))


@njit(cache=True, nogil=True)
def dequantize(codes, bits, half, scales, out):  # type: ignore[no-untyped-def]
    """Decode the output of :func:`quantize` into `out` (float32 [n])."""
    mask = np.uint8((1 << bits) - 1)
    for block in range(len(scales)):
        start, stop = block * BLOCK, min((block + 1) * BLOCK, len(out))
        for i in range(start, stop):
            at = i * bits
            share = (np.float32((codes[at >> 3] >> np.uint8(at & 7)) & mask) - half) / half
            out[i] = share * scales[block]


KERNELS = (
    digest,
    encode_deltas,
    decode_deltas,
    number_keys,
    renumber,
    read_numbers,
    quantize,
    quantize_nearest,
    dequantize,
)


def compile_kernels() -> None:
    """Compile the kernels for the argument types of their callers, or load them from Numba's cache."""
    keys, data = np.zeros(1, np.uint64), np.zeros(16, np.uint8)
    values, half = np.zeros(1, np.float32), np.float32(127)
    digest(keys, np.zeros(2, np.uint64))
    encode_deltas(keys, data)
    decode_deltas(data, keys)
    slots, numbers, state = np.zeros(2, np.uint64), np.zeros(2, np.uint32), np.array([0, 1], np.int64)
    number_keys(keys, slots, numbers, state, data)
    renumber(slots, numbers, np.zeros(4, np.uint64), np.zeros(4, np.uint32))
    read_numbers(data, keys, np.array([0, 1], np.int64), keys)
    data[:] = 0
    quantize(values, 8, half, np.uint64(0), values, data)
    quantize_nearest(values, 8, half, values, data)
    dequantize(data, 8, half, values, values)
