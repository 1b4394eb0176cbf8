"""Snapshots of a running cluster: taken while training goes on, kept in a directory, read back into another cluster.

The coordinator, a client outside the iterations, tells each server which buckets are its own to write, asks now and
then how far they are, and when all are through writes the manifest (:class:`SnapshotTaker`). Rows go from servers to
the disk and back, never through it. What lies in the directory is :mod:`paceline.ps.snapshot_files`'.

Under sequential consistency a snapshot is the state at one iteration's end on all servers; under others each bucket is
as it was at some moment while the snapshot was taken.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import ModelError, PeerError, StaleEpochError, TableMismatchError, UsageError
from paceline.protocol import NUM_BUCKETS, Sequential
from paceline.protocol.buckets import ALL, Buckets, bucket_set, buckets_in, count, from_bytes, to_bytes
from paceline.ps.client import Client
from paceline.ps.connection import ServerConnection
from paceline.ps.messages import ClusterMap, GetMap, TableSpec
from paceline.ps.records import write_records
from paceline.ps.snapshot_files import (
    FORMAT,
    FORMAT_VERSION,
    PartUse,
    SnapshotManifest,
    SnapshotTable,
    SnapshotWriteError,
    check_part,
    describe_failure,
    files_of,
    folder_name,
    numbers_in,
    read_manifest,
    read_part,
    remove_folder,
    write_manifest,
)
from paceline.ps.snapshot_messages import (
    DropSnapshot,
    GetLoadState,
    GetSnapshotState,
    JobAccount,
    LoadParts,
    LoadState,
    SnapshotBegun,
    SnapshotPart,
    SnapshotState,
    TakeSnapshot,
)

FULL_EVERY = 10
"""Every so many snapshots one does not refer to earlier ones."""
_MARGINS = (2, 16, 256, 4096)  # iterations: how far ahead a boundary is chosen, should it be too late at some server
_READERS = 2
_POLL_S = 0.01


# The directory.


@dataclass(frozen=True)
class Snapshot:
    """A snapshot that was found whole."""

    directory: Path
    manifest: SnapshotManifest

    def __str__(self) -> str:
        return f"{self.directory / folder_name(self.manifest.number)}"


def read_newest(directory: str | os.PathLike[str], warn: Callable[[str], None] = lambda text: None) -> Snapshot:
    """Return the newest snapshot of a directory whose files are all there and undamaged.

    `warn` is told of each newer one that is not, with the checksum found. Raises ModelError if none is whole.
    """
    folder = Path(directory)
    numbers = [number for number in numbers_in(folder) if (folder / folder_name(number) / "manifest.json").exists()]
    if not numbers:
        raise ModelError(f"{folder} holds no whole snapshot to resume from")
    whole: set[str] = set()
    reasons: dict[int, str] = {}
    for number in reversed(numbers):
        try:
            manifest = read_manifest(folder, number)
            _check_files(folder, manifest, whole)
        except ModelError as error:
            reasons[number] = str(error)
            continue
        for newer, reason in reasons.items():
            warn(f"{folder_name(newer)} is not used, {folder_name(number)} is: {reason}")
        return Snapshot(folder, manifest)
    raise ModelError(f"{folder} holds no whole snapshot to resume from: {'; '.join(reasons.values())}")


def _check_files(folder: Path, manifest: SnapshotManifest, whole: set[str]) -> None:
    """Raise ModelError unless a snapshot's files are whole; those that are known to be are not read again."""
    parts = {use.part.file: use.part for table in manifest.tables for use in table.uses}
    unknown = [part for file, part in parts.items() if file not in whole]
    with ThreadPoolExecutor(_READERS, thread_name_prefix="paceline-snapshot") as pool:
        checks = [(part, pool.submit(check_part, folder, part)) for part in unknown]
        try:
            for part, check in checks:
                check.result()
                whole.add(part.file)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


class SnapshotFolder:
    """A directory of snapshots, of which the newest `keep` stay, and the files that they refer to."""

    def __init__(self, directory: str | os.PathLike[str], keep: int = 3) -> None:
        if keep < 1:
            raise UsageError(f"snapshots to keep: {keep}; expected at least 1")
        self.directory = Path(os.path.abspath(directory))
        self._keep = keep
        self._last = max(numbers_in(self.directory), default=0)
        self._manifests: dict[int, SnapshotManifest] = {}
        for number in numbers_in(self.directory):
            try:
                self._manifests[number] = read_manifest(self.directory, number)
            except ModelError:
                pass  # cut off or damaged: it goes when there is a whole one in its place

    def next_number(self) -> int:
        """Return a number that no snapshot had."""
        self._last += 1
        return self._last

    def commit(self, manifest: SnapshotManifest) -> None:
        """Make a snapshot of what was written for it; let older ones go. Raises OSError, and then it is none."""
        write_manifest(self.directory, manifest)
        self._manifests[manifest.number] = manifest
        for number in sorted(self._manifests)[: -self._keep]:
            del self._manifests[number]
        needed = files_of(self._manifests.values())
        for number in numbers_in(self.directory):
            if number not in self._manifests:
                remove_folder(self.directory, number, needed)

    def discard(self, number: int) -> None:
        """Remove what was written of a snapshot that did not come about."""
        remove_folder(self.directory, number)


