"""Snapshots read back: the rows of one into a new cluster.

Each server reads its own buckets, as primary or as replica; this process reads for those that do not see the directory.
It was found by :mod:`paceline.storage.snapshot_directory`, and taken by :mod:`paceline.ps.client.snapshots`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.errors import ModelError, PeerError, StaleEpochError, TableMismatchError, UsageError
from paceline.protocol.buckets import Buckets, bucket_set, to_bytes
from paceline.ps.client.client import Client
from paceline.ps.client.connection import ServerConnection
from paceline.ps.client.records import write_records
from paceline.ps.client.snapshots import shares_of
from paceline.ps.messages.snapshots import GetLoadState, LoadParts, LoadState
from paceline.storage.format import StoredTable
from paceline.storage.snapshot_directory import Snapshot, read_buckets
from paceline.tables.rules import RULES
from paceline.tables.settings import from_fields
from paceline.tables.spec import TableSpec

_POLL_S = 0.01


def load_snapshot(
    client: Client, snapshot: Snapshot, timeout_s: float = 600.0, check: Callable[[], None] = lambda: None
) -> None:
    """Load a snapshot's tables into a new cluster, whatever its number of servers; each server reads its own buckets.

    Servers may join, leave and die meanwhile: it begins again until none did. `check` is called now and then, and may
    raise. Tables that the cluster has keep the hyperparameters that they have there. Raises PeerError if it gets no
    further, table by table, for `timeout_s`, TableMismatchError if the cluster has such a table with other settings,
    UsageError if it has rows already, ModelError for a file that is damaged, ConnectionLostError if buckets are lost.
    """
    known = {spec.name: spec for spec in client.tables()}
    for table in snapshot.manifest.tables:
        spec, other = table.spec, known.get(table.spec.name)
        if other is not None and not _are_alike(spec, other):
            raise TableMismatchError(
                f"{snapshot} holds table {spec.name!r} as {spec}, and this cluster has it as {other}: resume with the "
                "settings that it was taken with"
            )
    for server in client.statistics():
        for name, statistics in server.tables.items():
            if statistics.rows and known[name].kind == "sparse":
                raise UsageError(f"table {name!r} has rows already: a snapshot is loaded into a new cluster")
    loading = SnapshotLoading(client, snapshot, timeout_s, check)
    while not loading.load():
        loading.pause("servers join, leave or die all the while")


def _are_alike(spec: TableSpec, other: TableSpec) -> bool:
    """Return whether records of one table are records of the other: its hyperparameters may be others."""
    before, now = (from_fields(RULES, each.update) for each in (spec, other))
    return spec == other.with_update(spec.update) and (type(before), before.state_names) == (type(now), now.state_names)


class SnapshotLoading:
    """A snapshot on its way into a cluster.

    A server reads what it holds, as primary or replica; nothing goes down the chains. So what is loaded while nobody is
    being filled, by one version of the map from beginning to end, is on every server that has a part in it: one filled
    later is filled from those. Whatever else was loaded is loaded again.
    """

    def __init__(self, client: Client, snapshot: Snapshot, timeout_s: float, check: Callable[[], None]) -> None:
        self._client = client
        self._directory = snapshot.directory.absolute()
        self._tables = snapshot.manifest.tables
        self._specs = {spec.name: spec for spec in client.tables()}
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._num_through = 0  # tables, in the attempt that came furthest
        self._check = check

    def load(self) -> bool:
        """Load all tables; return False if they have to be loaded again, since servers came or went."""
        cluster = self._client.link.get_view()
        if any(group.filling is not None for group in cluster.groups):
            return False
        try:
            for number, table in enumerate(self._tables):
                self._load_table(table, cluster.version)
                if number >= self._num_through:
                    self._num_through = number + 1
                    self._deadline = time.monotonic() + self._timeout_s
        except StaleEpochError:
            return False
        return self._client.link.get_view().version == cluster.version

    def pause(self, awaited: str) -> None:
        """Wait a moment. Raises PeerError if there was time enough for something to get through."""
        self._check()
        if time.monotonic() > self._deadline:
            raise PeerError(
                f"the snapshot in {self._directory} was not loaded: for {self._timeout_s:g} s nothing came of it "
                f"({awaited}); see to the servers, and resume again"
            )
        time.sleep(_POLL_S)

    def _load_table(self, table: StoredTable, version: int) -> None:
        client = self._client
        number = client.open_table(self._specs.get(table.spec.name, table.spec)).number
        waits: list[ServerConnection] = []
        with client.servers.lock:
            for connection, _ in self._shares(version):
                request = LoadParts(
                    version=version,
                    table=number,
                    directory=str(self._directory),
                    parts=table.parts,
                    buckets=tuple(to_bytes(bucket_set(use.buckets)) for use in table.uses),
                )
                connection.call(request, sequence=client.servers.core.next_sequence())
                waits.append(connection)
        unseen: Buckets = 0
        while waits:
            with client.servers.lock:
                self._shares(version)
                states = [(connection, load_state(connection)) for connection in waits]
            waits = [connection for connection, state in states if not state.done]
            for connection, state in states:
                if not state.is_seen:
                    unseen |= _held_by(client, connection.session.server)
            if waits:
                self.pause(f"server {waits[0].rank} still reads its part")
        if unseen:  # a server runs elsewhere, and does not see this directory
            self._load_through(table, unseen)

    def _shares(self, version: int) -> list[tuple[ServerConnection, Buckets]]:
        """Return the shares of the servers by this version of the map. Raises StaleEpochError if it is another now."""
        shares = list(shares_of(self._client))
        if self._client.servers.routes.version != version:
            raise StaleEpochError(f"the map of the cluster has changed since version {version}")
        return shares

    def _load_through(self, table: StoredTable, wanted: Buckets) -> None:
        """Load buckets through this process."""
        for use in table.uses:
            mine = bucket_set(use.buckets) & wanted
            if not mine:
                continue
            self._check()
            for _, keys, records in read_buckets(self._directory, use.part, mine):
                write_records(self._client, self._specs.get(table.spec.name, table.spec), keys, records)


def _held_by(client: Client, server: int) -> Buckets:
    """Return the buckets of whose chain a server is a member."""
    held = 0
    for group in client.servers.routes.groups:
        if server in group.members:
            held |= group.buckets
    return held


def load_state(connection: ServerConnection) -> LoadState:
    """Return how far a server is with loading; raise what it has failed of."""
    state: LoadState = connection.call(GetLoadState(), LoadState)[0]
    if state.error:
        raise ModelError(f"server {connection.rank} could not load its part of the snapshot: {state.error}")
    return state
