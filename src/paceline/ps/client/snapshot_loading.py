"""Load a snapshot into a new cluster.

Each server reads its own buckets, as primary or as replica. This process reads the files for servers that have no
access to the directory.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.errors import ModelError, PeerError, StaleEpochError, TableMismatchError, UsageError
from paceline.observe.work import track
from paceline.protocol.buckets import Buckets, bucket_set, to_bytes
from paceline.ps.client.client import Client
from paceline.ps.client.connection import ServerConnection
from paceline.ps.client.records import write_records
from paceline.ps.client.snapshots import shares_of
from paceline.ps.snapshot_messages import GetLoadState, LoadParts, LoadState
from paceline.storage.format import StoredTable
from paceline.storage.snapshot_directory import Snapshot, read_buckets
from paceline.tables.rules import RULES
from paceline.tables.settings import from_fields
from paceline.tables.spec import TableSpec

_POLL_S = 0.01


def load_snapshot(
    client: Client, snapshot: Snapshot, timeout_s: float = 600.0, check: Callable[[], None] = lambda: None
) -> None:
    """Load a snapshot's tables into a new cluster with any number of servers; each server reads its own buckets.

    If servers join, leave or die, the loading starts again. `check` is called repeatedly and may raise. Tables that the
    cluster already has keep their hyperparameters.

    Raises PeerError if no further table is loaded within `timeout_s`, TableMismatchError for a table with other
    settings, UsageError if a table has rows, ModelError for a damaged file, ConnectionLostError if buckets are lost.
    """
    known = {spec.name: spec for spec in client.tables()}
    for table in snapshot.manifest.tables:
        spec, other = table.spec, known.get(table.spec.name)
        if other is not None and not _are_compatible(spec, other):
            raise TableMismatchError(
                f"{snapshot} has table {spec.name!r} as {spec}, but this cluster has it as {other}: resume with the "
                "settings of the snapshot"
            )
    for server in client.statistics():
        for name, statistics in server.tables.items():
            if statistics.rows and known[name].kind == "sparse":
                raise UsageError(f"table {name!r} already has rows: load the snapshot into a new cluster")
    loading = SnapshotLoading(client, snapshot, timeout_s, check)
    while not loading.load():
        loading.pause("servers keep joining, leaving or dying")


def _are_compatible(spec: TableSpec, other: TableSpec) -> bool:
    """Return whether two tables have the same records; hyperparameters may differ."""
    rules = [from_fields(RULES, table.update) for table in (spec, other)]
    first, second = ((type(rule), rule.state_names) for rule in rules)
    return spec == other.with_update(spec.update) and first == second


class SnapshotLoading:
    """The loading of a snapshot into a cluster.

    The loading is repeated if the view changes in the meantime, or if a server is still receiving a copy of a bucket.
    Servers that are filled later copy the loaded buckets.
    """

    def __init__(self, client: Client, snapshot: Snapshot, timeout_s: float, check: Callable[[], None]) -> None:
        self._client = client
        self._directory = snapshot.directory.absolute()
        self._tables = snapshot.manifest.tables
        self._specs = {spec.name: spec for spec in client.tables()}
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._num_through = 0  # the number of loaded tables in the attempt with the most tables
        self._check = check

    def load(self) -> bool:
        """Load all tables; return False if the view changed, so that the tables must be loaded again."""
        view = self._client.link.get_view()
        if any(group.filling is not None for group in view.groups):
            return False
        try:
            num_rows = sum(table.rows for table in self._tables)
            tables = track(self._tables, "loading the snapshot", num_rows, "rows", lambda table: table.rows)
            for number, table in enumerate(tables):
                self._load_table(table, view.version)
                if number >= self._num_through:
                    self._num_through = number + 1
                    self._deadline = time.monotonic() + self._timeout_s
        except StaleEpochError:
            return False
        return self._client.link.get_view().version == view.version

    def pause(self, reason: str) -> None:
        """Wait a moment before the next attempt. Raises PeerError after the timeout."""
        self._check()
        if time.monotonic() > self._deadline:
            raise PeerError(
                f"the snapshot in {self._directory} was not loaded: no progress for {self._timeout_s:g} s ({reason}); "
                "check the servers and resume again"
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
        if unseen:  # servers on other machines have no access to this directory
            self._load_through(table, unseen)

    def _shares(self, version: int) -> list[tuple[ServerConnection, Buckets]]:
        """Return the connection to each server, and the buckets that it leads.

        Raises StaleEpochError if the chains have changed since their `version`.
        """
        shares = list(shares_of(self._client))
        if self._client.servers.routes.version != version:
            raise StaleEpochError(f"the chains have changed since version {version}")
        return shares

    def _load_through(self, table: StoredTable, wanted: Buckets) -> None:
        for use in table.uses:
            buckets = bucket_set(use.buckets) & wanted
            if not buckets:
                continue
            self._check()
            for _, keys, records in read_buckets(self._directory, use.part, buckets):
                write_records(self._client, self._specs.get(table.spec.name, table.spec), keys, records)


def _held_by(client: Client, server: int) -> Buckets:
    held = 0
    for group in client.servers.routes.groups:
        if server in group.members:
            held |= group.buckets
    return held


def load_state(connection: ServerConnection) -> LoadState:
    """Return the progress of a server's loading. Raises ModelError if it failed."""
    state: LoadState = connection.call(GetLoadState(), LoadState)[0]
    if state.error:
        raise ModelError(f"server {connection.rank} could not load its part of the snapshot: {state.error}")
    return state
