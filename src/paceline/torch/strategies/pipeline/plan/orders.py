"""Convert torch's own pipeline schedules to the ordered actions of every process. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from paceline.errors import UsageError
from paceline.strategies import SCHEDULES
from paceline.torch.strategies.pipeline.run.actions import Action

_V_SHAPED: Final = ("zbv", "dualpipev")

Orders = tuple[tuple[Action, ...], ...]


def place_stages(schedule: str, num_ranks: int) -> list[int]:
    """Return the rank of each stage: in a cycle (0, 1, 0, 1), or for some schedules in a V (0, 1, 1, 0)."""
    parts = SCHEDULES[schedule].parts_per_rank
    if schedule in _V_SHAPED:
        return [*range(num_ranks), *reversed(range(num_ranks))]
    return [stage % num_ranks for stage in range(parts * num_ranks)]


@lru_cache
def orders_of(schedule: str, num_ranks: int, num_microbatches: int) -> Orders:
    """Return the actions of each rank. Raises UsageError for an unsupported number of microbatches."""
    kind = SCHEDULES[schedule]
    if num_ranks == 1 and schedule not in ("gpipe", "1f1b"):
        return all_forward_first(place_stages(schedule, 1), 1, num_microbatches)
    if schedule == "1f1b" and num_microbatches < num_ranks:
        raise UsageError(
            f"schedule 1f1b needs a microbatch per stage, but a batch has {num_microbatches} microbatches for "
            f"{num_ranks} stages. Pass --microbatches {num_ranks} or more and batches with this number of rows, or "
            "--schedule gpipe"
        )
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    parts = None if kind.parts_per_rank == 1 else kind.parts_per_rank
    try:
        rows = get_schedule_ops(kind.torch_name, num_ranks, num_microbatches, parts)
    except (ValueError, RuntimeError, AssertionError) as error:
        raise UsageError(
            f"schedule {schedule} does not support {num_microbatches} microbatches over {num_ranks} processes: "
            f"{str(error).rstrip('.')}. Choose another number of --microbatches"
        ) from None
    orders = tuple(_in_number_order(_actions(row)) for row in rows)
    _check_complete(orders, len(place_stages(schedule, num_ranks)), num_microbatches, schedule)
    return orders


def all_forward_first(places: Sequence[int], num_ranks: int, num_microbatches: int) -> Orders:
    """Return the actions of each rank if all forwards run before all backwards, for any placement of stages."""
    stages = range(len(places))
    return tuple(
        (
            *(Action("F", s, m) for s in stages if places[s] == rank for m in range(num_microbatches)),
            *(Action("B", s, m) for s in reversed(stages) if places[s] == rank for m in range(num_microbatches)),
        )
        for rank in range(num_ranks)
    )


def forward_part(orders: Orders) -> Orders:
    return tuple(tuple(action for action in row if action.kind == "F") for row in orders)


def backward_part(orders: Orders) -> Orders:
    return tuple(tuple(action for action in row if action.kind != "F") for row in orders)


def split_backwards(row: Sequence[Action]) -> frozenset[tuple[int, int]]:
    """Return the pairs (stage, microbatch) whose backward is split into two actions."""
    return frozenset((action.stage, action.microbatch) for action in row if action.kind == "I")


def most_in_flight(row: Sequence[Action]) -> int:
    """Return the largest number of forwards on a rank that wait for their backward at the same time."""
    count = most = 0
    for action in row:
        count += 1 if action.kind == "F" else -1 if action.kind in ("B", "W") else 0
        most = max(most, count)
    return most


def _actions(row: Sequence[Any]) -> list[Action]:
    actions: list[Action] = []
    for action in row:
        if action is None:
            continue
        for part in action.sub_actions or (action,):
            kind = str(part.computation_type.value)
            if kind in ("F", "B", "I", "W"):
                actions.append(Action(kind, part.stage_index, part.microbatch_index))  # type: ignore[arg-type]
    return actions


def _in_number_order(row: list[Action]) -> tuple[Action, ...]:
    """Change each stage's microbatch numbers to begin at 0: torch 2.13 begins at 1 on the last rank of 1F1B."""
    shift: dict[int, int] = {}
    for action in row:
        if action.kind == "F":
            shift.setdefault(action.stage, action.microbatch)
    return tuple(Action("F", a.stage, a.microbatch - shift[a.stage]) if a.kind == "F" else a for a in row)


def _check_complete(orders: Orders, num_stages: int, num_microbatches: int, schedule: str) -> None:
    """Raise UsageError unless every stage runs every microbatch forward and backward exactly once."""
    for kinds in (("F",), ("B", "I"), ("B", "W")):
        done = sorted((a.stage, a.microbatch) for row in orders for a in row if a.kind in kinds)
        if done != [(s, m) for s in range(num_stages) for m in range(num_microbatches)]:
            raise UsageError(
                f"schedule {schedule} of this torch does not support {num_microbatches} microbatches over "
                f"{len(orders)} processes. Choose another number of --microbatches, or --schedule gpipe"
            )
