"""The arithmetic of a reduction: elementwise over n pieces of raw memory, one native function per dtype.

A collective's kernels call these functions by address, so that they know neither dtypes nor operations. The functions
are built from LLVM instructions instead of ``numba.njit``, because the target may be one of the sources. Then the
compiler cannot prove that arrays are disjoint, and its loops are not vectorized (two sources of float32 in L2: 14 GB/s
instead of 58). The functions of this module read a vector of every source before they write one, which is correct in
both cases and needs one pass for any number of sources. LLVM compiles a function in 20 to 40 ms, so there is no cache
on disk.
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
"""The operations. A mean is SUM with a scale of 1/n. Integers wrap around. MIN and MAX of a NaN are NaN, and of two
zeros they return the later zero. For bool, as in NumPy, SUM and MAX are "or", PRODUCT and MIN are "and"."""

_STEP_BYTES: Final = 256
"""The bytes that a step accumulates, in 4 registers of AVX-512 or 8 of AVX2. 512 would not fit AVX2's 16 registers."""

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32, _F64 = ir.FloatType(), ir.DoubleType()
_SIGNATURE = ir.FunctionType(ir.VoidType(), [_I64, _I64, _I64, _I64, _I64, _F64])

_Conversion = Callable[[Any, Any], Any]
_Operation = Callable[[Any, Any, Any], Any]


def _choice(compare: Any, sign: str) -> _Operation:
    return lambda builder, a, b: builder.select(compare(builder, sign, a, b), a, b)


def _float_choice(sign: str) -> _Operation:
    choose = _choice(ir.IRBuilder.fcmp_ordered, sign)  # the comparison chooses b if a or b is NaN
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
    """Return the type of a vector of `element` with as many elements as `value`."""
    return ir.VectorType(element, value.type.count)


def _splat(vector_type: Any, value: Any) -> Any:
    return ir.Constant(vector_type, [value] * vector_type.count)


def _lanes(numbers: Sequence[int]) -> Any:
    return ir.Constant(ir.VectorType(_I32, len(numbers)), list(numbers))


def _widen_bfloat16(builder: Any, value: Any) -> Any:
    """Return the lower elements of all pairs, then the upper elements.

    The order does not matter as long as :func:`_narrow_bfloat16` undoes it. Keeping the order would need shuffles,
    which reduce AVX2 from 20 to 12 GB/s (2 sources in L2).
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
    """Round to nearest even by carrying into the upper half; the carry out of the largest makes infinity.

    A NaN remains a NaN, because its low half is 0: it comes from a bfloat16 or from the processor.
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
    twice = builder.add(bits, bits)  # without the sign
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
    # too large for float16 becomes infinity; then a float32 addition rounds at the right bit
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
    """Return whether the processor converts float16: 4 times as fast as the code from M. Dukhan's FP16 library.

    Every 64-bit ARM and every x86 since 2013 converts float16, but some emulators of x86 do not.
    """
    return binding.get_process_triple().startswith(("aarch64", "arm64")) or "+f16c" in get_host_cpu_features()


def _unchanged(_builder: Any, value: Any) -> Any:
    return value


@dataclass(frozen=True)
class _Format:
    """The elements of a dtype in memory, and the type in which they are accumulated."""

    numpy: Any
    element: Any
    accumulator: Any
    operations: Mapping[int, _Operation]
    widen: _Conversion = _unchanged
    """A function that converts vectors of elements to vectors of accumulators."""
    narrow: _Conversion = _unchanged

    @property
    def item_bytes(self) -> int:
        """The size of an element."""
        return int(np.dtype(self.numpy).itemsize)

    @property
    def step(self) -> int:
        """The number of elements in a step."""
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
"""The dtypes that can be reduced. NumPy has no bfloat16, so an array of bfloat16 has dtype uint16."""


def combiner(dtype: str) -> int:
    """Return the address of the native function that reduces memory of `dtype`. It is compiled at the first call.

    Its type is ``void (uint64 target, uint64 sources, int64 num_sources, int64 count, int64 op, double scale)``:
    ``target[i] = scale * (sources[0][i] op sources[1][i] op ...)`` for ``0 <= i < count``, in this order, so every
    process computes the same bits. `sources` is the address of a table of `num_sources` (>= 1) addresses (uint64).
    `target` may be one of the sources, but must not overlap a source partly. All addresses are aligned to the item.
    Integers and bools ignore `scale`. float16 and bfloat16 are computed and scaled in float32, and rounded once, to
    nearest even. One source with a scale of 1 is copied bit by bit. The function takes no locks and needs no GIL.
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
"""The owners of the compiled code, which is never freed."""
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
    """Emit the reduction of elements from `start` on in steps of `width`; return the index after the last step."""
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
        if format_.operations is _FLOATS:  # multiplication by 1 changes nothing, and costs nothing
            total = builder.fmul(total, _broadcast(builder, scale, total.type))
        pointer = builder.inttoptr(builder.add(target, offset), vector.as_pointer())
        builder.store(format_.narrow(builder, total), pointer, align=format_.item_bytes)

    stop, _ = _loop(builder, (start, count, width), step)
    return stop


def _loop(
    builder: Any, bounds: tuple[Any, Any, int], body: Callable[[Any, Any], Any], carried: Any = None
) -> tuple[Any, Any]:
    """Emit ``while i + step <= stop: carried = body(i, carried); i += step``; return the last `i` and `carried`."""
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
