"""Snapshots of a running cluster: taken while training goes on, kept in a directory.

The coordinator, a client outside the iterations, tells each server which buckets are its own to write, asks now and
then how far they are, and when all are through writes the manifest (:class:`SnapshotTaker`). Rows go from servers to
the disk, never through it. What lies in the directory is the business of :mod:`paceline.storage.snapshot_directory`; it
is read back by :mod:`paceline.ps.client.snapshot_loading`.

Under sequential consistency a snapshot is the state at one iteration's end on all servers; under others each bucket is
as it was at some moment while the snapshot was taken.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.errors import ConnectionLostError, PeerError, StaleEpochError
from paceline.protocol import Sequential
from paceline.protocol.buckets import ALL, Buckets, bucket_set, buckets_in, count, from_bytes, to_bytes
from paceline.protocol.jobs import JobAccount
from paceline.ps.client.client import Client
from paceline.ps.client.connection import ServerConnection
from paceline.ps.messages import TableSpec
from paceline.ps.messages.snapshots import (
    DropSnapshot,
    GetSnapshotState,
    SnapshotBegun,
    SnapshotState,
    TakeSnapshot,
)
from paceline.storage.format import PartUse, SnapshotManifest, StoredPart, StoredTable
from paceline.storage.snapshot_directory import SnapshotDirectory, SnapshotWriteError, describe_failure, folder_name

FULL_EVERY = 10
"""Every so many snapshots one does not refer to earlier ones."""
_MARGINS = (2, 16, 256, 4096)  # iterations: how far ahead a boundary is chosen, should it be too late at some server
_PATIENCE_S = 120.0
"""How long a snapshot may take in whose course buckets move."""
_MAX_ROUNDS = 64


def shares_of(client: Client) -> Iterator[tuple[ServerConnection, Buckets]]:
    """Yield the connection to each server, and the buckets that it leads, which are its to write."""
    client.servers.check_there(ALL)
    yield from zip(client.servers.newest(), client.servers.routes.leads, strict=True)


class _Under:
    """A snapshot that is being taken, in rounds: what moved or was lost in one is taken in the next."""

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
        self.round = -1
        self.version = 0
        """Of the map by which servers were asked last."""
        self.begun_s = time.monotonic()
        self.waits: list[ServerConnection] = []
        self.states: list[SnapshotState] = []


class SnapshotTaker:
    """Has a cluster's servers write snapshots to a directory that they all see, one at a time.

    Buckets may move, servers die, join and leave meanwhile: what is missing then is taken from those that lead it by
    the newest map. Under sequential consistency, where that would be of another iteration, all is taken again.

    No call waits for more than the servers' next pause between requests. All raise SnapshotWriteError for a snapshot
    that does not come about, of which nothing is left then; what is wrong with the cluster is raised as ever.
    """

    def __init__(self, client: Client, directory: str | os.PathLike[str], *, keep: int = 3) -> None:
        self._client = client
        self._snapshots = SnapshotDirectory(directory, keep)
        self._whole: list[int] = []  # of this run, since the last full one: those that servers may refer to
        self._newest: SnapshotManifest | None = None
        self._num_taken = 0
        self.under_way: _Under | None = None

    @property
    def directory(self) -> Path:
        """Where the snapshots are."""
        return self._snapshots.path

    @property
    def is_taking(self) -> bool:
        """Whether one is being taken."""
        return self.under_way is not None

    def begin(self, account: JobAccount | None = None, training: dict[str, Any] | None = None) -> int:
        """Have a snapshot taken from now on; return its number. `account` is what was done of the job before now."""
        assert self.under_way is None
        client = self._client
        tables = [(client.open_table(spec).number, spec) for spec in client.tables()]
        full = self._num_taken % FULL_EVERY == 0
        number = self._snapshots.next_number()
        self.under_way = _Under(number, full, tables, account, training or {})
        self._num_taken += 1
        try:
            self._snapshots.make(number)
        except OSError as error:
            raise self._failed(describe_failure(self.directory, error)) from None
        if isinstance(client.consistency, Sequential):
            self._begin_ahead(self.under_way)
        else:
            self._ask(self.under_way, ALL, None)
        return self.under_way.number

    def _begin_ahead(self, under: _Under) -> None:
        """Have it taken at the end of an iteration that is still ahead on every server."""
        clock = 0
        for margin in (0, *_MARGINS):
            answers = self._ask(under, ALL, clock + margin)
            if all(answer.begun for answer in answers):
                under.iteration = clock + margin
                return
            clock = max(answer.clock for answer in answers)
        raise self._failed("iterations end quicker than servers can be told of one")

    def _ask(self, under: _Under, wanted: Buckets, boundary: int | None) -> list[SnapshotBegun]:
        """Have the servers write what they lead of some buckets, in another round."""
        whole = () if under.full or under.states else tuple(self._whole)
        under.waits = []
        under.round += 1
        answers = []
        with self._client.servers.lock:
            shares = list(shares_of(self._client))
            under.version = self._client.servers.routes.version
            for connection, buckets in shares:
                if not buckets & wanted:
                    continue
                request = TakeSnapshot(
                    number=under.number,
                    directory=str(self.directory),
                    folder=folder_name(under.number),
                    tables=tuple(number for number, _ in under.tables),
                    buckets=to_bytes(buckets & wanted),
                    whole=whole,
                    boundary=boundary,
                    round=under.round,
                )
                with contextlib.suppress(StaleEpochError, ConnectionLostError):  # what it leads is missing then
                    answers.append(connection.call(request, SnapshotBegun)[0])
                    under.waits.append(connection)
        return answers

    def poll(self) -> SnapshotManifest | None:
        """Return the snapshot that is being taken if it is there now, else None."""
        under = self.under_way
        assert under is not None
        self._hear(under)
        if under.waits:
            return None
        tables = {spec.name: self._gather(under, number, spec) for number, spec in under.tables}
        missing = ALL & ~functools.reduce(operator.and_, (covered for _, covered in tables.values()), ALL)
        if missing:
            self._take_again(under, missing)
            return None
        manifest = self._assemble(under, {name: uses for name, (uses, _) in tables.items()})
        try:
            self._snapshots.commit(manifest)
        except OSError as error:
            raise self._failed(describe_failure(self.directory, error)) from None
        self._newest = manifest
        self._whole = [manifest.number] if under.full else [*self._whole, manifest.number]
        self.under_way = None
        return manifest

    def _hear(self, under: _Under) -> None:
        """Ask the servers that are not through how far they are."""
        client = self._client
        with client.servers.lock:
            connections = client.servers.newest()
            client.servers.check_there(ALL)
            for connection in list(under.waits):
                if connection not in connections:
                    under.waits.remove(connection)
                    continue
                try:
                    state = connection.call(
                        GetSnapshotState(directory=str(self.directory), number=under.number), SnapshotState
                    )[0]
                except (StaleEpochError, ConnectionLostError):  # it is gone, and what it wrote is not known
                    under.waits.remove(connection)
                    continue
                if state.error:
                    raise self._failed(f"server {connection.rank}: {state.error}")
                if state.done:
                    under.states.append(state)
                    under.waits.remove(connection)

    def _take_again(self, under: _Under, missing: Buckets) -> None:
        """Have buckets that have moved taken by those that lead them now, once it is known who does."""
        if time.monotonic() - under.begun_s > _PATIENCE_S or under.round >= _MAX_ROUNDS:
            raise self._failed(f"{count(missing)} buckets went on moving to other servers")
        if self._client.servers.routes.version == under.version:
            return  # the map by which they have moved is on its way
        if under.iteration is None:
            self._ask(under, missing, None)
            return
        begun_s, round_before = under.begun_s, under.round
        self.give_up()
        again = self.under_way = _Under(
            self._snapshots.next_number(), under.full, under.tables, under.account, under.training
        )
        again.begun_s, again.round = begun_s, round_before
        try:
            self._snapshots.make(again.number)
        except OSError as error:
            raise self._failed(describe_failure(self.directory, error)) from None
        self._begin_ahead(again)

    def give_up(self) -> None:
        """Take none after all, if one is being taken."""
        under, self.under_way = self.under_way, None
        if under is None:
            return
        try:
            with self._client.servers.lock:
                for connection, _ in shares_of(self._client):
                    with contextlib.suppress(PeerError):  # it is gone: whoever needs it hears of it
                        connection.call(DropSnapshot(directory=str(self.directory), number=under.number))
        except PeerError:
            pass  # so are all
        finally:
            self._snapshots.discard(under.number)

    def close(self) -> None:
        """Take none any more, and let another run have the directory. Idempotent."""
        try:
            self.give_up()
        finally:
            self._snapshots.close()

    def _failed(self, reason: str) -> SnapshotWriteError:
        assert self.under_way is not None
        number = self.under_way.number
        self.give_up()
        return SnapshotWriteError(f"snapshot {number} was not taken: {reason}")

    def _gather(self, under: _Under, number: int, spec: TableSpec) -> tuple[list[tuple[StoredPart, Buckets]], Buckets]:
        """Return what there is of a table by now: parts and the buckets to use of each; and all these buckets."""
        covered = 0
        used: dict[str, tuple[StoredPart, Buckets]] = {}
        found: list[tuple[StoredPart, Buckets]] = []
        for state in under.states:
            found += [(part, bucket_set(part.buckets)) for part in state.parts if part.table == spec.name]
            for kept in state.kept:
                if kept.table == number and self._newest is not None:  # which uses the same part: nothing has changed
                    found += _parts_of(self._newest, spec.name, kept.number, from_bytes(kept.buckets))
        for part, buckets in found:
            fresh = buckets & ~covered  # a bucket that was taken by two servers, of one of them
            if fresh:
                used[part.file] = part, used.get(part.file, (part, 0))[1] | fresh
                covered |= fresh
        return list(used.values()), covered

    def _assemble(self, under: _Under, uses: dict[str, list[tuple[StoredPart, Buckets]]]) -> SnapshotManifest:
        for part, _ in itertools.chain.from_iterable(uses.values()):
            if part.file.startswith(f"{folder_name(under.number)}/"):
                self._check_seen(part)
        tables = tuple(_make_table(spec, uses[spec.name]) for _, spec in under.tables)
        folder = folder_name(under.number)
        return SnapshotManifest(
            number=under.number,
            full=all(part.file.startswith(f"{folder}/") for table in tables for part in table.parts),
            iteration=under.iteration,
            tables=tables,
            account=under.account,
            training=under.training,
        )

    def _check_seen(self, part: StoredPart) -> None:
        try:
            size = os.stat(self.directory / part.file).st_size
        except OSError:
            size = -1
        if size != part.num_bytes:
            raise self._failed(
                f"a server wrote {part.file}, which is not seen in {self.directory} here: servers and this process "
                "must share that directory"
            )


def _make_table(spec: TableSpec, parts: list[tuple[StoredPart, Buckets]]) -> StoredTable:
    rows = sum(n for part, buckets in parts for b, n in zip(part.buckets, part.rows, strict=True) if buckets >> b & 1)
    uses = tuple(PartUse(part=part, buckets=tuple(buckets_in(buckets))) for part, buckets in parts)
    return StoredTable(spec=spec, rows=rows, uses=uses)


def _parts_of(
    manifest: SnapshotManifest, table: str, number: int, wanted: Buckets
) -> Iterator[tuple[StoredPart, Buckets]]:
    """Yield the parts written for snapshot `number` that hold some of the wanted buckets of a table, with those."""
    for each in manifest.tables:
        if each.spec.name == table:
            for use in each.uses:
                if not use.part.file.startswith(f"{folder_name(number)}/"):
                    continue
                if buckets := bucket_set(use.buckets) & wanted:
                    yield use.part, buckets
