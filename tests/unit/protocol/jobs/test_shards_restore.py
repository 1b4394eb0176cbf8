"""The pool of shards restored from the workers' records: no shard is lost or done twice."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.random_examples import num_examples
from tests.unit.protocol.jobs.shard_events import Done, ShardCountFound, ShardWanted, WorkerLost, handle

from paceline.protocol.jobs.shards import Assignment, Exhausted, Granted, Shards

NUM_WORKERS = 3
Key = tuple[int, int, int]
workers = st.integers(0, NUM_WORKERS - 1)
assignments: st.SearchStrategy[Assignment] = st.sampled_from(["first-come", "strided"])


def key_of(granted: Granted) -> Key:
    return granted.epoch, granted.file, granted.shard


def test_a_restored_pool_continues_at_the_position() -> None:
    held = [Granted(1, 7, 0, 0, 2), Granted(2, 9, 0, 0, 4)]
    shards = Shards.restore([5], done=[(0, 0, 0), (0, 0, 3), (0, 0, 0)], held=held, last_lease=30)
    shards.validate()
    assert shards.progress() == (2, 5)
    assert shards.shard_of(7) == (0, 0, 2)
    (granted,) = handle(shards, ShardWanted(0))
    assert isinstance(granted, Granted)
    assert granted.shard == 1
    assert granted.lease > 30
    assert handle(shards, Done(1, 7)) == []
    assert handle(shards, Done(1, 7)) == []  # a repeated record has no effect
    assert handle(shards, Done(0, 12)) == []  # a lease without a recorded holder
    assert shards.progress() == (3, 5)
    handle(shards, WorkerLost(2))
    (again,) = handle(shards, ShardWanted(0))
    assert isinstance(again, Granted)
    assert again.shard == 4


def test_restored_records_may_overlap_and_exceed_the_end() -> None:
    held = [Granted(0, 3, 0, 0, 1), Granted(1, 5, 0, 0, 1), Granted(1, 6, 0, 0, 0), Granted(2, 8, 0, 0, 9)]
    shards = Shards.restore([2], done=[(0, 0, 0), (0, 0, 7), (1, 0, 0), (0, 1, 0)], held=held)
    shards.validate()
    assert shards.progress() == (1, 2)
    assert [shards.shard_of(lease) for lease in (3, 5, 6, 8)] == [None, (0, 0, 1), None, None]
    assert handle(shards, Done(1, 5)) == []
    assert handle(shards, ShardWanted(0)) == [Exhausted(0)]


class RestartMachine(RuleBasedStateMachine):
    """Workers record leases and finished shards. The pool dies and is restored."""

    @initialize(
        sizes=st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=3),
        epochs=st.integers(1, 3),
        assignment=assignments,
    )
    def start(self, sizes: list[tuple[int, bool]], epochs: int, assignment: Assignment) -> None:
        self.real = [size for size, _ in sizes]
        self.sizes: list[int | None] = [size if known else None for size, known in sizes]
        self.epochs = epochs
        self.assignment: Assignment = assignment
        self.shards = Shards(self.sizes, epochs, assignment, NUM_WORKERS)
        self.held: dict[int, dict[int, Granted]] = {worker: {} for worker in range(NUM_WORKERS)}
        self.known: dict[int, set[Key]] = {worker: set() for worker in range(NUM_WORKERS)}
        self.reports: list[tuple[int, int]] = []
        self.last_lease = -1
        self.counted: list[Key] = []
        """Shards that a worker has done, if a living member has a record."""

    def apply(self, event: ShardWanted | Done | WorkerLost | ShardCountFound, *, is_delivered: bool = True) -> None:
        for instruction in handle(self.shards, event):
            if isinstance(instruction, Granted) and is_delivered:
                every = [key_of(lease) for leases in self.held.values() for lease in leases.values()]
                assert key_of(instruction) not in every, "two leases of one shard"
                assert key_of(instruction) not in self.counted, "a shard that is done was leased again"
                assert instruction.lease not in [number for _, number in self.reports], "the number of a former lease"
                self.held[instruction.worker][instruction.lease] = instruction
                self.last_lease = max(self.last_lease, instruction.lease)

    @rule(worker=workers)
    def lease(self, worker: int) -> None:
        self.apply(ShardWanted(worker))

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), processed=st.booleans(), is_reported=st.booleans())
    def work(self, data: st.DataObject, processed: bool, is_reported: bool) -> None:
        """A worker finishes a shard. The pool may die before it receives or forwards the report."""
        worker = data.draw(st.sampled_from(sorted(w for w, leases in self.held.items() if leases)))
        lease = data.draw(st.sampled_from(sorted(self.held[worker])))
        self.finish(worker, lease, processed=processed, is_reported=is_reported)
        if not (processed and is_reported):
            self.die(set())

    def finish(self, worker: int, lease: int, *, processed: bool = True, is_reported: bool = True) -> None:
        key = key_of(self.held[worker].pop(lease))
        self.reports.append((worker, lease))
        _, file, shard = key
        if shard >= self.real[file]:
            if self.sizes[file] is None:
                self.sizes[file] = self.real[file]
                for leases in self.held.values():
                    for number in [n for n, lease in leases.items() if self.is_past(key_of(lease))]:
                        leases.pop(number)
            self.apply(ShardCountFound(file, self.real[file]))
            self.apply(Done(worker, lease))
            return
        self.counted.append(key)
        self.known[worker].add(key)
        if processed:
            self.apply(Done(worker, lease), is_delivered=is_reported)
            if is_reported:
                for account in self.known.values():
                    account.add(key)

    def is_past(self, key: Key) -> bool:
        size = self.sizes[key[1]]
        return size is not None and key[2] >= size

    @rule(worker=workers, is_undelivered=st.booleans())
    def lose(self, worker: int, is_undelivered: bool) -> None:
        """A worker dies. Perhaps only the pool has its records."""
        late = list(self.held[worker])
        self.held[worker] = {}
        self.apply(WorkerLost(worker))
        for number in late:
            self.apply(Done(worker, number))
        if is_undelivered:  # the next pool receives no earlier events; the other workers have recorded them
            self.known[worker] = set()

    @rule(lost=st.sets(workers, max_size=NUM_WORKERS - 1), repeated=st.booleans(), ungranted=st.sets(workers))
    def restart(self, lost: set[int], repeated: bool, ungranted: set[int]) -> None:
        for worker in sorted(ungranted):
            self.apply(ShardWanted(worker), is_delivered=False)  # the lease was granted, but the answer was lost
        self.die(lost)
        if repeated:
            for worker, number in self.reports:
                self.apply(Done(worker, number))  # messages from before the restart are repeated

    def die(self, lost: set[int]) -> None:
        for worker in lost:
            self.held[worker], self.known[worker] = {}, set()
        present = set(range(NUM_WORKERS)) - lost
        union = set().union(*(self.known[worker] for worker in present))
        self.counted = [key for key in self.counted if key in union]
        self.shards = Shards.restore(
            self.sizes,
            self.epochs,
            self.assignment,
            NUM_WORKERS,
            done=[key for worker in present for key in sorted(self.known[worker])],
            held=[lease for worker in present for lease in self.held[worker].values()],
            last_lease=self.last_lease,
        )
        for worker in lost:
            self.apply(WorkerLost(worker))

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "shards"):
            self.shards.validate()
            assert len(set(self.counted)) == len(self.counted), "a shard was done twice"
            assert self.shards.progress()[0] == len(self.counted)

    def teardown(self) -> None:
        """If the workers continue, every shard is done once."""
        if not hasattr(self, "shards"):
            return
        for _ in range(4 * (self.epochs + 1) * (sum(self.real) + len(self.real) + 1)):
            for worker in range(NUM_WORKERS):
                if worker not in self.shards.waiting:
                    self.lease(worker)
            for worker in range(NUM_WORKERS):
                for lease in list(self.held[worker]):
                    if lease in self.held[worker]:
                        self.finish(worker, lease)
                        self.agrees()
        every = [(e, f, s) for e in range(self.epochs) for f, size in enumerate(self.real) for s in range(size)]
        assert sorted(self.counted) == every


TestRestartMachine = RestartMachine.TestCase
TestRestartMachine.settings = num_examples(200, stateful_step_count=30)
