"""What the tags of frames cost between hosts without TLS: network namespaces stand for hosts, with a limited link.

    sudo python benchmarks/sealing.py [--mbit 1000] [--bytes 100 1000000 24000000] [--rounds 40]

A step is one frame to a server and one of the same size back, as a push of gradients and a pull of parameters are. The
same bytes go by turns over a connection whose frames are sealed and over one whose ends were made to believe that
nobody can be in between. The cost is that of the medians, and of the best times, which say more where other
programs run. Needs root, iproute2 and the kernel's tbf.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import time

import numpy as np
from hosts import NETWORK, network  # type: ignore[import-not-found]  # beside this program

from paceline.testing import EchoHandler
from paceline.testing.transports import ECHO
from paceline.transport import Channel, Hello, SocketTransport, client, frame_parts, new_event_loop
from paceline.transport.security import sealing

TOKEN = "the token of a benchmark"
KINDS = ("sealed", "bare")
TIMEOUT_S = 60.0


def believe_that_nobody_is_in_between() -> None:
    """Let both ends of every connection to come see the same one."""
    for module in (sealing, client):
        module.socket_binding = lambda connected, *, connecting: b"the same"  # type: ignore[attr-defined]


def serve() -> None:
    """Be the server of one connection after the other, until standard input ends; print the port."""

    async def run() -> None:
        address = f"{NETWORK}.1:0"
        listener = await SocketTransport(TOKEN).serve(EchoHandler(), Hello(role="server"), address=address, unix=False)
        print(listener.endpoint.tcp.port, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        await listener.close()

    new_event_loop().run_until_complete(run())


def step(channel: Channel, body: np.ndarray, into: np.ndarray) -> float:
    """Do one exchange; return how long it took."""
    start = time.perf_counter()
    channel.send(*frame_parts(ECHO, body=body))
    channel.receive(into, TIMEOUT_S)
    return time.perf_counter() - start


def measure(ports: list[int], sizes: list[int], rounds: int) -> None:
    """Be the client: print one JSON object per size."""
    channels = []
    for kind, port in zip(KINDS, ports, strict=True):
        if kind == "bare":
            believe_that_nobody_is_in_between()
        channels.append(SocketTransport(TOKEN).connect(f"{NETWORK}.1:{port}", Hello(role="worker")))
    for size in sizes:
        body, into = np.ones(size, np.uint8), np.empty(size, np.uint8)
        times = [[step(channel, body, into) for channel in channels] for _ in range(rounds + 1)][1:]
        result: dict[str, float] = {"bytes": size}
        for kind, taken in zip(KINDS, zip(*times, strict=True), strict=True):
            result |= {f"{kind}_s": statistics.median(taken), f"{kind}_best_s": min(taken)}
        print(json.dumps(result), flush=True)
    for channel in channels:
        channel.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--bytes", type=int, nargs="+", default=[100, 1_000_000, 24_000_000])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--ports", type=int, nargs=2, help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.serve is not None:
        if told.serve == "bare":
            believe_that_nobody_is_in_between()
        serve()
        return
    if told.ports is not None:
        measure(told.ports, told.bytes, told.rounds)
        return
    if told.mbit < 1 or told.rounds < 1 or min(told.bytes) < 1:
        parser.error("expected at least 1 Mbit/s, 1 round and 1 byte")
    if os.geteuid() != 0 or not all(shutil.which(tool) for tool in ("ip", "tc")):
        sys.exit("sealing.py: network namespaces need root, and ip and tc of iproute2")
    with network(2, told.mbit) as (here, there):
        command = [sys.executable, __file__]
        servers = [
            subprocess.Popen(
                ["ip", "netns", "exec", here, *command, "--serve", kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            for kind in KINDS
        ]
        try:
            ports = [str(int(server.stdout.readline())) for server in servers if server.stdout is not None]
            sizes = [str(size) for size in told.bytes]
            options = ["--ports", *ports, "--bytes", *sizes, "--rounds", str(told.rounds)]
            command = ["ip", "netns", "exec", there, *command, *options]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        finally:
            for server in servers:
                server.communicate()
    if told.json:
        print(output, end="")
        return
    print(f"a step between hosts at {told.mbit} Mbit/s, {told.rounds} rounds")
    heads = f"{'sealed ms':>11}{'bare ms':>10}{'cost':>8}", f"{'best: sealed ms':>18}{'bare ms':>10}{'cost':>8}"
    print(f"{'bytes each way':>14}", *heads, sep="")
    for result in map(json.loads, output.splitlines()):
        line = f"{result['bytes']:>14,}"
        for what, wide in (("_s", 11), ("_best_s", 18)):
            sealed, bare = (result[kind + what] * 1e3 for kind in KINDS)
            line += f"{sealed:>{wide}.2f}{bare:>10.2f}{sealed / bare - 1:>8.1%}"
        print(line)


if __name__ == "__main__":
    main()
