"""A server's side of snapshots: its buckets are copied between requests, and written and read by threads.

One bucket is copied at a time, in the event loop, where nothing changes it meanwhile; then whoever has sent something
is served, then the next one. At most `_WRITERS` parts are on their way to the disk: a slow disk slows the snapshot,
never a push. Whom it talks to: a coordinator (:mod:`paceline.ps.client.snapshots`), by its messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from paceline.errors import ModelError, PacelineError, StaleEpochError, UsageError
from paceline.protocol import ServerCore
from paceline.protocol.buckets import buckets_in, from_bytes, to_bytes
from paceline.ps.messages.snapshots import (
    DropSnapshot,
    GetLoadState,
    GetSnapshotState,
    KeptBuckets,
    LoadParts,
    LoadState,
    SnapshotBegun,
    SnapshotState,
    TakeSnapshot,
)
from paceline.storage import parts
from paceline.storage.format import StoredPart
from paceline.storage.parts import PartBuffer, write_part
from paceline.storage.snapshot_directory import describe_failure, read_buckets
from paceline.tables.non_finite import NonFinite
from paceline.tables.server_tables import ServerTables
from paceline.tables.snapshot_part import Moment, watch
from paceline.tables.sparse_store import Floats, Keys

_WRITERS = 2  # while one waits for the disk, the other one hashes and writes
_PAUSE = 1.0  # after a bucket is copied, in the time that it took


class _Taking:
    """One snapshot on one server, from its beginning to the last part on the disk."""

    def __init__(self, tables: ServerTables, request: TakeSnapshot) -> None:
        self._tables = tables
        self._request = request
        self.number = request.number
        self.begun = self.done = False
        self.error = ""
        self.parts: list[StoredPart] = []
        self.kept: list[KeptBuckets] = []
        self._given_up = self._is_dropped = False
        self._moments: dict[int, Moment] = {}
        self._todo: list[tuple[int, int]] = []  # table, bucket; the next one last
        self._free: list[PartBuffer] = []
        self._gathered: PartBuffer | None = None  # the buckets of the next part
        self._table = -1  # which they are of
        self._num_parts = 0
        self._num_writing = 0
        self._stands_still = False
        self._directory = Path(request.directory)
        self._prefix = f"s{tables.rank}-r{request.round}"
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(_WRITERS, thread_name_prefix="paceline-snapshot")
        held = [tables.find(number).part for number in request.tables]
        size = sum((8 + 4 * part.record_words) * part.num_rows for part in held)
        for _ in range(1 + min(_WRITERS, size // parts.PART_BYTES)):
            future = self._pool.submit(PartBuffer, min(size, parts.PART_BYTES))
            future.add_done_callback(lambda made: _call_soon(self._loop, self._has_made, made))

    def _has_made(self, future: Future[PartBuffer]) -> None:
        error = future.exception()
        if error is not None:
            self._fail(str(error) or "no memory for a copy of buckets")
        elif not self.done and not self._given_up:
            self._has_free(future.result())

    def _has_free(self, buffer: PartBuffer) -> None:
        self._free.append(buffer)
        if self._stands_still:
            self._stands_still = False
            self._step()

    def begin(self) -> None:
        """Begin: at the boundary, or at once."""
        self.begun = True
        mine = from_bytes(self._request.buckets)
        todo = []
        for number in self._request.tables:
            part = watch(self._tables.find(number))
            rest = mine & part.held
            for earlier in self._request.whole:
                if kept := part.unchanged_since(earlier) & rest:
                    self.kept.append(KeptBuckets(table=number, number=earlier, buckets=to_bytes(kept)))
                    rest &= ~kept
            if self._request.boundary is not None and rest:
                self._moments[number] = part.moment = Moment(part.part, rest)
                part.note_written(self.number, rest)
            todo += [(number, bucket) for bucket in buckets_in(rest)]
        self._todo = todo[::-1]
        future = self._pool.submit((self._directory / self._request.folder).mkdir, parents=True, exist_ok=True)
        future.add_done_callback(lambda made: _call_soon(self._loop, self._has_folder, made))

    def _has_folder(self, future: Future[None]) -> None:
        error = future.exception()
        if isinstance(error, OSError):
            self._fail(describe_failure(self._directory, error))
        else:
            self._step()

    def _step(self) -> None:
        """Copy one bucket; whoever waits is served before the next one."""
        if self.error or self._given_up:
            return
        gathered, table = self._gathered, self._todo[-1][0] if self._todo else -1
        if gathered is not None and (gathered.is_full or table != self._table):
            self._write(gathered)
            gathered = self._gathered = None
        if not self._todo:
            self._look_for_end()
            return
        self._table = table
        if gathered is None:
            if not self._free:
                self._stands_still = True
                return
            gathered = self._gathered = self._free.pop()
            gathered.begin(self._tables.find(table).part.record_words)
        number, bucket = self._todo.pop()
        start = time.perf_counter()
        try:
            copy = self._copy(number, bucket)
            if copy is not None:
                gathered.add(*copy, bucket)
        except (UsageError, MemoryError) as error:
            self._fail(str(error) or "no memory for a copy of a bucket")
            return
        # Not at once: a push that is being received would have a bucket copied between any two of its pieces.
        self._loop.call_later(min(max(_PAUSE * (time.perf_counter() - start), 1e-4), 0.02), self._step)

    def _copy(self, number: int, bucket: int) -> tuple[Keys, Floats] | None:
        """Return a bucket; None if it has moved to another server."""
        moment = self._moments.get(number)
        if moment is not None:
            keys, records = moment.read(bucket)
            if not moment.waiting:
                self._close_moment(number)
            return keys, records
        part = watch(self._tables.find(number))
        if not part.held >> bucket & 1:
            return None
        keys, records = part.part.read_bucket(bucket)
        part.note_written(self.number, 1 << bucket)
        return keys, records

    def _close_moment(self, number: int) -> None:
        moment, part = self._moments.pop(number), watch(self._tables.find(number))
        if part.moment is moment:
            part.moment = None

    def _write(self, gathered: PartBuffer) -> None:
        name = self._tables.find(self._table).part.spec.name
        file = f"{self._request.folder}/{self._prefix}-t{self._table}-{self._num_parts:05d}.safetensors"
        self._num_parts += 1
        self._num_writing += 1
        future = self._pool.submit(write_part, self._directory, file, name, gathered)
        future.add_done_callback(lambda done: _call_soon(self._loop, self._written, done, gathered))

    def _written(self, future: Future[StoredPart], gathered: PartBuffer) -> None:
        self._num_writing -= 1
        error = future.exception()
        if error is None:
            self.parts.append(future.result())
        elif isinstance(error, OSError):
            self._fail(describe_failure(self._directory, error))
        else:
            self._fail(f"{type(error).__name__}: {error}")
        if self.error or self._given_up:
            if not self._num_writing:
                self._remove()
        else:
            self._has_free(gathered)
            self._look_for_end()

    def _look_for_end(self) -> None:
        if not self._todo and self._gathered is None and not self._num_writing:
            self.done = True
            self._free = []
            self._pool.shutdown(wait=False)

    def _fail(self, error: str) -> None:
        self.error = self.error or error
        self.give_up()

    def give_up(self) -> None:
        """Stop, and remove what was written."""
        self._given_up = True
        self._todo, self._free, self._gathered = [], [], None
        for number in list(self._moments):
            self._close_moment(number)
        self._pool.shutdown(wait=False)
        if not self._num_writing:
            self._remove()

    def drop(self) -> None:
        """Give it up, since the coordinator does; its folder goes too when the last server has left it."""
        self._is_dropped = True
        self.give_up()

    def _remove(self) -> None:
        # If it is not dropped the folder stays, or another server would have none, and tell of that.
        folder, names = self._directory / self._request.folder, f"{self._prefix}-t*.safetensors"
        pool = ThreadPoolExecutor(1, thread_name_prefix="paceline-snapshot")
        pool.submit(_remove_files, folder, names, self._is_dropped)
        pool.shutdown(wait=False)

    def state(self) -> SnapshotState:
        """Return how far it is."""
        done = self.done
        return SnapshotState(
            done=done, error=self.error, parts=tuple(self.parts) if done else (), kept=tuple(self.kept) if done else ()
        )


class _Loading:
    """Buckets on their way from parts on the disk into a table."""

    def __init__(self, tables: ServerTables, request: LoadParts, non_finite: NonFinite) -> None:
        self._table = tables.find(request.table)
        self._part = self._table.part
        self._non_finite = non_finite
        self._directory = Path(request.directory)
        held = self._part.held  # as the primary server or as a replica
        wanted = [from_bytes(buckets) & held for buckets in request.buckets]
        self._todo = [(part, mine) for part, mine in zip(request.parts, wanted, strict=True) if mine][::-1]
        self._num_reading = 0
        self._ready: list[tuple[int, Keys, Floats]] = []
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(_WRITERS, thread_name_prefix="paceline-loading")
        self._is_setting = self._given_up = False
        self.done = False
        self.is_seen = True
        self.error = ""
        self.rows = 0
        future = self._pool.submit(_are_there, self._directory, request.parts)
        future.add_done_callback(lambda looked: _call_soon(self._loop, self._has_looked, looked))

    def _has_looked(self, future: Future[bool]) -> None:
        if self._given_up:
            return
        error = future.exception()
        if error is not None:
            self._fail(str(error) or type(error).__name__)
            return
        self.is_seen = future.result()
        if not self.is_seen:
            self._todo = []
        self._read_on()

    def _read_on(self) -> None:
        while self._todo and self._num_reading < _WRITERS and len(self._ready) < 1024:
            part, buckets = self._todo.pop()
            self._num_reading += 1
            future = self._pool.submit(read_buckets, self._directory, part, buckets)
            future.add_done_callback(lambda done: _call_soon(self._loop, self._has_read, done))
        if not self._todo and not self._num_reading and not self._ready:
            self.done = True
            self._pool.shutdown(wait=False)

    def _has_read(self, future: Future[list[tuple[int, Keys, Floats]]]) -> None:
        self._num_reading -= 1
        if self._given_up:
            return
        error = future.exception()
        if error is not None:
            self._fail(str(error) or type(error).__name__)
            return
        self._ready += future.result()
        if not self._is_setting:
            self._is_setting = True
            self._set_next()

    def _set_next(self) -> None:
        """Set one bucket; whoever waits is served before the next one."""
        if self._given_up:
            return
        if self._ready:
            bucket, keys, records = self._ready.pop()
            try:
                if self._part.held >> bucket & 1:  # or it has moved meanwhile, and will be loaded again
                    self._non_finite.check_records(self._table, keys, records, f"the snapshot in {self._directory}")
                    self._part.load_bucket(bucket, keys, records)
            except PacelineError as error:
                self._fail(str(error) or type(error).__name__)
                return
            self.rows += len(keys)
            self._loop.call_soon(self._set_next)
        else:
            self._is_setting = False
        if not self._ready:
            self._read_on()

    def _fail(self, error: str) -> None:
        self.error = error
        self.give_up()

    def give_up(self) -> None:
        """Stop. It is no error by itself: another loading takes its place, or the server ends, which others see."""
        self._given_up = True
        self._todo, self._ready = [], []
        self._pool.shutdown(wait=False, cancel_futures=True)


def _remove_files(folder: Path, names: str, is_last: bool) -> None:
    with contextlib.suppress(OSError):
        for path in folder.glob(names):
            path.unlink(missing_ok=True)
        if is_last:
            folder.rmdir()


def _are_there(directory: Path, parts: Sequence[StoredPart]) -> bool:
    return all((directory / part.file).exists() for part in parts)


class ServerSnapshots:
    """Takes snapshots of one server's tables, and loads them."""

    def __init__(self, tables: ServerTables, core: ServerCore, non_finite: NonFinite) -> None:
        self._tables = tables
        self._core = core
        self._non_finite = non_finite
        self._taking: _Taking | None = None
        self._boundary: int | None = None
        self._loading: _Loading | None = None
        self.calls: dict[type, Callable[[Any], Any]] = {
            TakeSnapshot: self.take,
            GetSnapshotState: self.state,
            DropSnapshot: self.drop,
            LoadParts: self.load,
            GetLoadState: self.load_state,
        }
        """What answers which message."""

    def take(self, request: TakeSnapshot) -> SnapshotBegun:
        """Begin a snapshot now, or say when: at an iteration that no worker has begun yet."""
        for number in request.tables:
            self._tables.find(number)
        from_bytes(request.buckets)
        clock = max(self._core.workers.gate.clocks.values(), default=0)
        if request.boundary is not None and request.boundary <= clock:
            return SnapshotBegun(begun=False, clock=clock)
        if self._taking is not None and not self._taking.done:
            self._taking.give_up()
        self._taking = _Taking(self._tables, request)
        self._boundary = request.boundary
        if request.boundary is None:
            self._taking.begin()
        return SnapshotBegun(begun=True, clock=clock)

    def iteration_completed(self, iteration: int) -> None:
        """Take note that an iteration is complete and applied, and no later one is."""
        if self._boundary is not None and iteration + 1 >= self._boundary:
            self._boundary = None
            if self._taking is not None and not self._taking.begun:
                self._taking.begin()

    def state(self, request: GetSnapshotState) -> SnapshotState:
        """Return how far a snapshot is."""
        if self._taking is None or self._taking.number != request.number:
            raise UsageError(f"server {self._tables.rank} takes no snapshot {request.number}")
        return self._taking.state()

    def drop(self, request: DropSnapshot) -> None:
        """Give up a snapshot."""
        if self._taking is not None and self._taking.number == request.number:
            self._taking.drop()
            self._taking, self._boundary = None, None

    def load(self, request: LoadParts) -> None:
        """Begin to load. Raises StaleEpochError by another map."""
        version = self._core.replication.version
        if request.version != version:
            raise StaleEpochError(
                f"server {self._tables.rank} goes by version {version} of the map, and a snapshot is to be "
                f"loaded by version {request.version}: ask again by the newest one"
            )
        if self._loading is not None and not self._loading.done:
            self._loading.give_up()
        self._loading = _Loading(self._tables, request, self._non_finite)

    def load_state(self, request: GetLoadState) -> LoadState:
        """Return how far the loading is."""
        loading = self._loading
        if loading is None:
            raise ModelError(f"server {self._tables.rank} loads nothing")
        return LoadState(done=loading.done, error=loading.error, rows=loading.rows, is_seen=loading.is_seen)

    def close(self) -> None:
        """Stop what goes on."""
        if self._taking is not None and not self._taking.done:
            self._taking.give_up()
        if self._loading is not None and not self._loading.done:
            self._loading.give_up()


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
        loop.call_soon_threadsafe(function, *arguments)
