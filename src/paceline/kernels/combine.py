"""Compiled functions that reduce several arrays elementwise, for collectives: one function for each dtype.

The kernels of collectives call a function by its address, so that they need no code for dtypes or operations. The
result may be written over one of the sources. In this case ``numba.njit`` cannot vectorize the loop, because the arrays
share memory (two sources of float32 in the L2 cache: 14 GB/s instead of 58). Therefore this module builds the functions
from LLVM instructions: they read a vector of every source before they write a vector of the result, and reduce any
number of sources in one pass. LLVM compiles a function in 20 to 40 ms, so the functions are not cached on disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features

Array = npt.NDArray[Any]

SUM, PRODUCT, MIN, MAX, BITWISE_AND, BITWISE_OR, BITWISE_XOR = range(7)
"""The operations. A mean is SUM with a scale of 1/n. Integers wrap around. MIN and MAX return NaN if an operand is NaN.
If the operands are 0.0 and -0.0, they return the later one. For bool, as in NumPy, SUM and MAX are "or", and PRODUCT
and MIN are "and".
"""

_STEP_BYTES: Final = 256
"""Each step of the loop reduces this number of bytes: 4 registers of AVX-512, or 8 of the 16 registers of AVX2."""

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32, _F64 = ir.FloatType(), ir.DoubleType()
_SIGNATURE = ir.FunctionType(ir.VoidType(), [_I64, _I64, _I64, _I64, _I64, _F64])

_Conversion = Callable[[Any, Any], Any]
_Operation = Callable[[Any, Any, Any], Any]


def _choice(compare: Any, sign: str) -> _Operation:
    return lambda builder, a, b: builder.select(compare(builder, sign, a, b), a, b)


def _float_choice(sign: str) -> _Operation:
    choose = _choice(ir.IRBuilder.fcmp_ordered, sign)  # returns b if a or b is NaN
    return lambda builder, a, b: builder.select(builder.fcmp_unordered("uno", a, a), a, choose(builder, a, b))


def _integers(compare: Any) -> Mapping[int, _Operation]:
    minimum, maximum = _choice(compare, "<"), _choice(compare, ">")
    return {SUM: ir.IRBuilder.add, PRODUCT: ir.IRBuilder.mul, MIN: minimum, MAX: maximum, **_BITWISE}


_AND, _OR, _XOR = ir.IRBuilder.and_, ir.IRBuilder.or_, ir.IRBuilder.xor
_BITWISE: Final[Mapping[int, _Operation]] = {BITWISE_AND: _AND, BITWISE_OR: _OR, BITWISE_XOR: _XOR}
_SIGNED: Final = _integers(ir.IRBuilder.icmp_signed)
_UNSIGNED: Final = _integers(ir.IRBuilder.icmp_unsigned)
_BOOLS: Final[Mapping[int, _Operation]] = {SUM: _OR, PRODUCT: _AND, MIN: _AND, MAX: _OR, **_BITWISE}
_FLOATS: Final[Mapping[int, _Operation]] = {
    SUM: ir.IRBuilder.fadd,
    PRODUCT: ir.IRBuilder.fmul,
    MIN: _float_choice("<"),
    MAX: _float_choice(">"),
}


def _like(value: Any, element: Any) -> Any:
    """Return the type of a vector of `element` with as many elements as the vector `value`."""
    return ir.VectorType(element, value.type.count)


def _splat(vector_type: Any, value: Any) -> Any:
    return ir.Constant(vector_type, [value] * vector_type.count)


def _lanes(numbers: Sequence[int]) -> Any:
    return ir.Constant(ir.VectorType(_I32, len(numbers)), list(numbers))


def _widen_bfloat16(builder: Any, value: Any) -> Any:
    """Convert a vector of bfloat16 to float32. The result has the first elements of all pairs, then the second.

    :func:`_narrow_bfloat16` restores the original order. A conversion in the original order would need shuffle
    instructions, which reduce the speed with AVX2 from 20 to 12 GB/s (two sources in the L2 cache).
    """
    words, count = _like(value, _I32), value.type.count
    if count == 1:
        whole = builder.shl(builder.zext(value, words), _splat(words, 16))
    else:
        half = ir.VectorType(_I32, count // 2)
        pairs = builder.bitcast(value, half)
        lower, upper = builder.shl(pairs, _splat(half, 16)), builder.and_(pairs, _splat(half, 0xFFFF << 16))
        whole = builder.shuffle_vector(lower, upper, _lanes(range(count)))
    return builder.bitcast(whole, _like(value, _F32))


def _narrow_bfloat16(builder: Any, value: Any) -> Any:
    """Round float32 to bfloat16 (nearest, ties to even) with an addition that carries into the upper 16 bits.

    Values above the largest bfloat16 become infinity. A NaN remains a NaN, because its lower 16 bits are 0 for NaNs
    from bfloat16 values and from the processor.
    """
    words, count = _like(value, _I32), value.type.count
    bits = builder.bitcast(value, words)
    odd = builder.and_(builder.lshr(bits, _splat(words, 16)), _splat(words, 1))
    rounded = builder.add(bits, builder.add(odd, _splat(words, 0x7FFF)))
    if count == 1:
        return builder.trunc(builder.lshr(rounded, _splat(words, 16)), _like(value, _I16))
    half = ir.VectorType(_I32, count // 2)
    lower = builder.shuffle_vector(rounded, rounded, _lanes(range(count // 2)))
    upper = builder.shuffle_vector(rounded, rounded, _lanes(range(count // 2, count)))
    pairs = builder.or_(builder.lshr(lower, _splat(half, 16)), builder.and_(upper, _splat(half, 0xFFFF << 16)))
    return builder.bitcast(pairs, _like(value, _I16))


def _widen_float16(builder: Any, value: Any) -> Any:
    if _converts_float16():
        return builder.fpext(builder.bitcast(value, _like(value, ir.HalfType())), _like(value, _F32))
    words, floats = _like(value, _I32), _like(value, _F32)
    bits = builder.shl(builder.zext(value, words), _splat(words, 16))
    twice = builder.add(bits, bits)  # shifts the sign bit out
    normal = builder.add(builder.lshr(twice, _splat(words, 4)), _splat(words, 0xE0 << 23))
    normal = builder.fmul(builder.bitcast(normal, floats), _splat(floats, 2.0**-112))
    small = builder.or_(builder.lshr(twice, _splat(words, 17)), _splat(words, 126 << 23))
    small = builder.fsub(builder.bitcast(small, floats), _splat(floats, 0.5))
    chosen = builder.select(builder.icmp_unsigned("<", twice, _splat(words, 1 << 27)), small, normal)
    sign = builder.and_(bits, _splat(words, 1 << 31))
    return builder.bitcast(builder.or_(builder.bitcast(chosen, words), sign), floats)


def _narrow_float16(builder: Any, value: Any) -> Any:
    if _converts_float16():
        return builder.bitcast(builder.fptrunc(value, _like(value, ir.HalfType())), _like(value, _I16))
    words, floats = _like(value, _I32), _like(value, _F32)
    bits = builder.bitcast(value, words)
    twice = builder.add(bits, bits)
    magnitude = builder.bitcast(builder.lshr(twice, _splat(words, 1)), floats)
    # The two multiplications turn values above the largest float16 into infinity. The float32 addition that follows
    # rounds at the last bit of float16.
    base = builder.fmul(builder.fmul(magnitude, _splat(floats, 2.0**112)), _splat(floats, 2.0**-110))
    exponent, lowest = builder.and_(twice, _splat(words, 0xFF << 24)), _splat(words, 0x71 << 24)
    exponent = builder.select(builder.icmp_unsigned("<", exponent, lowest), lowest, exponent)
    anchor = builder.add(builder.lshr(exponent, _splat(words, 1)), _splat(words, 15 << 23))
    total = builder.bitcast(builder.fadd(builder.bitcast(anchor, floats), base), words)
    exponent = builder.and_(builder.lshr(total, _splat(words, 13)), _splat(words, 0x7C00))
    number = builder.add(exponent, builder.and_(total, _splat(words, 0xFFF)))
    nan = builder.icmp_unsigned(">", twice, _splat(words, 0xFF << 24))
    sign = builder.and_(builder.lshr(bits, _splat(words, 16)), _splat(words, 1 << 15))
    chosen = builder.or_(builder.select(nan, _splat(words, 0x7E00), number), sign)
    return builder.trunc(chosen, _like(value, _I16))


def _converts_float16() -> bool:
    """Return whether the processor has instructions that convert float16.

    They are 4 times as fast as the integer code from Dukhan's FP16 library. Every 64-bit ARM processor and every x86
    processor since 2013 has them, but some emulators of x86 do not.
    """
    return binding.get_process_triple().startswith(("aarch64", "arm64")) or "+f16c" in get_host_cpu_features()


def _unchanged(_builder: Any, value: Any) -> Any:
    return value


@dataclass(frozen=True)
class _Format:
    """The format of a dtype's elements in memory, and the type in which the elements are reduced."""

    numpy: Any
    element: Any
    accumulator: Any
    operations: Mapping[int, _Operation]
    widen: _Conversion = _unchanged
    """A function that converts a vector of elements to the type in which they are reduced."""
    narrow: _Conversion = _unchanged

    @property
    def item_bytes(self) -> int:
        """The size of an element in bytes."""
        return int(np.dtype(self.numpy).itemsize)

    @property
    def step(self) -> int:
        """The number of elements that one step of the loop reduces."""
        return _STEP_BYTES // (4 if self.accumulator == _F32 else self.item_bytes)


