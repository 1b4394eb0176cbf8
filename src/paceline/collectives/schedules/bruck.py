"""Bruck's algorithms: all-gather and all-to-all in a logarithmic number of rounds, for every number of ranks.

All-gather: in round k, rank r receives all blocks that rank ``r + 2^k`` (modulo p) has. For p ranks and a gathered
vector of n bytes, the time is ``ceil(log2 p) α + (p - 1)/p n β`` (the α-β-γ model of ``evaluator``). The all-gather is
good for short blocks, and no algorithm sends fewer bytes.

All-to-all: rank r sends its block for rank ``r + d`` (modulo p) in several hops. For each bit k that is set in d, the
block makes one hop of 2^k ranks. For an input of n bytes per rank, the time is ``ceil(log2 p) (α + n/2 β)``. The
all-to-all sends more bytes than the pairwise algorithm, but far fewer messages, so it is good for short blocks. All
blocks must have the same size, because ranks forward blocks whose sizes they do not know.

Source: Bruck, Ho, Kipnis, Upfal and Weathersby 1997 "Efficient algorithms for all-to-all communications in multiport
message-passing systems" (the sections on the index and the concatenation operation). The algorithms of the paper rotate
the blocks in memory in their first and last steps. This module does not rotate blocks: each block is sent from and
received at its final index, and a range of blocks that passes the last block continues at block 0.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.collectives.schedules.base import Copy, Receive, Round, Schedule, Send, merged, wrapped


def all_gather(rank: int, size: int) -> Schedule:
    """Gather all blocks. In round k, ``rank`` sends 2^k blocks: its own block and the blocks of the ranks after it."""
    rounds: list[Round] = []
    for hop in _hops(size):
        count = min(hop, size - hop)
        send = Send((rank - hop) % size, wrapped(rank, count, size))
        rounds.append((send, Receive((rank + hop) % size, wrapped(rank + hop, count, size))))
    return Schedule(size, tuple(rounds))


def all_to_all(rank: int, size: int) -> Schedule:
    """Send each block in hops. Between two hops, the block for rank ``rank + d`` is in block ``2 * size + d``."""
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
