"""The scheduler and the servers of a run, as far as they are on this machine, and a look at who lives and uses them.

With replicas servers die and are replaced while the run goes on, and several machines share one cluster: then its map,
which an observer's link to the scheduler brings, says what is lost.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from paceline.closing import Closing
from paceline.errors import PacelineError, PeerError
from paceline.launch.local import LocalCluster, Share
from paceline.launch.supervisor import describe_status
from paceline.ps import SchedulerLink, make_node_name, messages
from paceline.ps.client.routes import MapWatch
from paceline.tables.memory.limit import MemoryLimit
from paceline.transport import TLS, Hello

_LEAVING_S = 2.0
"""How long a server that was declared dead may take to end by itself; one that is stopped never does."""
_LOOK_S = 0.5


class News:
    """Lines about dead and replaced processes, kept until the main thread prints them.

    The thread of the link to the scheduler adds them. It also sends heartbeats, so it must not wait for a reader of
    standard error. A server's death is reported when another server has joined.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._notes: dict[str, str] = {}  # by the place of a server, in the order of the deaths
        self._known: set[int] | None = None

    def add(self, line: str) -> None:
        """Say a line soon."""
        self._lines.append(line)

    def add_when_replaced(self, place: str, line: str) -> None:
        """Say a line when another server has joined. Of a place whose line is waiting the first one counts."""
        self._notes.setdefault(place, line)

    def take_servers(self, incarnations: Iterable[int], *, is_lost: bool) -> None:
        """Take who is there, and whether something is lost, which is then all there is to say."""
        now = set(incarnations)
        joined = set() if self._known is None else now - self._known
        self._known = now | (self._known or set())
        for place in [] if is_lost else list(self._notes)[: len(joined)]:
            self._lines.append(self._notes.pop(place))

    def take_lines(self) -> list[str]:
        """Return what is to be said now, and forget it."""
        lines, self._lines = self._lines, []
        return lines


