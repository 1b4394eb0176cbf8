"""Store a model's parameters in dense tables on servers.

Every parameter group is one float32 table. The parameters of a table have the model's order, which is approximately the
order in which the forward uses them. A *bucket* is a range of a table that is pushed and pulled in one message. It has
several small parameters, or a part of a large parameter.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.filters import Filter
from paceline.ps import Client, DenseTable, UpdateRule, read_records, to_fields, write_records
from paceline.tables.bucket_arrays import bucket_width
from paceline.torch.strategies.ranks import Ranks
from paceline.torch.strategies.server.watched import GradientWatch, ValueWatch, gradient_of, memory_of
from paceline.torch.update_rules import num_planes, rule_of, state_from_torch, state_to_torch

Floats = npt.NDArray[np.float32]
_WRITTEN_AT_ONCE = 1 << 21  # elements per call of write_records


class Slot:
    """The location of a parameter: elements [start, start + size) of its parameter group's table."""

    def __init__(self, parameter: nn.Parameter, name: str, number: int, group: int, start: int) -> None:
        self.parameter = parameter
        self.name = name
        self.number = number  # the parameter's number in the optimizer's state_dict()
        self.group = group
        self.start = start
        self.size = parameter.numel()
        self.kind = (parameter.shape, parameter.dtype, parameter.device)
        self.buckets: list[Bucket] = []
        self.num_backward = 0  # number of backwards in this iteration that computed the parameter's gradient
        self.is_averaged = False  # whether its gradient is the mean over the ranks
        self.gradient = GradientWatch(parameter)
        self.values = ValueWatch(parameter)
        self.wait_for_values: Callable[[], None] = lambda: None

    @property
    def grad(self) -> Tensor | None:
        return gradient_of(self.parameter)

    def check_unchanged(self, rank: int) -> None:
        parameter = self.parameter
        if (parameter.shape, parameter.dtype, parameter.device) != self.kind:
            raise UsageError(
                f"rank {rank}: parameter {self.name!r} was replaced after prepare(): it was {_describe(*self.kind)} "
                f"and is {_describe(parameter.shape, parameter.dtype, parameter.device)}; change it before prepare()"
            )


def _describe(shape: Any, dtype: Any, device: Any) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"


class Bucket:
    """Elements [start, stop) of a parameter group's table, and the parameters of these elements."""

    __slots__ = ("group", "is_current", "num_missing", "slots", "start", "stop", "table", "was_pushed")

    table: DenseTable
    """The group's table; :class:`DenseTables` sets it."""

    def __init__(self, group: int, start: int, stop: int, slots: Sequence[Slot]) -> None:
        self.group = group
        self.start = start
        self.stop = stop
        self.slots = tuple(slots)
        self.num_missing = len(self.slots)  # parameters whose gradient is not computed yet
        self.was_pushed = False
        self.is_current = True  # whether the parameters have the values of this iteration

    def begin(self) -> None:
        self.num_missing = len(self.slots)
        self.was_pushed = False