# Taking.


def shares_of(client: Client) -> Iterator[tuple[ServerConnection, Buckets]]:
    """Yield the connection to each server, and the buckets that it leads, which are its to write."""
    client.check_there(ALL)
    yield from zip(client.connections, client.routes.leads, strict=True)


def _placing(client: Client) -> list[tuple[int, Buckets]]:
    return [(connection.incarnation, buckets) for connection, buckets in shares_of(client)]


class _Under:
    """A snapshot that is being taken."""

    def __init__(
        self, number: int, full: bool, tables: list[tuple[int, TableSpec]], account: JobAccount | None,
        training: dict[str, Any],
    ) -> None:  # fmt: skip
        self.number = number
        self.full = full
        self.tables = tables
        self.account = account
        self.training = training
        self.iteration: int | None = None
        self.placing: list[tuple[int, Buckets]] = []
        self.waits: list[ServerConnection] = []
        self.states: list[SnapshotState] = []


class SnapshotTaker:
    """Has a cluster's servers write snapshots to a directory that they all see, one at a time.

    No call waits for more than the servers' next pause between requests. All raise SnapshotWriteError for a snapshot
    that does not come about, of which nothing is left then; what is wrong with the cluster is raised as ever.
    """

    def __init__(self, client: Client, directory: str | os.PathLike[str], *, keep: int = 3) -> None:
        self._client = client
        self._folder = SnapshotFolder(directory, keep)
        self._whole: list[int] = []  # of this run, since the last full one: those that servers may refer to
        self._newest: SnapshotManifest | None = None
        self._num_taken = 0
        self._under: _Under | None = None

    @property
    def directory(self) -> Path:
        """Where the snapshots are."""
        return self._folder.directory

    @property
    def is_taking(self) -> bool:
        """Whether one is being taken."""
        return self._under is not None

    def begin(self, account: JobAccount | None = None, training: dict[str, Any] | None = None) -> int:
        """Have a snapshot taken from now on; return its number. `account` is what was done of the job before now."""
        assert self._under is None
        client = self._client
        tables = [(client.open_table(spec).number, spec) for spec in client.tables()]
        full = self._num_taken % FULL_EVERY == 0
        number = self._folder.next_number()
        self._under = _Under(number, full, tables, account, training or {})
        self._num_taken += 1
        try:
            (self.directory / folder_name(number)).mkdir(parents=True)
        except OSError as error:
            raise self._failed(describe_failure(self.directory, error)) from None
        if isinstance(client.consistency, Sequential):
            self._begin_ahead(self._under)
        else:
            for begun in self._ask_all(self._under, None):
                assert begun.begun
        return number

    def _begin_ahead(self, under: _Under) -> None:
        """Have it taken at the end of an iteration that is still ahead on every server."""
        clock = -2
        for margin in (0, *_MARGINS):
            answers = self._ask_all(under, clock + margin)
            if all(answer.begun for answer in answers):
                under.iteration = clock + margin
                return
            clock = max(answer.clock for answer in answers)
        raise self._failed("iterations end quicker than servers can be told of one")

    def _ask_all(self, under: _Under, boundary: int | None) -> list[SnapshotBegun]:
        whole = () if under.full else tuple(self._whole)
        under.waits = []
        under.placing = _placing(self._client)
        answers = []
        with self._client.lock:
            for connection, buckets in shares_of(self._client):
                request = TakeSnapshot(
                    number=under.number,
                    directory=str(self.directory),
                    folder=folder_name(under.number),
                    tables=tuple(number for number, _ in under.tables),
                    buckets=to_bytes(buckets),
                    whole=whole,
                    boundary=boundary,
                )
                answers.append(msgspec.convert(connection.call(request)[0], SnapshotBegun))
                under.waits.append(connection)
        return answers

    def poll(self) -> SnapshotManifest | None:
        """Return the snapshot that is being taken if it is there now, else None."""
        under = self._under
        assert under is not None
        client = self._client
        with client.lock:
            if under.placing != _placing(client):
                raise self._failed("buckets have moved to other servers meanwhile")
            for connection in list(under.waits):
                answer = connection.call(GetSnapshotState(number=under.number))[0]
                state = msgspec.convert(answer, SnapshotState)
                if state.error:
                    raise self._failed(f"server {connection.rank}: {state.error}")
                if state.done:
                    under.states.append(state)
                    under.waits.remove(connection)
        if under.waits:
            return None
        manifest = self._assemble(under)
        try:
            self._folder.commit(manifest)
        except OSError as error:
            raise self._failed(describe_failure(self.directory, error)) from None
        self._newest = manifest
        self._whole = [manifest.number] if under.full else [*self._whole, manifest.number]
        self._under = None
        return manifest

    def give_up(self) -> None:
        """Take none after all, if one is being taken."""
        under, self._under = self._under, None
        if under is None:
            return
        try:
            with self._client.lock:
                for connection, _ in shares_of(self._client):
                    connection.call(DropSnapshot(number=under.number))
        except PeerError:
            pass  # a server is gone: whoever needs it hears of it
        self._folder.discard(under.number)

    def _failed(self, reason: str) -> SnapshotWriteError:
        assert self._under is not None
        number = self._under.number
        self.give_up()
        return SnapshotWriteError(f"snapshot {number} was not taken: {reason}")

    def _assemble(self, under: _Under) -> SnapshotManifest:
        from paceline.version import __version__

        used: dict[str, dict[str, tuple[SnapshotPart, Buckets]]] = {spec.name: {} for _, spec in under.tables}
        names = {number: spec.name for number, spec in under.tables}
        for state in under.states:
            for part in state.parts:
                self._check_seen(part)
                used[part.table][part.file] = part, bucket_set(part.buckets)
            for kept in state.kept:
                name = names[kept.table]
                assert self._newest is not None  # which uses the same part: nothing has changed since
                for part, buckets in _parts_of(self._newest, name, kept.number, from_bytes(kept.buckets)):
                    known = used[name].get(part.file, (part, 0))[1]
                    used[name][part.file] = part, known | buckets
        tables = tuple(self._make_table(spec, list(used[spec.name].values())) for _, spec in under.tables)
        return SnapshotManifest(
            format=FORMAT,
            version=FORMAT_VERSION,
            paceline=__version__,
            number=under.number,
            full=not any(use.part.file.split("/")[0] != folder_name(under.number) for t in tables for use in t.uses),
            iteration=under.iteration,
            tables=tables,
            account=under.account,
            training=under.training,
        )

    def _check_seen(self, part: SnapshotPart) -> None:
        try:
            size = os.stat(self.directory / part.file).st_size
        except OSError:
            size = -1
        if size != part.num_bytes:
            raise self._failed(
                f"a server wrote {part.file}, which is not seen in {self.directory} here: servers and this process "
                "must share that directory"
            )

    def _make_table(self, spec: TableSpec, parts: list[tuple[SnapshotPart, Buckets]]) -> SnapshotTable:
        covered = 0
        rows = 0
        for part, buckets in parts:
            if covered & buckets:
                raise self._failed(f"table {spec.name!r} has buckets that two servers wrote: they moved meanwhile")
            covered |= buckets
            rows += sum(n for bucket, n in zip(part.buckets, part.rows, strict=True) if buckets >> bucket & 1)
        if covered != ALL:
            raise self._failed(f"{count(ALL & ~covered)} buckets of table {spec.name!r} were written by no server")
        uses = tuple(PartUse(part=part, buckets=tuple(buckets_in(buckets))) for part, buckets in parts)
        return SnapshotTable(spec=spec, rows=rows, num_buckets=NUM_BUCKETS, uses=uses)


