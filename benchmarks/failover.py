"""Measure the time from the death of a server to the first pull of its rows from another server.

``python benchmarks/failover.py`` starts three servers with one replica, and a client that pulls 10,000 keys from all
servers in a loop. It kills one server (SIGKILL), and waits until a new server has replaced it before the next kill. It
prints the median and the longest time.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import threading
import time

import numpy as np

import paceline
from paceline.protocol import Role
from paceline.ps import Client, messages

KEYS = 10_000


class Puller(threading.Thread):
    """A thread that pulls the same keys in a loop, and records the start and end of each pull."""

    def __init__(self, client: Client) -> None:
        super().__init__(daemon=True)
        self._table = client.sparse_table("rows", dim=16, update=paceline.Adagrad(lr=0.1))
        self._keys = np.arange(KEYS, dtype=np.uint64)
        self._table.push(self._keys, np.ones((KEYS, 16), np.float32)).wait()
        self.pulls: list[tuple[float, float]] = []
        self.is_over = False
        self.error: BaseException | None = None
        """The error that ended the pulls."""

    def run(self) -> None:
        try:
            while not self.is_over:
                began = time.monotonic()
                self._table.pull(self._keys)
                self.pulls.append((began, time.monotonic()))
        except BaseException as error:
            self.error = error

    def wait_pull(self, after: float) -> float:
        """Return the end of the first pull that began after the time `after`."""
        while not self.pulls or self.pulls[-1][0] < after:
            self.check()
            time.sleep(0.001)
        return next(ended for began, ended in self.pulls if began > after)

    def check(self) -> None:
        """Raise SystemExit if the pulls have ended with an error."""
        if self.error is not None:
            raise SystemExit(f"the reader failed: {self.error}") from self.error


def wait_for_replicas(client: Client, puller: Puller, servers: int, killed: int | None) -> messages.View:
    """Return the first view without the killed process in which every bucket has its replica."""
    while True:
        puller.check()
        found: messages.View = client.link.get_view()
        members = found.of_role(Role.SERVER)
        has_replicas = all(len(group.members) == 2 and group.filling is None for group in found.groups)
        pids = [member.process.pid for member in members if member.process is not None]
        if has_replicas and len(members) == servers and killed not in pids:
            return found
        time.sleep(0.05)


def main() -> None:
    """Kill servers, and print the times until their rows were available again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    options = parser.parse_args()
    servers, chance, waits = 3, random.Random(1), []
    with (
        paceline.local_cluster(servers=servers, replicas=1) as cluster,
        cluster.connect(observer=True) as watcher,
        cluster.connect(observer=True) as client,
    ):
        puller = Puller(client)
        puller.start()
        pid: int | None = None
        for _ in range(options.kills):
            members = wait_for_replicas(watcher, puller, servers, pid).of_role(Role.SERVER)
            time.sleep(0.2)
            pid = chance.choice([member.process.pid for member in members if member.process is not None])
            killed = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            waits.append(puller.wait_pull(killed) - killed)
        puller.is_over = True
        puller.join()
    print(
        f"{options.kills} kills of one of {servers} servers: from the kill to the end of the first successful "
        f"pull that began after it, median {statistics.median(waits) * 1e3:.0f} ms, slowest {max(waits) * 1e3:.0f} ms"
    )


if __name__ == "__main__":
    main()
