"""Arrays and CPU tensors as raw memory: where they lie, of what dtype and shape. No torch is imported.

NumPy arrays (of `ml_dtypes` too) and PyTorch's CPU tensors (known by their ``data_ptr``) are taken where they lie.
What is not contiguous is copied, and copied back where it is a target.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.errors import UsageError
from paceline.kernels.combine import DTYPES

_ITEM_BYTES = {"bfloat16": 2, "bool": 1} | {
    name: np.dtype(name).itemsize for name in DTYPES if name not in ("bfloat16", "bool")
}
_NAMES = {f"torch.{name}": name for name in DTYPES} | {name: name for name in DTYPES}
_NUMPY_NAMES = {np.dtype(name): name for name in DTYPES if name != "bfloat16"}


class Memory:
    """An array's memory, contiguous."""

    __slots__ = ("_original", "address", "array", "count", "dtype", "item_bytes", "num_bytes", "shape")

    def __init__(self, array: Any, *, target: bool = False) -> None:
        """Look at an array; ``target``: it will be written.

        Raises UsageError if it is no array, of an unknown dtype, not on the CPU, or read-only though a target.
        """
        self._original: Any = None
        if type(array) is not np.ndarray and isinstance(array, np.ndarray):
            array = _plain(array)
        if type(array) is np.ndarray:
            dtype = _NUMPY_NAMES.get(array.dtype) or _numpy_name(array.dtype)
            flags = array.flags
            if target and not flags.writeable:
                raise UsageError("the result cannot be written into a read-only array; give a writable one, or no out")
            if not flags.c_contiguous:
                self._original, array = array if target else None, np.ascontiguousarray(array)
            self.address: int = array.__array_interface__["data"][0]
            self.count: int = array.size
        elif hasattr(array, "data_ptr"):
            dtype = _NAMES.get(str(array.dtype), "")
            _check_tensor(array, dtype)
            if not array.is_contiguous():
                self._original, array = array if target else None, array.detach().contiguous()
            self.address = array.data_ptr()
            self.count = array.numel()
        else:
            raise UsageError(f"got {type(array).__name__}, expected a NumPy array or a PyTorch tensor on the CPU")
        self.array = array
        self.dtype = dtype
        self.item_bytes: int = _ITEM_BYTES[dtype]
        self.num_bytes: int = self.count * self.item_bytes
        self.shape: tuple[int, ...] = tuple(array.shape)

    def give_back(self) -> None:
        """Copy the result to where it was wanted, if that is not contiguous."""
        original = self._original
        if original is not None:
            if isinstance(original, np.ndarray):
                original[...] = self.array
            else:
                original.detach().copy_(self.array)


def as_array(array: Any) -> Any:
    """Return arrays and tensors as they are; numbers, lists and other array-likes as NumPy arrays."""
    return array if type(array) is np.ndarray or hasattr(array, "data_ptr") else np.asarray(array)


def empty_like(array: Any, shape: Sequence[int]) -> Any:
    """Return a fresh array or tensor of another shape and the same kind."""
    if isinstance(array, np.ndarray):
        return np.empty(tuple(shape), array.dtype)
    return array.new_empty(tuple(shape))


def view_bytes(address: int, num_bytes: int, owner: object = None) -> memoryview:
    """Return memory at an address as writable bytes; they keep `owner` alive, if it is given, else the caller does."""
    if not num_bytes:
        return memoryview(bytearray())
    buffer = (ctypes.c_ubyte * num_bytes).from_address(address)
    buffer.owner = owner  # type: ignore[attr-defined]
    return memoryview(buffer).cast("B")


def _plain(array: Any) -> Any:
    """Return an array of a subclass (``memmap``, say) as the plain one that it is."""
    if isinstance(array, np.ma.MaskedArray):
        raise UsageError("got a masked array, expected a plain one; take its .filled() values")
    return array.view(np.ndarray)


def _numpy_name(dtype: Any) -> str:
    name = str(dtype)
    if name == "bfloat16":  # of ml_dtypes
        return name
    plain = dtype.newbyteorder("=") if dtype.kind in "fiub" else dtype
    if plain in _NUMPY_NAMES and dtype.isnative:
        return _NUMPY_NAMES[plain]
    hint = "; view complex numbers as pairs of floats" if dtype.kind == "c" else ""
    raise UsageError(f"got an array of dtype {dtype}, expected one of {', '.join(DTYPES)}{hint}")


def _check_tensor(tensor: Any, dtype: str) -> None:
    if str(getattr(tensor.device, "type", "cpu")) != "cpu":
        raise UsageError(f"got a tensor on {tensor.device}, expected one on the CPU; move it with .cpu()")
    if not dtype:
        raise UsageError(f"got a tensor of dtype {tensor.dtype}, expected one of {', '.join(DTYPES)}")
