"""Cases of the filter kernels: tests compare each with its reference, the benchmark times both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from tests.reference import filters as reference
from tests.reference.kernel_cases import LARGE, MIDDLE, SMALL, ArrayCase, floats, random_keys

from paceline.kernels import filters

_HALVES: Final = {8: np.float32(127), 4: np.float32(7), 2: np.float32(1), 1: np.float32(0.5)}


def _digest(count: int) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    return lambda generator: (random_keys(generator, count), np.zeros(2, np.uint64))


def _encode_deltas(count: int, bits: int) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        return _rising(generator, count, bits), np.zeros(10 * count, np.uint8)

    return make


def _decode_deltas(count: int, bits: int, lost: int = 0) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        written = np.zeros(10 * count, np.uint8)
        size = reference.encode_deltas(_rising(generator, count, bits), written)
        return written[: size - lost].copy(), np.zeros(count, np.uint64)

    return make


def _rising(generator: np.random.Generator, count: int, bits: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.sort(random_keys(generator, count) >> np.uint64(64 - bits))


def _number_keys(count: int, limit: int) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        slots = 1 << (3 * count).bit_length()
        tables = np.zeros(slots, np.uint64), np.zeros(slots, np.uint32)
        keys = random_keys(generator, count, max(1, count // 3))
        return keys, *tables, np.array([0, limit], np.int64), np.zeros(9 * count, np.uint8)

    return make


def _renumber(count: int) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        keys, slot_keys, slot_numbers, state, out = _number_keys(count, count)(generator)
        reference.number_keys(keys, slot_keys, slot_numbers, state, out)
        return slot_keys, slot_numbers, np.zeros(4 * len(slot_keys), np.uint64), np.zeros(4 * len(slot_keys), np.uint32)

    return make


def _read_numbers(count: int, lost: int) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        *given, out = _number_keys(count, count)(generator)
        size: int = reference.number_keys(given[0], given[1], given[2], given[3], out)
        known = np.zeros(count, np.uint64)
        return out[: size - lost].copy(), known, np.array([0, count], np.int64), np.zeros(count, np.uint64)

    return make


def _quantize(count: int, bits: int) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        values = floats(generator, count)
        values[::7] = 0
        values[300:600] = 0
        if count > 2000:
            values[1500], values[1900] = np.inf, 1e-45
        scales, codes = _written(count, bits)
        return values, bits, _HALVES[bits], np.uint64(generator.integers(1 << 63)), scales, codes

    return make


def _quantize_nearest(count: int, bits: int) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        values, _, half, _, scales, codes = _quantize(count, bits)(generator)
        if count > 2000:
            values[1700] = np.nan
        return values, bits, half, scales, codes

    return make


def _dequantize(count: int, bits: int) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        scales, codes = _written(count, bits)
        scales[:] = np.abs(floats(generator, len(scales)))
        codes[:] = generator.integers(0, 256, len(codes))
        return codes, bits, _HALVES[bits], scales, np.zeros(count, np.float32)

    return make


def _written(count: int, bits: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return np.zeros(-(-count // filters.BLOCK), np.float32), np.zeros(-(-count * bits // 8), np.uint8)


def _cases() -> Iterator[ArrayCase]:
    for n in (1, SMALL, MIDDLE, LARGE):
        yield ArrayCase(filters.digest, reference.digest, f"{n}", n, _digest(n), (1,))
        for bits in (24, 64):
            label = f"{n} of {bits} bits"
            encode, decode = _encode_deltas(n, bits), _decode_deltas(n, bits)
            yield ArrayCase(filters.encode_deltas, reference.encode_deltas, label, n, encode, (1,))
            yield ArrayCase(filters.decode_deltas, reference.decode_deltas, label, n, decode, (1,))
            cut = _decode_deltas(n, bits, lost=1)
            yield ArrayCase(filters.decode_deltas, reference.decode_deltas, f"{label}, cut", n, cut, (1,))
        if n <= MIDDLE:
            for limit in (n, n // 9):
                number = _number_keys(n, limit)
                yield ArrayCase(filters.number_keys, reference.number_keys, f"{n} to {limit}", n, number, (1, 2, 3, 4))
            yield ArrayCase(filters.renumber, reference.renumber, f"{n}", n, _renumber(n), (2, 3))
            for lost in (0, 1):
                read = _read_numbers(n, lost)
                label = f"{n} less {lost} bytes"
                yield ArrayCase(filters.read_numbers, reference.read_numbers, label, n, read, (1, 2, 3))
        for bits in _HALVES:
            label = f"{n} in {bits} bits"
            yield ArrayCase(filters.quantize, reference.quantize, label, n, _quantize(n, bits), (4, 5))
            nearest = _quantize_nearest(n, bits)
            yield ArrayCase(filters.quantize_nearest, reference.quantize_nearest, label, n, nearest, (3, 4))
            yield ArrayCase(filters.dequantize, reference.dequantize, label, n, _dequantize(n, bits), (4,))


ARRAY_CASES: Final = tuple(_cases())
