"""The scheduler and the servers of a run, as far as they are on this machine, and a look at who still uses them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

import msgspec

from paceline.errors import PacelineError, PeerError
from paceline.launch.local import LocalCluster, Share, describe_status
from paceline.protocol import Consistency, StalePolicy
from paceline.ps import SchedulerLink, make_node_name, messages
from paceline.transport import Hello

_HEARTBEAT_TIMEOUT_S = 30.0
"""Ranks that are lost are noticed by their connections; this is for hosts that are. A rank may be busy for long."""


class RunServers:
    """What this machine runs of a cluster whose workers are the ranks. Use it as a context manager."""

    def __init__(
        self,
        *,
        servers: int,
        workers: int,
        consistency: Consistency,
        stale: StalePolicy,
        token: str,
        share: Share | None,
        on_compile: Callable[[str], None] | None = None,
    ) -> None:
        self._num_servers, self._num_workers = servers, workers
        self._runs_scheduler = share is None or share.runs_scheduler
        self._seen: set[int] = set()
        self._there: set[int] = set()
        self._servers_there = 0
        self._lost = False
        self._changed = threading.Condition()
        self._cluster = LocalCluster(
            servers=servers,
            workers=workers,
            consistency=consistency,
            stale=stale,
            token=token,
            share=share,
            heartbeat_timeout_s=_HEARTBEAT_TIMEOUT_S,
            on_compile=on_compile,
        )
        self.scheduler = self._cluster.scheduler
        """Where the ranks of this machine find the scheduler."""
        self._link: SchedulerLink | None = None
        try:
            if share is not None and self._runs_scheduler:
                self._link = self._watch_members()
        except BaseException:
            self._cluster.close()
            raise

    def failure(self) -> str | None:
        """Say which process has ended, if one has."""
        for name, status in self._cluster.dead_children("scheduler") + self._cluster.dead_children("server"):
            if status == 0:
                return "the cluster of servers was ended by another node"
            return f"{name} {describe_status(status)}"
        return None

    def wait_others(self) -> None:
        """Wait until nobody on other machines needs what runs here; returns at once if all ranks were here.

        Where the scheduler runs, that is when every worker has come and gone, or none is there; elsewhere, when the
        scheduler has ended the servers. Raises PeerError if a process is lost before.
        """
        if self._link is not None:
            self._wait_workers_gone(all_of_them=False)
        elif not self._runs_scheduler:
            self.wait_ended()

    def serve(self) -> None:
        """Wait until every worker has come and gone: the static cluster's first server ends the cluster then."""
        if self._link is None:
            self.wait_ended()
        else:
            self._wait_workers_gone(all_of_them=True)

    def wait_ended(self) -> None:
        """Wait until the servers here have been ended by the scheduler."""
        for name, status in self._cluster.wait_children():
            if status:
                raise PeerError(f"{name} {describe_status(status)}")

    def close(self) -> None:
        """End everything. Idempotent."""
        if self._link is not None:
            self._link.close()
        self._cluster.close()

    def __enter__(self) -> RunServers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _watch_members(self) -> SchedulerLink:
        node = make_node_name("observer")
        link = SchedulerLink(
            self._cluster.transport(),
            self.scheduler,
            Hello(role="observer", name=node),
            on_notice=self._heard,
            on_lost=self._has_lost,
        )
        try:
            welcome = link.register(messages.Register(node=node, role="observer"))
            self._heard(welcome.cluster)
        except BaseException:
            link.close()
            raise
        return link

    def _heard(self, notice: msgspec.Struct) -> None:
        if isinstance(notice, messages.ClusterMap):
            with self._changed:
                self._there = {member.rank for member in notice.of_role("worker")}
                self._seen |= self._there
                self._servers_there = len(notice.of_role("server"))
                self._changed.notify_all()

    def _has_lost(self, error: PacelineError) -> None:
        with self._changed:
            self._lost = True
            self._changed.notify_all()

    def _wait_workers_gone(self, *, all_of_them: bool) -> None:
        def is_over() -> bool:
            # A script that never connects is not waited for where ranks of this machine have shown it.
            have_come = len(self._seen) >= self._num_workers or (not self._seen and not all_of_them)
            return self._lost or self._servers_there < self._num_servers or (not self._there and have_come)

        with self._changed:
            self._changed.wait_for(is_over)
            lost_servers = self._num_servers - self._servers_there
        if self._lost or lost_servers:
            what = self.failure() or ("the scheduler is gone" if self._lost else f"{lost_servers} server(s) are gone")
            raise PeerError(f"{what}; the ranks on other machines cannot go on")
