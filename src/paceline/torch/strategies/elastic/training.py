"""Control one rank's part in an elastic training: join, admit newcomers, transfer the state, commit steps."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from functools import partial

from paceline.collectives import Group
from paceline.collectives.elastic import ElasticGroup
from paceline.collectives.start import load_kernels
from paceline.errors import GroupClosedError
from paceline.kernels import checksum
from paceline.meeting.coordinator import ENDED
from paceline.torch.strategies.agreement import describe_other_names
from paceline.torch.strategies.base import Strategy
from paceline.torch.strategies.elastic.state import StateTransfer
from paceline.torch.strategies.elastic.steps import ElasticSteps
from paceline.torch.strategies.loaders import Loader


class ElasticTraining:
    """Connects a rank's training loop to the elastic group."""

    def __init__(self, strategy: Strategy, group: ElasticGroup, steps: ElasticSteps) -> None:
        self._strategy = strategy
        self._group = group
        self.steps = steps
        self._paused_rank: int | None = None
        """The rank of this process before it was excluded as a straggler; None if it was not excluded."""
        self._transfer: StateTransfer | None = None
        """Transfers the state until all ranks have it; None while no transfer is in progress."""
        self._has_just_joined = False
        """Whether this process has joined and not begun a step since."""
        self.has_computed_alone = False
        """Whether this process, as a newcomer, has computed a batch alone."""
        self._step_start = 0
        """The number of the group's exchanges before this rank's first batch of the current step."""
        self._has_compared_names = False
        """Whether this process has compared the names of its registered states with those of the other ranks."""

    @property
    def has_joined(self) -> bool:
        """Whether this process takes part in the training."""
        return self._group.quorum > 0

    @property
    def division(self) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """The incarnations of the ranks that divide the data, and each rank's number of samples in a step.

        A rank without the training's state is not among them. The second value is None if the numbers are equal.
        Between two exchanges, the values are equal on all ranks.
        """
        return self._group.contributors, self._group.shares

    @property
    def has_step_times(self) -> bool:
        """Whether the ranks compare the times of their steps."""
        return self._group.step_times is not None

    @property
    def has_balance(self) -> bool:
        """Whether the ranks' shares of a step depend on their speeds."""
        return self._group.balance is not None

    def begin_epoch(self, loader: Loader, epoch: int) -> None:
        """Publish the beginning of an epoch for newcomers."""
        if self._group.rank == 0 and epoch:
            self._group.values.mark(self._epoch_key(loader, epoch))

    def join(self, loader: Loader, epoch: int) -> bool:
        """Join the other ranks; return False if they are in a later epoch. End the process after the training."""
        if self._group.values.is_marked(self._epoch_key(loader, epoch + 1)):
            return False
        load_kernels()
        checksum.compile_kernels()
        try:
            if not self._group.enter(epoch):
                return False
        except GroupClosedError:
            _print("the training ended before this rank could take part")
            sys.exit(0)
        self._transfer = StateTransfer(self._strategy, is_newcomer=True)
        self._heal(is_urgent=False)
        self._has_just_joined = self._has_compared_names = True
        if self._paused_rank is not None:
            _print(f"rank {self._paused_rank} has recovered, and takes part again as rank {self._group.rank}")
            self._paused_rank = None
        return True

    def _epoch_key(self, loader: Loader, epoch: int) -> str:
        return f"epoch {epoch} of loader {self._strategy.loaders.index(loader)}"

    def receive(self, weight: float, *, is_last: bool) -> None:
        """Record that this rank receives a batch, as :meth:`ElasticSteps.receive`."""
        if not self.steps.num_since_exchange:
            self._step_start = self._group.num_exchanges
        self.steps.receive(weight, is_last=is_last)

    def publish_progress(self) -> None:
        """Record that the servers have applied the gradients of all batches that this rank has received.

        If this rank dies later, other ranks do not compute these batches again.
        """
        self._group.values.publish(f"{self._step_start} {self.steps.num_since_exchange}".encode())

    def settle(self, *, is_over: bool = False) -> bool:
        """Between two batches, end the leases of the items in committed steps.

        If servers update the parameters, and a step is complete or the epoch's items are over (`is_over`), the ranks
        first exchange their progress. Return whether they did.
        """
        limit, count = self.steps.batches_per_exchange, self.steps.num_since_exchange
        is_due = limit is not None and count >= (1 if is_over else limit)
        if is_due:
            applied = self._group.exchange(self._share_progress, is_step=True)
            self.steps.exchanged(self._group.contributors, is_complete=True, applied=applied)
        self.steps.settle()
        return is_due

    def _share_progress(self, group: Group) -> Mapping[int, int]:
        """Return the numbers of batches in this step that the servers have applied for dead ranks, by incarnation."""
        group.barrier()  # a rank that ends this function has evidence that all ranks have ended the step
        dead = sorted(self.steps.members.difference(self._group.ready))
        if not dead:
            return {}
        counts = None
        if group.rank == 0:
            values = [(self._group.values.published(member) or b"-1 0").split() for member in dead]
            counts = [int(count) if int(start) == self._step_start else 0 for start, count in values]
        return dict(zip(dead, group.broadcast_object(counts, root=0), strict=True))

    def admit_newcomers(self, epoch: int) -> bool:
        """Between two steps, let waiting processes join, and exclude a straggler, which then computes alone.

        Send a part of the training's state to processes that do not have it. Every rank must call this method before
        each batch of the training data. Return whether the quorum has changed.
        """
        if self._has_just_joined:
            self._has_just_joined = False
            return False
        # DistributedDataParallel changes its buckets after its first backward pass. All ranks must have done that pass.
        has_buckets = self.steps.has_exchanged or self.has_computed_alone
        if not self.steps.is_idle or not has_buckets:
            return False
        if not self._has_compared_names:
            self._strategy._ranks.agree(self._strategy.registered.names, describe_other_names)
            self._has_compared_names = True
        if self._group.straggler is not None and self._group.straggler == self._group.rank:
            self._pause()
            return True
        has_changed = self._group.admits_newcomers or self._group.straggler is not None
        if has_changed:
            self._group.admit(epoch)
        self._heal(is_urgent=False)
        return has_changed

    def _heal(self, *, is_urgent: bool) -> None:
        """Transfer the next part of the state to newcomers; if `is_urgent`, transfer everything."""
        if not self._group.has_newcomers:
            self._transfer = None
            return
        is_urgent |= self.steps.batches_per_exchange is not None  # the servers have the largest part of the state
        transfer = self._transfer = self._transfer or StateTransfer(self._strategy)
        may_share_part = self._group.heal(partial(transfer.share, is_urgent=is_urgent))
        transfer.load()
        if transfer.is_over:
            self._strategy.end_transfer()
        if may_share_part:
            transfer.share_part(self._group)
            # The first call of a compiled function is slow. Load the function before all ranks wait for it.
            threading.Thread(target=checksum.compile_kernels, daemon=True).start()
        if transfer.is_over:
            self._transfer = None

    def _pause(self) -> None:
        times, rank = self._group.step_times, self._group.rank
        assert times is not None
        own, others = _milliseconds(times.medians()[rank]), _milliseconds(times.others(rank))
        self._group.pause()
        self._paused_rank = rank
        _print(
            f"rank {rank} is left out, because its steps take {own}, more than {times.factor:g} times the other ranks' "
            f"{others}. It computes alone until it has recovered"
        )

    def may_join(self, loader: Loader, epoch: int) -> bool:
        """Return whether this process should try to join.

        The process must have computed a batch. A straggler must also have become fast enough.
        """
        if self._group.has_recovered:
            return self.has_computed_alone
        return self._group.values.is_marked(ENDED) or self._group.values.is_marked(self._epoch_key(loader, epoch + 1))

    def end_epoch(self, loader: Loader, epoch: int) -> None:
        """End the leases of an epoch. All ranks then have the training's state.

        If the ranks compare the times of their steps, rank 0 prints them.
        """
        self._heal(is_urgent=True)
        self.steps.end_epoch(loader)
        times = self._group.step_times
        if times is not None and self._group.rank == 0 and times.medians():
            shown = ", ".join(map(_milliseconds, times.medians()))
            shares = "; samples: " + ", ".join(map(str, self._group.shares)) if self._group.shares else ""
            _print(f"epoch {epoch}: computing time of a step, by rank: {shown}{shares}")


def _print(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)


def _milliseconds(time_s: float) -> str:
    return f"{1e3 * time_s:.3g} ms"