class RunServers(Closing):
    """What this machine runs of a cluster whose workers are the ranks. Use it as a context manager.

    `failure` and `wait_others` report replaced processes on standard error.
    """

    def __init__(self, workers: int, share: Share | None) -> None:
        """Make one without processes; :meth:`start` makes one that runs."""
        self._num_workers = workers
        self._share = share
        self._map: messages.ClusterMap | None = None
        self._seen: set[int] = set()  # the workers that have come
        self._expelled: dict[str, float] = {}  # servers that were there, and until when they may live
        self._stopped: set[str] = set()  # who was killed for that, by name
        self._news = News()
        self._watch = MapWatch()
        self._ended = self._cut_short = False
        self._lost: str | None = None  # why there is no scheduler any more
        self._changed = threading.Condition()
        self.cluster: LocalCluster
        self._link: SchedulerLink | None = None

    @classmethod
    def start(
        cls,
        settings: messages.ClusterSettings,
        *,
        token: str,
        share: Share | None,
        memory_limit: MemoryLimit | None = None,
        tls: TLS | None = None,
        on_compile: Callable[[str], None] | None = None,
        filter_modules: Sequence[str] = (),
    ) -> RunServers:
        """Start the processes, and wait until all servers are there."""
        run = cls(settings.num_workers, share)
        run.cluster = LocalCluster.start(
            settings,
            memory_limit=memory_limit,
            token=token,
            tls=tls,
            share=share,
            on_compile=on_compile,
            on_replaced=run._note_replaced,
            filter_modules=filter_modules,
        )
        try:
            if settings.replicas or share is not None:
                run._link = run._watch_cluster()
        except BaseException:
            run.cluster.close()
            raise
        return run

    @property
    def scheduler(self) -> str:
        """Where the ranks of this machine find the scheduler."""
        return self.cluster.scheduler

    def failure(self) -> str | None:
        """Say who is gone, if the ranks cannot go on without. To be called about every second."""
        self._look()
        if self._ended:  # by the machine with the scheduler, when all ranks have left their servers, or when it failed
            who = "the scheduler was told to end" if self._share is None else "the servers were ended by another node"
            return who if self._cut_short else None
        for name, status in self.cluster.dead_children("scheduler") + self.cluster.dead_children("server"):
            if status or self._link is None:  # else the link is about to say why
                return f"{name} {describe_status(status)}"
        routes = self._watch.newest
        if routes is not None and routes.lost:
            return routes.describe_loss()
        return self._lost

    def wait_others(self) -> None:
        """Wait until nobody on other machines needs what runs here; returns at once if all ranks were here.

        Where the scheduler runs, that is when every worker has come and gone, or none is there; elsewhere, when the
        scheduler has ended the servers. Raises PeerError if what they need is lost before.
        """
        if self._share is not None:
            # A script that never connects is not waited for: ranks of this machine have shown it.
            self._wait(lambda: self._runs_scheduler and not self.there and (self._have_all_come or not self._seen))

    def serve(self) -> None:
        """Wait until every worker has come and gone: the static cluster's first server ends the cluster then."""
        self._wait(lambda: self._runs_scheduler and not self.there and self._have_all_come)

    def close(self) -> None:
        """End everything. Idempotent."""
        if self._link is not None:
            self._link.close()
        self._say_news()
        self.cluster.close()

    # What the cluster's map and its scheduler say, in the link's thread.

    def _watch_cluster(self) -> SchedulerLink:
        node = make_node_name("observer")
        link = SchedulerLink(
            self.cluster.transport(),
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
            before = self._map
            if before is not None and cluster.epoch < before.epoch:
                return  # what registering was answered, while the next one came
            self._map = cluster
            self._watch.take(cluster)
            self._seen |= self.there
            servers = cluster.of_role("server")
            left = set() if before is None else {member.node for member in before.of_role("server")}
            left -= {member.node for member in servers}
            self._expelled.update(dict.fromkeys(left, time.monotonic() + _LEAVING_S))
            self._news.take_servers((member.incarnation for member in servers), is_lost=cluster.num_lost > 0)
            self._changed.notify_all()

    def _heard(self, notice: msgspec.Struct) -> None:
        with self._changed:
            if isinstance(notice, messages.Ended):
                self._ended, self._cut_short = True, bool(self.there)
            elif isinstance(notice, messages.Expelled):
                self._lost = self._lost or f"this launcher was declared dead: {notice.reason}"
            self._changed.notify_all()

    def _has_lost(self, error: PacelineError) -> None:
        with self._changed:
            self._lost = self._lost or str(error)
            self._changed.notify_all()

    def _note_replaced(self, name: str, status: int) -> None:
        with self._changed:
            if name == "scheduler":
                self._news.add(f"the scheduler {describe_status(status)}: another one takes its place")
                return
            died = "gave no sign of life and was killed" if name in self._stopped else describe_status(status)
            self._stopped.discard(name)
            after = "its replicas serve what it had, and another server took its place"
            self._news.add_when_replaced(name, f"{name} {died}: {after}")

    # What becomes of it, in the thread that asks for it.

    def _look(self) -> None:
        """Say what is new, and kill servers that were declared dead and do not end: others take their place then."""
        self._say_news()
        with self._changed:
            now = time.monotonic()
            for node in [node for node, until in self._expelled.items() if now >= until and not self._ended]:
                del self._expelled[node]
                name = self.cluster.kill_server(node)
                if name is not None:
                    self._stopped.add(name)

    def _say_news(self) -> None:
        with self._changed:
            lines = self._news.take_lines()
        for line in lines:
            with contextlib.suppress(OSError, ValueError):  # the reader has closed it
                sys.stderr.write(f"paceline run: {line}\n")
                sys.stderr.flush()

    @property
    def _runs_scheduler(self) -> bool:
        return self._share is None or self._share.runs_scheduler

    @property
    def there(self) -> set[int]:
        """The workers that are there."""
        return set() if self._map is None else {member.rank for member in self._map.of_role("worker")}

    @property
    def _have_all_come(self) -> bool:
        return len(self._seen) >= self._num_workers

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Wait until something is true, or the cluster has ended in good order. Raises PeerError if it has not."""

        def is_over() -> bool:
            routes = self._watch.newest
            return is_done() or self._ended or self._lost is not None or (routes is not None and routes.lost != 0)

        while True:
            self._look()
            with self._changed:
                has_ended, is_good = self._changed.wait_for(is_over, _LOOK_S), is_done()
            if has_ended:
                failure = None if is_good else self.failure()
                break
        if failure is not None:
            raise PeerError(f"{failure}; the ranks on other machines cannot go on")
