"""What a program writes into parameters whose values are the servers': it goes there, the same from every rank."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from paceline.errors import UsageError
from paceline.protocol import Consistency, Sequential
from paceline.torch.strategies.ranks import Ranks
from paceline.torch.strategies.server.dense_tables import DenseTables, Slot
from paceline.torch.strategies.server.watched import memory_of


def check_may_write(
    slot: Slot, ranks: Ranks, tables: DenseTables, consistency: Consistency, *, all_take_part: bool
) -> None:
    """Raise UsageError if what was written to a slot's parameter could not have the effect of one device."""
    what = f"rank {ranks.rank}: parameter {slot.name!r} was written to after prepare()"
    if ranks.size > 1 and not isinstance(consistency, Sequential) and tables.num_steps:
        raise UsageError(
            f"{what}, while under {consistency} others' steps change it at any time: write to parameters before the "
            "first step, or start the program with --consistency sequential"
        )
    if not all_take_part:
        raise UsageError(
            f"{what}, in an epoch in which not all ranks take part to its end: give the ranks equally many batches"
        )


def write_back(written: Sequence[Slot], ranks: Ranks, tables: DenseTables) -> None:
    """Write rank 0's values of `written` to the servers. Raises UsageError unless every rank has written the same."""
    told = ranks.exchange_as("has written to parameters", [[slot.name, _checksum(slot)] for slot in written])
    for rank, theirs in enumerate(told):
        if theirs != told[0]:
            name = next((mine[0] for mine, other in zip(told[0], theirs, strict=False) if mine != other), "")
            raise UsageError(
                f"parameter {name or written[0].name!r} was written to after prepare(), and rank {rank} has other "
                "values than rank 0: write the same on every rank (seed random values alike), or before prepare()"
            )
    if ranks.rank == 0:
        tables.assign(written)
    for slot in written:
        slot.values.settle()


def _checksum(slot: Slot) -> int:
    values = memory_of(slot.parameter).to("cpu", torch.float32).contiguous()
    return zlib.crc32(values.numpy().data)
