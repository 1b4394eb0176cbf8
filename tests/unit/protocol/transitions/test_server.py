"""Check that the planner makes exactly the transitions of the state table of servers."""

from __future__ import annotations

from random import Random

from paceline.protocol.chains import SERVER, Planner, lost_buckets
from paceline.protocol.scheduler.events import BucketsLost
from paceline.protocol.transitions import OUTSIDE

from .watching import Sight, Watch

NUM_BUCKETS = 6


def sights(planner: Planner, servers: range) -> dict[tuple[int, int], Sight]:
    found: dict[tuple[int, int], Sight] = {}
    for bucket in range(NUM_BUCKETS):
        for server in servers:
            found[server, bucket] = (OUTSIDE,)
        if planner.chains:
            chain = planner.chains[bucket]
            found.update({(server, bucket): ("replica",) for server in chain.members[1:]})
            if chain.members:
                found[chain.members[0], bucket] = ("primary",)
            if chain.filling is not None:
                found[chain.filling, bucket] = ("filling",)
    return found


class Run:
    """One planner, with servers that join, die, leave and are filled."""

    def __init__(self, random: Random, watch: Watch) -> None:
        self.random, self.watch = random, watch
        self.replicas = random.randrange(3)
        self.planner = Planner(NUM_BUCKETS, self.replicas)
        self.next_server = 1 + random.randrange(1, 5)
        self.servers = {server: server for server in range(1, self.next_server)}  # incarnation → rank
        self.leaving: set[int] = set()

    def step(self) -> None:
        """Execute a random action, and record the new state of every server in every bucket."""
        servers = range(1, self.next_server + 1)
        before = sights(self.planner, servers)
        lost_before = lost_buckets(self.planner.groups)
        name = self.act()
        lost = BucketsLost(lost_buckets(self.planner.groups) & ~lost_before)
        for (server, bucket), after in sights(self.planner, servers).items():
            former = before[server, bucket]
            if {former, after} != {(OUTSIDE,)}:
                self.watch.saw(former, name, after, lost if lost.buckets >> bucket & 1 else None)

    def act(self) -> str:
        if not self.planner.version:
            self.planner.start(self.servers)
            return "start"
        fills = [group for group in self.planner.groups if group.filling is not None]
        if fills and self.random.random() < 0.5:
            group = self.random.choice(fills)
            assert group.filling is not None
            self.planner.restore(self.planner.groups, [(group.filling, group.buckets)])
            self.planner.servers_changed(self.servers, self.leaving & self.servers.keys())
            return "filled"
        action = self.random.choice(["join", "join", "die", "leave", "restart"])
        if action == "join":
            free = set(range(1, 6)) - set(self.servers.values())
            if free:
                self.servers[self.next_server] = min(free)
                self.next_server += 1
        elif action == "die":
            for server in self.random.sample(sorted(self.servers), min(len(self.servers), self.random.choice([1, 2]))):
                del self.servers[server]
        elif action == "leave" and self.servers:
            self.leaving ^= {self.random.choice(sorted(self.servers))}
        else:  # a new planner has the same chains, and receives the living servers
            groups, version = self.planner.groups, self.planner.version
            self.planner = Planner.rebuild(groups, version, self.servers, self.replicas, self.leaving)
            return "servers_changed"
        self.planner.servers_changed(self.servers, self.leaving & self.servers.keys())
        return "servers_changed"


def test_the_planner_follows_the_table() -> None:
    watch, random = Watch(SERVER), Random(2)
    for _ in range(150):
        run = Run(random, watch)
        for _ in range(25):
            run.step()
    watch.ends()
