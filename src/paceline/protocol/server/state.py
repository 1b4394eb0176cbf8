"""The state of one server's core that its runtime reads."""

from __future__ import annotations

from paceline.protocol import replication
from paceline.protocol.buckets import Buckets
from paceline.protocol.consistency import Consistency
from paceline.protocol.server.events import Clocks, Instruction, ViewChanged, WaitReasons
from paceline.protocol.server.progress import Progress
from paceline.protocol.server.waiting import EarlyRequests


class ServerState:
    """The parts of a server's core. A runtime uses only its properties and methods, not the parts."""

    def __init__(
        self, consistency: Consistency, *, expected_workers: int = 1, replicas: int = 0, min_replicas: int = 0
    ) -> None:
        self._replicas = replicas
        self._min_replicas = min_replicas
        self._out: list[Instruction] = []
        self.progress = Progress(consistency, expected_workers, self._out)
        self.replication = self.progress.replication
        self.workers = self.progress.workers
        self.reads = self.progress.reads
        self.early = EarlyRequests()
        self.epoch = -1
        self.has_copies = replicas > 0
        """Whether other servers have or receive replicas. If not, a push counts for all buckets led here."""
        self._me = 0
        self._view_before: ViewChanged | None = None  # a view that came before the welcome

    @property
    def consistency(self) -> Consistency:
        """The consistency of the cluster."""
        return self.workers.gate.consistency

    @property
    def version(self) -> int:
        """The version of the view; 0 before the first."""
        return self.replication.version

    @property
    def primary(self) -> Buckets:
        """The buckets that this server leads."""
        return self.replication.primary

    @property
    def held(self) -> Buckets:
        """The buckets that this server has completely."""
        return self.replication.held

    @property
    def filling(self) -> frozenset[int]:
        """The servers that this one must send buckets to."""
        return self.replication.filling

    @property
    def durable(self) -> int:
        """The number of iterations that are complete and durable; 0 unless consistency is sequential."""
        iterations = self.progress.iterations
        return 0 if iterations is None else iterations.durable

    @property
    def latest_clock(self) -> int:
        """The highest clock of a worker."""
        return max(self.workers.gate.clocks.values(), default=0)

    @property
    def num_waiting(self) -> int:
        """The number of blocked reads, and of pushes with too few replicas."""
        return self.progress.num_waiting

    @property
    def early_requests(self) -> list[object]:
        """The tokens of early requests."""
        return list(self.early)

    @property
    def pending_pushes(self) -> set[object]:
        """The tokens of pushes that wait for successors."""
        return self.replication.pushes.waiting

    def forwarded(self, worker: int, sequence: int) -> list[tuple[object, Buckets]]:
        """Return the tokens of a push that a successor may lack, with their buckets, the newest first."""
        return self.replication.pushes.forwarded(worker, sequence)

    def shortage(self, buckets: Buckets) -> tuple[int, int] | None:
        """Return a bucket with too few replicas to acknowledge a push, and their number; else None."""
        return self.replication.place.shortage(buckets)

    def is_readable(self, clock: int) -> bool:
        """Return whether values of iteration `clock` may be read."""
        return self.workers.gate.is_open(clock) and self.progress.updates.may_read(clock)

    def wait_reasons(self, clock: int) -> WaitReasons:
        """Return the reasons why a read of iteration `clock` waits."""
        gate, updates, ranks = self.workers.gate, self.progress.updates, self.workers.ranks
        late = [ranks.get(worker, worker) for worker in gate.lagging(clock)]
        late += [ranks[worker] for worker in updates.pending_workers if worker in ranks]
        return WaitReasons(late, gate.num_missing, not late and gate.is_open(clock) and not updates.may_read(clock))

    def takes_part(self, worker: int) -> bool:
        """Return whether a worker currently takes part in the iterations."""
        return worker in self.workers.counted

    def is_excluded(self, incarnation: int) -> bool:
        """Return whether a process has left or died, by its incarnation."""
        return self.workers.is_excluded(incarnation)

    def is_ahead(self, worker: int) -> bool:
        """Return whether a worker is in a later iteration than another one."""
        gate = self.workers.gate
        return gate.clocks.get(worker, 0) > gate.minimum

    def rank_of(self, worker: int) -> int:
        """Return the rank with which a worker joined the iterations."""
        return self.workers.ranks[worker]

    def known_clocks(self) -> Clocks:
        """Return the workers' clocks, for a server that is being filled."""
        return self.workers.known_clocks()

    def next_fill(self, target: int) -> tuple[int, int, replication.FilterState] | None:
        """Return the next bucket to send to `target`: see :meth:`Replication.next_fill`."""
        return self.replication.next_fill(target)

    def checkable(self, target: int) -> Buckets:
        """Return the buckets that `target` can compare with its own."""
        return self.replication.checkable(target)

    def is_comparable(self, source: int, version: int, bucket: int) -> bool:
        """Return whether a bucket can be compared with the bucket of `source`, sent in the view of `version`."""
        return self.replication.is_comparable(source, version, bucket)

    def applied_to(self, bucket: int) -> tuple[tuple[int, int], ...]:
        """Return the last push of each incarnation that was applied to a bucket."""
        return self.replication.applied_to(bucket)

    def validate(self) -> None:
        """Assert the invariants."""
        self.progress.validate()
