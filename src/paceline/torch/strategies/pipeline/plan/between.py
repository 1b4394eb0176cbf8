"""Times of a step outside its computations: messages between ranks, and agreements of all ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

_REPEATS: Final = 10
_AGREEMENTS: Final = 3
_SMALL, _LARGE = 1 << 8, 1 << 18  # elements of float32


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageCost:
    """Times of a message between two ranks, in total and at the sender."""

    latency_s: float = 0.0
    seconds_per_byte: float = 0.0
    sending_s: float = 0.0
    sending_s_per_byte: float = 0.0
    agreement_s: float = 0.0
    """Time of a step's agreements of all ranks: two on the program's position, one on the loss."""

    def seconds(self, num_bytes: float) -> float:
        """Return the time from the beginning of a send to the end of the receive."""
        return self.latency_s + self.seconds_per_byte * num_bytes

    def sending(self, num_bytes: float) -> float:
        """Return the time that the sender is busy with a message."""
        return self.sending_s + self.sending_s_per_byte * num_bytes


def measure_link(group: Any, rank: int) -> MessageCost:
    """Return the times of messages between the first two ranks of a group; both call it."""
    small, large = (_trip(group, rank, size) for size in (_SMALL, _LARGE))
    (latency_s, per_byte), (sending_s, sending_per_byte) = (
        (of_small, max(of_large - of_small, 0.0) / ((_LARGE - _SMALL) * 4))
        for of_small, of_large in zip(small, large, strict=True)
    )
    return MessageCost(
        latency_s=latency_s,
        seconds_per_byte=per_byte,
        sending_s=sending_s,
        sending_s_per_byte=sending_per_byte,
    )


def measure_agreement(group: Any) -> float:
    times = []
    for _ in range(1 + _REPEATS):
        began = time.perf_counter()
        group.group.all_gather_objects(["measures", "", None, [0, 0.0, {}]])
        times.append(time.perf_counter() - began)
    return _AGREEMENTS * statistics.median(times[1:])


def _trip(group: Any, rank: int, size: int) -> tuple[float, float]:
    trips, sends = zip(*_round_trips(group, rank, size), strict=True)
    return statistics.median(trips) / 2, statistics.median(sends)


def _round_trips(group: Any, rank: int, size: int) -> Iterator[tuple[float, float]]:
    outgoing, incoming = torch.zeros(size), torch.zeros(size)
    for number in range(1 + _REPEATS):
        began = time.perf_counter()
        for sender in (0, 1):
            if rank == sender:
                sending = time.perf_counter()
                work = dist.isend(outgoing, group=group, group_dst=1 - rank)
                sent = time.perf_counter()
                assert work is not None
                work.wait()
            else:
                dist.recv(incoming, group=group, group_src=1 - rank)
        if number:
            yield time.perf_counter() - began, sent - sending
