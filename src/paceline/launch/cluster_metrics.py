"""Collect the metrics of a cluster: its members, views and servers."""

from __future__ import annotations

import contextlib
import math
import threading
from typing import Final

import msgspec
from typing_extensions import override

from paceline.closing import Closing
from paceline.errors import PacelineError
from paceline.observe.collector import Collector
from paceline.observe.metrics import METRICS, MetricValues, bucket_counts
from paceline.protocol import Role
from paceline.ps import Client, messages
from paceline.transport import Address, Transport

_EVERY_S: Final = 1.0
_TIMEOUT_S: Final = 10.0
_RECONNECT_S: Final = 3.0
_BOUNDS: Final = METRICS["paceline_staleness_pushes"].bounds


class ClusterMetrics(Closing):
    """Requests the statistics of all servers once a second, as an observer of the cluster, until it is closed.

    If servers or the scheduler do not answer, it connects again.
    """

    def __init__(self, transport: Transport, scheduler: Address | str, collector: Collector) -> None:
        """Create the metrics; :meth:`start` connects."""
        self._transport, self._scheduler, self._collector = transport, scheduler, collector
        self._lock = threading.Lock()
        self._view: messages.View | None = None
        self._num_failovers = 0
        self._client: Client | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-cluster-metrics", daemon=True)

    @classmethod
    def start(cls, transport: Transport, scheduler: Address | str, collector: Collector) -> ClusterMetrics:
        """Create the metrics, and start the thread that connects."""
        metrics = cls(transport, scheduler, collector)
        metrics._thread.start()
        return metrics

    @override
    def close(self) -> None:
        """Collect the last statistics, and disconnect. Waits at most a few seconds for servers that do not answer."""
        self._closed.set()
        self._thread.join(2 * _EVERY_S)
        client = self._client
        if self._thread.is_alive() and client is not None:
            client.abort()
        self._thread.join(_TIMEOUT_S)

    def _run(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(PacelineError), self._connect() as client:
                self._client = client
                is_last = False
                while not is_last:
                    is_last = self._closed.wait(_EVERY_S)
                    self._collect(client)
            self._client = None
            self._closed.wait(_EVERY_S)

    def _connect(self) -> Client:
        return Client.connect(
            self._transport,
            self._scheduler,
            observer=True,
            timeout_s=_TIMEOUT_S,
            scheduler_reconnect_s=_RECONNECT_S,
            on_notice=self._receive_notice,
        )

    def _receive_notice(self, notice: msgspec.Struct) -> None:
        if isinstance(notice, messages.View):
            self._apply(notice)
        elif isinstance(notice, messages.Ended):
            self._closed.set()

    def _apply(self, view: messages.View) -> None:
        """Count failovers and add events. The client calls this method when it connects, and later in a thread."""
        with self._lock:
            before = self._view
            if before is not None and view.order <= before.order:
                return
            self._view = view
            if before is not None:
                num_failovers, events = compare_views(before, view)
                self._num_failovers += num_failovers
                for text in events:
                    self._collector.add_event(text)

    def _collect(self, client: Client) -> None:
        values = MetricValues()
        for rank, server in client.statistics_by_rank().items():
            set_server(values, str(rank), server)
        with self._lock:
            view = self._view
            values.set("paceline_failovers_total", float(self._num_failovers))
        if view is not None:
            values.set("paceline_membership_epoch", float(view.epoch))
            for role in (Role.SERVER, Role.WORKER):
                values.set("paceline_members", float(len(view.of_role(role))), f"{role.value}s")
        self._collector.update(values)


def compare_views(before: messages.View, view: messages.View) -> tuple[int, list[str]]:
    """Return the number of primaries that a successor has replaced, and a sentence for each join and leave."""
    lost, joined = before.incarnations - view.incarnations, view.incarnations - before.incarnations
    replaced: set[int] = set()
    without_successor: set[int] = set()
    for group in before.groups:
        if group.members and group.members[0] in lost:
            has_successor = not lost.issuperset(group.members)
            (replaced if has_successor else without_successor).add(group.members[0])
    events = [
        f"view {view.epoch}: {member.role.value} {member.rank} joins"
        for member in view.members
        if member.incarnation in joined
    ]
    for member in before.members:
        if member.incarnation in lost:
            text = f"view {view.epoch}: {member.role.value} {member.rank} leaves"
            if member.incarnation in without_successor:
                text += ", and no server has a replica of its rows"
            elif member.incarnation in replaced:
                text += ", and its successor takes over"
            events.append(text)
    return len(replaced), events


def set_server(values: MetricValues, server: str, statistics: messages.ServerStatistics) -> None:
    """Set the metrics of a server from its statistics."""
    for name, value in (
        ("paceline_server_memory_bytes", statistics.resident_bytes),
        ("paceline_server_received_bytes_total", statistics.bytes_in),
        ("paceline_server_sent_bytes_total", statistics.bytes_out),
        ("paceline_server_held_requests", statistics.held),
        ("paceline_server_replica_differences", len(statistics.differences)),
    ):
        values.set(name, float(value), server)
    for table, found in statistics.tables.items():
        for name, value in (
            ("paceline_server_rows", found.rows),
            ("paceline_server_table_bytes", found.num_bytes),
            ("paceline_server_pushes_total", found.pushes),
            ("paceline_server_pulls_total", found.pulls),
            ("paceline_server_dropped_pushes_total", found.dropped),
            ("paceline_server_non_finite_total", found.non_finite),
        ):
            values.set(name, float(value), server, table)
        histogram = [float(count) for count in found.staleness]
        total = math.nan if histogram[-1] else sum(number * count for number, count in enumerate(histogram))
        values.set("paceline_staleness_pushes", [total, *bucket_counts(histogram, _BOUNDS)], server, table)
