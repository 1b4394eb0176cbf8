"""Write checkpoints at regular times during a training. After a restart of all ranks, continue from the last one."""

from __future__ import annotations

import atexit
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from paceline.errors import UsageError
from paceline.storage.model_directory import read_model

if TYPE_CHECKING:
    from paceline.torch.strategies.base import Strategy

_CHECK_EVERY: Final = 8
"""Every this many batches, the ranks decide together whether a snapshot is due."""


class Snapshots:
    """Writes and loads the snapshots of one training loop, in one directory. All ranks must make the same calls.

    A snapshot is a checkpoint of :meth:`Strategy.save <paceline.torch.strategies.base.Strategy.save>`. After a restart
    the script runs from its beginning. In each epoch before the snapshot's epoch, the loop gets one batch, so that its
    variables have values. Loading the snapshot then replaces the effects of these batches.
    """

    def __init__(self, directory: str | os.PathLike[str], every_s: float) -> None:
        self.directory = Path(directory).absolute()  # a script may change the current folder later
        self._every_s = every_s
        self._saved_at_s = time.monotonic()
        self._is_first = True
        self._epoch: int | None = None
        """The snapshot's epoch, until the snapshot is loaded; None without a snapshot."""
        self.is_repeating = False
        """Whether the loop is in an epoch before the snapshot's epoch. In such an epoch, ranks must not write files."""

    def resume(self, strategy: Strategy, epoch: int) -> bool:
        """Load the snapshot if it was written in this `epoch`. Return whether it was written in a later epoch.

        Raises UsageError for a training with several loaders, and the errors of ``Strategy.load``.
        """
        if self._is_first:
            self._is_first = False
            self._epoch = self._find(strategy)
        if self._epoch is None:
            return False
        self.is_repeating = epoch < self._epoch
        if epoch == self._epoch:
            strategy.load(self.directory)
        if not self.is_repeating:
            self._epoch = None
        return self.is_repeating

    def disable_resume(self) -> None:
        """Prevent loading a snapshot, because this process receives its state from other ranks."""
        self._is_first = False

    def _find(self, strategy: Strategy) -> int | None:
        """Return the epoch of the newest snapshot; None without a snapshot."""
        if len(strategy.loaders) > 1:
            raise UsageError("snapshots of a training with several training loaders are not supported")
        if strategy.takes_uneven:
            raise UsageError("snapshots of a training with join=True are not supported. Leave join out")
        epoch: int | None = None
        if strategy.rank == 0 and self.directory.exists():
            loaders = read_model(self.directory).manifest.model.get("loaders")
            epoch = loaders[0]["epoch"] if loaders else 0  # load() raises an error for a model of another kind
            text = f"paceline: the training continues in epoch {epoch}, from the snapshot in {self.directory}"
            print(text, file=sys.stderr, flush=True)
            atexit.register(self._check_end, epoch)
        found: int | None = strategy._ranks.exchange(epoch)[0]
        return found

    def _check_end(self, epoch: int) -> None:
        """At the end of the process, warn if the training has not reached the snapshot's epoch."""
        if self.is_repeating:
            text = (
                f"paceline: the script ended before epoch {epoch} of the snapshot in {self.directory}, so it trained "
                "and saved nothing. Train for more epochs, or remove the directory"
            )
            print(text, file=sys.stderr, flush=True)

    def save_if_due(self, strategy: Strategy, num_batches: int) -> None:
        """Between two batches, write a snapshot if it is due. `num_batches` is equal on all ranks."""
        if num_batches % _CHECK_EVERY:
            return
        is_due = time.monotonic() - self._saved_at_s >= self._every_s
        if strategy.reduce(float(is_due), "max"):
            strategy.save(self.directory)
            self._saved_at_s = time.monotonic()
