"""The settings of one simulated cluster."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from paceline.protocol.consistency import BoundedDelay, Consistency, Eventual, Sequential


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Size, consistency and work of a cluster."""

    num_servers: int
    num_workers: int
    replicas: int
    consistency: Consistency
    think_s: float
    """Maximum pause of a worker in an iteration."""
    min_replicas: int = 0
    heartbeat_timeout_s: float = 1.0
    is_one_host: bool = True
    """Whether the scheduler's kernel reports the ends of processes."""
    num_buckets: int = 8
    """Only protocol runs use this setting and the next three."""
    num_shards: int = 5
    epochs: int = 1
    iterations_per_shard: tuple[int, ...] = (1,)
    num_tables: int = 1
    """Only product runs use this setting and the next two."""
    num_phases: int = 1
    iterations: int = 3
    """Number of iterations of each phase."""

    @property
    def all_buckets(self) -> int:
        """All buckets of protocol runs, as a mask."""
        return (1 << self.num_buckets) - 1

    @property
    def is_sequential(self) -> bool:
        """Whether consistency is sequential."""
        return isinstance(self.consistency, Sequential)

    @classmethod
    def draw(cls, random: Random) -> RunSettings:
        """Return random settings of a small cluster."""
        consistencies: tuple[Consistency, ...] = (
            Sequential(), Sequential(), BoundedDelay(tau=0), BoundedDelay(tau=1), BoundedDelay(tau=3), Eventual(),
        )  # fmt: skip
        num_servers = random.choice((2, 3, 3, 4))
        return cls(
            num_servers=num_servers,
            num_workers=random.choice((1, 2, 2, 3)),
            replicas=min(random.choice((0, 1, 1, 2)), num_servers - 1),
            consistency=random.choice(consistencies),
            think_s=random.choice((0.01, 0.1, 0.3)),
            heartbeat_timeout_s=random.choice((1.0, 3.0)),
            is_one_host=random.random() < 0.5,
            num_buckets=random.choice((6, 8, 12)),
            num_shards=random.choice((5, 8)),
            epochs=random.choice((1, 2)),
            iterations_per_shard=random.choice(((1,), (2,), (1, 2, 3))),
            num_tables=random.choice((1, 2, 3)),
            num_phases=random.choice((1, 1, 2)),
            iterations=random.choice((3, 5, 8)),
        )
