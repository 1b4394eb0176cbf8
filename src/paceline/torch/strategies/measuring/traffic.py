"""Count the bytes that a rank exchanges, and the staleness of pushes, between two moments of a training loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from paceline.observe import recording
from paceline.observe.recording import Recorder
from paceline.ps import Client

_ALL_REDUCE, _OTHER = 4.0, 2.0
"""The bytes that n ranks send and receive on average, in units of (n - 1) / n of a collective's array, by an algorithm
that sends the fewest bytes. An all-reduce is a reduce-scatter and an all-gather, so it counts twice.
"""
_BYTES: Final = "paceline_collective_bytes_total"


class TrafficCounter:
    """Counts the bytes of this rank and, on rank 0, the staleness of all ranks' pushes. Starts at its creation."""

    def __init__(self, rank: int, world_size: int, clients: Sequence[Client]) -> None:
        """`clients` are the connections to servers."""
        if recording.recorder is None:
            recording.recorder = Recorder(rank=rank, world_size=world_size)  # without a launcher that collects reports
        self._recorder, self._world_size = recording.recorder, world_size
        self._clients = clients
        self._counts_staleness = rank == 0
        self._staleness_before = self._histogram()
        self._bytes_before = self._count_bytes()

    def num_bytes(self) -> float:
        """Return the bytes of all messages with servers, and of the messages of collectives."""
        return self._count_bytes() - self._bytes_before

    def staleness(self) -> float | None:
        """Return the mean staleness in pushes; None without pushes, without open servers, and on other ranks."""
        if any(client.servers.is_closed for client in self._clients):
            return None
        counts = self._histogram() - self._staleness_before
        return float(counts @ np.arange(len(counts)) / counts.sum()) if counts.any() else None

    def _count_bytes(self) -> float:
        total = float(sum(sum(client.byte_counts()) for client in self._clients))
        for (operation,), value in self._recorder.report().samples.get(_BYTES, []):
            assert not isinstance(value, list)
            share = (self._world_size - 1) / self._world_size
            total += value * share * (_ALL_REDUCE if operation == "all_reduce" else _OTHER)
        return total

    def _histogram(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        tables = [
            table.staleness
            for client in self._clients
            if self._counts_staleness
            for server in client.statistics()
            for table in server.tables.values()
        ]
        return np.array(tables, np.int64).sum(axis=0) if tables else np.zeros(1, np.int64)
