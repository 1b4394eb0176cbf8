"""Write a program's changes of parameters, which are equal on every rank, to the servers."""

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
    """Raise UsageError if writing to a slot's parameter cannot have the same effect as on one device."""
    problem = f"rank {ranks.rank}: parameter {slot.name!r} was written to after prepare()"
    if ranks.size > 1 and not isinstance(consistency, Sequential) and tables.num_steps:
        raise UsageError(
            f"{problem}, but under {consistency} other ranks' steps change it at any time: write to parameters before "
            "the first step, or start the program with --consistency sequential"
        )
    if not all_take_part:
        raise UsageError(
            f"{problem}, in an epoch that some ranks leave early: give all ranks the same number of batches"
        )


def write_back(written: Sequence[Slot], ranks: Ranks, tables: DenseTables) -> None:
    """Write rank 0's values of `written` to the servers. Raises UsageError unless all ranks wrote the same."""
    checksums_by_rank = ranks.exchange_as(
        "has written to parameters", [[slot.name, _checksum(slot)] for slot in written]
    )
    for rank, checksums in enumerate(checksums_by_rank):
        if checksums != checksums_by_rank[0]:
            name = next(
                (first[0] for first, other in zip(checksums_by_rank[0], checksums, strict=False) if first != other), ""
            )
            raise UsageError(
                f"parameter {name or written[0].name!r} was written to after prepare(), but rank {rank} has other "
                "values than rank 0: write the same on every rank (with equal random seeds), or before prepare()"
            )
    if ranks.rank == 0:
        tables.assign(written)
    for slot in written:
        slot.values.reset()


def _checksum(slot: Slot) -> int:
    values = memory_of(slot.parameter).to("cpu", torch.float32).contiguous()
    return zlib.crc32(values.numpy().data)