_FORMATS: Final[Mapping[str, _Format]] = {
    "float32": _Format(np.float32, _F32, _F32, _FLOATS),
    "float64": _Format(np.float64, _F64, _F64, _FLOATS),
    "float16": _Format(np.float16, _I16, _F32, _FLOATS, _widen_float16, _narrow_float16),
    "bfloat16": _Format(np.uint16, _I16, _F32, _FLOATS, _widen_bfloat16, _narrow_bfloat16),
    "int8": _Format(np.int8, _I8, _I8, _SIGNED),
    "int16": _Format(np.int16, _I16, _I16, _SIGNED),
    "int32": _Format(np.int32, _I32, _I32, _SIGNED),
    "int64": _Format(np.int64, _I64, _I64, _SIGNED),
    "uint8": _Format(np.uint8, _I8, _I8, _UNSIGNED),
    "uint16": _Format(np.uint16, _I16, _I16, _UNSIGNED),
    "uint32": _Format(np.uint32, _I32, _I32, _UNSIGNED),
    "uint64": _Format(np.uint64, _I64, _I64, _UNSIGNED),
    "bool": _Format(np.bool_, _I8, _I8, _BOOLS),
}
DTYPES: Final[tuple[str, ...]] = tuple(_FORMATS)
"""The dtypes that can be reduced. A bfloat16 array has the NumPy dtype uint16, because NumPy has no bfloat16."""


