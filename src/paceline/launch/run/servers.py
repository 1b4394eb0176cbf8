"""Run this machine's part of a run's scheduler and servers, and detect losses.

With replicas, dead servers are replaced during the run. Several machines may share one cluster. In both cases this
process connects to the scheduler as an observer, and the cluster's view shows losses.
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
from paceline.launch.local import LocalCluster
from paceline.launch.share import Share
from paceline.launch.supervisor import describe_status
from paceline.protocol import Role
from paceline.ps import SchedulerLink, make_node_name, messages
from paceline.ps.client.routes import RouteWatch
from paceline.ps.scheduler.link import LinkHooks
from paceline.tables.memory.limit import MemoryLimit
from paceline.transport import TLS, Hello

_LEAVING_S = 2.0
"""A server that was declared dead is killed after this time, because a stopped process does not end by itself."""
_POLL_S = 0.5


class News:
    """Messages about dead and replaced processes, stored until the main thread prints them.

    The thread of the link to the scheduler adds them. This thread also sends heartbeats, so it must not wait for a
    reader of standard error. The line about a server's death is kept until another server has joined.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._notes: dict[str, str] = {}  # name of a dead server → line, in the order of the deaths
        self._known: set[int] | None = None

    def add(self, line: str) -> None:
        self._lines.append(line)

    def add_when_replaced(self, place: str, line: str) -> None:
        """Store a line to print after another server has joined, unless a line for the server `place` is stored."""
        self._notes.setdefault(place, line)

    def take_servers(self, incarnations: Iterable[int], *, is_lost: bool) -> None:
        """Process the living servers. If `is_lost` (data is lost), drop the lines, because the loss is reported."""
        present = set(incarnations)
        joined = set() if self._known is None else present - self._known
        self._known = present | (self._known or set())
        for place in [] if is_lost else list(self._notes)[: len(joined)]:
            self._lines.append(self._notes.pop(place))

    def take_lines(self) -> list[str]:
        """Remove and return the lines to print."""
        lines, self._lines = self._lines, []
        return lines


