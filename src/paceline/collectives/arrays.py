"""Access the memory of NumPy arrays and CPU tensors, without importing torch.

Contiguous NumPy arrays (including the dtypes of `ml_dtypes`) and PyTorch's CPU tensors (recognized by ``data_ptr``) are
used in place. Other arrays are copied. This module rejects an invalid result array before a call sends its first
message. After a later rejection, the other ranks would wait for this rank.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.errors import UsageError
from paceline.kernels.combine import DTYPES
from paceline.observe.stuck.recorder import item_bytes

_ITEM_BYTES = {name: item_bytes(name) for name in DTYPES}
_NAMES = {f"torch.{name}": name for name in DTYPES} | {name: name for name in DTYPES}
_NUMPY_NAMES = {np.dtype(name): name for name in DTYPES if name != "bfloat16"}


class ArrayMemory:
    """The contiguous memory of one array, or of a contiguous copy of the array."""

    __slots__ = ("_original", "address", "array", "count", "dtype", "item_bytes", "num_bytes", "shape")

    def __init__(self, array: Any, *, target: bool = False) -> None:
        """With `target`, the array receives the result of a call. Raises UsageError for unsupported objects, dtypes and
        devices, and for a result array that cannot be written.
        """
        self._original: Any = None
        if type(array) is not np.ndarray and isinstance(array, np.ndarray):
            array = _as_ndarray(array)
        if type(array) is np.ndarray:
            dtype = _NUMPY_NAMES.get(array.dtype) or _numpy_name(array.dtype)
            flags = array.flags
            if target and not flags.writeable:
                raise UsageError("the result array is read-only; pass a writable array, or leave out `out`")
            if not flags.c_contiguous:
                if target:
                    self._original = distinct(array)
                array = np.ascontiguousarray(array)
            self.address: int = array.__array_interface__["data"][0]
            self.count: int = array.size
        elif hasattr(array, "data_ptr"):
            dtype = _NAMES.get(str(array.dtype), "")
            _check_tensor(array, dtype)
            if array.is_neg():
                if target:
                    raise UsageError("the result tensor has the negative bit set; pass its .resolve_neg()")
                array = array.detach().resolve_neg()
            if not array.is_contiguous():
                if target:
                    self._original = distinct(words(array, _ITEM_BYTES[dtype]))
                array = array.detach().contiguous()
            self.address = array.data_ptr()
            self.count = array.numel()
        else:
            raise UsageError(f"got {type(array).__name__}, expected a NumPy array or a PyTorch tensor on the CPU")
        self.array = array
        self.dtype = dtype
        self.item_bytes: int = _ITEM_BYTES[dtype]
        self.num_bytes: int = self.count * self.item_bytes
        self.shape: tuple[int, ...] = tuple(array.shape)

    def view(self) -> memoryview:
        return view_bytes(self.address, self.num_bytes, owner=self)

    def copy_back(self) -> None:
        """Copy the result into the caller's array, if the caller's array is not contiguous."""
        original = self._original
        if original is not None:
            if isinstance(self.array, np.ndarray):
                original[...] = self.array
            else:
                original[...] = words(self.array, self.item_bytes)


def as_array(array: Any) -> Any:
    return array if type(array) is np.ndarray or hasattr(array, "data_ptr") else np.asarray(array)


def empty_like(array: Any, shape: Sequence[int]) -> Any:
    if isinstance(array, np.ndarray):
        return np.empty(tuple(shape), array.dtype)
    return array.new_empty(tuple(shape))


def view_bytes(address: int, num_bytes: int, owner: object = None) -> memoryview:
    """Return ``num_bytes`` of memory at ``address`` as a writable view that keeps `owner` alive.

    Without `owner`, the caller must ensure that the memory is valid while the view is used.
    """
    if not num_bytes:
        return memoryview(bytearray())
    buffer = (ctypes.c_ubyte * num_bytes).from_address(address)
    buffer.owner = owner  # type: ignore[attr-defined]
    return memoryview(buffer).cast("B")


def words(tensor: Any, item_bytes: int) -> Any:
    """Return the tensor's memory as a NumPy array. Inside some modes of PyTorch, a write to the tensor itself fails."""
    strides = [stride * item_bytes for stride in tensor.stride()]
    reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, strides, strict=True)) + item_bytes
    memory = view_bytes(tensor.data_ptr(), reach if tensor.numel() else 0, owner=tensor)
    return np.ndarray(tuple(tensor.shape), f"u{item_bytes}", memory, strides=strides)


def distinct(array: Any) -> Any:
    """Return the array unchanged. Raises UsageError if several items of the array share memory."""
    offsets = zip(array.strides, array.shape, strict=True)
    axes = sorted((abs(stride), length) for stride, length in offsets if length > 1)
    reach = array.itemsize
    for stride, length in axes:
        if stride < reach:  # the items of this axis may overlap, so an exact and slow check follows
            break
        reach += (length - 1) * stride
    else:
        return array
    if axes[0][0] and _is_disjoint(array):
        return array
    raise UsageError("items of the result array share memory, as in an expanded tensor; pass a copy")


def _as_ndarray(array: Any) -> Any:
    if isinstance(array, np.ma.MaskedArray):
        raise UsageError("got a masked array, expected a plain one; pass its .filled() values")
    return array.view(np.ndarray)


def _is_disjoint(array: Any) -> bool:
    offsets = np.zeros(array.shape, np.int64)
    for axis, (stride, length) in enumerate(zip(array.strides, array.shape, strict=True)):
        shape = [1] * array.ndim
        shape[axis] = length
        offsets += (np.arange(length) * stride).reshape(shape)
    return bool((np.diff(np.sort(offsets, axis=None)) >= array.itemsize).all())


def _numpy_name(dtype: Any) -> str:
    name = str(dtype)
    if name == "bfloat16":  # a dtype of ml_dtypes, not of NumPy
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