def _parts_of(
    manifest: SnapshotManifest, table: str, number: int, wanted: Buckets
) -> Iterator[tuple[SnapshotPart, Buckets]]:
    """Yield the parts written for snapshot `number` that hold some of the wanted buckets of a table, with those."""
    for each in manifest.tables:
        if each.spec.name == table:
            for use in each.uses:
                if not use.part.file.startswith(f"{folder_name(number)}/"):
                    continue
                if buckets := bucket_set(use.buckets) & wanted:
                    yield use.part, buckets


# Reading back.


def load_snapshot(
    client: Client, snapshot: Snapshot, timeout_s: float = 600.0, check: Callable[[], None] = lambda: None
) -> None:
    """Load a snapshot's tables into a new cluster, whatever its number of servers; each server reads its own buckets.

    Servers may join, leave and die meanwhile: it begins again until none did. `check` is called now and then, and may
    raise. Raises TableMismatchError if the cluster has such a table with other settings, UsageError if it has rows
    already, ModelError for a file that is damaged, ConnectionLostError if buckets are lost.
    """
    known = {spec.name: spec for spec in client.tables()}
    for table in snapshot.manifest.tables:
        spec, other = table.spec, known.get(table.spec.name)
        if other is not None and other != spec:
            raise TableMismatchError(
                f"{snapshot} holds table {spec.name!r} as {spec}, and this cluster has it as {other}: resume with the "
                "settings that it was taken with"
            )
    for server in client.statistics():
        for name, statistics in server.tables.items():
            if statistics.rows and known[name].kind == "sparse":
                raise UsageError(f"table {name!r} has rows already: a snapshot is loaded into a new cluster")
    loading = _Loading(client, snapshot, time.monotonic() + timeout_s, check)
    while not loading.load():
        loading.pause("servers join, leave or die all the while")


