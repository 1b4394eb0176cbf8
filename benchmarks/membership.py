"""Measure the scheduler's cost when many processes join at the same time, and when one process leaves.

``python benchmarks/membership.py`` runs a scheduler, 4 servers and 2,000 workers in one process. The members are only
connected to the scheduler. There are no tables and no data. The program prints the time until all members are admitted,
and the bytes that the scheduler sends. It prints both figures again for one worker that leaves.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from functools import partial

from paceline.protocol import Role
from paceline.ps import Scheduler, messages
from paceline.ps.fail_stop import end_process
from paceline.ps.messages import CALL, NOTICE, RESULT
from paceline.transport import Endpoint, Handler, Header, Hello, Peer, SocketTransport, frame_parts, make_token

SERVERS = 4
MAX_OPENING = 64  # connections that are opened at the same time


class Node(Handler):
    """A member without tables. It registers and acknowledges views."""

    def __init__(self, role: str, rank: int) -> None:
        self.role, self.rank = role, rank
        self.welcomed = asyncio.Event()
        self.views = 0

    async def join(self, transport: SocketTransport, scheduler: Endpoint) -> Peer:
        """Connect and register."""
        name = f"{self.role}-{self.rank}"
        peer = await transport.open(self, scheduler, Hello(role=self.role, name=name))
        address = scheduler if self.role == "server" else None  # required, but not used here
        message = messages.Register(node=name, role=Role(self.role), rank=self.rank, address=address)
        peer.send(*frame_parts(CALL, request=1, meta=messages.encode(message)))
        return peer

    def frame_received(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        """Count views. Acknowledge those that are to be prepared."""
        if header.kind == RESULT:
            self.welcomed.set()
        elif header.kind == NOTICE:
            notice = messages.decode_notice(meta)
            self.views += 1
            if isinstance(notice, messages.PrepareView):
                prepared = messages.Prepared(notice.view.term, notice.view.epoch)
                peer.send(*frame_parts(NOTICE, meta=messages.encode(prepared)))


async def measure(num_workers: int) -> None:
    """Measure how long all members take to join and one to leave, and print the results."""
    transport = SocketTransport(make_token())
    scheduler = Scheduler(
        messages.ClusterSettings(num_servers=SERVERS, heartbeat_timeout_s=600.0),
        fail=partial(end_process, "scheduler"),
    )
    listener = await transport.serve(scheduler, Hello(role="scheduler"))
    nodes = [Node("server", rank) for rank in range(SERVERS)] + [Node("worker", rank) for rank in range(num_workers)]
    gate = asyncio.Semaphore(MAX_OPENING)

    async def join(node: Node) -> Peer:
        async with gate:
            return await node.join(transport, listener.endpoint)

    began = time.perf_counter()
    peers = await asyncio.gather(*(join(node) for node in nodes))
    await asyncio.gather(*(node.welcomed.wait() for node in nodes))
    joined_s, joined_bytes = time.perf_counter() - began, bytes_received(peers)
    began = time.perf_counter()
    peers[-1].send(*frame_parts(NOTICE, meta=messages.encode(messages.Leave())))
    views = sum(node.views for node in nodes[:SERVERS])
    while sum(node.views for node in nodes[:SERVERS]) < views + 2 * SERVERS:  # views are prepared and committed
        await asyncio.sleep(0.001)
    left_s, left_bytes = time.perf_counter() - began, bytes_received(peers) - joined_bytes
    print(
        f"{len(nodes):,} processes joined in {joined_s:.1f} s, {joined_bytes / 1e6:,.1f} MB sent by the scheduler; "
        f"one left: {1e3 * left_s:.1f} ms, {left_bytes / 1e3:,.1f} kB"
    )
    for peer in peers:
        peer.abort()
    scheduler.close()
    await listener.close()


def bytes_received(peers: list[Peer]) -> int:
    """Return the number of bytes received from the scheduler."""
    return sum(peer.statistics().bytes_received for peer in peers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="*", default=[500, 2000])
    for workers in parser.parse_args().workers:
        asyncio.run(measure(workers))


if __name__ == "__main__":
    main()
