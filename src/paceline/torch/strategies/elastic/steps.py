"""Record one rank's current step: its samples, the leases (items given to ranks), and whether it is complete."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

from paceline.protocol.leases import EpochLeases


class ElasticSteps:
    """Records the steps of a training. A step has one or more batches and ends with an exchange of gradients.

    `global_batch` is the constant number of samples in a step; None if a step has one batch of each rank.

    If servers update the parameters, ranks do not exchange gradients. They exchange only their progress, after
    `batches_per_exchange` batches of each rank. A step then has these batches.
    """

    def __init__(self, global_batch: int | None, batches_per_exchange: int | None = None) -> None:
        self.global_batch = global_batch
        self.batches_per_exchange = batches_per_exchange
        self.num_batches = 0
        """Number of batches that this rank has received."""
        self.is_first_batch = True
        """Whether the current batch is the first batch of its step."""
        self.is_last_batch = True
        """Whether the ranks exchange gradients after this batch; always True without a global batch."""
        self.is_complete = True
        """Whether the step is complete, so that the optimizer may use the gradients."""
        self.has_exchanged = False
        """Whether the ranks have ever exchanged gradients."""
        self.num_since_exchange = 0
        """Number of batches that this rank has received since the last exchange."""
        self._weight = 1.0
        self._is_weight_taken = True
        self._applied: Mapping[int, int] = {}
        """The number of batches, since the last exchange, whose gradients dead ranks had sent, by incarnation."""
        self._leases: dict[Hashable, EpochLeases] = {}
        """The leases of the running epochs, by loader."""
        self._contributors: set[int] | None = None
        """The ranks (incarnations) that took part in every exchange since the last :meth:`settle`; None without one."""

    def begin_epoch(self, loader: Hashable, leases: EpochLeases) -> None:
        self._leases[loader] = leases

    def end_epoch(self, loader: Hashable) -> None:
        self._leases.pop(loader, None)

    @property
    def is_idle(self) -> bool:
        """Whether this rank is between two steps."""
        return all(leases.is_idle for leases in self._leases.values())

    def receive(self, weight: float, *, is_last: bool) -> None:
        """Record that this rank receives a batch. `weight` is the batch's number of samples divided by the batch size.

        Call this method before the lease of the batch's items begins.
        """
        self.is_first_batch = self.is_idle
        if self._is_weight_taken:
            self._weight, self._is_weight_taken = 0.0, False
        self._weight += weight
        self.num_batches += 1
        self.num_since_exchange += 1
        if self.global_batch is not None:
            self.is_last_batch, self.is_complete = is_last, False

    @property
    def has_samples(self) -> bool:
        """Whether this rank's last batch has samples; False for another rank's item at the end of an epoch."""
        return self._weight > 0

    def take_weight(self) -> float:
        """Return the total weight of this rank's batches since the last call."""
        self._is_weight_taken = True
        return self._weight

    def lacks(self, contributors: Collection[int]) -> bool:
        """Return whether samples of the global batch belong to ranks that are not among the contributors."""
        return self.global_batch is not None and any(leases.lacks(contributors) for leases in self._leases.values())

    @property
    def members(self) -> set[int]:
        """The members with items in the current step."""
        return {member for leases in self._leases.values() for member in leases.members}

    def exchanged(
        self, contributors: Collection[int], *, is_complete: bool, applied: Mapping[int, int] | None = None
    ) -> None:
        """Record an exchange of gradients, or of progress, among the contributors.

        `applied` has the numbers of batches, since the last exchange, that servers have applied for dead ranks.
        """
        self.is_complete, self.has_exchanged = is_complete, True
        self.num_since_exchange, self._applied = 0, applied or {}
        self._contributors = set(contributors).intersection(self._contributors or contributors)

    def settle(self) -> None:
        """After an exchange, end the leases of ranks that did not contribute. After a complete step, end all leases."""
        if self._contributors is None:
            return
        contributors, self._contributors = self._contributors, None
        for leases in self._leases.values():
            if self.is_complete:
                leases.commit(contributors, self._applied)
            else:
                leases.keep(contributors)
