"""Call filters and check their results, so that a mistake in a filter raises an error with the filter's name."""

from __future__ import annotations

import math
import operator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from paceline.errors import PacelineError, UsageError
from paceline.filters.base import ByteFilter, Bytes, Filter, RowFilter, ValueFilter
from paceline.tables.types import Floats, Keys

_Array = TypeVar("_Array", bound="npt.NDArray[Any]")


def num_bytes_of(chosen: ValueFilter | None, count: int) -> int:
    if chosen is None:
        return 4 * count
    try:
        num_bytes = operator.index(chosen.num_bytes(count))
    except Exception as error:
        raise _failed(chosen, f"num_bytes({count})", error) from error
    if num_bytes < 0:
        raise UsageError(f"filter {chosen.name!r}: num_bytes({count}) is {num_bytes}, expected 0 or more")
    return num_bytes


def write_values(chosen: ValueFilter | None, values: Floats, seed: int | None, out: Bytes) -> None:
    if chosen is None:
        out.view(np.float32)[:] = values
        return
    try:
        chosen.encode(_shown(chosen, values), seed, out)
    except Exception as error:
        raise _failed(chosen, f"encode() of {len(values)} values to {len(out)} bytes", error) from error


def read_values(chosen: ValueFilter | None, data: Bytes, out: Floats) -> None:
    if chosen is None:
        out.view(np.uint8)[:] = data
        return
    try:
        chosen.decode(_shown(chosen, data), out)
    except Exception as error:
        raise _failed(chosen, f"decode() of {len(data)} bytes to {len(out)} values", error) from error


def packed_by(chosen: ByteFilter, data: Bytes) -> Bytes:
    try:
        packed = chosen.pack(_shown(chosen, data))
    except Exception as error:
        raise _failed(chosen, f"pack() of {len(data)} bytes", error) from error
    return _checked_bytes(chosen, "pack", packed)


def unpacked_by(chosen: ByteFilter, data: Bytes, num_bytes: int) -> Bytes:
    """Return unpacked bytes. Raises ValueError for invalid input, and UsageError if the filter fails."""
    try:
        unpacked = chosen.unpack(_shown(chosen, data), num_bytes)
    except ValueError:
        raise
    except Exception as error:
        raise _failed(chosen, f"unpack() of {len(data)} bytes", error) from error
    return _checked_bytes(chosen, "unpack", unpacked)


def rows_chosen_by(chosen_by: RowFilter, keys: Keys, rows: Floats, clock: int, seed: int) -> npt.NDArray[np.bool_]:
    try:
        chosen = chosen_by.choose(_shown(chosen_by, keys), _shown(chosen_by, rows), clock, seed)
    except Exception as error:
        raise _failed(chosen_by, f"choose() of {len(keys)} rows", error) from error
    return _checked_choice(chosen_by, "choose", chosen, len(keys))


def zeros_chosen_by(chosen_by: RowFilter, rows: Floats, l1: float) -> npt.NDArray[np.bool_]:
    """Return which of these rows, whose weights are 0, to send: bool [n]."""
    try:
        chosen = chosen_by.choose_zeros(_shown(chosen_by, rows), l1)
    except Exception as error:
        raise _failed(chosen_by, f"choose_zeros() of {len(rows)} rows", error) from error
    return _checked_choice(chosen_by, "choose_zeros", chosen, len(rows))


def scale_of(chosen_by: RowFilter) -> float:
    try:
        scale = float(chosen_by.rescale())
    except Exception as error:
        raise _failed(chosen_by, "rescale", error) from error
    if not math.isfinite(scale):
        raise UsageError(f"filter {chosen_by.name!r}: rescale() is {scale}, expected a finite number")
    return scale


def _shown(chosen: Filter, array: _Array) -> _Array:
    """Return a read-only view for a user's filter, because the array may belong to the caller.

    The kernels of Paceline's own filters are compiled for writable arrays.
    """
    if type(chosen).__module__.partition(".")[0] == __name__.partition(".")[0]:
        return array
    shown = array.view()
    shown.flags.writeable = False
    return shown


def _checked_choice(
    chosen_by: RowFilter, method: str, found: npt.NDArray[np.bool_], count: int
) -> npt.NDArray[np.bool_]:
    if not isinstance(found, np.ndarray) or found.dtype != np.bool_ or found.shape != (count,):
        raise UsageError(
            f"filter {chosen_by.name!r}: {method} returned {_kind_of(found)}, expected an array, bool [{count}]"
        )
    return found


def _checked_bytes(chosen: ByteFilter, method: str, found: Bytes) -> Bytes:
    if not isinstance(found, np.ndarray) or found.dtype != np.uint8 or found.ndim != 1:
        raise UsageError(f"filter {chosen.name!r}: {method} returned {_kind_of(found)}, expected an array, uint8 [n]")
    return found


def _kind_of(found: object) -> str:
    return f"{found.dtype} {list(found.shape)}" if isinstance(found, np.ndarray) else type(found).__name__


def _failed(chosen: Filter, method: str, error: Exception) -> Exception:
    if isinstance(error, (PacelineError, MemoryError)):
        return error
    return UsageError(f"filter {chosen.name!r} failed in {method}: {type(error).__name__}: {error}")
