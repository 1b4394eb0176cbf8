"""Functions with which kernels load, store, copy and prefetch memory at an address.

A sparse table has a few hundred small allocations that grow separately. So its kernels use a list of memory addresses
instead of one NumPy array. The entries of a table consist of 32-bit words, so a 64-bit load or store is only aligned to
4 bytes.

With ``NUMBA_DISABLE_JIT=1``, this module defines these functions in plain Python with :mod:`ctypes`, so that a coverage
measurement includes the kernels.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic

if config.DISABLE_JIT:  # type: ignore[attr-defined]  # pragma: no cover - taken in coverage runs only

    def prefetch(address: Any) -> None:
        """Do nothing, because a prefetch has no use in plain Python."""

    def load_u32(address: Any) -> Any:
        """Return the 32-bit word at `address`."""
        return np.uint32(ctypes.c_uint32.from_address(int(address)).value)

    def load_u64(address: Any) -> Any:
        """Return the 64-bit word at `address`."""
        return np.uint64(ctypes.c_uint64.from_address(int(address)).value)

    def store_u32(address: Any, value: Any) -> None:
        """Write a 32-bit word at `address`."""
        ctypes.c_uint32.from_address(int(address)).value = int(value)

    def store_u64(address: Any, value: Any) -> None:
        """Write a 64-bit word at `address`."""
        ctypes.c_uint64.from_address(int(address)).value = int(value)

    def floats_at(address: Any, size: Any) -> Any:
        """Return the `size` float32 numbers from `address` on, as an array."""
        return np.ctypeslib.as_array((ctypes.c_float * int(size)).from_address(int(address)))

else:
    from llvmlite import ir
    from numba.np.arrayobj import populate_array

    @intrinsic
    def prefetch(typing_context: Any, address: Any) -> Any:
        """Prefetch the cache line at `address`. The address may be invalid."""
        signature = types.void(types.uint64)

        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            byte_pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
            function = cgutils.get_or_insert_function(
                builder.module,
                ir.FunctionType(ir.VoidType(), [byte_pointer, word, word, word]),
                "llvm.prefetch.p0i8",
            )
            # arguments: address, read (0) or write (1), locality 0 to 3, data cache (1)
            builder.call(function, [builder.inttoptr(args[0], byte_pointer), word(0), word(3), word(1)])
            return context.get_dummy_value()

        return signature, generate

    def _make_load(machine_type: Any, numba_type: Any) -> Any:
        @intrinsic
        def load(typing_context: Any, address: Any) -> Any:
            def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
                value = builder.load(builder.inttoptr(args[0], machine_type.as_pointer()))
                value.align = 4
                return value

            return numba_type(types.uint64), generate

        return load

    def _make_store(machine_type: Any, numba_type: Any) -> Any:
        @intrinsic
        def store(typing_context: Any, address: Any, value: Any) -> Any:
            def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
                instruction = builder.store(args[1], builder.inttoptr(args[0], machine_type.as_pointer()))
                instruction.align = 4
                return context.get_dummy_value()

            return types.void(types.uint64, numba_type), generate

        return store

    load_u32 = _make_load(ir.IntType(32), types.uint32)
    load_u64 = _make_load(ir.IntType(64), types.uint64)
    store_u32 = _make_store(ir.IntType(32), types.uint32)
    store_u64 = _make_store(ir.IntType(64), types.uint64)

    @intrinsic
    def floats_at(typing_context: Any, address: Any, size: Any) -> Any:
        """Return the `size` float32 numbers from `address` on, as an array without reference counting.

        In compiled code the array's length is 0. So the compiler generates no code that adds the length to a negative
        index.
        """
        kind = types.Array(types.float32, 1, "C")

        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            array = context.make_array(kind)(context, builder)
            none, word = (context.get_constant(types.intp, number) for number in (0, 4))
            data = builder.inttoptr(args[0], ir.FloatType().as_pointer())
            populate_array(array, data=data, shape=[none], strides=[word], itemsize=word, meminfo=None)
            return array._getvalue()

        return kind(types.uint64, types.intp), generate
