"""Detect whether a program changes gradients between ``backward()`` and ``optimizer.step()``.

At first, ``optimizer.step()`` sends the gradients. If the servers make one update from all workers' gradients, every
``backward()`` ends with an average over the ranks, so that the program changes the gradient of the complete batch.
After three steps without changes, each rank sends its gradients during backward. A later change raises UsageError.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.errors import UsageError
from paceline.torch.strategies.ranks import Ranks
from paceline.torch.strategies.reached import average_present
from paceline.torch.strategies.server.dense_tables import Slot
from paceline.torch.strategies.server.watched import gradient_of, set_gradient

_CALM_STEPS = 3  # gradients are sent early after this number of steps without an access to gradients
_NEVER = -(1 << 30)  # no number of steps increases this value to _CALM_STEPS
_LOOP = "is in backward(), or past the loop"


class HandsOn:
    """Records the program's accesses to gradients, and decides when gradients are averaged and sent.

    With `joins`, the servers make one update from all workers' gradients. Without `overlaps`, gradients are never sent
    early (during backward).
    """

    def __init__(self, ranks: Ranks, *, joins: bool, overlaps: bool) -> None:
        self._ranks = ranks
        self._slots: list[Slot] = []
        self._joins = joins and ranks.group is not None
        self._num_calm = 0 if overlaps else _NEVER
        self._becomes_early = False
        self._backward = -1  # torch's number of the last backward
        self.is_early = False
        """Whether gradients are sent during backward."""
        self._is_uneven = False  # some ranks have fewer batches, so they miss the last iterations
        self._has_early_leaver = False  # whether a rank left the epoch before the end of its data
        self.share = 1.0
        """The factor of this rank's gradients in an average over the ranks."""

    def add(self, slots: Sequence[Slot]) -> None:
        """Watch the gradients of an optimizer's `slots`. With several optimizers, gradients are never sent early."""
        if self._slots:
            self._num_calm = _NEVER
            self.is_early = self._becomes_early = False
        self._slots += slots

    @property
    def was_averaged(self) -> bool:
        return all(slot.is_averaged for slot in self._slots if slot.grad is not None)

    @property
    def averages(self) -> bool:
        """Whether ``backward()`` averages the gradients over the ranks at its end."""
        return self._joins and not self.is_early and self.all_take_part

    def begin_epoch(self, *, is_early: bool, is_uneven: bool) -> None:
        """Start an epoch. `is_early`: all ranks send gradients early. `is_uneven`: numbers of batches differ."""
        self.is_early = self._becomes_early = is_early
        self._is_uneven = is_uneven
        self._has_early_leaver = False

    def restart(self) -> None:
        """Observe the program again before gradients are sent early, because a new rank has not observed it."""
        self._num_calm = min(self._num_calm, 0)
        self.is_early = self._becomes_early = False

    @property
    def all_take_part(self) -> bool:
        return not (self._is_uneven or self._has_early_leaver)

    def record_gradient(self, slot: Slot, *, is_held: bool) -> None:
        """Record that backward has computed a gradient. Raises UsageError if the gradient was already sent."""
        slot.is_averaged = False
        slot.gradient.keeps = self.is_early or self._joins
        slot.gradient.open()
        if is_held:
            return
        slot.num_backward += 1
        if slot.num_backward > 1:
            if self.is_early:
                raise UsageError(
                    f"rank {self._ranks.rank}: backward() reached parameter {slot.name!r} a second time before "
                    "optimizer.step(), but its first gradient was already sent: run all except the last backward() in "
                    "strategy.accumulate(), or create the strategy with overlap=False"
                )
            self._num_calm = _NEVER
        backward = torch._C._current_graph_task_id()
        if self.averages and backward != self._backward:
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self.average)

    def average(self) -> None:
        """Replace the gradients by their mean over all ranks, unless a rank has ended its loop."""
        group = self._ranks.group
        assert group is not None
        if any(slot.gradient.was_changed for slot in self._slots):  # a hook of the program changed the gradient
            self._num_calm = _NEVER
        has_gradient = bytes(slot.grad is not None for slot in self._slots)
        states = self._ranks.exchange_as(_LOOP, [True, self._num_calm, has_gradient])
        if not all(is_in for is_in, _, _ in states):
            self._has_early_leaver = True
            return
        self._becomes_early = min(num_calm for _, num_calm, _ in states) >= _CALM_STEPS
        are_present = [any(flags) for flags in zip(*(rank_flags for _, _, rank_flags in states), strict=True)]
        parameters = [slot.parameter for slot, present in zip(self._slots, are_present, strict=True) if present]
        for slot in self._slots if self.share != 1.0 else ():
            if slot.grad is not None:
                slot.grad.copy_(slot.grad * self.share if self.share else torch.zeros_like(slot.grad))
        average_present(group, parameters, gradient_of, set_gradient)
        for slot in self._slots:
            slot.is_averaged = True
            slot.gradient.close()
            slot.gradient.keeps = False
            slot.gradient.open()

    def meet(self) -> None:
        """Wait until no rank is in a loop that averages gradients. Call this method before other exchanges."""
        if self._joins and not self.is_early and not self._is_uneven:
            while any(is_in for is_in, _, _ in self._ranks.exchange_as(_LOOP, [False, 0, b""])):
                pass

    def end(self, slots: Sequence[Slot]) -> None:
        """Prepare the optimizer step of `slots`. Raises UsageError if the program changed gradients too late."""
        changed = [slot for slot in slots if slot.gradient.was_changed]
        for slot in changed:
            if self.is_early or (self._joins and not slot.is_averaged):
                raise UsageError(self._describe(slot))
        was_shown = any(slot.gradient.was_shown for slot in slots)
        self._num_calm = _NEVER if changed else min(self._num_calm, 0) if was_shown else self._num_calm + 1
        if not self._joins or self._is_uneven:
            self._becomes_early = self._num_calm >= _CALM_STEPS

    def _describe(self, slot: Slot) -> str:
        text = f"rank {self._ranks.rank}: the gradient of {slot.name!r} was changed between backward() and step(), "
        if self.is_early:
            return text + (
                "but it was already sent during backward(), because the program did not access gradients in earlier "
                "steps: create the strategy with ParameterServer(overlap=False), or change gradients from the first "
                "step on"
            )
        if not self.all_take_part:
            return text + (
                "and is not averaged over the ranks, because they have different numbers of batches: give all ranks "
                "the same number, or change the loss instead"
            )
        return text + (
            "and is not averaged over the ranks, because every backward() was in no_sync(): run the last backward() "
            "outside of no_sync(), or use strategy.accumulate(is_last)"
        )

    def begin(self, slots: Sequence[Slot]) -> None:
        if self._becomes_early:
            self.is_early = True
        for slot in slots:
            slot.num_backward = 0
            slot.is_averaged = False
            slot.gradient.close()
