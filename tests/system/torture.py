"""Real processes killed and stopped at random while they count: every acknowledged push must be there, once.

``make torture`` runs it; so does ``python tests/system/torture.py --runs 3``. A run is a cluster of three servers with
one replica, three workers and a scheduler. Every second one of them is killed (SIGKILL) or stopped for a while
(SIGSTOP), servers only while every bucket has its replica. Runs take turns:

* eventual, bounded and sequential: each worker counts on keys of its own, and reads back what it pushed after every
  iteration. In the end each count is that of the acknowledged pushes; of a worker that was killed it may hold the one
  under way too. (Under sequential consistency that is one that it has not read back: an iteration is safe when it is
  complete.)
* lockstep: under sequential consistency all workers push to the same keys, and each checks every value that it reads
  against the only one that is right. Here workers are stopped but not killed: what a dead one would have pushed is
  missing by right.

The first argument of a worker process is its part, as JSON.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

import paceline
from paceline.errors import AddressError, ConnectionLostError, PacelineError
from paceline.launch import LocalCluster
from paceline.protocol import parse_consistency
from paceline.ps import Client, messages

KEYS = 256
SERVERS = 3
WORKERS = 3
HEARTBEAT_TIMEOUT_S = 1.5
WRONG = 3  # exit status of a worker that has read a wrong value
MODES = {"eventual": "eventual", "bounded": "bounded:2", "sequential": "sequential", "lockstep": "sequential"}
"""Name → consistency."""
RULE = paceline.SGD(lr=1.0)


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker process does."""

    number: int
    rank: int
    seed: int
    seconds: float
    iterations: int
    log: str
    mode: str


# Workers.


def work(part: Part) -> int:
    """Be a worker; return the exit status."""
    with join(part) as client:
        if part.mode == "lockstep":
            return count_together(client, part)
        return count_alone(client, part)


