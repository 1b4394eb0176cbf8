"""Measure the latency of predictions over HTTP by `paceline serve` with a click model, at a steady rate of requests.

Requests are sent at fixed times, even if earlier requests have no reply yet. So if the server pauses, the delays of all
waiting requests are measured (no coordinated omission). Server and client are separate processes.

python benchmarks/serving.py --rate 1000 --rows 10 --seconds 30 [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

import numpy as np
import psutil

from paceline.bench.other_load import OtherLoad
from paceline.data import ClickLogSpec, write_click_log
from paceline.data.formats.criteo import CRITEO_NAMES
from paceline.training.driver import train_locally
from paceline.training.options import TrainOptions

_BODIES = 500


class Connection(asyncio.Protocol):
    """A connection that sends requests one after the other.

    A request's latency is the time from its scheduled time to its reply.
    """

    def __init__(self, latencies: list[float]) -> None:
        self._latencies = latencies
        self._due: deque[float] = deque()
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    @property
    def is_idle(self) -> bool:
        return not self._due and not self._waiting

    def send(self, due: float, request: bytes) -> None:
        if self._due:
            self._waiting.append((due, request))
            return
        assert self._transport is not None
        self._due.append(due)
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        if len(body) < length:
            return
        assert head.startswith(b"HTTP/1.1 200"), self._received
        self._received = b""
        self._latencies.append(time.perf_counter() - self._due.popleft())
        if self._waiting:
            self.send(*self._waiting.popleft())


async def send_requests(
    port: int, requests: list[bytes], rate: float, seconds: float, num_connections: int
) -> list[float]:
    """Send requests at a rate over several connections. Return the latencies in seconds."""
    latencies: list[float] = []
    loop = asyncio.get_running_loop()
    connections = [
        (await loop.create_connection(lambda: Connection(latencies), "127.0.0.1", port))[1]
        for _ in range(num_connections)
    ]
    start = time.perf_counter() + 0.05
    total = int(rate * seconds)
    for number in range(total):
        due = start + number / rate
        while (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait if wait > 0.002 else 0)
        first = number % num_connections  # use all connections in turn, because the server closes idle ones
        in_turn = [*connections[first:], *connections[:first]]
        connection = next((candidate for candidate in in_turn if candidate.is_idle), in_turn[0])
        connection.send(due, requests[number % len(requests)])
    while len(latencies) < total:
        await asyncio.sleep(0.01)
    return latencies


def make_requests(data: Path, num_rows: int) -> list[bytes]:
    """Return requests with rows of a Criteo file."""
    requests: list[bytes] = []
    with open(data, encoding="utf-8") as lines:
        for _ in range(_BODIES):
            rows = []
            for _ in range(num_rows):
                cells = next(lines).rstrip("\n").split("\t")[1:]
                rows.append(
                    {
                        name: (int(cell) if name.startswith("I") else cell) if cell else None
                        for name, cell in zip(CRITEO_NAMES, cells, strict=True)
                    }
                )
            body = json.dumps(rows).encode()
            requests.append(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    return requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=1000.0, help="requests per second")
    parser.add_argument("--rows", type=int, default=10, help="rows per request")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--reload", action="store_true", help="replace the model after half of the time")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data, model = Path(folder, "clicks.tsv"), Path(folder, "model")
        write_click_log(data, ClickLogSpec(rows=100_000))
        options = TrainOptions(data=[data], epochs=1, save=model)
        features = train_locally(options).num_features
        requests = make_requests(data, arguments.rows)
        command = [sys.executable, "-m", "paceline", "serve", str(model), "--port", "0"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
            try:
                assert server.stderr is not None
                port = int(server.stderr.readline().split(", until")[0].rpartition(":")[2])
                asyncio.run(send_requests(port, requests, arguments.rate, 2.0, arguments.connections))  # to warm up
                other_load, watched = OtherLoad(), psutil.Process(server.pid)
                before = sum(watched.cpu_times()[:2])
                latencies = asyncio.run(_measure(port, requests, arguments, options))
                cpu_ms = (sum(watched.cpu_times()[:2]) - before) / len(latencies) * 1e3
            finally:
                server.send_signal(signal.SIGINT)
    p50, p99, p999 = np.percentile(np.array(latencies) * 1e3, [50, 99, 99.9])
    found = {
        "rate": arguments.rate,
        "rows": arguments.rows,
        "features": features,
        "requests": len(latencies),
        "p50_ms": p50,
        "p99_ms": p99,
        "p999_ms": p999,
        "max_ms": max(latencies) * 1e3,
        "server_cpu_ms": cpu_ms,
        "others_share": other_load.share(),
    }
    if arguments.json:
        print(json.dumps(found))
    else:
        print(
            f"{len(latencies):,} requests of {arguments.rows} rows at {arguments.rate:g}/s, {features:,} features: "
            f"p50 {p50:.2f} ms, p99 {p99:.2f} ms, p99.9 {p999:.2f} ms, slowest {found['max_ms']:.1f} ms\n"
            f"{cpu_ms:.2f} ms of a core for each in the server; other processes had "
            f"{other_load.share():.0%} of all cores"
        )


async def _measure(
    port: int, requests: list[bytes], arguments: argparse.Namespace, options: TrainOptions
) -> list[float]:
    sending = asyncio.create_task(
        send_requests(port, requests, arguments.rate, arguments.seconds, arguments.connections)
    )
    if arguments.reload:
        await asyncio.sleep(arguments.seconds / 2)
        await asyncio.to_thread(train_locally, options)
    return await sending


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
