"""Detect processes that die during a training, and warn the user."""

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
    """Detects the loss and the replacement of workers, servers and the scheduler.

    `processes` is the training's own cluster. If workers are busy with the previous job for longer than `patience_s`,
    the user gets a warning.
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
        self._busy_ranks: tuple[int, ...] = ()
        self._waiting_since_s = math.inf
        self._schedulers_replaced = client.link.num_replacements
        self._first_servers = client.servers.routes.server_ranks
        self._server_restarts = 0

    def begin_job(self) -> None:
        self._num_lost_before = self.num_lost_workers

    def report_lost_workers(self, task: str, state: JobState) -> None:
        num_lost = self._num_lost_before + state.lost_workers
        if num_lost > self.num_lost_workers:
            self.num_lost_workers = num_lost
            if state.num_workers:  # if no worker remains, :meth:`check_workers` warns
                remaining = "1 continues" if state.num_workers == 1 else f"{state.num_workers} continue"
                self._warn(f"a worker died: {remaining}, and its unfinished shards are read again ({task})")

    def report_replacements(self) -> None:
        if self._client.link.num_replacements > self._schedulers_replaced:
            self._schedulers_replaced = self._client.link.num_replacements
            self._warn("the scheduler died, and another scheduler replaced it")
        if self._processes is not None and self._processes.server_restarts > self._server_restarts:
            self._server_restarts = self._processes.server_restarts
            self._warn("a server died. Its replicas serve its rows until another server replaces it")

    def find_loss(self) -> str | None:
        """Return a description of a lost scheduler, or of a server that was lost with its rows; otherwise None."""
        if self._processes is not None:
            dead = self._processes.dead_children("server") + self._processes.dead_children("scheduler")
            if dead:
                return f"{dead[0][0]} {describe_status(dead[0][1])}"
        view = self._client.link.view
        if view is None or not view.num_lost:
            return None
        missing = sorted(set(self._first_servers) - {member.rank for member in view.of_role(Role.SERVER)})
        return f"server {missing[0]} was lost" if missing else f"{view.num_lost} of {NUM_BUCKETS} buckets were lost"

    def check_workers(self, state: JobState) -> None:
        """Warn if a job waits for workers. Raises PeerError if all workers of the training's own cluster have died."""
        self._check_busy(state.busy_ranks)
        if self._processes is not None:
            if not self._processes.pids("worker"):
                raise PeerError("all workers have died. Their output is above")
            return
        is_alone = not state.num_workers
        if is_alone and not self._was_alone:
            self._warn("the cluster has no worker. The training waits for a worker: see 'paceline worker --help'")
        self._was_alone = is_alone

    def _check_busy(self, ranks: tuple[int, ...]) -> None:
        if not ranks:
            self._waiting_since_s = math.inf
            return
        self._waiting_since_s = min(self._waiting_since_s, time.monotonic())
        if time.monotonic() - self._waiting_since_s >= self._patience_s and ranks != self._busy_ranks:
            self._busy_ranks = ranks
            listed = ", ".join(map(str, ranks))
            workers = f"workers {listed} are" if len(ranks) > 1 else f"worker {listed} is"
            self._warn(f"{workers} still busy with the previous job, so this job waits")