def combiner(dtype: str) -> int:
    """Return the address of the native function that reduces arrays of `dtype`. The first call compiles the function.

    The function has the type ``void (uint64 target, uint64 sources, int64 num_sources, int64 count, int64 op, double
    scale)``. It computes ``target[i] = scale * (sources[0][i] op sources[1][i] op ...)`` for ``0 <= i < count``, in
    this order, so that every process computes the same bits.

    `sources` is the address of a table with the addresses (uint64) of `num_sources` (at least 1) arrays. `target` may
    be one of the sources, but must not partly overlap a source. All addresses are multiples of the item size. Integers
    and bools ignore `scale`. float16 and bfloat16 are reduced and scaled in float32, and the result is rounded once, to
    nearest even. A single source with a scale of 1 is copied bit by bit. The function takes no locks and does not need
    the GIL.
    """
    with _compiling:
        return _compiled(dtype)


@cache
def _compiled(dtype: str) -> int:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=get_host_cpu_features(), jit=True
    )
    module = binding.parse_assembly(str(_module(_FORMATS[dtype])))
    engine = binding.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    _engines.append(engine)
    return int(engine.get_function_address("combine"))


_engines: Final[list[Any]] = []
"""The LLVM engines that own the compiled functions. They are never freed, because kernels keep the addresses."""
_compiling: Final = threading.Lock()


