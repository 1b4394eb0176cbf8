"""Placement of buckets on servers by rendezvous (highest random weight) hashing.

Each bucket ranks all servers by a hash of (bucket, server): the first server is the primary, the next are the replicas.
So a new server takes buckets from the other servers, and no bucket moves between two of the other servers. If a server
leaves, each of its buckets moves to the next server in the bucket's ranking, which already has a replica.

Source: Thaler and Ravishankar 1998 "Using name-based mappings to increase hit rates"; chains as in OSDI'14 "Scaling
Distributed Machine Learning with the Parameter Server", section 4.3; mixing by splitmix64 (Steele, Lea, Flood 2014).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from paceline.errors import UsageError

NUM_BUCKETS: Final = 512
"""Default number of buckets of a table. With fifty servers, each server leads about ten."""

_MASK: Final = 0xFFFF_FFFF_FFFF_FFFF


def place(num_buckets: int, servers: Sequence[int], replicas: int = 0) -> tuple[tuple[int, ...], ...]:
    """Return the servers of buckets 0..num_buckets-1: ``1 + replicas`` each (or all servers, if fewer), primary first.

    The result is the same on every machine and for every order of ``servers``. Takes about a microsecond per bucket and
    server; recent results are cached. Raises UsageError if ``servers`` is empty or has duplicates, ``num_buckets`` is
    below 1, or ``replicas`` is negative.
    """
    if not servers:
        raise UsageError("No servers to place the buckets on. Start at least one server.")
    if len(set(servers)) != len(servers):
        raise UsageError(f"Servers {list(servers)} have a duplicate: expected distinct ids.")
    if num_buckets < 1 or replicas < 0:
        raise UsageError(f"place(num_buckets={num_buckets}, replicas={replicas}): expected at least 1 and 0.")
    return _place(num_buckets, tuple(sorted(servers)), replicas)


@lru_cache(maxsize=64)
def _place(num_buckets: int, servers: tuple[int, ...], replicas: int) -> tuple[tuple[int, ...], ...]:
    seeds = [(_mix(_mix(0) ^ _mix(server + 1)), server) for server in servers]
    chains = []
    for bucket in range(num_buckets):
        mixed = _mix(bucket)
        # The server with the highest weight comes first; if weights are equal, the server with the smaller id.
        ranked = sorted((-_mix(mixed ^ seed), server) for seed, server in seeds)
        chains.append(tuple(server for _, server in ranked[: 1 + replicas]))
    return tuple(chains)


def _mix(value: int) -> int:
    """The splitmix64 step: a bijection of 64-bit integers.

    A change of one input bit changes each output bit half of the time.

    >>> hex(_mix(0))
    '0xe220a8397b1dcdaf'
    """
    value = (value + 0x9E37_79B9_7F4A_7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK
    return value ^ (value >> 31)