class RunServers(Closing):
    """This machine's scheduler and servers of a run, whose workers are the ranks. Prints the :class:`News`."""

    def __init__(self, workers: int, share: Share | None) -> None:
        """Create the object without processes; use :meth:`start` instead."""
        self._num_workers = workers
        self._share = share
        self._view: messages.View | None = None
        self._seen: set[int] = set()  # ranks of workers that have joined
        self._expelled: dict[str, float] = {}  # server that was declared dead → deadline for its end
        self._stopped: set[str] = set()  # names of servers that were killed after this deadline
        self._news = News()
        self._watch = RouteWatch()
        self._ended = self._cut_short = False
        self._lost: str | None = None  # the reason why the scheduler is lost
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
        run = cls(settings.num_workers, share)
        run.cluster = LocalCluster.start(
            settings,
            memory_limit=memory_limit,
            token=token,
            tls=tls,
            share=share,
            on_compile=on_compile,
            on_replaced=run._report_replaced,
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
        return self.cluster.scheduler

    def failure(self) -> str | None:
        """Return a message if the run cannot continue. Call this method about every second."""
        self._check()
        if self._ended:  # the scheduler's machine ends the cluster after all ranks have left or after a failure
            cause = "the scheduler was ended" if self._share is None else "another node ended the servers"
            return cause if self._cut_short else None
        for name, status in self.cluster.dead_children("scheduler") + self.cluster.dead_children("server"):
            if status or self._link is None:  # for a child with status 0, the link to the scheduler reports the reason
                return f"{name} {describe_status(status)}"
        routes = self._watch.newest
        if routes is not None and routes.lost:
            return routes.describe_loss()
        return self._lost

    def wait_workers(self) -> None:
        """Wait until ranks on other machines no longer need this machine's processes.

        The machine with the scheduler waits until every worker has joined and left, or no worker is connected. Other
        machines wait until the scheduler has ended the servers. Raises PeerError if a required process is lost.
        """
        if self._share is not None:
            # If no rank has ever connected, the script does not use the servers: do not wait for other ranks.
            self._wait(lambda: self._runs_scheduler and not self.connected and (self._have_all_come or not self._seen))

    def serve(self) -> None:
        """Wait until every worker has joined and left. In a static cluster, the first server then ends the cluster."""
        self._wait(lambda: self._runs_scheduler and not self.connected and self._have_all_come)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        self._print_news()
        self.cluster.close()

    # The link's thread calls the following methods for the scheduler's notices.

    def _watch_cluster(self) -> SchedulerLink:
        node = make_node_name("observer")
        link = SchedulerLink(
            self.cluster.transport(),
            self.scheduler,
            Hello(role="observer", name=node),
            hooks=LinkHooks(self._handle_notice, self._handle_loss),
        )
        try:
            link.register(messages.Register(node=node, role=Role.OBSERVER))
        except BaseException:
            link.close()
            raise
        return link

    def _take_view(self, view: messages.View) -> None:
        with self._changed:
            before = self._view
            if before is not None and view.epoch < before.epoch:
                return  # an older view, in a reply to the registration that came after a newer view
            self._view = view
            self._watch.take(view)
            self._seen |= self.connected
            servers = view.of_role(Role.SERVER)
            left = set() if before is None else {member.node for member in before.of_role(Role.SERVER)}
            left -= {member.node for member in servers}
            self._expelled.update(dict.fromkeys(left, time.monotonic() + _LEAVING_S))
            self._news.take_servers((member.incarnation for member in servers), is_lost=view.num_lost > 0)
            self._changed.notify_all()

    def _handle_notice(self, notice: msgspec.Struct) -> None:
        if isinstance(notice, messages.View):
            self._take_view(notice)
            return
        with self._changed:
            if isinstance(notice, messages.Ended):
                self._ended, self._cut_short = True, bool(self.connected)
            elif isinstance(notice, messages.Expelled):
                self._lost = self._lost or f"this launcher was declared dead: {notice.reason}"
            self._changed.notify_all()

    def _handle_loss(self, error: PacelineError) -> None:
        with self._changed:
            self._lost = self._lost or str(error)
            self._changed.notify_all()

    def _report_replaced(self, name: str, status: int) -> None:
        with self._changed:
            if name == "scheduler":
                self._news.add(f"the scheduler {describe_status(status)}. Another scheduler replaces it")
                return
            death = "sent no heartbeat and was killed" if name in self._stopped else describe_status(status)
            self._stopped.discard(name)
            after = "its replicas serve its data, and another server replaces it"
            self._news.add_when_replaced(name, f"{name} {death}: {after}")

    # The caller's thread calls the following methods.

    def _check(self) -> None:
        """Print news. Kill servers that were declared dead but have not ended, so that the cluster replaces them."""
        self._print_news()
        with self._changed:
            time_s = time.monotonic()
            for node in [node for node, until in self._expelled.items() if time_s >= until and not self._ended]:
                del self._expelled[node]
                name = self.cluster.kill_server(node)
                if name is not None:
                    self._stopped.add(name)

    def _print_news(self) -> None:
        with self._changed:
            lines = self._news.take_lines()
        for line in lines:
            with contextlib.suppress(OSError, ValueError):  # the reader of standard error has closed it
                sys.stderr.write(f"paceline run: {line}\n")
                sys.stderr.flush()

    @property
    def _runs_scheduler(self) -> bool:
        return self._share is None or self._share.runs_scheduler

    @property
    def connected(self) -> set[int]:
        return set() if self._view is None else {member.rank for member in self._view.of_role(Role.WORKER)}

    @property
    def _have_all_come(self) -> bool:
        return len(self._seen) >= self._num_workers

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Wait until a condition is true or the cluster has ended without a failure. Raises PeerError after one."""

        def is_over() -> bool:
            routes = self._watch.newest
            return is_done() or self._ended or self._lost is not None or (routes is not None and routes.lost != 0)

        while True:
            self._check()
            with self._changed:
                has_ended, is_good = self._changed.wait_for(is_over, _POLL_S), is_done()
            if has_ended:
                failure = None if is_good else self.failure()
                break
        if failure is not None:
            raise PeerError(f"{failure}. The ranks on other machines cannot continue")
