"""A server's side of snapshots: buckets are copied between requests, and threads write and read files.

The event loop copies one bucket at a time, during which no change is possible, and serves requests before the next
bucket. At most `_WRITERS` parts are being written, so a slow disk delays the snapshot but never a push.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import zlib
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import ModelError, PacelineError, StaleEpochError, UsageError
from paceline.protocol import ServerCore
from paceline.protocol.buckets import Buckets, buckets_in, from_bytes, to_bytes
from paceline.ps.server.replica_checks import BucketOrders
from paceline.ps.snapshot_messages import (
    DropSnapshot,
    GetLoadState,
    GetSnapshotState,
    LoadParts,
    LoadState,
    SnapshotStarted,
    SnapshotState,
    TakeSnapshot,
    UnchangedBuckets,
)
from paceline.storage import parts
from paceline.storage.format import StoredPart
from paceline.storage.parts import PartBuffer, write_part
from paceline.storage.snapshot_directory import describe_failure, read_buckets
from paceline.tables.non_finite import NonFinite
from paceline.tables.server_tables import ServerTables
from paceline.tables.snapshot_part import Moment, SnapshotId, watch
from paceline.tables.types import Floats, Keys

_WRITERS = 2  # while one writer waits for the disk, the other computes hashes
PAUSE = 1.0  # the pause after a bucket, as a multiple of the time for copying it

_Result = TypeVar("_Result")


class _Taking:
    """One snapshot on one server, until the last part is on the disk."""

    def __init__(self, tables: ServerTables, request: TakeSnapshot) -> None:
        self._tables = tables
        self._request = request
        self.done = False
        self.error = ""
        self._parts: list[StoredPart] = []
        self._unchanged: list[UnchangedBuckets] = []
        self._given_up = self._is_dropped = False
        self._moments: dict[int, Moment] = {}
        self._directory = Path(request.directory)
        self._pool = ThreadPoolExecutor(_WRITERS, thread_name_prefix="paceline-snapshot")
        self._buffers: deque[asyncio.Future[PartBuffer]] = deque()
        self._task: asyncio.Task[None] | None = None

    @property
    def id(self) -> SnapshotId:
        return self._request.directory, self._request.number

    @property
    def has_started(self) -> bool:
        return self._task is not None

    def prepare(self) -> None:
        """Allocate buffers in threads. Each buffer is available after its allocation, and again after each write."""
        held = [self._tables.find(number).part for number in self._request.tables]
        size = sum((8 + 4 * part.record_words) * part.num_rows for part in held)
        for _ in range(1 + min(_WRITERS, size // parts.PART_BYTES)):
            self._buffers.append(_call(self._pool, PartBuffer, min(size, parts.PART_BYTES)))

    def begin(self) -> None:
        """Start copying. Call this at the boundary, or immediately without a boundary."""
        wanted = from_bytes(self._request.buckets)
        todo: dict[int, Buckets] = {}
        for number in self._request.tables:
            part = watch(self._tables.find(number))
            remaining = wanted & part.held
            for earlier in self._request.complete:
                if kept := part.unchanged_since((self._request.directory, earlier)) & remaining:
                    self._unchanged.append(UnchangedBuckets(table=number, number=earlier, buckets=to_bytes(kept)))
                    remaining &= ~kept
            if self._request.boundary is not None and remaining:
                self._moments[number] = part.moment = Moment(part.part, remaining)
                part.record_written(self.id, remaining)
            todo[number] = remaining
        self._task = _start(self._take(todo))

    async def _take(self, todo: dict[int, Buckets]) -> None:
        try:
            folder = self._directory / self._request.folder
            await _result(_call(self._pool, partial(folder.mkdir, parents=True, exist_ok=True)))
            for number, buckets in todo.items():
                if not self._given_up:
                    await self._copy_table(number, buckets)
            while self._buffers:
                await _result(self._buffers.popleft())
            self.done = not self._given_up
        except OSError as error:
            self._fail(describe_failure(self._directory, error))
        except (PacelineError, MemoryError) as error:
            self._fail(str(error) or "no memory for a copy of buckets")
        finally:
            if not self.done:
                await asyncio.gather(*self._buffers, return_exceptions=True)  # wait for the writers
                self._buffers.clear()
                self._remove()
            self._pool.shutdown(wait=False)

    async def _copy_table(self, number: int, buckets: Buckets) -> None:
        """Copy the buckets of a table and write them; requests are served between buckets."""
        spec = self._tables.find(number).part.spec
        files = (f"{self._request.folder}/{self._prefix}-t{number}-{index:05d}.safetensors" for index in count())
        gathered: PartBuffer | None = None
        for bucket in buckets_in(buckets):
            if gathered is None:
                gathered = await _result(self._buffers.popleft())
                has_passes = self._tables.find(number).part.pass_number > 0
                gathered.begin(spec.record_words + has_passes, has_passes=has_passes)
            if self._given_up:
                return
            start = time.perf_counter()
            copy = self._copy(number, bucket)
            if copy is not None:
                keys, records = copy
                if gathered.has_passes:
                    records = self._tables.find(number).part.with_passes(bucket, keys, records)
                gathered.add(keys, records, bucket)
            # Pause, because a push that arrives in several pieces would otherwise wait for one copy per piece.
            await asyncio.sleep(min(max(PAUSE * (time.perf_counter() - start), 1e-4), 0.02))
            if gathered.is_full:
                self._buffers.append(_call(self._pool, self._write, next(files), spec.name, gathered))
                gathered = None
        if gathered is not None:
            self._buffers.append(_call(self._pool, self._write, next(files), spec.name, gathered))

    def _copy(self, number: int, bucket: int) -> tuple[Keys, Floats] | None:
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
        part.record_written(self.id, 1 << bucket)
        return keys, records

    def _close_moment(self, number: int) -> None:
        moment, part = self._moments.pop(number), watch(self._tables.find(number))
        if part.moment is moment:
            part.moment = None

    def _write(self, file: str, table: str, gathered: PartBuffer) -> PartBuffer:
        self._parts.append(write_part(self._directory, file, table, gathered))
        return gathered

    def _fail(self, error: str) -> None:
        self.error = error
        self.give_up()

    def give_up(self) -> None:
        """Stop, and remove the written files."""
        self._given_up = True
        for number in list(self._moments):
            self._close_moment(number)
        if self._task is None:
            for buffer in self._buffers:
                buffer.cancel()
            self._buffers.clear()
            self._pool.shutdown(wait=False)
        if self._task is None or self._task.done():
            self._remove()

    def drop(self) -> None:
        """Stop, because the coordinator cancels the snapshot. The last server that stops also removes the folder."""
        self._is_dropped = True
        self.give_up()

    @property
    def _prefix(self) -> str:
        return f"s{self._tables.rank}-r{self._request.round}"

    def _remove(self) -> None:
        # Keep the folder unless the snapshot is dropped, because other servers may still write to it.
        folder, names = self._directory / self._request.folder, f"{self._prefix}-t*.safetensors"
        pool = ThreadPoolExecutor(1, thread_name_prefix="paceline-snapshot")
        pool.submit(_remove_files, folder, names, self._is_dropped)
        pool.shutdown(wait=False)

    def state(self) -> SnapshotState:
        if not self.done:
            return SnapshotState(done=False, error=self.error, parts=(), unchanged=())
        return SnapshotState(done=True, error="", parts=tuple(self._parts), unchanged=tuple(self._unchanged))


class _PartsLoading:
    def __init__(self, tables: ServerTables, request: LoadParts, non_finite: NonFinite, orders: BucketOrders) -> None:
        self._number = request.table
        self._table = tables.find(request.table)
        self._part = self._table.part
        self._non_finite = non_finite
        self._orders = orders
        self._directory = Path(request.directory)
        self._parts = request.parts
        held = self._part.held  # the buckets of which this server is the primary or a replica
        self._wanted = [from_bytes(buckets) & held for buckets in request.buckets]
        self._task: asyncio.Task[None] | None = None
        self.done = False
        self.is_seen = True
        self.error = ""
        self.rows = 0

    def begin(self) -> None:
        self._task = _start(self._load())

    async def _load(self) -> None:
        pool = ThreadPoolExecutor(_WRITERS, thread_name_prefix="paceline-loading")
        read = partial(read_buckets, with_passes=True)
        todo = deque((part, wanted) for part, wanted in zip(self._parts, self._wanted, strict=True) if wanted)
        reading: deque[asyncio.Future[list[tuple[int, Keys, Floats]]]] = deque()
        try:
            self.is_seen = await _result(_call(pool, do_all_exist, self._directory, self._parts))
            while self.is_seen and (todo or reading):
                while todo and len(reading) < _WRITERS:
                    reading.append(_call(pool, read, self._directory, *todo.popleft()))
                for bucket, keys, records in await _result(reading.popleft()):
                    self._set(bucket, keys, records)
                    await asyncio.sleep(0)  # serve requests before the next bucket
            self.done = True
        except (PacelineError, OSError) as error:
            self.error = str(error) or type(error).__name__
        finally:
            for future in reading:
                future.cancel()
            pool.shutdown(wait=False, cancel_futures=True)

    def _set(self, bucket: int, keys: Keys, records: Floats) -> None:
        if self._part.held >> bucket & 1:  # skip a moved bucket: the coordinator repeats the loading
            self._non_finite.check_records(self._table, keys, records, f"the snapshot in {self._directory}")
            self._part.load_with_passes(bucket, keys, records)
            # The servers of a chain load a bucket at different times. Until all have loaded it, replicas differ without
            # an error, because the hashes of the order differ too.
            self._orders.applied(self._number, zlib.crc32(str(self._directory).encode()), 1 << bucket)
        self.rows += len(keys)

    def give_up(self) -> None:
        """Stop without an error, because another load starts or the server ends."""
        if self._task is not None:
            self._task.cancel()


def _start(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(lambda ended: None if ended.cancelled() else ended.result())
    return task


def _call(pool: ThreadPoolExecutor, function: Callable[..., _Result], *arguments: Any) -> asyncio.Future[_Result]:
    return asyncio.get_running_loop().run_in_executor(pool, function, *arguments)


async def _result(called: asyncio.Future[_Result]) -> _Result:
    """Return the result of a call in a thread. Raises OSError, or ModelError for any other exception."""
    try:
        return await called
    except OSError:
        raise
    except Exception as error:
        raise ModelError(str(error) or type(error).__name__) from None


def _remove_files(folder: Path, names: str, is_last: bool) -> None:
    with contextlib.suppress(OSError):
        for path in folder.glob(names):
            path.unlink(missing_ok=True)
        if is_last:
            folder.rmdir()


def do_all_exist(directory: Path, parts: Sequence[StoredPart]) -> bool:
    return all((directory / part.file).exists() for part in parts)


class ServerSnapshots:
    """Takes snapshots of one server's tables, and loads them."""

    def __init__(self, tables: ServerTables, core: ServerCore, non_finite: NonFinite, orders: BucketOrders) -> None:
        self._tables = tables
        self._core = core
        self._non_finite = non_finite
        self._orders = orders
        self._taking: _Taking | None = None
        self._boundary: int | None = None
        self._loading: _PartsLoading | None = None
        self.calls: dict[type, Callable[[Any], Any]] = {
            TakeSnapshot: self.take,
            GetSnapshotState: self.state,
            DropSnapshot: self.drop,
            LoadParts: self.load,
            GetLoadState: self.load_state,
        }

    def take(self, request: TakeSnapshot) -> SnapshotStarted:
        """Start a snapshot now or at the `boundary`, which is an iteration that no worker has begun.

        If the boundary has passed, return the current clock instead.
        """
        for number in request.tables:
            self._tables.find(number)
        from_bytes(request.buckets)
        clock = self._core.latest_clock
        if request.boundary is not None and request.boundary <= clock:
            return SnapshotStarted(is_started=False, clock=clock)
        if self._taking is not None and not self._taking.done:
            self._taking.give_up()
        self._taking = _Taking(self._tables, request)
        self._taking.prepare()
        self._boundary = request.boundary
        if request.boundary is None:
            self._taking.begin()
        return SnapshotStarted(is_started=True, clock=clock)

    def iteration_completed(self, iteration: int) -> None:
        """Record that an iteration was applied. Call this before the next iteration is applied."""
        if self._boundary is not None and iteration + 1 >= self._boundary:
            self._boundary = None
            if self._taking is not None and not self._taking.has_started:
                self._taking.begin()

    def state(self, request: GetSnapshotState) -> SnapshotState:
        if self._taking is None:
            raise UsageError(f"server {self._tables.rank} is not taking snapshot {request.number}")
        if self._taking.id != (request.directory, request.number):
            directory, number = self._taking.id
            reason = f"snapshot {number} in {directory} has replaced it: a server takes one snapshot at a time"
            return SnapshotState(done=False, error=reason, parts=(), unchanged=())
        return self._taking.state()

    def drop(self, request: DropSnapshot) -> None:
        if self._taking is not None and self._taking.id == (request.directory, request.number):
            self._taking.drop()
            self._taking, self._boundary = None, None

    def load(self, request: LoadParts) -> None:
        """Start loading. Raises StaleEpochError if the request is of another view."""
        version = self._core.version
        if request.version != version:
            raise StaleEpochError(
                f"server {self._tables.rank} has view {version}, but the request to load a snapshot is of view "
                f"{request.version}: retry in the newest view"
            )
        if self._loading is not None and not self._loading.done:
            self._loading.give_up()
        self._loading = _PartsLoading(self._tables, request, self._non_finite, self._orders)
        self._loading.begin()

    def load_state(self, request: GetLoadState) -> LoadState:
        loading = self._loading
        if loading is None:
            raise ModelError(f"server {self._tables.rank} is not loading a snapshot")
        return LoadState(done=loading.done, error=loading.error, rows=loading.rows, is_seen=loading.is_seen)

    def close(self) -> None:
        if self._taking is not None and not self._taking.done:
            self._taking.give_up()
        if self._loading is not None and not self._loading.done:
            self._loading.give_up()
