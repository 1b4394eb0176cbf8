"""Measure pushes and pulls on this machine with one server process, one client process and a real sparse store.

Every request uses a new random sample of the 10^7 keys in the store. The lower bound of each figure is measured in the
same run: two processes send equal sizes over the same kind of socket and do nothing else. If possible, the client is
pinned to one core and the server to another. Otherwise both may share a core for a whole run, which doubles the times.
The two other processes are not pinned: they sleep while they wait, so they are fastest on one core. Paceline's client
and server spin instead.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.environment import usable_cores
from paceline.launch.local import LocalCluster
from paceline.ps import FTRL, SGD, Adagrad, SparseTable, UpdateRule
from paceline.temporary import TemporaryFolder
from paceline.transport import HEADER_BYTES

RULES: dict[str, UpdateRule] = {"sgd": SGD(lr=0.1), "ftrl": FTRL(alpha=0.05, l1=0.1), "adagrad": Adagrad(lr=0.1)}
_LOAD_KEYS = 200_000
_ECHO = """
import socket, struct, sys
listening = socket.socket(socket.AF_UNIX); listening.bind(sys.argv[1]); listening.listen(1); print(flush=True)
connected, _ = listening.accept()
def fill(view):
    while view: view = view[connected.recv_into(view):]
head = bytearray(16)
while connected.recv_into(head, 16, socket.MSG_WAITALL) == 16:
    size_in, size_out = struct.unpack("qq", head)
    buffer, answer = memoryview(bytearray(size_in)), bytes(size_out)
    while size_in:
        fill(buffer)
        connected.sendall(answer)
        if buffer[0]: break
"""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line of the benchmark, with times in microseconds."""

    work: str
    keys: int
    dim: int
    update: str
    median_us: float
    p99_us: float
    floor_us: float
    keys_per_s: float
    rows: int


class _Echo:
    """A process that answers requests, with given sizes of requests and answers. It measures the lower bound."""

    def __init__(self) -> None:
        self._folder = TemporaryFolder.make("bench")
        path = str(self._folder.path / "s")
        self._process = subprocess.Popen([sys.executable, "-c", _ECHO, path], stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._process.stdout.readline()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)

    def median_us(self, size_in: int, size_out: int, repetitions: int) -> float:
        """Return the median round trip."""
        request, answer = bytearray(size_in), memoryview(bytearray(size_out))
        self._socket.sendall(size_in.to_bytes(8, sys.byteorder) + size_out.to_bytes(8, sys.byteorder))
        times = []
        for i in range(repetitions):
            request[0] = i == repetitions - 1
            start = time.perf_counter()
            self._socket.sendall(request)
            view = answer
            while view:
                view = view[self._socket.recv_into(view) :]
            times.append(time.perf_counter() - start)
        return float(np.median(times) * 1e6)

    def close(self) -> None:
        """End the process."""
        self._socket.close()
        self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._folder.close()


def bench_ps(
    *, rows: int = 10_000_000, update: str = "sgd", show: Callable[[str], None] = lambda text: None
) -> Iterator[Result]:
    """Measure push, pull and push_pull with dim 1 (`update`: sgd or ftrl) and dim 16 (Adagrad). Yield each result."""
    with LocalCluster.start(on_compile=show) as cluster, cluster.connect() as client:
        echo = _Echo()
        cores = usable_cores() if hasattr(os, "sched_setaffinity") else ()
        try:
            if len(cores) > 1:
                os.sched_setaffinity(0, {cores[0]})
                for pid in cluster.pids("server"):
                    os.sched_setaffinity(pid, {cores[1]})
            random = np.random.default_rng(0)
            keys = random.integers(0, 2**64, rows, dtype=np.uint64)
            for dim, name, sizes in ((1, update, (1, 1000, 10_000, 100_000)), (16, "adagrad", (1, 1000, 100_000))):
                table = client.sparse_table(f"bench{dim}", dim=dim, update=RULES[name])
                show(f"filling a table of {rows:,} rows of dim {dim} ({name}) ...")
                for start in range(0, rows, _LOAD_KEYS):
                    part = keys[start : start + _LOAD_KEYS]
                    table.push(part, np.full((len(part), dim), 0.5, np.float32), assume_unique=True).wait()
                for size in sizes:
                    yield from _measure(table, name, keys, size, random, echo)
        finally:
            if len(cores) > 1:
                os.sched_setaffinity(0, cores)
            echo.close()


def _measure(
    table: SparseTable, update: str, keys: np.ndarray[Any, np.dtype[np.uint64]], size: int,
    random: np.random.Generator, echo: _Echo,
) -> Iterator[Result]:  # fmt: skip
    dim = table.dim
    repetitions = max(min(2_000_000 // (size * dim), 1500), 40)
    batches = [np.unique(keys[random.integers(0, len(keys), size)]) for _ in range(min(repetitions, 64))]
    batches = [random.permutation(batch) for batch in batches]
    grads, out = np.full((size, dim), 0.01, np.float32), np.empty((size, dim), np.float32)
    works: dict[str, tuple[Callable[[Any], Any], int, int]] = {
        "pull": (lambda batch: table.pull(batch, out[: len(batch)], assume_unique=True), 8, 4 * dim),
        "push": (lambda batch: table.push(batch, grads[: len(batch)], assume_unique=True).wait(), 8 + 4 * dim, 0),
        "push_pull": (
            lambda batch: table.push_pull(batch, grads[: len(batch)], out[: len(batch)], assume_unique=True),
            8 + 4 * dim,
            4 * dim,
        ),
    }
    for work, (call, bytes_in, bytes_out) in works.items():
        floor = echo.median_us(HEADER_BYTES + size * bytes_in, HEADER_BYTES + size * bytes_out, repetitions)
        times = []
        for i in range(repetitions + 5):
            batch = batches[i % len(batches)]
            start = time.perf_counter()
            call(batch)
            times.append(time.perf_counter() - start)
        median, p99 = (float(value) for value in np.percentile(times[5:], (50, 99)))
        yield Result(
            work=work,
            keys=size,
            dim=dim,
            update=update,
            median_us=round(median * 1e6, 1),
            p99_us=round(p99 * 1e6, 1),
            floor_us=round(floor, 1),
            keys_per_s=round(size / median),
            rows=len(keys),
        )
