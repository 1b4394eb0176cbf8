"""Predict the time of schedules in the α-β-γ model.

A message of n bytes takes ``α + β n`` seconds: α is the latency of the link, and β the time per byte. If the receiver
combines the message with its own data, this takes additional ``γ n`` seconds. Each rank has one output port and one
input port, which work concurrently. A port sends or receives one message at a time. Messages between hosts use one
output port and one input port per host, which all ranks of the host share. A send is done when the last byte has left
the port. A message that arrives before its receive is buffered. Local copies take no time.

Source: Hockney 1994 "The communication challenge for MPP" (α and β); with γ, Thakur, Rabenseifner and Gropp 2005
"Optimization of collective communication operations in MPICH" (the section on the cost model).
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from paceline.collectives.schedules.base import Receive, Schedule, ScheduleError, Send, Spans

_RING: Final = "ring"
_CLOSE: Final = 1.1
"""The ring is chosen if its predicted time is at most this many times the shortest one.

All-reduce of 2.4 MB between 8 hosts with links of 100 Mbit/s takes 360 ms with the ring (predicted: 379), and 581 ms
with halving-doubling (predicted: 374), probably because its long messages fill the queues (``benchmarks/hosts.py``).
"""


class LinkCost(NamedTuple):
    """Cost of a message between two ranks."""

    alpha_s: float
    beta_s_per_byte: float


def fastest(times_s: Mapping[str, float]) -> str:
    """Return the algorithm to choose, given the predicted seconds of each: the fastest one, or the ring if it is close.

    The predictions know no congestion. The ring's short messages, each to one neighbour, suffer least from it.
    """
    best = min(times_s, key=lambda name: times_s[name])
    return _RING if _RING in times_s and times_s[_RING] <= _CLOSE * times_s[best] else best


def predict(
    schedules: Sequence[Schedule],
    block_bytes: Sequence[int] | int,
    link: Callable[[int, int], LinkCost] | LinkCost,
    *,
    gamma_s_per_byte: float = 0.0,
    hosts: Sequence[int] | None = None,
) -> float:
    """Return the seconds until the last rank has finished, if all ranks start together.

    `schedules` has one schedule for each rank. `block_bytes` is a list with the size of each block, or one size for all
    blocks. `link` is the cost of all links, or a function from two ranks to the cost of their link. `hosts` has the
    number of each rank's host; without it, all ranks are on one host. Raises ScheduleError if the ranks deadlock.
    """
    return _Run(schedules, block_bytes, link, gamma_s_per_byte, hosts).until_all_finished()


class _Run:
    """A simulation of the schedules. Events run in the order of time; events of equal time in the order of creation."""

    def __init__(
        self,
        schedules: Sequence[Schedule],
        block_bytes: Sequence[int] | int,
        link: Callable[[int, int], LinkCost] | LinkCost,
        gamma_s_per_byte: float,
        hosts: Sequence[int] | None,
    ) -> None:
        self._rounds: Final = [schedule.rounds for schedule in schedules]
        self._num_bytes: Final = _sizes(block_bytes)
        self._link: Final = link
        self._gamma: Final = gamma_s_per_byte
        size = len(schedules)
        self._hosts: Final = [0] * size if hosts is None else hosts
        self._next_round: Final = [0] * size
        self._round_end_s: Final = [0.0] * size
        self._num_missing: Final[list[int]] = [0] * size
        self._combining_until_s: Final = [0.0] * size
        self._sending_until_s: Final = defaultdict[tuple[str, int], float](float)
        self._receiving_until_s: Final = defaultdict[tuple[str, int], float](float)
        # By (source, target): the number of messages that arrived before their receive started, and the receives that
        # started before their message arrived.
        self._buffered: Final = defaultdict[tuple[int, int], int](int)
        self._posted: Final = defaultdict[tuple[int, int], deque[Receive]](deque)
        self._events: Final[list[tuple[float, int, Callable[[float], None]]]] = []
        self._num_events = 0

    def until_all_finished(self) -> float:
        for rank in range(len(self._rounds)):
            self._begin_round(rank, 0.0)
        while self._events:
            time_s, _, action = heapq.heappop(self._events)
            action(time_s)
        for rank, rounds in enumerate(self._rounds):
            if self._num_missing[rank]:
                number = self._next_round[rank] - 1
                raise ScheduleError(f"rank {rank} in round {number} of {len(rounds)} waits forever for a message.")
        return max(self._round_end_s, default=0.0)

    def _at(self, time_s: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time_s, self._num_events, action))
        self._num_events += 1

    def _begin_round(self, rank: int, time_s: float) -> None:
        if self._next_round[rank] == len(self._rounds[rank]):
            return
        actions = self._rounds[rank][self._next_round[rank]]
        self._next_round[rank] += 1
        self._round_end_s[rank] = time_s
        receives = [action for action in actions if isinstance(action, Receive)]
        self._num_missing[rank] = len(receives)
        for action in actions:
            if isinstance(action, Send):
                self._send(rank, action, time_s)
        for receive in receives:
            channel = (receive.peer, rank)
            if self._buffered[channel]:
                self._buffered[channel] -= 1
                self._receive(rank, receive, time_s)
            else:
                self._posted[channel].append(receive)
        if not receives:
            self._at(self._round_end_s[rank], lambda time_s: self._begin_round(rank, time_s))

    def _send(self, rank: int, send: Send, time_s: float) -> None:
        link = self._link if isinstance(self._link, LinkCost) else self._link(rank, send.peer)
        busy_s = link.beta_s_per_byte * self._num_bytes(send.spans)
        port, peer_port = ("rank", rank), ("rank", send.peer)
        if self._hosts[rank] != self._hosts[send.peer]:
            port, peer_port = ("host", self._hosts[rank]), ("host", self._hosts[send.peer])
        start_s = max(time_s, self._sending_until_s[port])
        self._sending_until_s[port] = start_s + busy_s
        self._round_end_s[rank] = max(self._round_end_s[rank], start_s + busy_s)

        def reach(time_s: float) -> None:
            end_s = max(time_s, self._receiving_until_s[peer_port]) + busy_s
            self._receiving_until_s[peer_port] = end_s
            self._at(end_s, lambda time_s: self._arrive((rank, send.peer), time_s))

        self._at(start_s + link.alpha_s, reach)

    def _arrive(self, channel: tuple[int, int], time_s: float) -> None:
        if self._posted[channel]:
            self._receive(channel[1], self._posted[channel].popleft(), time_s)
        else:
            self._buffered[channel] += 1

    def _receive(self, rank: int, receive: Receive, time_s: float) -> None:
        done_s = time_s
        if receive.reduce:
            done_s = max(time_s, self._combining_until_s[rank]) + self._gamma * self._num_bytes(receive.spans)
            self._combining_until_s[rank] = done_s
        self._round_end_s[rank] = max(self._round_end_s[rank], done_s)
        self._num_missing[rank] -= 1
        if not self._num_missing[rank]:
            self._at(self._round_end_s[rank], lambda time_s: self._begin_round(rank, time_s))


def _sizes(block_bytes: Sequence[int] | int) -> Callable[[Spans], int]:
    if isinstance(block_bytes, int):
        return lambda spans: block_bytes * sum(stop - start for start, stop in spans)
    starts = [0]
    for num_bytes in block_bytes:
        starts.append(starts[-1] + num_bytes)
    return lambda spans: sum(starts[stop] - starts[start] for start, stop in spans)
