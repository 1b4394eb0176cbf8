"""The scheduler and the servers of a run, as far as they are on this machine, and a look at who lives and uses them.

With replicas servers die and are replaced while the run goes on, and several machines share one cluster: then its map,
which an observer's link to the scheduler brings, says what is lost.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from types import TracebackType

import msgspec

from paceline.errors import PacelineError, PeerError
from paceline.launch.local import LocalCluster, Share, describe_status
from paceline.protocol import Consistency, StalePolicy
from paceline.ps import SchedulerLink, make_node_name, messages
from paceline.ps.routes import MapWatch
from paceline.transport import Hello

_HEARTBEAT_TIMEOUT_S = 30.0
"""Ranks that are lost are noticed by their connections; this is for hosts that are. A rank may be busy for long."""


class RunServers:
    """What this machine runs of a cluster whose workers are the ranks. Use it as a context manager.

    Whatever the servers hold is on `replicas` servers more than one. That a process died and was replaced is said on
    standard error.
    """

    def __init__(
        self,
        *,
        servers: int,
        workers: int,
        consistency: Consistency,
        stale: StalePolicy,
        replicas: int,
        token: str,
        share: Share | None,
        on_compile: Callable[[str], None] | None = None,
    ) -> None:
        self._num_workers = workers
        self._share = share
        self._seen: set[int] = set()
        self._there: set[int] = set()
        self._servers: set[int] = set()  # by incarnation
        self._replaced: list[tuple[set[int], str]] = []  # who was there before, and what is said when one more is
        self._watch = MapWatch()
        self._ended = self._cut_short = self._lost = False
        self._changed = threading.Condition()
        self._cluster = LocalCluster(
            servers=servers,
            workers=workers,
            consistency=consistency,
            stale=stale,
            replicas=replicas,
            token=token,
            share=share,
            heartbeat_timeout_s=_HEARTBEAT_TIMEOUT_S,
            on_compile=on_compile,
            on_replaced=self._note_replaced,
        )
        self.scheduler = self._cluster.scheduler
        """Where the ranks of this machine find the scheduler."""
        self._link: SchedulerLink | None = None
        try:
            if replicas or share is not None:
                self._link = self._watch_cluster()
        except BaseException:
            self._cluster.close()
            raise

    def failure(self) -> str | None:
        """Say who is gone, if the ranks cannot go on without."""
        if self._ended:  # by the machine with the scheduler, when all ranks have left their servers, or when it failed
            return "the cluster of servers was ended by another node" if self._cut_short else None
        for name, status in self._cluster.dead_children("scheduler") + self._cluster.dead_children("server"):
            if status or self._link is None:  # else the link is about to say why
                return f"{name} {describe_status(status)}"
        routes = self._watch.newest
        if routes is not None and routes.lost:
            return routes.describe_loss()
        return "the scheduler is gone" if self._lost else None

    def wait_others(self) -> None:
        """Wait until nobody on other machines needs what runs here; returns at once if all ranks were here.

        Where the scheduler runs, that is when every worker has come and gone, or none is there; elsewhere, when the
        scheduler has ended the servers. Raises PeerError if what they need is lost before.
        """
        if self._share is not None:
            # A script that never connects is not waited for: ranks of this machine have shown it.
            self._wait(lambda: self._runs_scheduler and not self._there and (self._have_all_come or not self._seen))

    def serve(self) -> None:
        """Wait until every worker has come and gone: the static cluster's first server ends the cluster then."""
        self._wait(lambda: self._runs_scheduler and not self._there and self._have_all_come)

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

    # What the cluster's map and its scheduler say, in the link's thread.

    def _watch_cluster(self) -> SchedulerLink:
        node = make_node_name("observer")
        link = SchedulerLink(
            self._cluster.transport(),
            self.scheduler,
            Hello(role="observer", name=node),
            on_notice=self._heard,
            on_lost=self._has_lost,
            on_map=self._take_map,
        )
        try:
            link.register(messages.Register(node=node, role="observer"))
        except BaseException:
            link.close()
            raise
        return link

    def _take_map(self, cluster: messages.ClusterMap) -> None:
        with self._changed:
            self._watch.take(cluster)
            self._there = {member.rank for member in cluster.of_role("worker")}
            self._seen |= self._there
            self._servers = {member.incarnation for member in cluster.of_role("server")}
            ripe = [] if cluster.num_lost else [each for each in self._replaced if self._servers - each[0]]
            for each in ripe:
                self._replaced.remove(each)
            self._changed.notify_all()
        for _, text in ripe:
            _say(text)

    def _heard(self, notice: msgspec.Struct) -> None:
        if isinstance(notice, messages.Ended):
            with self._changed:
                self._ended, self._cut_short = True, bool(self._there)
                self._changed.notify_all()

    def _has_lost(self, error: PacelineError) -> None:
        with self._changed:
            self._lost = True
            self._changed.notify_all()

    def _note_replaced(self, name: str, status: int) -> None:
        """Say that a process died; of a server when another one is there, since it may have been one too many."""
        if name == "scheduler":
            _say(f"the scheduler {describe_status(status)}: another one takes its place")
            return
        text = f"{name} {describe_status(status)}: its replicas serve what it had, and another server took its place"
        with self._changed:
            self._replaced.append((self._servers, text))

    @property
    def _runs_scheduler(self) -> bool:
        return self._share is None or self._share.runs_scheduler

    @property
    def _have_all_come(self) -> bool:
        return len(self._seen) >= self._num_workers

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Wait until something is true, or the cluster has ended in good order. Raises PeerError if it has not."""

        def is_over() -> bool:
            routes = self._watch.newest
            return is_done() or self._ended or self._lost or (routes is not None and routes.lost != 0)

        with self._changed:
            self._changed.wait_for(is_over)
            failure = None if is_done() else self.failure()
        if failure is not None:
            raise PeerError(f"{failure}; the ranks on other machines cannot go on")


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
        sys.stderr.write(f"paceline run: {text}\n")
        sys.stderr.flush()
