"""The jobs that workers understand: train on leased shards, predict them, or solve by blocks of columns.

And a worker's side of the leases of their shards, and of the counters of a job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from paceline.filters import Filter, parse_filters
from paceline.models.progressive import FirstPass
from paceline.models.proximal.solver import SolveTask
from paceline.protocol.jobs import NONE_FREE, Lease
from paceline.ps import Client, SchedulerLink, messages
from paceline.training.weighting import Weighting
from paceline.transport import register_type

FOREVER_S: Final = 365 * 86400.0
"""How long a worker waits for a shard, or for a job."""


class JobRates(msgspec.Struct, frozen=True, kw_only=True):
    """How workers change the rates of the model's tables: the texts and numbers of a :class:`RatePlan`."""

    schedule: str
    warmup: float
    most_passes: int
    num_examples: int
    """Of the data, or an estimate; 0: unknown."""


class WorkerTask(msgspec.Struct, frozen=True, kw_only=True):
    """A job for the workers of a cluster. `task` is ``train``, ``evaluate``, ``read-columns`` or ``solve-blocks``.

    `model` is what :meth:`SparseModel.describe` returned, `dataset` a :meth:`Dataset.spec`, `update` the rule of those
    tables for which the model has none of its own. `filters` and `pull_filters` (None: the same) are texts of
    :func:`paceline.filters.parse_filters`. A worker mixes the examples of `shards_at_once` shards.
    `solve` is of a job that solves by blocks, and follows one that reads columns.
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
    """Whether examples come in random order."""
    epochs: int = 1
    """How often the whole training reads the data."""
    reordered: tuple[int, ...] = ()
    """Passes in the opposite order, because an earlier run began them with other options."""
    filters: str = ""
    pull_filters: str | None = None
    solve: SolveTask | None = None
    rates: JobRates | None = None
    """None: rates stay as they are."""

    def shuffles(self, epoch: int) -> bool:
        """Return whether a pass, from 0 up, is shuffled."""
        return (self.is_shuffled and epoch < self.epochs - 1) != (epoch in self.reordered)

    def filter_chains(self, *, exact: bool = False) -> tuple[Sequence[Filter], Sequence[Filter] | None]:
        """Return the filters, and those of what is pulled; with `exact`, those that change nothing.

        Raises UsageError if there are none of these names.
        """
        texts = (self.filters, self.pull_filters)
        pushed, pulled = (
            None
            if text is None
            else [each for each in parse_filters(text).filters if not exact or each.preserves == "exact"]
            for text in texts
        )
        return pushed or [], pulled


encode = msgspec.json.encode


def decode(data: bytes) -> WorkerTask:
    """Return the job that :data:`encode` wrote."""
    return msgspec.json.decode(data, type=register_type(WorkerTask))


class WorkerLeases:
    """The shards of a job that a worker gets. The next one is asked for while this one is read."""

    def __init__(self, link: SchedulerLink, job: int) -> None:
        self._link = link
        self._job = job
        self._asked: Callable[[], Lease] | None = None
        self._ended: set[int] = set()

    def prefetch(self) -> None:
        """Ask for the next shard, without waiting for the answer."""
        if self._asked is None:
            self._asked = self._link.start(messages.TakeLease(job=self._job, wait=False), Lease)

    def next_nowait(self) -> Lease | None:
        """Return the next lease (its number is ALL_DONE if there is none any more), or None if there is none now."""
        self.prefetch()
        assert self._asked is not None
        lease, self._asked = self._asked(), None
        return None if lease.lease == NONE_FREE else lease

    def wait_next(self) -> Lease:
        """Return the next lease when there is one; one that somebody else holds may come back."""
        lease: Lease = self._link.call(messages.TakeLease(job=self._job, wait=True), Lease, timeout_s=FOREVER_S)
        return lease

    def read(self, file: int, num_shards: int | None) -> None:
        """Report the number of a file's shards, if known; at once, or shards behind its end are leased for ever."""
        if num_shards is not None and file not in self._ended:
            self._ended.add(file)
            self._link.tell(messages.FileEnded(job=self._job, file=file, num_shards=num_shards))

    def done(self, lease: Lease, progress: dict[str, float]) -> None:
        """Report a shard, all of whose pushes are acknowledged."""
        self._link.tell(messages.LeaseDone(job=self._job, lease=lease.lease, progress=progress))


@dataclass
class WorkerCounters:
    """What a worker has done in one job; it goes to the scheduler with the heartbeats."""

    job: int
    examples: int = 0
    weight: float = 0.0
    """How often examples count, summed."""
    held: int = 0
    """Examples that are kept in memory, for the solver by blocks."""
    loss: float = 0.0
    positives: int = 0
    bad_lines: int = 0
    first_pass: FirstPass = field(default_factory=FirstPass)
    start_bytes: tuple[int, int] = (0, 0)
    told: float = field(default_factory=time.monotonic)

    def as_progress(self, client: Client) -> dict[str, float]:
        """Return them by name, as the scheduler adds them up."""
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
