"""Operations for kernels on memory that processes share: atomics, copies, calls by address, waits.

Addresses are ``uint64``. If a process writes a word with :data:`exchange`, and another process reads this word with
:func:`load_acquire`, the reader also sees all earlier writes of the writer. Other modules have plain-Python versions of
their kernels for ``NUMBA_DISABLE_JIT=1``. This module has none, because no process uses shared memory in this mode.
"""

from __future__ import annotations

import platform
import sys
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_BYTE, _WORD, _LONG = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_MACHINE = platform.machine().lower()
_FUTEX_NUMBERS = {"x86_64": 202, "amd64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}

FUTEX = _FUTEX_NUMBERS.get(_MACHINE, 0) if sys.platform == "linux" else 0
"""The number of the futex system call. It is 0 on systems without futexes. There, a waiting process polls."""

sched_yield = types.ExternalFunction("sched_yield", types.int32())
usleep = types.ExternalFunction("usleep", types.int32(types.uint32))
system_call = types.ExternalFunction(
    "syscall",
    types.int64(types.int64, types.uint64, types.int64, types.int64, types.uint64, types.uint64, types.int64),
)
process_vm_readv = types.ExternalFunction(
    "process_vm_readv",
    types.int64(types.int32, types.uint64, types.uint64, types.uint64, types.uint64, types.uint64),
)
"""The Linux function that reads the memory of another process. Kernels that call it are compiled only on Linux."""


@intrinsic
def load_acquire(typing_context: Any, address: Any) -> Any:
    """Return the 64-bit word at `address`, with acquire memory order."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], _LONG.as_pointer()), "acquire", 8)

    return types.uint64(types.uint64), generate


def _make_read_modify_write(operation: str) -> Any:
    @intrinsic
    def read_modify_write(typing_context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.atomic_rmw(operation, builder.inttoptr(args[0], _LONG.as_pointer()), args[1], "seq_cst")

        return types.uint64(types.uint64, types.uint64), generate

    return read_modify_write


exchange = _make_read_modify_write("xchg")
"""Write a 64-bit word atomically and return its previous value. The operation is a full memory fence."""
fetch_add = _make_read_modify_write("add")
"""Add to a 64-bit word atomically and return its previous value. The operation is a full memory fence."""


@intrinsic
def copy_bytes(typing_context: Any, target: Any, source: Any, num_bytes: Any) -> Any:
    """Copy `num_bytes` between two areas of memory that do not overlap."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = _BYTE.as_pointer()
        cgutils.raw_memcpy(builder, builder.inttoptr(args[0], pointer), builder.inttoptr(args[1], pointer), args[2], 1)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.int64), generate


@intrinsic
def pause(typing_context: Any) -> Any:
    """Notify the processor that this thread polls in a loop, so that the processor saves power."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        if _MACHINE in ("x86_64", "amd64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        elif _MACHINE in ("aarch64", "arm64"):
            kind = ir.FunctionType(ir.VoidType(), [_WORD])
            hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.aarch64.hint")
            builder.call(hint, [_WORD(1)])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def call_combiner(
    typing_context: Any, function: Any, target: Any, sources: Any, num: Any, count: Any, op: Any, scale: Any
) -> Any:
    """Call the compiled reduction whose address :func:`paceline.kernels.combine.combiner` returned."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_LONG, _LONG, _LONG, _LONG, _LONG, ir.DoubleType()])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return (
        types.void(types.uint64, types.uint64, types.uint64, types.int64, types.int64, types.int64, types.float64),
        generate,
    )