def join(part: Part) -> Client:
    """Join the cluster; its scheduler may be dead just now."""
    deadline = time.monotonic() + 30.0
    while True:
        try:
            return paceline.connect(rank=part.rank if part.mode == "lockstep" else None, timeout_s=60.0)
        except (AddressError, ConnectionLostError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def own_keys(number: int) -> npt.NDArray[np.uint64]:
    """Return the keys of a worker, over all buckets."""
    return np.arange(KEYS, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(number)


def open_log(path: str) -> npt.NDArray[np.int64]:
    """Return how often each key was sent, and acknowledged (int64 [2, KEYS]); it outlives the process."""
    return np.memmap(path, np.int64, "r+", shape=(2, KEYS))


def count_alone(client: Client, part: Part) -> int:
    table = client.sparse_table("counts", dim=1, update=RULE)
    keys, log, chance = own_keys(part.number), open_log(part.log), np.random.default_rng(part.seed)
    end = time.monotonic() + part.seconds
    while time.monotonic() < end:
        chosen = chance.choice(KEYS, chance.integers(1, 64), replace=False)
        log[0, chosen] += 1
        table.push(keys[chosen], np.full((len(chosen), 1), -1.0, np.float32), tick=True).wait()
        if part.mode != "sequential":
            log[1, chosen] += 1
        found = table.pull(keys[chosen]).reshape(-1)
        if not np.array_equal(found, log[0, chosen]):
            print(f"worker {part.number}: read {found.tolist()}, pushed {log[0, chosen].tolist()}", flush=True)
            return WRONG
        log[1, chosen] = log[0, chosen]
    return 0


def step(rank: int, iteration: int) -> float:
    """Return what a rank adds to each key in an iteration."""
    return float((rank + 1) * (iteration % 7 + 1))


def total(iterations: int) -> float:
    """Return what each key holds after so many iterations."""
    return sum(step(rank, iteration) for rank in range(WORKERS) for iteration in range(iterations))


def count_together(client: Client, part: Part) -> int:
    table = client.sparse_table("counts", dim=1, update=RULE)
    keys, right = own_keys(0), 0.0
    for iteration in range(part.iterations):
        found = table.pull(keys).reshape(-1)
        if not (found == np.float32(right)).all():
            wrong = int((found != np.float32(right)).sum())
            values = ", ".join(f"{value:g}" for value in np.unique(found))
            print(f"rank {part.rank}: {wrong} of {KEYS} values of iteration {iteration} are wrong: {values} instead of "
                  f"{right:g}", flush=True)  # fmt: skip
            return WRONG
        grads = np.full((KEYS, 1), -step(part.rank, iteration), np.float32)
        table.push(keys, grads, tick=True)
        right += sum(step(rank, iteration) for rank in range(WORKERS))
        time.sleep(0.005)
    client.flush()
    return 0


# The run.


@dataclasses.dataclass
class Run:
    """One cluster and its faults."""

    seed: int
    mode: str
    seconds: float
    folder: Path
    first: tuple[str, str] | None = None
    """Role and action of the first fault, such as ``("server", "kill")``; it waits until a worker has pushed."""
    faults: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.workers: dict[int, subprocess.Popen[bytes]] = {}
        self.killed: set[int] = set()
        self.resume_at: list[tuple[float, int]] = []

    def carry_out(self) -> str:
        """Return what went wrong; empty if nothing did."""
        with LocalCluster(
            servers=SERVERS,
            workers=WORKERS,
            replicas=1,
            consistency=parse_consistency(MODES[self.mode]),
            heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
        ) as cluster:
            try:
                with cluster.connect(observer=True, timeout_s=60.0) as client:
                    return self._torture(cluster, client)
            finally:
                self._resume(time.monotonic() + 1e9)
                for worker in self.workers.values():
                    worker.kill()
                    worker.wait()

    def _torture(self, cluster: LocalCluster, client: Client) -> str:
        table = client.sparse_table("counts", dim=1, update=RULE)
        for number in range(WORKERS):
            self._start_worker(cluster, number)
        started = time.monotonic()
        next_fault = started + 1.0
        deadline = started + self.seconds + 60.0
        while any(worker.poll() is None for worker in self.workers.values()):
            now = time.monotonic()
            self._resume(now)
            if now > deadline:
                return f"it did not end within {deadline - started:.0f} s"
            if self.first is not None and not self.faults:
                if len(table):
                    self._fault(cluster, client)
                    next_fault = now + 1.0
            elif now >= next_fault and now < started + self.seconds:
                next_fault = now + 1.0
                self._fault(cluster, client)
            time.sleep(0.02)
        for number, worker in self.workers.items():
            if worker.returncode and number not in self.killed:
                return f"worker {number} ended with status {worker.returncode}"
        if self.mode == "lockstep":
            found = table.pull(own_keys(0)).reshape(-1)
            right = np.float32(total(self._iterations()))
            return "" if (found == right).all() else f"the model holds {np.unique(found)}, {right} is right"
        for number in self.workers:
            sent, acknowledged = open_log(self._log(number))
            found = table.pull(own_keys(number)).reshape(-1)
            most = sent if number in self.killed else acknowledged
            if not ((acknowledged <= found) & (found <= most)).all():
                worst = int(np.abs(found - acknowledged).max())
                return f"counts of worker {number} are off by up to {worst}"
        return ""

    def _iterations(self) -> int:
        return int(self.seconds * 60)

    def _log(self, number: int) -> str:
        return str(self.folder / f"run{self.seed}-worker{number}")

    def _start_worker(self, cluster: LocalCluster, number: int) -> None:
        np.zeros((2, KEYS), np.int64).tofile(self._log(number))
        part = Part(
            number=number,
            rank=number,
            seed=self.seed * 100 + number,
            seconds=self.seconds,
            iterations=self._iterations(),
            log=self._log(number),
            mode=self.mode,
        )
        self.workers[number] = subprocess.Popen(
            [sys.executable, __file__, "--part", msgspec.json.encode(part).decode()],
            env={**os.environ, "PACELINE_SCHEDULER": cluster.scheduler, "PACELINE_TOKEN": cluster.token},
        )

    def _fault(self, cluster: LocalCluster, client: Client) -> None:
        role = self.chance.choice(["server", "server", "scheduler", "worker"])
        action = self.chance.choice(["kill", "stop"])
        if self.first is not None and not self.faults:
            role, action = self.first
        if role == "server" and not self._has_replicas(client):
            return
        if role == "worker":
            alive = [number for number, worker in self.workers.items() if worker.poll() is None]
            if not alive:
                return
            number = self.chance.choice(alive)
            pid = self.workers[number].pid
            if self.mode == "lockstep":
                action = "stop"
            elif action == "kill":
                self.killed.add(number)
                self._start_worker(cluster, max(self.workers) + 1)
            stop_s = self.chance.uniform(0.1, HEARTBEAT_TIMEOUT_S / 2)
        else:
            pids = cluster.pids(role)
            if not pids:
                return
            pid = self.chance.choice(pids)
            stop_s = self.chance.uniform(0.1, 2 * HEARTBEAT_TIMEOUT_S if role == "server" else 1.0)
        self.faults[f"{role} {action}"] += 1
        try:
            os.kill(pid, signal.SIGKILL if action == "kill" else signal.SIGSTOP)
        except ProcessLookupError:
            return
        if action == "stop":
            self.resume_at.append((time.monotonic() + stop_s, pid))

    def _has_replicas(self, client: Client) -> bool:
        try:
            found: messages.ClusterMap = client.link.call(messages.GetMap(), messages.ClusterMap, timeout_s=1.0)
        except PacelineError:
            return False
        servers = len(found.of_role("server"))
        whole = all(len(group.members) >= 2 and group.filling is None for group in found.groups)
        return servers >= 2 and whole and not any(pid for _, pid in self.resume_at)

    def _resume(self, now: float) -> None:
        for when, pid in list(self.resume_at):
            if now >= when:
                self.resume_at.remove((when, pid))
                try:
                    os.kill(pid, signal.SIGCONT)
                except ProcessLookupError:
                    pass


def main() -> int:
    """Run; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=6.0, help="of faults, per run")
    parser.add_argument("--seed", type=int, default=1, help="of the first run")
    parser.add_argument("--mode", choices=MODES, help="only this one")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        return work(msgspec.json.decode(options.part, type=Part))
    faults: collections.Counter[str] = collections.Counter()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="paceline-torture-") as folder:
        for seed in range(options.seed, options.seed + options.runs):
            mode = options.mode or list(MODES)[seed % len(MODES)]
            run = Run(seed, mode, options.seconds, Path(folder))
            began = time.monotonic()
            wrong = run.carry_out()
            faults += run.faults
            failed += bool(wrong)
            told = ", ".join(f"{count} {name}" for name, count in sorted(run.faults.items())) or "none"
            print(f"run {seed:4} {mode:10} {time.monotonic() - began:5.1f} s  faults: {told}", flush=True)
            if wrong:
                again = f"python {Path(__file__).name} --runs 1 --seed {seed} --mode {mode}"
                print(f"  WRONG: {wrong}\n  once more: {again} --seconds {options.seconds:g}", flush=True)
    print(f"{options.runs} runs, {failed} wrong; faults: {json.dumps(dict(sorted(faults.items())))}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
