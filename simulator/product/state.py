"""The state that all parts of a simulated cluster share: settings, processes, pushes and counters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from random import Random

from paceline.errors import PacelineError
from paceline.protocol import BoundedDelay, Consistency, Eventual, Sequential
from simulator.product.memory import MemoryShortage
from simulator.product.network import VirtualNetwork
from simulator.product.snapshots import Disk
from simulator.product.truth import CHANGED, CLOCKS, OTHERS, RATES, Plan, Truth
from simulator.product.world import VirtualProcess, VirtualWorld


@dataclass(frozen=True, slots=True)
class ProductSettings:
    """What a cluster is made of."""

    num_servers: int
    num_workers: int
    replicas: int
    consistency: Consistency
    num_tables: int
    num_phases: int
    iterations: int
    """Of each phase."""
    think_s: float
    heartbeat_timeout_s: float
    is_one_host: bool
    """Whether the scheduler hears at once of processes that have ended."""

    @property
    def work_s(self) -> float:
        """About how long a phase takes without faults."""
        return self.iterations * (self.think_s / 2 + 0.02)

    @classmethod
    def draw(cls, random: Random) -> ProductSettings:
        """Choose a small cluster."""
        num_servers = random.choice((2, 2, 3, 3, 4))
        consistencies: tuple[Consistency, ...] = (
            Sequential(), Sequential(), BoundedDelay(tau=0), BoundedDelay(tau=2), Eventual(), Eventual()
        )  # fmt: skip
        return cls(
            num_servers=num_servers,
            num_workers=random.choice((1, 2, 2, 3)),
            replicas=min(random.choice((0, 1, 1, 2)), num_servers - 1),
            consistency=random.choice(consistencies),
            num_tables=random.choice((1, 2, 3)),
            num_phases=random.choice((1, 1, 2)),
            iterations=random.choice((3, 5, 8)),
            think_s=random.choice((0.01, 0.1, 0.4)),
            heartbeat_timeout_s=random.choice((1.0, 3.0)),
            is_one_host=random.random() < 0.5,
        )


class Participant:
    """A worker, as the others see it; `slot` tells which keys are its own."""

    def __init__(self, process: VirtualProcess, slot: int) -> None:
        self.process = process
        self.slot = slot
        self.num_arrived = 0
        """How many phases it has ended."""
        self.is_joined = False
        self.is_disturbed = False
        """Whether the others may take it for dead."""
        self.first_clock = self.num_counted = 0


class ClusterState(ABC):
    """A cluster, for its workers and for what breaks it."""

    def __init__(self, world: VirtualWorld, settings: ProductSettings | None) -> None:
        self.world = world
        self.settings = ProductSettings.draw(world.random) if settings is None else settings
        self.network = VirtualNetwork(world)
        self.address = "memory://scheduler"
        self.patience_s = 60.0
        others = world.random.sample(OTHERS, self.settings.num_tables)
        changed = world.random.choice(((), (CHANGED,)))
        self.plans: tuple[Plan, ...] = (CLOCKS, RATES, *changed, *others)
        self.truth = Truth()
        self.phase = 0
        self.workers: dict[str, Participant] = {}
        self.servers: dict[str, VirtualProcess] = {}
        self.scheduler: VirtualProcess | None = None
        self.snapshot: VirtualProcess | None = None
        """Who takes one: servers know of one at a time."""
        self.fired: Counter[str] = Counter()
        self.num_pushes = self.num_reads = 0
        self.memory = MemoryShortage(world)
        self.disk = Disk(world)
        self.excused: dict[VirtualProcess, None] = {}
        """Servers that the others may take for dead."""
        self.may_refuse = not self.is_sequential and world.random.random() < 0.3
        """Whether servers may refuse pushes for want of memory."""

    @property
    def is_sequential(self) -> bool:
        """Whether gradients of an iteration are applied together."""
        return isinstance(self.settings.consistency, Sequential)

    @abstractmethod
    def start_scheduler(self, *, replaces: bool = False, accepts_minority: bool = False) -> None:
        """Start a scheduler, which may take over from one before."""

    @abstractmethod
    def start_server(self, *, extra: bool = False) -> VirtualProcess:
        """Start a server: one of the first, or one more."""

    @abstractmethod
    def start_snapshot(self) -> None:
        """Have a snapshot taken while all goes on."""

    @abstractmethod
    def start_worker(self) -> None:
        """Start a worker, if there are keys for one more."""

    @abstractmethod
    def kill(self, process: VirtualProcess, *, is_silent: bool = False) -> None:
        """End a process; `is_silent`: with its host, so that nobody is told."""

    @abstractmethod
    def is_whole(self) -> bool:
        """Return whether every chain has all the servers that it should have, and none is on its way."""

    @abstractmethod
    def worker_failed(self, worker: Participant, error: PacelineError) -> None:
        """Take what a worker's client raised: nothing may, unless the others took it for dead."""
