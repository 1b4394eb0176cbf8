"""Placement of buckets on servers by rendezvous (highest random weight) hashing.

The placement depends only on the list of servers. Each bucket ranks all servers by a hash of (bucket, server): the
first is the primary, the next ones are the replicas. So a join moves buckets only to the new server. If a server
leaves, each of its buckets moves to the next server in the bucket's ranking, which has the first replica.

Source: Thaler and Ravishankar 1998 "Using name-based mappings to increase hit rates"; chains as in OSDI'14
"Scaling Distributed Machine Learning with the Parameter Server", section 4.3; mixing by splitmix64 (Steele,
Lea, Flood 2014).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from paceline.errors import UsageError

NUM_BUCKETS: Final = 512
"""Default number of buckets of a table: about ten for each of fifty servers."""

_MASK: Final = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(frozen=True, slots=True)
class Move:
    """A move of one bucket from server `source` to server `target`."""

    bucket: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Placement:
    """A mapping of buckets to servers; :func:`place` computes it."""

    chains: tuple[tuple[int, ...], ...]
    """For each bucket its servers: the primary, then the replicas in order."""

    @property
    def num_buckets(self) -> int:
        """The number of buckets."""
        return len(self.chains)

    def primary(self, bucket: int) -> int:
        """The primary of the bucket."""
        return self.chains[bucket][0]

    def owned(self, server: int) -> tuple[int, ...]:
        """The buckets whose primary this server is, ascending. O(buckets)."""
        return tuple(bucket for bucket, chain in enumerate(self.chains) if chain[0] == server)

    def moves(self, other: Placement) -> tuple[Move, ...]:
        """Return the moves of primaries from this placement to the other one, by bucket.

        Raises:
            UsageError: the placements have different numbers of buckets.
        """
        if self.num_buckets != other.num_buckets:
            raise UsageError(
                f"Placements of {self.num_buckets} and {other.num_buckets} buckets cannot be compared: the number "
                "of buckets is fixed when a table is created."
            )
        pairs = enumerate(zip(self.chains, other.chains, strict=True))
        return tuple(Move(bucket, old[0], new[0]) for bucket, (old, new) in pairs if old[0] != new[0])

    def validate(self) -> None:
        """Assert the invariants."""
        for chain in self.chains:
            assert chain, "a bucket without a server"
            assert len(set(chain)) == len(chain), "a server twice in one chain"
        assert len({len(chain) for chain in self.chains}) <= 1


def place(num_buckets: int, servers: Sequence[int], replicas: int = 0, salt: int = 0) -> Placement:
    """Place buckets 0..num_buckets-1 on servers, in chains of ``1 + replicas`` (or of all servers, if fewer).

    The result is the same on every machine and for every order of ``servers``. ``salt`` (any integer, modulo 2^64)
    gives another placement on the same servers. Takes about a microsecond per bucket and server.

    Raises:
        UsageError: ``servers`` is empty or has a duplicate, or a number is out of range.
    """
    if not servers:
        raise UsageError("No servers to place the buckets on. Start at least one server.")
    if len(set(servers)) != len(servers):
        raise UsageError(f"Servers {list(servers)} have a duplicate: expected distinct ids.")
    if num_buckets < 1 or replicas < 0:
        raise UsageError(f"place(num_buckets={num_buckets}, replicas={replicas}): expected at least 1 and 0.")
    seeds = [(_mix(_mix(salt) ^ _mix(server + 1)), server) for server in sorted(servers)]
    length = 1 + replicas
    chains = []
    for bucket in range(num_buckets):
        mixed = _mix(bucket)
        # The highest weight first; equal weights by the smaller server id.
        ranked = sorted((-_mix(mixed ^ seed), server) for seed, server in seeds)
        chains.append(tuple(server for _, server in ranked[:length]))
    return Placement(tuple(chains))


def _mix(value: int) -> int:
    """The splitmix64 step: a bijection of 64-bit integers, each bit in flips each bit out half of the time.

    >>> hex(_mix(0))
    '0xe220a8397b1dcdaf'
    """
    value = (value + 0x9E37_79B9_7F4A_7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK
    return value ^ (value >> 31)
