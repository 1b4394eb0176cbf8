"""The rates of a training's tables, as its schedule has them change.

Workers change them with each minibatch, each by how far it is in its own shard; under sequential consistency the
driver does, between passes.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.data import Dataset
from paceline.data.streams import stat_file
from paceline.models.base import SparseModel
from paceline.protocol.jobs import Lease
from paceline.ps import RULES, SparseTable, UpdateRule, from_fields
from paceline.training.schedules import RatePlan, parse_schedule
from paceline.training.worker.jobs import JobRates, WorkerTask

_UNPACKED = 4  # bytes of text per byte of a packed file
_LEAST_CHANGE = 0.02  # of the rate: servers are told of no smaller one


class TableRates:
    """Changes the rates of those tables that have the training's update rule. Raises UsageError if it has no rate.

    `tables` are those of the model; `most` is how many passes the training has at most.
    """

    def __init__(
        self, tables: Sequence[SparseTable], model: SparseModel, rule: UpdateRule, plan: RatePlan, most: int
    ) -> None:
        plan.check(rule)
        self._tables = [handle for handle, table in zip(tables, model.tables, strict=True) if table.update is None]
        self._rule, self._plan, self._most = rule, plan, most
        self._share = 0.0

    def set_within(self, passes: float) -> None:
        """Have servers take the rate for so many passes that are done, parts of one included."""
        self._set(self._plan.share(passes, self._most))

    def set_before(self, number: int) -> None:
        """Have servers take one rate for the whole of a pass, whose number is from 1."""
        self._set(self._plan.share_of_pass(number, self._most))

    def reset(self) -> None:
        """Have servers take the whole rate again: with it a model is saved, and may be trained further."""
        self._share = 0.0
        self._set(1.0)

    def _set(self, share: float) -> None:
        if self._share and abs(share / self._share - 1) < _LEAST_CHANGE:
            return
        for table in self._tables:
            table.set_update(self._plan.rule(self._rule, share))
        self._share = share


class PassProgress:
    """How many passes over a data set are done, by how far a lease's shard is, where shards are read in their order.

    `num_examples` is how many the data set has, or an estimate; 0 where that is unknown: then shards count as read to
    their middle. Files count by their bytes. Of a packed file in its first pass the end is unknown: it is taken to hold
    four times its bytes.
    """

    def __init__(self, dataset: Dataset, num_examples: int) -> None:
        self._sizes = [stat_file(file).num_bytes for file in dataset.files]
        self._total = max(sum(self._sizes), 1)
        self._shard_bytes = dataset.shard_bytes
        self._num_examples = num_examples

    def passes(self, lease: Lease, num_read: int | None = None) -> float:
        """Return the passes done when so many examples of the lease's shard are read (None: half of them)."""
        size = self._sizes[lease.file]
        num_shards = lease.num_shards or max(_UNPACKED * size / self._shard_bytes, 1)
        within = 0.5
        if num_read is not None and self._num_examples:
            within = min(num_read * num_shards * self._total / (self._num_examples * max(size, 1)), 1.0)
        done = min((lease.shard + within) / num_shards, 1.0) * size
        return lease.epoch + (sum(self._sizes[: lease.file]) + done) / self._total


class WorkerRates:
    """Changes rates as one worker gets on."""

    @classmethod
    def open(
        cls, job: WorkerTask, rates: JobRates, model: SparseModel, dataset: Dataset, tables: Sequence[SparseTable]
    ) -> WorkerRates:
        """Return those of a job; `tables` are the model's."""
        plan = RatePlan(schedule=parse_schedule(rates.schedule), warmup=rates.warmup)
        changed = TableRates(tables, model, from_fields(RULES, job.update), plan, rates.most_passes)
        return cls(changed, PassProgress(dataset, rates.num_examples))

    def __init__(self, rates: TableRates, progress: PassProgress) -> None:
        self._rates = rates
        self._progress = progress

    def set_within(self, lease: Lease, num_read: int | None = None) -> None:
        """Have servers take the rate that belongs to where the worker is; arguments as PassProgress.passes has them."""
        self._rates.set_within(self._progress.passes(lease, num_read))
