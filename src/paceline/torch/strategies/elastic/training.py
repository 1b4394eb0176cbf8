"""One rank's part in an elastic training: when it joins, which ranks take part, and which steps are committed."""

from __future__ import annotations

import sys

from paceline.collectives.elastic import ElasticGroup, load_kernels
from paceline.errors import GroupClosedError
from paceline.torch.strategies.base import Strategy
from paceline.torch.strategies.elastic.state import TransferredState
from paceline.torch.strategies.elastic.steps import ElasticSteps
from paceline.torch.strategies.loaders import Loader


class ElasticTraining:
    """The ranks of a training, its steps, and the transfer of the state to newcomers."""

    def __init__(self, strategy: Strategy, group: ElasticGroup, steps: ElasticSteps) -> None:
        self._strategy = strategy
        self._group = group
        self.steps = steps

    @property
    def has_joined(self) -> bool:
        """Whether this process takes part in the training."""
        return self._group.quorum > 0

    @property
    def quorum(self) -> int:
        """Number of the present set of ranks; it grows when ranks die or join."""
        return self._group.quorum

    @property
    def members(self) -> tuple[int, ...]:
        """The incarnations of the present ranks, in rank order."""
        return self._group.members

    def begin_epoch(self, loader: Loader, epoch: int) -> None:
        """Publish the epoch for processes that want to join."""
        if self._group.rank == 0 and epoch:
            self._group.mark(self._epoch_key(loader, epoch))

    def join(self, loader: Loader, epoch: int) -> bool:
        """Join the other ranks; return False if the other ranks are in a later epoch.

        Ends the process if the training has ended.
        """
        if self._group.is_marked(self._epoch_key(loader, epoch + 1)):
            return False
        load_kernels()
        try:
            if not self._group.enter(epoch):
                return False
        except GroupClosedError:
            print("paceline: the training ended before this rank could take part", file=sys.stderr)
            sys.exit(0)
        self._transfer_state()
        return True

    def _epoch_key(self, loader: Loader, epoch: int) -> str:
        return f"epoch {epoch} of loader {self._strategy.loaders.index(loader)}"

    def admit_newcomers(self, epoch: int) -> None:
        """Let processes join that wait, unless a step has begun; called before each batch of the training data."""
        if not self.steps.is_idle:
            return
        # More newcomers may be announced during a transfer. All ranks must admit them here, as the last newcomers do.
        while self._group.admits_newcomers or self._group.has_newcomers:
            if self._group.admits_newcomers:
                self._group.admit(epoch)
            if self._group.has_newcomers:
                self._transfer_state()

    def _transfer_state(self) -> None:
        state = TransferredState(self._strategy)
        is_needed = not self._group.has_state
        if self._group.transfer(state.share) and is_needed:
            state.load()