def _module(format_: _Format) -> Any:
    module = ir.Module()
    module.triple = binding.get_process_triple()
    function = ir.Function(module, _SIGNATURE, "combine")
    target, sources, num_sources, count, op, scale = function.args
    builder, end = ir.IRBuilder(function.append_basic_block()), function.append_basic_block()
    copies = builder.and_(builder.icmp_signed("==", num_sources, _I64(1)), builder.fcmp_ordered("==", scale, _F64(1.0)))
    with builder.if_then(copies):
        pointer = _I8.as_pointer()
        source = builder.inttoptr(_load(builder, _I64, sources, 8), pointer)
        cgutils.raw_memmove(builder, builder.inttoptr(target, pointer), source, count, format_.item_bytes)
        builder.branch(end)
    switch = builder.switch(op, end)
    for code, operation in format_.operations.items():
        block = function.append_basic_block()
        switch.add_case(code, block)
        builder.position_at_end(block)
        start: Any = _I64(0)
        for width in (format_.step, 1):
            start = _reduce(builder, format_, operation, start, width)
        builder.branch(end)
    builder.position_at_end(end)
    builder.ret_void()
    return module


def _reduce(builder: Any, format_: _Format, operation: _Operation, start: Any, width: int) -> Any:
    """Emit the loop that reduces the elements from `start` on, `width` elements per step.

    Return the index of the first element after the last step.
    """
    target, sources, num_sources, count, _, scale = builder.function.args
    vector = ir.VectorType(format_.element, width)

    def load(k: Any, offset: Any) -> Any:
        address = _load(builder, _I64, builder.add(sources, builder.mul(k, _I64(8))), 8)
        return format_.widen(builder, _load(builder, vector, builder.add(address, offset), format_.item_bytes))

    def step(i: Any, _: Any) -> None:
        offset = builder.mul(i, _I64(format_.item_bytes))
        _, total = _loop(
            builder,
            (_I64(1), num_sources, 1),
            lambda k, so_far: operation(builder, so_far, load(k, offset)),
            load(_I64(0), offset),
        )
        if format_.operations is _FLOATS:  # even if the scale is 1: this changes no value and takes no time
            total = builder.fmul(total, _broadcast(builder, scale, total.type))
        pointer = builder.inttoptr(builder.add(target, offset), vector.as_pointer())
        builder.store(format_.narrow(builder, total), pointer, align=format_.item_bytes)

    stop, _ = _loop(builder, (start, count, width), step)
    return stop


def _loop(
    builder: Any, bounds: tuple[Any, Any, int], body: Callable[[Any, Any], Any], carried: Any = None
) -> tuple[Any, Any]:
    """Emit the loop ``while i + step <= stop: carried = body(i, carried); i += step``.

    Return the values of `i` and `carried` after the loop.
    """
    start, stop, step = bounds
    before, head = builder.block, builder.append_basic_block()
    inside, after = builder.append_basic_block(), builder.append_basic_block()
    builder.branch(head)
    builder.position_at_end(head)
    i = builder.phi(_I64)
    i.add_incoming(start, before)
    if carried is not None:
        first, carried = carried, builder.phi(carried.type)
        carried.add_incoming(first, before)
    following = builder.add(i, _I64(step))
    builder.cbranch(builder.icmp_signed("<=", following, stop), inside, after)
    builder.position_at_end(inside)
    result = body(i, carried)
    i.add_incoming(following, builder.block)
    if carried is not None:
        carried.add_incoming(result, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return i, carried


def _load(builder: Any, type_: Any, address: Any, align: int) -> Any:
    return builder.load(builder.inttoptr(address, type_.as_pointer()), align=align)


def _broadcast(builder: Any, scale: Any, vector_type: Any) -> Any:
    if vector_type.element == _F32:
        scale = builder.fptrunc(scale, _F32)
    undefined = ir.Constant(vector_type, ir.Undefined)
    one = builder.insert_element(undefined, scale, _I32(0))
    return builder.shuffle_vector(one, undefined, _lanes([0] * vector_type.count))
