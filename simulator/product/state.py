"""The parts of a product run that its workers share."""

from __future__ import annotations

from simulator.network import VirtualNetwork
from simulator.product.memory import MemoryShortage
from simulator.product.snapshots import Disk
from simulator.product.truth import CHANGED, CLOCKS, OPTIONAL, RATES, Plan, Truth
from simulator.settings import RunSettings
from simulator.world import VirtualProcess


class Participant:
    """A worker's state that other workers read. `slot` is its number, which determines the worker's own keys."""

    def __init__(self, process: VirtualProcess, slot: int) -> None:
        self.process = process
        self.slot = slot
        self.num_arrived = 0
        """The number of phases that the worker has ended."""
        self.is_joined = False
        self.first_clock = self.num_counted = 0


class SharedState:
    """Tables, model, workers, disk and memory of a run."""

    def __init__(self, network: VirtualNetwork, settings: RunSettings, truth: Truth) -> None:
        self.world = world = network.world
        self.network = network
        self.settings = settings
        self.truth = truth
        optional = world.random.sample(OPTIONAL, settings.num_tables)
        changed = world.random.choice(((), (CHANGED,)))
        self.plans: tuple[Plan, ...] = (CLOCKS, RATES, *changed, *optional)
        self.workers: dict[str, Participant] = {}
        self.num_phases = 0
        """The number of phases that all workers have ended."""
        self.memory = MemoryShortage(world)
        self.disk = Disk(world)
        self.may_refuse = not settings.is_sequential and world.random.random() < 0.3
        """Whether servers may reject pushes because they lack memory."""
