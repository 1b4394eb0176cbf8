"""Measure the cost of the authentication tags in frames between hosts without TLS.

    sudo python benchmarks/sealing.py [--mbit 1000] [--bytes 100 1000000 24000000] [--rounds 40]

The hosts are network namespaces with a limited link. A step is one frame to a server and one frame of the same size
back, like a push of gradients and a pull of parameters. Steps alternate between two connections. The frames of one
connection are sealed. For the other connection, both ends are given equal bindings, so its frames are not sealed.
The cost is the ratio of the medians, and the ratio of the best times. The latter is more reliable if other programs
run. Needs root, iproute2 and the kernel's tbf.
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
from hosts import NETWORK, network  # type: ignore[import-not-found]  # a module of this folder

from paceline.testing import EchoHandler
from paceline.testing.transports import ECHO
from paceline.transport import Channel, Hello, SocketTransport, client, frame_parts, new_event_loop
from paceline.transport.security import sealing

TOKEN = "the token of a benchmark"
KINDS = ("sealed", "bare")
TIMEOUT_S = 60.0


def use_equal_bindings() -> None:
    """Give both ends of each later connection equal bindings, so that its frames are not sealed."""
    for module in (sealing, client):
        module.socket_binding = lambda connected, *, connecting: b"the same"  # type: ignore[attr-defined]


def serve() -> None:
    """Run the server until standard input ends. Print its port."""

    async def run() -> None:
        address = f"{NETWORK}.1:0"
        listener = await SocketTransport(TOKEN).serve(EchoHandler(), Hello(role="server"), address=address, unix=False)
        print(listener.endpoint.tcp.port, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        await listener.close()

    new_event_loop().run_until_complete(run())


def step(channel: Channel, body: np.ndarray, into: np.ndarray) -> float:
    """Send a frame and receive its echo. Return the seconds."""
    start = time.perf_counter()
    channel.send(*frame_parts(ECHO, body=body))
    channel.receive(into, TIMEOUT_S)
    return time.perf_counter() - start


def measure(ports: list[int], sizes: list[int], rounds: int) -> None:
    """Run the client, and print one JSON object per size."""
    channels = []
    for kind, port in zip(KINDS, ports, strict=True):
        if kind == "bare":
            use_equal_bindings()
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
    options = parser.parse_args()
    if options.serve is not None:
        if options.serve == "bare":
            use_equal_bindings()
        serve()
        return
    if options.ports is not None:
        measure(options.ports, options.bytes, options.rounds)
        return
    if options.mbit < 1 or options.rounds < 1 or min(options.bytes) < 1:
        parser.error("expected at least 1 Mbit/s, 1 round and 1 byte")
    if os.geteuid() != 0 or not all(shutil.which(tool) for tool in ("ip", "tc")):
        sys.exit("sealing.py: network namespaces need root, and ip and tc of iproute2")
    with network(2, f"{options.mbit}Mbit") as (server_host, client_host):
        command = [sys.executable, __file__]
        servers = [
            subprocess.Popen(
                ["ip", "netns", "exec", server_host, *command, "--serve", kind],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for kind in KINDS
        ]
        try:
            ports = [str(int(server.stdout.readline())) for server in servers if server.stdout is not None]
            sizes = [str(size) for size in options.bytes]
            client_options = ["--ports", *ports, "--bytes", *sizes, "--rounds", str(options.rounds)]
            command = ["ip", "netns", "exec", client_host, *command, *client_options]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        finally:
            for server in servers:
                server.communicate()
    if options.json:
        print(output, end="")
        return
    print(f"a step between hosts at {options.mbit} Mbit/s, {options.rounds} rounds")
    heads = f"{'sealed ms':>11}{'bare ms':>10}{'cost':>8}", f"{'best: sealed ms':>18}{'bare ms':>10}{'cost':>8}"
    print(f"{'bytes each way':>14}", *heads, sep="")
    for result in map(json.loads, output.splitlines()):
        line = f"{result['bytes']:>14,}"
        for suffix, wide in (("_s", 11), ("_best_s", 18)):
            sealed, bare = (result[kind + suffix] * 1e3 for kind in KINDS)
            line += f"{sealed:>{wide}.2f}{bare:>10.2f}{sealed / bare - 1:>8.1%}"
        print(line)


if __name__ == "__main__":
    main()
