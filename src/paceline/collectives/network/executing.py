"""Run an engine's call on the executor, with reductions on bytes."""

from __future__ import annotations

import ctypes
from typing import Final

from paceline.collectives.engine import Area, Order, Reduction
from paceline.collectives.network.executor import Blocks, Combine, ScheduleExecutor
from paceline.collectives.schedules import Schedule

COMBINER: Final = ctypes.CFUNCTYPE(
    None, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_double
)
"""Type of the functions of `kernels.combine`."""


def execute(
    executor: ScheduleExecutor, order: Order, schedule: Schedule, blocks: Blocks, reduction: Reduction | None
) -> None:
    """Run this rank's part of a schedule, without the final scaling of a mean."""
    executor.run(
        schedule,
        blocks,
        call=order.call,
        sequence=order.sequence,
        combine=None if reduction is None else combine_with(reduction),
        item_bytes=1 if reduction is None else reduction.item_bytes,
        timeout_s=order.timeout_s,
    )


def combine_with(reduction: Reduction) -> Combine:
    function = COMBINER(reduction.combiner)
    table = (ctypes.c_uint64 * 2)()
    place = ctypes.addressof(table)

    def combine(target: memoryview, incoming: memoryview, incoming_first: bool) -> None:
        own = address_of(target)
        table[incoming_first], table[not incoming_first] = own, address_of(incoming)
        function(own, place, 2, target.nbytes // reduction.item_bytes, reduction.op, 1.0)

    return combine


def scale(target: Area, reduction: Reduction) -> None:
    if reduction.scale != 1.0:
        table = (ctypes.c_uint64 * 1)(target.address)
        count = target.num_bytes // reduction.item_bytes
        COMBINER(reduction.combiner)(target.address, ctypes.addressof(table), 1, count, reduction.op, reduction.scale)


def address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if view.nbytes else 0
