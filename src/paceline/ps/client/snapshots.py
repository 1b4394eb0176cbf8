"""Snapshots of a running cluster, taken during training and stored in a directory.

:class:`SnapshotCoordinator` requests each server to write the buckets that the server leads, polls the servers, and
finally writes the manifest. Servers write rows directly to the disk.

Under sequential consistency a snapshot is the state at the end of one iteration on all servers. Otherwise buckets are
copied at different moments while the snapshot is taken.
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
from paceline.protocol.buckets import ALL, Buckets, bucket_set, buckets_in, from_bytes, to_bytes
from paceline.protocol.jobs import JobAccount
from paceline.ps.client.client import Client
from paceline.ps.client.connection import ServerConnection
from paceline.ps.messages import TableSpec
from paceline.ps.snapshot_messages import (
    DropSnapshot,
    GetSnapshotState,
    SnapshotStarted,
    SnapshotState,
    TakeSnapshot,
)
from paceline.storage.format import PartUse, SnapshotManifest, StoredPart, StoredTable
from paceline.storage.snapshot_directory import SnapshotDirectory, SnapshotWriteError, describe_failure, folder_name

FULL_EVERY = 10
"""One in this number of snapshots is full: it refers to no earlier snapshot."""
_MARGINS = (2, 16, 256, 4096)  # tried in order: iterations from the servers' highest clock to the snapshot
_PATIENCE_S = 120.0
"""A snapshot fails if buckets still move to other servers after this time."""
_MAX_ROUNDS = 64


def shares_of(client: Client) -> Iterator[tuple[ServerConnection, Buckets]]:
    """Yield the connection to each server, and the buckets that it leads."""
    client.servers.check_not_lost(ALL)
    yield from zip(client.servers.newest(), client.servers.routes.leads, strict=True)


class _Attempt:
    """A snapshot in progress. The next round requests the buckets that moved or were lost in the last round."""

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
        """The version of the view in which the last requests were sent."""
        self.started_s = time.monotonic()
        self.waits: list[ServerConnection] = []
        self.states: list[SnapshotState] = []


class SnapshotCoordinator:
    """Takes snapshots of all servers of a cluster, one at a time, in a directory that all servers can access.

    If buckets move, or servers die, join or leave, the new primaries write the missing buckets. Under sequential
    consistency the whole snapshot is repeated, because the missing buckets would show another iteration.

    Calls raise SnapshotWriteError for a failed snapshot, and remove its files; errors of the cluster are raised
    unchanged.
    """

    def __init__(self, client: Client, directory: str | os.PathLike[str], *, keep: int = 3) -> None:
        self._client = client
        self._snapshots = SnapshotDirectory(directory, keep)
        self._referable: list[int] = []  # the snapshots of this run since the last full snapshot
        self._newest: SnapshotManifest | None = None
        self._num_taken = 0
        self.attempt: _Attempt | None = None

    @property
    def directory(self) -> Path:
        return self._snapshots.path

    @property
    def is_taking(self) -> bool:
        return self.attempt is not None

    def begin(self, account: JobAccount | None = None, training: dict[str, Any] | None = None) -> int:
        """Start a snapshot; return its number. `account` has the finished shards of the job before this call."""
        assert self.attempt is None
        client = self._client
        tables = [(client.open_table(spec).number, spec) for spec in client.tables()]
        full = self._num_taken % FULL_EVERY == 0
        number = self._snapshots.next_number()
        self._num_taken += 1
        self._start(_Attempt(number, full, tables, account, training or {}))
        return number

    def _start(self, attempt: _Attempt) -> None:
        self.attempt = attempt
        try:
            self._snapshots.make(attempt.number)
        except OSError as error:
            raise self._failed(describe_failure(self.directory, error)) from None
        if isinstance(self._client.consistency, Sequential):
            self._begin_ahead(attempt)
        else:
            self._request_parts(attempt, ALL, None)

    def _begin_ahead(self, attempt: _Attempt) -> None:
        """Request the snapshot for the end of an iteration that no server has completed."""
        clock = 0
        for margin in (0, *_MARGINS):
            answers = self._request_parts(attempt, ALL, clock + margin)
            if all(answer.is_started for answer in answers):
                attempt.iteration = clock + margin
                return
            clock = max(answer.clock for answer in answers)
        raise self._failed("iterations end faster than requests reach the servers")

    def _request_parts(self, attempt: _Attempt, wanted: Buckets, boundary: int | None) -> list[SnapshotStarted]:
        referable = () if attempt.full or attempt.states else tuple(self._referable)
        attempt.waits = []
        attempt.round += 1
        answers = []
        with self._client.servers.lock:
            shares = list(shares_of(self._client))
            attempt.version = self._client.servers.routes.version
            for connection, buckets in shares:
                if not buckets & wanted:
                    continue
                request = TakeSnapshot(
                    number=attempt.number,
                    directory=str(self.directory),
                    folder=folder_name(attempt.number),
                    tables=tuple(number for number, _ in attempt.tables),
                    buckets=to_bytes(buckets & wanted),
                    complete=referable,
                    boundary=boundary,
                    round=attempt.round,
                )
                with contextlib.suppress(StaleEpochError, ConnectionLostError):  # the next round retries
                    answers.append(connection.call(request, SnapshotStarted)[0])
                    attempt.waits.append(connection)
        return answers

    def poll(self) -> SnapshotManifest | None:
        """Return the manifest of the snapshot if it is complete, else None."""
        attempt = self.attempt
        assert attempt is not None
        self._poll_servers(attempt)
        if attempt.waits:
            return None
        tables = {spec.name: self._gather(attempt, number, spec) for number, spec in attempt.tables}
        missing = ALL & ~functools.reduce(operator.and_, (covered for _, covered in tables.values()), ALL)
        if missing:
            self._take_again(attempt, missing)
            return None
        manifest = self._assemble(attempt, {name: uses for name, (uses, _) in tables.items()})
        try:
            self._snapshots.commit(manifest)
        except OSError as error:
            raise self._failed(describe_failure(self.directory, error)) from None
        self._newest = manifest
        self._referable = [manifest.number] if attempt.full else [*self._referable, manifest.number]
        self.attempt = None
        return manifest

    def _poll_servers(self, attempt: _Attempt) -> None:
        client = self._client
        with client.servers.lock:
            connections = client.servers.newest()
            client.servers.check_not_lost(ALL)
            for connection in list(attempt.waits):
                if connection not in connections:
                    attempt.waits.remove(connection)
                    continue
                try:
                    state = connection.call(
                        GetSnapshotState(directory=str(self.directory), number=attempt.number), SnapshotState
                    )[0]
                except (StaleEpochError, ConnectionLostError):  # the next round requests its buckets
                    attempt.waits.remove(connection)
                    continue
                if state.error:
                    raise self._failed(f"server {connection.rank}: {state.error}")
                if state.done:
                    attempt.states.append(state)
                    attempt.waits.remove(connection)

    def _take_again(self, attempt: _Attempt, missing: Buckets) -> None:
        """Request the buckets that have moved from their new primaries, once a newer view is known."""
        if time.monotonic() - attempt.started_s > _PATIENCE_S or attempt.round >= _MAX_ROUNDS:
            raise self._failed(f"{missing.bit_count()} buckets kept moving to other servers")
        if self._client.servers.routes.version == attempt.version:
            return  # the view in which the buckets moved has not arrived
        if attempt.iteration is None:
            self._request_parts(attempt, missing, None)
            return
        started_s, round_before = attempt.started_s, attempt.round
        self.give_up()
        number = self._snapshots.next_number()
        again = _Attempt(number, attempt.full, attempt.tables, attempt.account, attempt.training)
        again.started_s, again.round = started_s, round_before
        self._start(again)

    def give_up(self) -> None:
        attempt, self.attempt = self.attempt, None
        if attempt is None:
            return
        try:
            with self._client.servers.lock:
                for connection, _ in shares_of(self._client):
                    with contextlib.suppress(PeerError):  # the server was lost; the next request raises the error
                        connection.call(DropSnapshot(directory=str(self.directory), number=attempt.number))
        except PeerError:
            pass  # all servers were lost
        finally:
            self._snapshots.discard(attempt.number)

    def close(self) -> None:
        """Cancel the snapshot in progress, and release the directory for other runs. Idempotent."""
        try:
            self.give_up()
        finally:
            self._snapshots.close()

    def _failed(self, reason: str) -> SnapshotWriteError:
        assert self.attempt is not None
        number = self.attempt.number
        self.give_up()
        return SnapshotWriteError(f"snapshot {number} was not taken: {reason}")

    def _gather(
        self, attempt: _Attempt, number: int, spec: TableSpec
    ) -> tuple[list[tuple[StoredPart, Buckets]], Buckets]:
        """Return a table's parts so far, each with the buckets to use, and the union of the buckets."""
        covered = 0
        used: dict[str, tuple[StoredPart, Buckets]] = {}
        found: list[tuple[StoredPart, Buckets]] = []
        for state in attempt.states:
            found += [(part, bucket_set(part.buckets)) for part in state.parts if part.table == spec.name]
            for kept in state.unchanged:
                if kept.table == number and self._newest is not None:  # unchanged since `kept.number`
                    found += _parts_of(self._newest, spec.name, kept.number, from_bytes(kept.buckets))
        for part, buckets in found:
            fresh = buckets & ~covered  # if two servers wrote the same bucket, use only one copy
            if fresh:
                used[part.file] = part, used.get(part.file, (part, 0))[1] | fresh
                covered |= fresh
        return list(used.values()), covered

    def _assemble(self, attempt: _Attempt, uses: dict[str, list[tuple[StoredPart, Buckets]]]) -> SnapshotManifest:
        for part, _ in itertools.chain.from_iterable(uses.values()):
            if part.file.startswith(f"{folder_name(attempt.number)}/"):
                self._check_seen(part)
        tables = tuple(_make_table(spec, uses[spec.name]) for _, spec in attempt.tables)
        folder = folder_name(attempt.number)
        return SnapshotManifest(
            number=attempt.number,
            full=all(part.file.startswith(f"{folder}/") for table in tables for part in table.parts),
            iteration=attempt.iteration,
            tables=tables,
            account=attempt.account,
            training=attempt.training,
        )

    def _check_seen(self, part: StoredPart) -> None:
        try:
            size = os.stat(self.directory / part.file).st_size
        except OSError:
            size = -1
        if size != part.num_bytes:
            raise self._failed(
                f"a server wrote {part.file}, but this process does not see it in {self.directory}: servers and this "
                "process must share the directory"
            )


def _make_table(spec: TableSpec, parts: list[tuple[StoredPart, Buckets]]) -> StoredTable:
    rows = sum(n for part, buckets in parts for b, n in zip(part.buckets, part.rows, strict=True) if buckets >> b & 1)
    uses = tuple(PartUse(part=part, buckets=tuple(buckets_in(buckets))) for part, buckets in parts)
    return StoredTable(spec=spec, rows=rows, uses=uses)


def _parts_of(
    manifest: SnapshotManifest, table: str, number: int, wanted: Buckets
) -> Iterator[tuple[StoredPart, Buckets]]:
    """Yield the parts of a table in snapshot `number` that contain wanted buckets, with these buckets."""
    for stored in manifest.tables:
        if stored.spec.name == table:
            for use in stored.uses:
                if not use.part.file.startswith(f"{folder_name(number)}/"):
                    continue
                if buckets := bucket_set(use.buckets) & wanted:
                    yield use.part, buckets
