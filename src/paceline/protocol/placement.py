"""Which server holds which bucket.

Everybody computes the map alone from the list of servers and gets the same one; it is never sent. Rendezvous
(highest random weight) hashing: each bucket ranks all servers by a hash of (bucket, server) and lives at the
first; its replicas are the next. So a join takes buckets for the newcomer only, and when a server goes, each
of its buckets falls to its own next in rank, which is where its first replica is.

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
"""How many buckets a table is cut into, unless said otherwise: some ten for each of fifty servers."""

_MASK: Final = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(frozen=True, slots=True)
class Move:
    """One bucket goes from one server to another."""

    bucket: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Placement:
    """The map of buckets to servers; make one with :func:`place`."""

    chains: tuple[tuple[int, ...], ...]
    """For each bucket its servers: the primary, then the replicas in order."""

    @property
    def num_buckets(self) -> int:
        """How many buckets there are."""
        return len(self.chains)

    def primary(self, bucket: int) -> int:
        """The server that holds the bucket."""
        return self.chains[bucket][0]

    def owned(self, server: int) -> tuple[int, ...]:
        """The buckets whose primary this server is, ascending. O(buckets)."""
        return tuple(bucket for bucket, chain in enumerate(self.chains) if chain[0] == server)

    def moves(self, other: Placement) -> tuple[Move, ...]:
        """What must move to get from this map to the other one, by bucket; primaries only.

        Raises:
            UsageError: the other map has another number of buckets.
        """
        if self.num_buckets != other.num_buckets:
            raise UsageError(
                f"Maps of {self.num_buckets} and {other.num_buckets} buckets cannot be compared: the number "
                "of buckets is fixed when a table is made."
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
    """Map buckets 0..num_buckets-1 to servers, in chains of ``1 + replicas`` (or of all servers, if fewer).

    Deterministic on every machine, and independent of the order of ``servers``. ``salt`` (any integer, taken
    modulo 2^64) gives another map of the same servers. Takes about a microsecond per bucket and server.

    Raises:
        UsageError: there is no server, one is named twice, or a number is out of range.
    """
    if not servers:
        raise UsageError("No servers: there is nowhere to place the buckets. Start at least one server.")
    if len(set(servers)) != len(servers):
        raise UsageError(f"Servers {list(servers)} name one twice: expected distinct ids.")
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
