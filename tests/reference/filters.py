"""References of the filter kernels, in NumPy and plain Python: readable and slow."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from tests.reference.kernels import Integers

from paceline.filters.base import Bytes
from paceline.kernels.filters import BLOCK
from paceline.kernels.hashing import MASK, mix
from paceline.tables.types import Floats, Keys

_GOLDEN, _SALT = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03


Numbers = npt.NDArray[np.uint32]


def digest(keys: Keys, out: Keys) -> None:
    """Write a digest of 128 bits."""
    positions = np.arange(1, len(keys) + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    hashes = mix(keys + positions)
    sums = (
        len(keys) + int(hashes.sum(dtype=np.uint64)),
        _SALT + int(mix(hashes ^ np.uint64(_SALT)).sum(dtype=np.uint64)),
    )
    out[:] = mix(np.array([total & MASK for total in sums], np.uint64))


def encode_deltas(keys: Keys, out: Bytes) -> int:
    """Write differences, seven bits per byte."""
    written: list[int] = []
    former = 0
    for key in keys.tolist():
        remaining, former = (key - former) & MASK, key
        while remaining > 127:
            written.append(remaining & 127 | 128)
            remaining >>= 7
        written.append(remaining)
    out[: len(written)] = written
    return len(written)


def decode_deltas(data: Bytes, out: Keys) -> int:
    """Read differences, seven bits per byte."""
    given = iter(data.tolist())
    num_read = key = 0
    for i in range(len(out)):
        for shift in range(0, 71, 7):
            byte = next(given, None)
            if byte is None or shift > 63:
                return -1
            num_read += 1
            key = (key + ((byte & 127) << shift)) & MASK
            if byte < 128:
                break
        out[i] = key
    return num_read


def number_keys(keys: Keys, slot_keys: Keys, slot_numbers: Numbers, state: Integers, out: Bytes) -> int:
    """Write the numbers of known keys, and unknown keys in full."""
    written: list[int] = []
    mask = len(slot_keys) - 1
    for key, hashed in zip(keys.tolist(), mix(keys).tolist(), strict=True):
        slot = hashed & mask
        while slot_numbers[slot] and int(slot_keys[slot]) != key:
            slot = slot + 1 & mask
        number = int(slot_numbers[slot])
        if number:
            one = np.zeros(10, np.uint8)
            written += one[: encode_deltas(np.array([number], np.uint64), one)].tolist()
            continue
        written += [0, *key.to_bytes(8, "little")]
        if state[0] < state[1]:
            state[0] += 1
            slot_keys[slot], slot_numbers[slot] = key, state[0]
    out[: len(written)] = written
    return len(written)


def renumber(slot_keys: Keys, slot_numbers: Numbers, new_keys: Keys, new_numbers: Numbers) -> None:
    """Copy a hash table to a larger one."""
    for key, number, hashed in zip(slot_keys.tolist(), slot_numbers.tolist(), mix(slot_keys).tolist(), strict=True):
        if number:
            slot = hashed & len(new_keys) - 1
            while new_numbers[slot]:
                slot = slot + 1 & len(new_keys) - 1
            new_keys[slot], new_numbers[slot] = key, number


def read_numbers(data: Bytes, known: Keys, state: Integers, out: Keys) -> int:
    """Read numbers of known keys, and keys in full."""
    remaining, count, one = data, int(state[0]), np.zeros(1, np.uint64)
    for i in range(len(out)):
        size = decode_deltas(remaining, one)
        number = int(one[0])
        if size < 0 or number > count:
            return -1
        remaining = remaining[size:]
        if number:
            out[i] = known[number - 1]
            continue
        if len(remaining) < 8:
            return -1
        out[i] = int.from_bytes(remaining[:8].tobytes(), "little")
        remaining = remaining[8:]
        if count < state[1]:
            known[count] = out[i]
            count += 1
    state[0] = count
    return len(data) - len(remaining)


def quantize(values: Floats, bits: int, half: np.float32, seed: np.uint64, scales: Floats, codes: Bytes) -> None:
    """Round to few bits, randomly up or down."""
    per_byte = 8 // bits
    whole = np.zeros(len(codes) * per_byte, np.uint8)
    for block in range(len(scales)):
        part = values[block * BLOCK : (block + 1) * BLOCK]
        top = np.abs(part).max() if np.isfinite(part).all() else np.float32(np.nan)
        scales[block] = top
        if not top > 0:
            continue
        exact = (part / top + np.float32(1)) * half
        low = np.floor(exact)
        places = np.arange(block * BLOCK, block * BLOCK + len(part), dtype=np.uint64)
        chance = (mix(seed + places * np.uint64(_GOLDEN)) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
        whole[block * BLOCK : block * BLOCK + len(part)] = low + (chance < exact - low)
    shifts = np.arange(per_byte, dtype=np.uint8) * np.uint8(bits)
    codes[:] = np.bitwise_or.reduce(whole.reshape(-1, per_byte) << shifts, axis=1) if len(codes) else 0


def quantize_nearest(values: Floats, bits: int, half: np.float32, scales: Floats, codes: Bytes) -> None:
    """Round to few bits, to nearest."""
    per_byte = 8 // bits
    whole = np.zeros(len(codes) * per_byte, np.uint8)
    for block in range(len(scales)):
        part = values[block * BLOCK : (block + 1) * BLOCK]
        sizes = np.abs(part)
        if not np.isfinite(part).all():
            scales[block] = np.nan
            continue
        threshold = np.float32(0.7 * sizes.sum(dtype=np.float64) / len(part)) if bits == 2 else np.float32(0)
        top = sizes.max() if bits > 2 else np.float32(sizes[sizes >= threshold].mean(dtype=np.float64))
        scales[block] = top
        if top > 0:
            exact = part / top if bits > 2 else np.where(sizes < threshold, 0, np.where(part >= 0, 1, -1))
            rounded = np.floor((exact.astype(np.float32) + np.float32(1)) * half + np.float32(0.5 if bits > 2 else 0))
            whole[block * BLOCK : block * BLOCK + len(part)] = rounded
    shifts = np.arange(per_byte, dtype=np.uint8) * np.uint8(bits)
    codes[:] = np.bitwise_or.reduce(whole.reshape(-1, per_byte) << shifts, axis=1) if len(codes) else 0


def dequantize(codes: Bytes, bits: int, half: np.float32, scales: Floats, out: Floats) -> None:
    """Read rounded values."""
    shifts = np.arange(8 // bits, dtype=np.uint8) * np.uint8(bits)
    whole: npt.NDArray[Any] = ((codes[:, None] >> shifts) & np.uint8((1 << bits) - 1)).reshape(-1)[: len(out)]
    out[:] = (whole.astype(np.float32) - half) / half * np.repeat(scales, BLOCK)[: len(out)]
