"""The jobs of workers, their leases of shards, and their counters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from paceline.filters import Filter, parse_filters
from paceline.models.progressive import FirstPass
from paceline.models.proximal.solver import SolveTask
from paceline.protocol.jobs import ALL_DONE, NONE_FREE, Lease
from paceline.ps import Client, SchedulerLink, messages
from paceline.training.weighting import Weighting
from paceline.transport import register_type

FOREVER_S: Final = 365 * 86400.0
"""Timeout of a worker that waits for a shard or a job."""


class JobRates(msgspec.Struct, frozen=True, kw_only=True):
    """The learning rates' :class:`RatePlan`, as a part of a job."""

    schedule: str
    warmup: float
    most_passes: int
    num_examples: int
    """The number of examples in the data, possibly an estimate; 0: unknown."""


class WorkerTask(msgspec.Struct, frozen=True, kw_only=True):
    """A job for the workers of a cluster. `task` is ``train``, ``evaluate``, ``read-columns`` or ``solve-blocks``.

    `model` comes from :meth:`SparseModel.describe` and `dataset` from :meth:`Dataset.spec`. `update` is the rule of all
    tables without a rule of their own. `filters` and `pull_filters` (None: the same) are texts for
    :func:`paceline.filters.parse_filters`. A worker mixes the examples of `shards_at_once` shards. A job with `solve`
    solves for the weights by blocks of columns, after another job has read the columns.
    """

    task: str
    model: dict[str, Any]
    dataset: dict[str, Any]
    batch_size: int
    update: dict[str, Any]
    consistency: str
    weighting: Weighting = Weighting()
    shards_at_once: int = 1
    is_shuffled: bool = False
    epochs: int = 1
    reordered: tuple[int, ...] = ()
    """In these passes, the opposite of `is_shuffled` applies, because an earlier run started them in that order."""
    filters: str = ""
    pull_filters: str | None = None
    solve: SolveTask | None = None
    rates: JobRates | None = None

    def shuffles(self, epoch: int) -> bool:
        return (self.is_shuffled and epoch < self.epochs - 1) != (epoch in self.reordered)

    def filter_chains(self, *, exact: bool = False) -> tuple[Sequence[Filter], Sequence[Filter] | None]:
        """Return the filters of pushes and pulls. If `exact`, omit those that change values. Raises UsageError."""
        texts = (self.filters, self.pull_filters)
        pushed, pulled = (
            None
            if text is None
            else [kind for kind in parse_filters(text).filters if not exact or kind.preserves == "exact"]
            for text in texts
        )
        return pushed or [], pulled


encode = msgspec.json.encode


def decode(data: bytes) -> WorkerTask:
    return msgspec.json.decode(data, type=register_type(WorkerTask))


class WorkerLeases:
    """A worker's leases of a job's shards. The worker requests the next shard while it reads the current one."""

    def __init__(self, link: SchedulerLink, job: int) -> None:
        self._link = link
        self._job = job
        self._requested: Callable[[], Lease] | None = None
        self._ended: set[int] = set()

    def prefetch(self) -> None:
        if self._requested is None:
            self._requested = self._link.start(messages.TakeLease(job=self._job, wait=False), Lease)

    def next_nowait(self) -> Lease | None:
        """Return the next lease, or None if no shard is free now. After the last shard, the lease is ALL_DONE."""
        self.prefetch()
        assert self._requested is not None
        lease, self._requested = self._requested(), None
        return None if lease.lease == NONE_FREE else lease

    def wait_next(self) -> Lease:
        lease: Lease = self._link.call(messages.TakeLease(job=self._job, wait=True), Lease, timeout_s=FOREVER_S)
        return lease

    def until_done(self, before_waiting: Callable[[], None] = lambda: None) -> Iterator[Lease]:
        """Yield leases until all shards are done. Call `before_waiting` before each wait for a free shard."""
        while True:
            lease = self.next_nowait()
            if lease is None:
                before_waiting()
                lease = self.wait_next()
            if lease.lease == ALL_DONE:
                return
            self.prefetch()
            yield lease

    def read(self, file: int, num_shards: int | None) -> None:
        """Report a file's number of shards, because the scheduler would lease shards beyond the file's end."""
        if num_shards is not None and file not in self._ended:
            self._ended.add(file)
            self._link.notify(messages.FileEnded(job=self._job, file=file, num_shards=num_shards))

    def done(self, lease: Lease, progress: dict[str, float]) -> None:
        """Report a shard as done, after all its pushes are acknowledged."""
        self._link.notify(messages.LeaseDone(job=self._job, lease=lease.lease, progress=progress))


@dataclass
class WorkerCounters:
    """A worker's counters of one job. Heartbeats send them to the scheduler."""

    job: int
    examples: int = 0
    weight: float = 0.0
    held: int = 0
    """Number of examples that the worker holds in memory for the block solver."""
    loss: float = 0.0
    positives: int = 0
    bad_lines: int = 0
    first_pass: FirstPass = field(default_factory=FirstPass)
    start_bytes: tuple[int, int] = (0, 0)
    reported_s: float = field(default_factory=time.monotonic)

    def as_progress(self, client: Client) -> dict[str, float]:
        received, sent = client.byte_counts()
        return {
            "job": self.job,
            "examples": self.examples,
            "weight": self.weight,
            **({"held": self.held} if self.held else {}),
            "loss": self.loss,
            "positives": self.positives,
            "bad_lines": self.bad_lines,
            "bytes": received + sent - sum(self.start_bytes),
            **self.first_pass.counters,
        }
