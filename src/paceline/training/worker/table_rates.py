"""Change the learning rates of a training's tables by its schedule.

Each worker sets the rates before its minibatches, according to its position in the data. Under sequential consistency
the driver sets the rates, between passes.
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
_LEAST_CHANGE = 0.02  # as a fraction of the rate; smaller changes are not sent to the servers


class TableRates:
    """Sets the rates of tables with the training's rule. Raises UsageError if the rule has no rate."""

    def __init__(
        self, tables: Sequence[SparseTable], model: SparseModel, rule: UpdateRule, plan: RatePlan, most: int
    ) -> None:
        plan.check(rule)
        self._tables = [handle for handle, table in zip(tables, model.tables, strict=True) if table.update is None]
        self._rule, self._plan, self._most = rule, plan, most
        self._share = 0.0

    def set_within(self, passes: float) -> None:
        """Set the rate after this number of passes, which may be a fraction."""
        self._set(self._plan.share(passes, self._most))

    def set_before(self, number: int) -> None:
        self._set(self._plan.share_of_pass(number, self._most))

    def reset(self) -> None:
        """Restore the full rate, so that a training can continue from the saved model."""
        self._share = 0.0
        self._set(1.0)

    def _set(self, share: float) -> None:
        if self._share and abs(share / self._share - 1) < _LEAST_CHANGE:
            return
        for table in self._tables:
            table.set_update(self._plan.rule(self._rule, share))
        self._share = share


class WorkerRates:
    """Sets `rates` by one worker's progress: the number of finished passes, given its position in a shard.

    `num_examples` may be an estimate. If it is 0 (unknown), half of the shard is assumed to be read. Files are weighted
    by their bytes. In the first pass, the number of shards of a packed file is computed from four times its bytes,
    because its unpacked size is unknown.
    """

    @classmethod
    def open(
        cls, job: WorkerTask, rates: JobRates, model: SparseModel, dataset: Dataset, tables: Sequence[SparseTable]
    ) -> WorkerRates:
        plan = RatePlan(schedule=parse_schedule(rates.schedule), warmup=rates.warmup)
        changed = TableRates(tables, model, from_fields(RULES, job.update), plan, rates.most_passes)
        return cls(changed, dataset, rates.num_examples)

    def __init__(self, rates: TableRates, dataset: Dataset, num_examples: int) -> None:
        self._rates = rates
        self._sizes = [stat_file(file).num_bytes for file in dataset.files]
        self._total = max(sum(self._sizes), 1)
        self._shard_bytes = dataset.shard_bytes
        self._num_examples = num_examples

    def set_within(self, lease: Lease, num_read: int | None = None) -> None:
        self._rates.set_within(self.passes(lease, num_read))

    def passes(self, lease: Lease, num_read: int | None = None) -> float:
        """Return the finished passes after `num_read` examples of the lease's shard (None: half of the shard)."""
        size = self._sizes[lease.file]
        num_shards = lease.num_shards or max(_UNPACKED * size / self._shard_bytes, 1)
        within = 0.5
        if num_read is not None and self._num_examples:
            within = min(num_read * num_shards * self._total / (self._num_examples * max(size, 1)), 1.0)
        done = min((lease.shard + within) / num_shards, 1.0) * size
        return lease.epoch + (sum(self._sizes[: lease.file]) + done) / self._total
