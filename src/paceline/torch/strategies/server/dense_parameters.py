"""A model's dense parameters on servers: send gradients during backward, and receive the new values."""

from __future__ import annotations

import functools
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.filters import Filter
from paceline.protocol import Consistency, Sequential
from paceline.ps import Client
from paceline.torch.strategies.ranks import Ranks
from paceline.torch.strategies.replicas.replica import raise_for_replaced
from paceline.torch.strategies.server.dense_tables import Bucket, DenseTables, Slot
from paceline.torch.strategies.server.hands_on import HandsOn
from paceline.torch.strategies.server.push_pull import PushPull
from paceline.torch.strategies.server.staging import Staging
from paceline.torch.strategies.server.watched import (
    arrive,
    depart,
    make_wait,
    memory_of,
    unwatch,
    wait_for_values,
    watch,
)

_NAMED = 5


class _OptimizerParameters(NamedTuple):
    tables: DenseTables
    slots: list[Slot]
    buckets: list[Bucket]


class DenseParameters:
    """Keeps the parameters of one or more optimizers in tables on servers."""

    def __init__(
        self,
        client: Client,
        ranks: Ranks,
        device: torch.device,
        *,
        overlaps: bool,
        skips_unused: bool,
        filters: Sequence[Filter] = (),
    ) -> None:
        self._client, self._ranks, self._filters = client, ranks, filters
        self._models: list[tuple[nn.Module, dict[str, nn.Parameter]]] = []
        self._parts: dict[Optimizer, _OptimizerParameters] = {}
        self._of_parameter: dict[nn.Parameter, Slot] = {}
        self._consistency = client.consistency
        self._skips_unused = skips_unused
        self._is_on_cpu = device.type == "cpu"
        is_sequential = isinstance(self._consistency, Sequential)
        self.hands_on = HandsOn(ranks, joins=is_sequential, overlaps=overlaps)
        self.holds = False
        """Whether backwards only add to the gradients, without sending them."""
        # Servers that sum the workers' gradients need gradients that are divided by the number of workers.
        adds_up = isinstance(self._consistency, Sequential) and self._consistency.aggregate == "sum"
        self._staging = Staging(device, ranks if adds_up else None)
        self._push_pull = PushPull(client, self._staging, ranks.rank)
        self._undo: list[Callable[[], None]] = []

    def follow(self, model: nn.Module) -> None:
        if any(model is other for other, _ in self._models):
            return
        self._models.append((model, dict(model.named_parameters())))
        self._undo.append(make_wait(model, wait_for_values))

    def add(self, optimizer: Optimizer, groups: Sequence[Sequence[Slot]], order: Mapping[nn.Parameter, Any]) -> None:
        """Write rank 0's values and the state of `optimizer` to the servers, which update them from now on.

        `groups` has the slots of every parameter group, at least one per group. The keys of `order` are the models'
        parameters in order. Raises UsageError for a parameter that is also in another optimizer.
        """
        places = {parameter: place for place, parameter in enumerate(order)}
        slots = [slot for group in groups for slot in group]
        slots.sort(key=lambda slot: places.get(slot.parameter, len(places)))
        for slot in slots:
            if slot.parameter in self._of_parameter:
                raise UsageError(
                    f"parameter {slot.name!r} is in two optimizers, but servers update it by one: give each parameter "
                    "to one optimizer, or choose --strategy all-reduce"
                )
        buckets = list(dict.fromkeys(bucket for slot in slots for bucket in slot.buckets))
        prefix = f"dense {len(self._parts)}"
        tables = DenseTables(self._client, self._ranks, optimizer, groups, prefix, self._filters)
        self._parts[optimizer] = _OptimizerParameters(tables, slots, buckets)
        self._of_parameter |= {slot.parameter: slot for slot in slots}
        self.hands_on.add(slots)
        tables.write({slot.number: optimizer.state.get(slot.parameter, {}) for slot in slots})
        for slot in slots:
            optimizer.state.pop(slot.parameter, None)  # the servers have this state now
            watch(slot)
            slot.wait_for_values = functools.partial(self._wait_for, slot.parameter)
            self._undo.append(functools.partial(unwatch, slot))
            handle = slot.parameter.register_post_accumulate_grad_hook(self._record_gradient)  # type: ignore[no-untyped-call]
            self._undo.append(handle.remove)
        self.pull_all()

    @property
    def _slots(self) -> Iterable[Slot]:
        return self._of_parameter.values()

    @property
    def _buckets(self) -> list[Bucket]:
        return [bucket for part in self._parts.values() for bucket in part.buckets]

    def set_share(self, share: float) -> None:
        """Set this rank's number of samples in the next iteration, divided by the mean over the ranks.

        Under sequential consistency, gradients are multiplied by `share`. Under other consistencies, the servers apply
        each rank's gradients separately, so only a share of 0 matters: gradients without own samples are not sent.
        """
        if not isinstance(self._consistency, Sequential):
            share = float(share > 0)
        self.hands_on.share = self._staging.share = share

    def leave_out(self, optimizer: Optimizer) -> None:
        """Drop the gradients of a step, on a rank whose steps have no effect."""
        if optimizer in self._parts:
            self._begin_iteration(self._parts[optimizer])

    @property
    def num_steps(self) -> list[int]:
        """Each optimizer's number of steps."""
        return [part.tables.num_steps for part in self._parts.values()]

    @num_steps.setter
    def num_steps(self, counts: list[int]) -> None:
        for part, count in zip(self._parts.values(), counts, strict=True):
            part.tables.num_steps = count

    def close(self, *, at_once: bool) -> None:
        try:
            self._push_pull.close(at_once=at_once)
        finally:
            for undo in self._undo:
                undo()
            self._undo = []

    def _record_gradient(self, parameter: nn.Parameter) -> None:
        slot = self._of_parameter[parameter]
        self.hands_on.record_gradient(slot, is_held=self.holds)
        if self.holds or not self.hands_on.is_early:
            return
        for bucket in slot.buckets:
            bucket.num_missing -= 1
            if not bucket.num_missing:
                self._push_pull.push(bucket)

    def begin_step(self, optimizer: Optimizer) -> None:
        """Prepare to send the iteration's remaining gradients. Raises UsageError for gradients that cannot be sent."""
        tables, slots, _ = self._parts[optimizer]
        self._check(slots)
        self.hands_on.end(slots)
        # Under sequential consistency, new hyperparameters apply to exactly this iteration. When this worker has its
        # values, every server has applied the last iteration completely, and applies the current iteration only after
        # this worker's tick. Under other consistencies they apply to all gradients that arrive later.
        self.wait_all()
        self.write_back()
        tables.follow_rules()

    def end_step(self, optimizer: Optimizer) -> None:
        """Send the remaining gradients, end the iteration, and request the new values."""
        part = self._parts[optimizer]
        for bucket in part.buckets:
            if not bucket.was_pushed:
                self._push_pull.push(bucket)
        self._push_pull.end_iteration(part.buckets)
        self._depart(part.slots)
        part.tables.num_steps += 1
        self._begin_iteration(part)

    def has(self, optimizer: Optimizer) -> bool:
        return optimizer in self._parts

    def drop_pushes(self) -> None:
        """If gradients were pushed and no ``optimizer.step()`` follows, receive the servers' values again."""
        if any(slot.num_backward for slot in self._slots) and not self._find_written():
            self._push_pull.pull(self._buckets)  # the servers process these pulls after the pushes
        self.wait_all()

    def begin_iteration(self) -> None:
        for part in self._parts.values():
            self._begin_iteration(part)

    def _begin_iteration(self, part: _OptimizerParameters) -> None:
        for bucket in part.buckets:
            bucket.begin()
        self.hands_on.begin(part.slots)

    def _check(self, slots: Sequence[Slot]) -> None:
        rank = self._ranks.rank
        for slot in slots:
            slot.check_unchanged(rank)
        if self._skips_unused:
            return
        unused = [slot.name for slot in slots if slot.grad is None and slot.parameter.requires_grad]
        if unused:
            for model, prepared in self._models:
                raise_for_replaced(model, prepared, rank)
            more = f" and {len(unused) - _NAMED} more" if unused[_NAMED:] else ""
            named = ", ".join(map(repr, unused[:_NAMED])) + more
            raise UsageError(
                f"rank {rank}: parameters without a gradient: {named}. Either the loss of this iteration does not "
                "depend on these parameters, or backward() was not called. If that is intended, create the strategy "
                "with ParameterServer(unused='skip'), else remove these parameters from the model"
            )

    def _wait_for(self, parameter: nn.Parameter) -> None:
        slot = self._of_parameter.get(parameter)
        if slot is None:
            return
        if not (self._push_pull.is_current and self._is_on_cpu):
            for bucket in slot.buckets:
                self._push_pull.wait(bucket)
        arrive(slot)

    def wait_all(self) -> None:
        for slot in self._slots:
            self._wait_for(slot.parameter)

    def pull_all(self) -> None:
        self._push_pull.pull(self._buckets)
        self.wait_all()
        for slot in self._slots:
            slot.values.reset()
            if slot.values.is_exposed:
                slot.values.seal()

    def _depart(self, slots: Sequence[Slot]) -> None:
        """Make accesses to the parameters wait for the new values, and increase the parameters' versions."""
        with torch._C.DisableTorchFunctionSubclass():
            torch.autograd.graph.increment_version([slot.parameter for slot in slots])
        for slot in slots:
            slot.values.reset()
            depart(slot)
        if _is_compiling_code():  # compiled code reads the memory without waiting
            self.wait_all()
        for slot in slots:
            if slot.values.is_exposed:  # the program can use an alias of the memory without waiting
                self._wait_for(slot.parameter)
                slot.values.seal()

    def _find_written(self) -> list[tuple[DenseTables, list[Slot]]]:
        found = [(part.tables, [s for s in part.slots if s.values.was_written]) for part in self._parts.values()]
        return [(tables, slots) for tables, slots in found if slots]

    def write_back(self, *, all_present: bool = False) -> None:
        """Send the program's writes to parameters to the servers.

        Under sequential consistency, the servers apply this iteration's updates after this rank's tick, so they apply
        rank 0's values before these updates. Under other consistencies updates may arrive at any time, so writes are
        allowed only before the first step.
        """
        written = self._find_written()
        if not written:
            return
        all_take_part = all_present or self.hands_on.all_take_part
        for tables, slots in written:
            check_may_write(slots[0], self._ranks, tables, self._consistency, all_take_part=all_take_part)
            write_back(slots, self._ranks, tables)
        if all_present or not isinstance(self._consistency, Sequential):
            self._ranks.barrier()

    def write_values(self) -> None:
        """Write the module's values, which are equal on all ranks, to the servers. Every rank must call this method."""
        for part in self._parts.values():
            part.tables.write(None)
        self.pull_all()

    def read_state(self, optimizer: Optimizer) -> dict[int, dict[str, Any]]:
        """Return the state of an optimizer from the servers. A rank may call this method alone."""
        self.wait_all()
        return self._parts[optimizer].tables.read_state() if optimizer in self._parts else {}

    def write_state(self, optimizer: Optimizer, state: dict[int, dict[str, Any]]) -> None:
        """Write an optimizer's state, which is equal on all ranks, to the servers. Every rank calls this method."""
        if optimizer not in self._parts:
            return
        self.wait_all()
        self.hands_on.meet()
        tables = self._parts[optimizer].tables
        tables.follow_rules()
        tables.write(state)
        self.pull_all()


def _is_compiling_code() -> bool:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])


def check_may_write(
    slot: Slot, ranks: Ranks, tables: DenseTables, consistency: Consistency, *, all_take_part: bool
) -> None:
    """Raise UsageError if the program's write to a parameter would not have the same effect as on one device."""
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
    """Write rank 0's values of the slots `written` to the servers. Raises UsageError if ranks have different values."""
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
    ranks.call_on_first(lambda: tables.assign(written))
    for slot in written:
        slot.values.reset()


def _checksum(slot: Slot) -> int:
    values = memory_of(slot.parameter).to("cpu", torch.float32).contiguous()
    return zlib.crc32(values.numpy().data)
