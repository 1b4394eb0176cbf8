"""Bruck's algorithms: all-gather and all-to-all in a logarithmic number of rounds, for every number of ranks.

All-gather: in round k each rank receives all blocks that the rank 2^k after it has. The time is ``ceil(log2 p) α + (p -
1)/p n β``, where n is the gathered vector. Good for short blocks; no algorithm sends fewer bytes.

All-to-all: the block for the rank at distance o makes a hop of 2^k for each bit k that is set in o. The time is
``ceil(log2 p) (α + n/2 β)``, where n is one rank's input. All-to-all sends more bytes than the pairwise algorithm, but
far fewer messages: good for short blocks. Blocks must have equal sizes, because ranks forward blocks of other ranks.

Source: Bruck, Ho, Kipnis, Upfal and Weathersby 1997 "Efficient algorithms for all-to-all communications in multiport
message-passing systems" (the sections on the index and the concatenation operation). The first and last step of the
paper rotate the blocks in memory. Here, each block is sent and received at its final index, in spans that continue at
block 0.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.collectives.schedules.base import Copy, Receive, Round, Schedule, Send, merged, wrapped


def all_gather(rank: int, size: int) -> Schedule:
    """In round k, send the blocks of this rank and the ranks after it: 2^k blocks."""
    rounds: list[Round] = []
    for hop in _hops(size):
        count = min(hop, size - hop)
        send = Send((rank - hop) % size, wrapped(rank, count, size))
        rounds.append((send, Receive((rank + hop) % size, wrapped(rank + hop, count, size))))
    return Schedule(size, tuple(rounds))


def all_to_all(rank: int, size: int) -> Schedule:
    """Send each block in hops. Between hops, the block for distance o is in scratch block ``2 * size + o``."""
    copy_own = Copy(((rank, rank + 1),), ((size + rank, size + rank + 1),))
    rounds: list[Round] = [] if size > 1 else [(copy_own,)]
    for hop in _hops(size):
        distances = [distance for distance in range(1, size) if distance & hop]
        send = Send((rank + hop) % size, merged(_departure(rank, size, distance, hop) for distance in distances))
        spans = merged(_arrival(rank, size, distance, hop) for distance in distances)
        receive = Receive((rank - hop) % size, spans)
        rounds.append((send, receive, copy_own) if hop == 1 else (send, receive))
    return Schedule(3 * size, tuple(rounds))


def _hops(size: int) -> Iterator[int]:
    hop = 1
    while hop < size:
        yield hop
        hop *= 2


def _departure(rank: int, size: int, distance: int, hop: int) -> int:
    first = distance & (hop - 1) == 0
    return (rank + distance) % size if first else 2 * size + distance


def _arrival(rank: int, size: int, distance: int, hop: int) -> int:
    last = distance < 2 * hop
    return size + (rank - distance) % size if last else 2 * size + distance
