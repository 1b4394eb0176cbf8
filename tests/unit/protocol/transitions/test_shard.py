"""Check that the pool makes exactly the transitions of the state table of shards."""

from __future__ import annotations

from random import Random

from tests.unit.protocol.jobs.shard_events import Done, Event, ShardCountFound, ShardWanted, WorkerLost, handle

from paceline.protocol.jobs import SHARD
from paceline.protocol.jobs.shards import Granted, Shards
from paceline.protocol.transitions import OUTSIDE

from .watching import Sight, Watch

Key = tuple[int, int, int]
KEYS: list[Key] = [(epoch, file, shard) for epoch in range(2) for file in range(2) for shard in range(5)]

NAMES = {ShardWanted: "want", Done: "finish", WorkerLost: "worker_lost", ShardCountFound: "file_ended"}


class Run:
    """Several successive pools for two files that are read twice. The size of the second file is unknown at first."""

    def __init__(self, random: Random, watch: Watch) -> None:
        self.random, self.watch = random, watch
        self.strided = random.choice([True, False])
        self.granted: list[Granted] = []
        self.leased: set[Key] = set()  # leases of this pool
        self.shards = Shards([3, None], 2, "strided" if self.strided else "first-come", 2)
        for after in self.sights().values():
            self.watch.saw((OUTSIDE,), "Shards", after)

    def sights(self) -> dict[Key, Sight]:
        sizes = self.shards.sizes
        found: dict[Key, Sight] = {key: ("returned" if key in self.leased else "free",) for key in KEYS}
        found.update(dict.fromkeys(self.shards.done(), ("done",)))
        for grant in self.granted:
            key = self.shards.shard_of(grant.lease)
            if key is not None:
                found[key] = "open", grant.lease, grant.worker
        return {key: found[key] if key[2] < (sizes[key[1]] or 5) else (OUTSIDE,) for key in KEYS}

    def step(self) -> None:
        """Execute a random action, and record the new state of every shard."""
        if self.random.random() < 0.04:
            self.restart()
            return
        before, event = self.sights(), self.event()
        granted = [grant for grant in handle(self.shards, event) if isinstance(grant, Granted)]
        self.granted += granted
        grants = {(grant.epoch, grant.file, grant.shard): grant for grant in granted}
        self.leased.update(grants)
        for key, after in self.sights().items():
            former = before[key]
            if key in grants:
                if former[0] == "open":  # the shard was returned and immediately leased to a waiting worker
                    self.watch.saw(former, NAMES[type(event)], ("returned",))
                    former = ("returned",)
                # The event may have enabled a reply to an earlier request.
                self.watch.saw(former, "want", after, grants[key])
            else:
                self.watch.saw(former, NAMES[type(event)], after)

    def event(self) -> Event:
        if self.shards.sizes[1] is None and self.random.random() < 0.05:
            return ShardCountFound(1, self.random.choice([1, 3]))
        worker = self.random.randrange(3)
        events: list[Event] = [ShardWanted(worker), ShardWanted(worker), WorkerLost(worker)]
        if self.granted:
            grant = self.random.choice(self.granted[-4:])
            if self.shards.shard_of(grant.lease) is not None:
                events += [Done(grant.worker, grant.lease)] * 2
        return self.random.choice(events)

    def restart(self) -> None:
        """A new pool receives the finished shards, and some leases."""
        done, sizes = list(self.shards.done()), self.shards.sizes
        self.granted = [grant for grant in self.granted if self.random.random() < 0.8]
        self.shards = Shards.restore(
            sizes,
            2,
            "strided" if self.strided else "first-come",
            2,
            done=done,
            held=[grant for grant in self.granted if self.shards.shard_of(grant.lease) is not None],
            last_lease=max((grant.lease for grant in self.granted), default=-1),
        )
        held = (self.shards.shard_of(grant.lease) for grant in self.granted)
        self.leased = {key for key in held if key is not None}
        for after in self.sights().values():
            if after != (OUTSIDE,):
                self.watch.saw((OUTSIDE,), "restore", after)


def test_the_pool_follows_the_table() -> None:
    watch, random = Watch(SHARD), Random(4)
    for _ in range(80):
        run = Run(random, watch)
        for _ in range(60):
            run.step()
    watch.ends()
