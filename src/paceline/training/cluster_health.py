"""Who of the cluster has died while it trains, and what the user is told of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from paceline.errors import PeerError
from paceline.launch.local import LocalCluster
from paceline.launch.supervisor import describe_status
from paceline.protocol import NUM_BUCKETS, Role
from paceline.protocol.jobs import JobState
from paceline.ps import Client


class ClusterHealth:
    """What becomes of workers, servers and scheduler. `processes`, if it is our own cluster, is asked who has died.

    That workers are still at the job before is told after `patience_s`.
    """

    def __init__(
        self, client: Client, processes: LocalCluster | None, warn: Callable[[str], None], *, patience_s: float = 5.0
    ) -> None:
        self._client = client
        self._processes = processes
        self._warn = warn
        self.num_lost_workers = self._num_lost_before = 0
        self._was_alone = False
        self._patience_s = patience_s
        self._awaited: tuple[int, ...] = ()
        self._awaited_since_s = math.inf
        self._reconnections = client.link.reconnections
        self._first_servers = client.servers.routes.server_ranks
        self._server_restarts = 0

    def begin_job(self) -> None:
        """Count the lost workers of another job."""
        self._num_lost_before = self.num_lost_workers

    def note_lost_workers(self, task: str, state: JobState) -> None:
        """Say if a job has lost more workers."""
        num_lost = self._num_lost_before + state.lost_workers
        if num_lost > self.num_lost_workers:
            self.num_lost_workers = num_lost
            if state.num_workers:  # else :meth:`check_workers` says what follows
                go_on = "1 goes on" if state.num_workers == 1 else f"{state.num_workers} go on"
                self._warn(f"a worker died: {go_on}, and its unfinished shards are read again ({task})")

    def note_replaced(self) -> None:
        """Say if the scheduler or a server was replaced."""
        if self._client.link.reconnections > self._reconnections:
            self._reconnections = self._client.link.reconnections
            self._warn("the scheduler died: another one has taken its place")
        if self._processes is not None and self._processes.server_restarts > self._server_restarts:
            self._server_restarts = self._processes.server_restarts
            self._warn("a server died: its replicas serve what it had, and another server takes its place")

    def find_gone(self) -> str | None:
        """Say that a server, and what it had, or the scheduler, is gone."""
        if self._processes is not None:
            dead = self._processes.dead_children("server") + self._processes.dead_children("scheduler")
            if dead:
                return f"{dead[0][0]} {describe_status(dead[0][1])}"
        cluster = self._client.link.view
        if cluster is None or not cluster.num_lost:
            return None
        missing = sorted(set(self._first_servers) - {member.rank for member in cluster.of_role(Role.SERVER)})
        return f"server {missing[0]} is gone" if missing else f"{cluster.num_lost} of {NUM_BUCKETS} buckets are gone"

    def check_workers(self, state: JobState) -> None:
        """Say if a job waits for workers. Raises PeerError if those of this machine have all died."""
        self._check_awaited(state.busy_ranks)
        if self._processes is not None:
            if not self._processes.pids("worker"):
                raise PeerError("all workers have died: nobody is left to train")
            return
        is_alone = not state.num_workers
        if is_alone and not self._was_alone:
            self._warn("the cluster has no worker: this waits until there is one (see 'paceline worker --help')")
        self._was_alone = is_alone

    def _check_awaited(self, ranks: tuple[int, ...]) -> None:
        if not ranks:
            self._awaited_since_s = math.inf
            return
        self._awaited_since_s = min(self._awaited_since_s, time.monotonic())
        if time.monotonic() - self._awaited_since_s >= self._patience_s and ranks != self._awaited:
            self._awaited = ranks
            who = "worker" + "s" * (len(ranks) > 1)
            self._warn(f"{who} {', '.join(map(str, ranks))} still at the job before: this one waits until that ends")