class _Loading:
    """A snapshot on its way into a cluster.

    A server reads what it holds, as primary or replica; nothing goes down the chains. So what is loaded while nobody is
    being filled, by one version of the map from beginning to end, is on every server that has a part in it: one filled
    later is filled from those. Whatever else was loaded is loaded again.
    """

    def __init__(self, client: Client, snapshot: Snapshot, deadline: float, check: Callable[[], None]) -> None:
        self._client = client
        self._directory = snapshot.directory.absolute()
        self._tables = snapshot.manifest.tables
        self._deadline = deadline
        self._check = check

    def load(self) -> bool:
        """Load all tables; return False if they have to be loaded again, since servers came or went."""
        cluster = self._map()
        if any(group.filling is not None for group in cluster.groups):
            return False
        try:
            for table in self._tables:
                self._load_table(table, cluster.version)
        except StaleEpochError:
            return False
        return self._map().version == cluster.version

    def pause(self, awaited: str) -> None:
        """Wait a moment. Raises PeerError if there was time enough."""
        self._check()
        if time.monotonic() > self._deadline:
            raise PeerError(f"the snapshot in {self._directory} was not loaded in time: {awaited}")
        time.sleep(_POLL_S)

    def _map(self) -> ClusterMap:
        found: ClusterMap = self._client.link.call(GetMap(), ClusterMap)
        return found

    def _load_table(self, table: SnapshotTable, version: int) -> None:
        client = self._client
        number = client.open_table(table.spec).number
        waits: list[ServerConnection] = []
        unseen: Buckets = 0
        with client.lock:
            for connection, _ in self._shares(version):
                request = LoadParts(
                    version=version,
                    table=number,
                    directory=str(self._directory),
                    parts=tuple(use.part for use in table.uses),
                    buckets=tuple(to_bytes(bucket_set(use.buckets)) for use in table.uses),
                )
                if connection.call(request)[0]:
                    waits.append(connection)
                else:
                    unseen |= _held_by(client, connection.incarnation)
        if unseen:  # it runs elsewhere, and does not see this directory
            self._load_through(table, unseen)
        while waits:
            with client.lock:
                self._shares(version)
                waits = [connection for connection in waits if not _has_loaded(connection)]
            if waits:
                self.pause(f"server {waits[0].rank} still reads its part")

    def _shares(self, version: int) -> list[tuple[ServerConnection, Buckets]]:
        """Return the shares of the servers by this version of the map. Raises StaleEpochError if it is another now."""
        shares = list(shares_of(self._client))
        if self._client.routes.version != version:
            raise StaleEpochError(f"the map of the cluster has changed since version {version}")
        return shares

    def _load_through(self, table: SnapshotTable, wanted: Buckets) -> None:
        """Load buckets through this process."""
        for use in table.uses:
            mine = bucket_set(use.buckets) & wanted
            if not mine:
                continue
            self._check()
            keys, records = read_part(self._directory, use.part)
            at = 0
            for bucket, rows in zip(use.part.buckets, use.part.rows, strict=True):
                if rows and mine >> bucket & 1:
                    write_records(self._client, table.spec, keys[at : at + rows], records[at : at + rows])
                at += rows


def _held_by(client: Client, server: int) -> Buckets:
    """Return the buckets of whose chain a server is a member."""
    held = 0
    for group in client.routes.groups:
        if server in group.members:
            held |= group.buckets
    return held


def _has_loaded(connection: ServerConnection) -> bool:
    state = msgspec.convert(connection.call(GetLoadState())[0], LoadState)
    if state.error:
        raise ModelError(f"server {connection.rank} could not load its part of the snapshot: {state.error}")
    return state.done
