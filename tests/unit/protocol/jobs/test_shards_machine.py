"""Leases with random losses of workers: at the end every shard is done, and no shard ever has two open leases."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.random_examples import num_examples
from tests.unit.protocol.jobs.shard_events import Done, Event, ShardCountFound, ShardWanted, Wait, WorkerLost, handle

from paceline.protocol.jobs.shards import Assignment, Exhausted, Granted, Shards

NUM_WORKERS = 3
workers = st.integers(0, NUM_WORKERS)  # one worker more than positions; it joins late
assignments: st.SearchStrategy[Assignment] = st.sampled_from(["first-come", "strided"])
Key = tuple[int, int, int]


class ShardsMachine(RuleBasedStateMachine):
    @initialize(
        sizes=st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=3),
        epochs=st.integers(1, 3),
        assignment=assignments,
    )
    def start(self, sizes: list[tuple[int, bool]], epochs: int, assignment: Assignment) -> None:
        self.sizes = [size for size, _ in sizes]
        self.known = [known for _, known in sizes]
        self.offsets = [sum(s for s, known in sizes[:i] if known) for i in range(len(sizes))]
        self.strided = assignment == "strided"
        self.epochs = epochs
        self.shards = Shards([s if known else None for s, known in sizes], epochs, assignment, NUM_WORKERS)
        self.open: dict[int, tuple[int, Key]] = {}
        self.past_end: dict[int, int] = {}  # leases of shards that do not exist → worker
        self.done: list[Key] = []
        self.back: set[Key] = set()
        self.lost: set[int] = set()
        self.waiting: set[int] = set()

    def apply(self, event: Event) -> None:
        for instruction in handle(self.shards, event):
            if isinstance(instruction, Granted):
                self.granted(instruction)
            elif isinstance(instruction, Wait):
                self.waiting.add(instruction.worker)
            else:
                assert isinstance(instruction, Exhausted)
                self.waiting.discard(instruction.worker)
                assert not self.open
                assert len(self.done) == self.epochs * sum(self.sizes)

    def granted(self, granted: Granted) -> None:
        worker, key = granted.worker, (granted.epoch, granted.file, granted.shard)
        self.waiting.discard(worker)
        assert key not in [other for _, other in self.open.values()], "two open leases of one shard"
        assert key not in self.done
        if self.back:
            assert key == min(self.back), "returned shards are leased first"
            self.back.remove(key)
        elif self.strided:
            owner = (self.offsets[granted.file] + granted.shard) % NUM_WORKERS
            assert owner == worker or owner in self.lost, "leased the shard of a living worker"
        if granted.shard >= self.sizes[granted.file]:
            assert not self.known[granted.file], "leased past a known end"
        self.open[granted.lease] = worker, key

    @rule(worker=workers)
    def lease(self, worker: int) -> None:
        self.lost.discard(worker)
        self.apply(ShardWanted(worker))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def work(self, data: st.DataObject) -> None:
        """A worker reads its shard, and reports it as done or reports the end of the file."""
        lease = data.draw(st.sampled_from(sorted(self.open)))
        self.read(lease)

    def read(self, lease: int) -> None:
        worker, key = self.open[lease]
        _, file, shard = key
        if shard >= self.sizes[file]:
            self.known[file] = True
            nonexistent = {n for n, (_, k) in self.open.items() if k[1] == file and k[2] >= self.sizes[file]}
            self.open = {n: held for n, held in self.open.items() if n not in nonexistent}
            self.back = {k for k in self.back if k[1] != file or k[2] < self.sizes[file]}
            self.apply(ShardCountFound(file, self.sizes[file]))
        else:
            del self.open[lease]
            self.done.append(key)
        self.apply(Done(worker, lease))

    @rule(worker=workers)
    def lose(self, worker: int) -> None:
        held = {lease: key for lease, (holder, key) in self.open.items() if holder == worker}
        self.open = {lease: held_ for lease, held_ in self.open.items() if lease not in held}
        self.back |= set(held.values())
        self.waiting.discard(worker)
        self.lost.add(worker)
        self.apply(WorkerLost(worker))
        for lease in held:
            self.apply(Done(worker, lease))  # a late report of the dead worker has no effect

    @invariant()
    def agrees(self) -> None:
        self.shards.validate()
        assert set(self.shards.waiting) == self.waiting
        assert len(set(self.done)) == len(self.done)
        total = self.epochs * sum(self.sizes) if all(self.known) else None
        assert self.shards.progress() == (len(self.done), total)

    def teardown(self) -> None:
        """If the workers come back and continue, all shards are finished, and all workers are notified."""
        if not hasattr(self, "shards"):
            return
        for _ in range(2 * (self.epochs + 1) * (sum(self.sizes) + len(self.sizes) + 1) * (NUM_WORKERS + 2)):
            for worker in range(NUM_WORKERS + 1):
                if worker not in self.waiting:
                    self.lease(worker)
            if not self.open:
                break
            self.read(min(self.open))
            self.shards.validate()
        every = [(e, f, s) for e in range(self.epochs) for f, size in enumerate(self.sizes) for s in range(size)]
        assert sorted(self.done) == every
        assert not self.waiting
        assert sorted(self.shards.done()) == every


TestShardsMachine = ShardsMachine.TestCase
TestShardsMachine.settings = num_examples(250, stateful_step_count=40)