def lay_out(optimizer: Optimizer, names: Mapping[nn.Parameter, str], bucket_bytes: int) -> list[list[Slot]]:
    """Return the trained parameters' slots by group, with their buckets. Raises UsageError for unsupported dtypes."""
    order = {parameter: position for position, parameter in enumerate(names)}
    groups: list[list[Slot]] = []
    number = 0
    for position, group in enumerate(optimizer.param_groups):
        numbered = list(enumerate(group["params"], number))
        number += len(numbered)
        trained = [(i, parameter) for i, parameter in numbered if parameter.requires_grad and parameter.numel()]
        slots: list[Slot] = []
        start = 0
        for i, parameter in sorted(trained, key=lambda found: order.get(found[1], len(order))):
            name = names.get(parameter, f"parameter {i} of the optimizer")
            if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise UsageError(
                    f"parameter {name!r} is {str(parameter.dtype).removeprefix('torch.')}: servers support float32, "
                    "bfloat16 and float16; convert the model, or choose all-reduce"
                )
            slots.append(Slot(parameter, name, i, position, start))
            start += parameter.numel()
        _fill_buckets(slots, max(bucket_bytes // 4, 1))
        groups.append(slots)
    return groups


def _fill_buckets(slots: Sequence[Slot], capacity: int) -> None:
    small: list[Slot] = []

    def flush() -> None:
        if small:
            stop = small[-1].start + small[-1].size
            bucket = Bucket(small[0].group, small[0].start, stop, small)
            for slot in small:
                slot.buckets.append(bucket)
            small.clear()

    for slot in slots:
        if slot.size >= capacity:
            flush()
            num_parts = -(-slot.size // capacity)
            bounds = [slot.start + slot.size * i // num_parts for i in range(num_parts + 1)]
            slot.buckets = [Bucket(slot.group, a, b, [slot]) for a, b in pairwise(bounds)]
            continue
        if small and slot.start + slot.size - small[0].start > capacity:
            flush()
        small.append(slot)
    flush()


class DenseTables:
    """The tables of an optimizer's groups on the servers. Every rank creates this object; rank 0 writes the values."""

    def __init__(
        self,
        client: Client,
        ranks: Ranks,
        optimizer: Optimizer,
        groups: Sequence[Sequence[Slot]],
        prefix: str,
        filters: Sequence[Filter] = (),
    ) -> None:
        self._client = client
        self._ranks = ranks
        self._optimizer = optimizer
        self.groups = groups
        # The names contain a random token, because tables of earlier trainings remain on the servers.
        token = ranks.share(prefix, secrets.token_hex(4))
        self.rules: list[UpdateRule] = [rule_of(optimizer, group) for group in optimizer.param_groups]
        self._sent: list[UpdateRule | None] = [*self.rules]
        """The rules on the servers, as far as this rank knows."""
        self.tables: list[DenseTable | None] = [
            client.dense_table(
                f"{prefix} {token} group {position}",
                size=slots[-1].start + slots[-1].size,
                update=rule,
                filters=filters,
                pull_filters=(),  # pulled values must be exact, because a program may write them back
            )
            if slots
            else None
            for position, (slots, rule) in enumerate(zip(groups, self.rules, strict=True))
        ]
        for slots, table in zip(groups, self.tables, strict=True):
            for bucket in (bucket for slot in slots for bucket in slot.buckets):
                assert table is not None
                bucket.table = table
        # Servers accept the declared rule even after another rank has changed it.
        self._specs = {
            table: table.spec.with_update(to_fields(rule))
            for table, rule in zip(self.tables, self.rules, strict=True)
            if table is not None
        }
        self.num_steps = 0

    def follow_rules(self) -> None:
        """On rank 0, send changed hyperparameters of the optimizer to the servers. Every rank calls this method."""
        if self._ranks.rank:
            self._sent = [None] * len(self.rules)  # rank 0 may die before it sends a change
            return
        for position, group in enumerate(self._optimizer.param_groups):
            table = self.tables[position]
            if table is None:
                continue
            rule = rule_of(self._optimizer, group)
            if rule != self._sent[position]:
                table.set_update(rule)
                self.rules[position] = self._sent[position] = rule

    def write(self, state: Mapping[int, Mapping[str, Any]] | None) -> None:
        """Write rank 0's values, and torch's optimizer state (None: keep the servers'). All ranks must call this."""
        self._ranks.barrier()  # no push may arrive after the values
        self._ranks.call_on_first(lambda: self._write(state))
        self._ranks.barrier()

    def _write(self, state: Mapping[int, Mapping[str, Any]] | None) -> None:
        for slots, rule, table in zip(self.groups, self.rules, self.tables, strict=True):
            if table is None:
                continue
            stored_planes = self.read_all(table)[1:] if state is None and num_planes(rule) else None
            for slot in slots:
                if stored_planes is not None:
                    planes = stored_planes[:, slot.start : slot.start + slot.size]
                else:
                    planes = state_from_torch(rule, (state or {}).get(slot.number, {}), slot.size)
                self._write_slot(slot, table, planes)

    def assign(self, slots: Iterable[Slot]) -> None:
        """Write the values of `slots`, without optimizer state. Only one rank calls this, while no pushes arrive."""
        for slot in slots:
            table = self.tables[slot.group]
            assert table is not None
            planes = np.empty((num_planes(self.rules[slot.group]), slot.size), np.float32)
            if len(planes):
                planes = self._read(table, slot.start, slot.start + slot.size)[1:]
            self._write_slot(slot, table, planes)

    def _write_slot(self, slot: Slot, table: DenseTable, planes: Floats) -> None:
        values = memory_of(slot.parameter).to("cpu", torch.float32).reshape(-1).numpy()
        for first in range(0, slot.size, _WRITTEN_AT_ONCE):
            part = slice(first, min(first + _WRITTEN_AT_ONCE, slot.size))
            keys = np.arange(slot.start + part.start, slot.start + part.stop, dtype=np.uint64)
            write_records(self._client, self._specs[table], keys, np.column_stack([values[part], *planes[:, part]]))

    def read_all(self, table: DenseTable) -> Floats:
        """Return a table as float32 [1 + num_planes, size]: the values, then each state of the optimizer."""
        return self._read(table, 0, table.size)

    def _read(self, table: DenseTable, start: int, stop: int) -> Floats:
        words = 1 + num_planes(self.rules[self.tables.index(table)])
        width = bucket_width(table.size)
        planes = np.empty((words, table.size), np.float32)
        buckets = range(start // width, -(-stop // width))
        for keys, records in read_records(self._client, self._specs[table], buckets):
            if len(keys):
                planes[:, int(keys[0]) : int(keys[-1]) + 1] = records.T
        return planes[:, start:stop]

    def read_state(self) -> dict[int, dict[str, Any]]:
        """Return the state of every parameter by its number, in the format of torch's optimizers."""
        state: dict[int, dict[str, Any]] = {}
        for slots, rule, table in zip(self.groups, self.rules, self.tables, strict=True):
            if table is None or not num_planes(rule):
                continue
            planes = self.read_all(table)[1:]
            for slot in slots:
                own = planes[:, slot.start : slot.start + slot.size]
                state[slot.number] = state_to_torch(rule, own, slot.parameter.shape, num_steps=self.num_steps)
        return state
