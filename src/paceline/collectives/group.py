"""Groups of ranks that run collective operations together."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Final

import numpy as np

from paceline.closing import Closing
from paceline.collectives import objects as _objects
from paceline.collectives.arrays import ArrayMemory, as_array
from paceline.collectives.connections import Connections
from paceline.collectives.operations import Operations, Work
from paceline.collectives.ticket import CollectiveTicket, MessageTicket, no_waiting_in_callbacks
from paceline.collectives.tuner import Candidate, Tuner, check_algorithm
from paceline.environment import Timeout, timedelta_of
from paceline.errors import CollectiveError, GroupClosedError, RankLostError, UsageError
from paceline.meeting.group_names import EndedError
from paceline.meeting.world import World

_ABORTED: Final = "it was aborted on this rank"
_FORKED: Final = "it belongs to the parent of this forked process; a forked process must create its own group"


class Group(Closing):
    """A group of ranks, numbered 0 to ``size - 1``, that make the same calls in the same order.

    Arguments are NumPy arrays or PyTorch CPU tensors of float16, bfloat16, float32, float64, any integer dtype or bool.
    Results have the type (array or tensor) of the arguments. The reductions are ``sum``, ``product``, ``min`` and
    ``max``, ``mean`` for floats, and ``bitwise_and``, ``bitwise_or`` and ``bitwise_xor`` for integers and bool. On one
    host, values of half precision are reduced in float32. An all-reduce returns the same bits on every rank if all
    hosts have the same kind of processor.

    Every call has a variant ``*_async`` that returns a :class:`CollectiveTicket`. All calls run in the order of their
    submission. A call waits at most :attr:`timeout`. If the calls of the ranks differ, all ranks raise MismatchError.
    If a rank dies, stops or is missing, the other ranks raise RankLostError, which names the rank. After such an error,
    all further calls raise GroupClosedError.
    """

    def __init__(
        self, world: World, ranks: Sequence[int], name: str, *, timeout: timedelta, algorithm: str | None = None
    ) -> None:
        """This constructor is internal. Users call :func:`init` or :meth:`subgroup`."""
        check_algorithm(algorithm)
        self._timeout_s = timeout.total_seconds()
        self.name = name
        self._world = world
        self._connections = Connections(world, ranks, name, self._timeout_s, self._message_failed)
        self.rank = self._connections.layout.rank
        """This process's rank in the group."""
        self.size = self._connections.layout.size
        self.ranks = self._connections.layout.ranks
        """The world rank of each rank: its rank in the group of all ranks."""
        self.hosts = self._connections.layout.hosts
        """The number of each rank's host. Ranks with equal numbers can share memory."""
        self.tuner = Tuner(self._connections, self._timeout_s, algorithm)
        """Chooses the algorithm of each operation."""
        self._operations = Operations(self._connections, self.tuner, self._timeout_s)
        self._sequence = self._num_pending = 0
        self._failure: str = ""
        self._unreported: CollectiveError | None = None
        """The error of a failed send or receive that no operation has raised yet. The next call raises this error."""
        self._reporter: threading.Thread | None = None
        self._lock = threading.RLock()
        self._submitting = threading.Lock()
        self._queue: SimpleQueue[tuple[Work, CollectiveTicket] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._owns_world = False
        world.enter(self)

    @property
    def timeout(self) -> timedelta:
        """The maximum time that a call waits for other ranks."""
        return timedelta(seconds=self._timeout_s)

    @property
    def num_pending(self) -> int:
        """The number of unfinished asynchronous calls. Sends and receives do not count."""
        return self._num_pending

    def barrier(self) -> None:
        """Wait until every rank has called this method."""
        self._run_blocking(self._operations.barrier())

    def barrier_async(self) -> CollectiveTicket:
        """See :meth:`barrier`."""
        return self._submit(self._operations.barrier())

    def all_reduce(self, array: Any, op: str = "sum", *, out: Any = None) -> Any:
        """Return the reduction of `array` over all ranks.

        The result is written to `out`, which may be `array` itself.
        """
        return self._run_blocking(self._operations.all_reduce(array, op, out))

    def all_reduce_async(self, array: Any, op: str = "sum", *, out: Any = None) -> CollectiveTicket:
        """See :meth:`all_reduce`."""
        return self._submit(self._operations.all_reduce(array, op, out))

    def reduce(self, array: Any, op: str = "sum", *, root: int = 0, out: Any = None) -> Any:
        """Return the reduction of `array` over all ranks to rank `root`; return None on other ranks."""
        return self._run_blocking(self._operations.reduce(array, op, root, out))

    def reduce_async(self, array: Any, op: str = "sum", *, root: int = 0, out: Any = None) -> CollectiveTicket:
        """See :meth:`reduce`."""
        return self._submit(self._operations.reduce(array, op, root, out))

    def reduce_scatter(
        self, array: Any, op: str = "sum", *, sizes: Sequence[int] | None = None, out: Any = None
    ) -> Any:
        """Reduce `array` over all ranks, divide the result along its first axis, and return this rank's part.

        `sizes` has the number of rows of each rank's part, and must be equal on all ranks. By default all parts are
        equal, and the number of rows must be a multiple of the group's size.
        """
        return self._run_blocking(self._operations.reduce_scatter(array, op, sizes, out))

    def reduce_scatter_async(
        self, array: Any, op: str = "sum", *, sizes: Sequence[int] | None = None, out: Any = None
    ) -> CollectiveTicket:
        """See :meth:`reduce_scatter`."""
        return self._submit(self._operations.reduce_scatter(array, op, sizes, out))

    def broadcast(self, array: Any, *, root: int = 0) -> Any:
        """Copy the root's `array` into all ranks' arrays of equal shape and dtype, and return `array`."""
        return self._run_blocking(self._operations.broadcast(array, root))

    def broadcast_async(self, array: Any, *, root: int = 0) -> CollectiveTicket:
        """See :meth:`broadcast`."""
        return self._submit(self._operations.broadcast(array, root))

    def all_gather(self, array: Any, *, sizes: Sequence[int] | None = None, out: Any = None) -> Any:
        """Return the arrays of all ranks, concatenated along the first axis. Arrays without axes become a vector.

        `sizes` has the number of rows of each rank's array, and must be equal on all ranks. Pass `sizes` if the arrays
        have different numbers of rows; :meth:`gather_sizes` returns this list.
        """
        return self._run_blocking(self._operations.all_gather(array, sizes, out))

    def all_gather_async(self, array: Any, *, sizes: Sequence[int] | None = None, out: Any = None) -> CollectiveTicket:
        """See :meth:`all_gather`."""
        return self._submit(self._operations.all_gather(array, sizes, out))

    def gather_sizes(self, array: Any) -> list[int]:
        """Return the number of rows of every rank's array."""
        shape = as_array(array).shape
        rows = np.array([shape[0] if len(shape) else 1], np.int64)
        return [int(number) for number in self.all_gather(rows)]

    def gather(self, array: Any, *, root: int = 0, sizes: Sequence[int] | None = None, out: Any = None) -> Any:
        """Return the arrays of all ranks on rank `root`, as :meth:`all_gather` does; return None on other ranks."""
        return self._run_blocking(self._operations.gather(array, root, sizes, out))

    def gather_async(
        self, array: Any, *, root: int = 0, sizes: Sequence[int] | None = None, out: Any = None
    ) -> CollectiveTicket:
        """See :meth:`gather`."""
        return self._submit(self._operations.gather(array, root, sizes, out))

    def scatter(self, array: Any, out: Any, *, root: int = 0, sizes: Sequence[int] | None = None) -> Any:
        """Divide the `array` of rank `root` along its first axis, and copy part r to the `out` of each rank r.

        On ranks other than `root`, `array` is None.
        """
        return self._run_blocking(self._operations.scatter(array, out, root, sizes))

    def scatter_async(
        self, array: Any, out: Any, *, root: int = 0, sizes: Sequence[int] | None = None
    ) -> CollectiveTicket:
        """See :meth:`scatter`."""
        return self._submit(self._operations.scatter(array, out, root, sizes))

    def all_to_all(
        self,
        array: Any,
        *,
        send_sizes: Sequence[int] | None = None,
        receive_sizes: Sequence[int] | None = None,
        out: Any = None,
    ) -> Any:
        """Send a part of `array` to each rank, and return the received parts in the order of ranks.

        `array` is divided along its first axis. `send_sizes` has the number of rows for each rank; by default all parts
        are equal. `receive_sizes` has the number of rows from each rank; without it, the ranks exchange these numbers
        first.
        """
        return self._run_blocking(self._operations.all_to_all(array, send_sizes, receive_sizes, out))

    def all_to_all_async(
        self,
        array: Any,
        *,
        send_sizes: Sequence[int] | None = None,
        receive_sizes: Sequence[int] | None = None,
        out: Any = None,
    ) -> CollectiveTicket:
        """See :meth:`all_to_all`."""
        return self._submit(self._operations.all_to_all(array, send_sizes, receive_sizes, out))

    def broadcast_object(self, value: Any = None, *, root: int = 0) -> Any:
        """Return the root's value. Values are numbers, strings, bytes, lists and dicts. They are not pickled."""
        return _objects.broadcast(self, value, root)

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Return the values of all ranks. See :meth:`broadcast_object` for their types."""
        return _objects.all_gather(self, value)

    def gather_objects(self, value: Any, *, root: int = 0) -> list[Any] | None:
        """Return the values of all ranks on `root`, None on other ranks."""
        return _objects.gather(self, value, root)

    def send(self, array: Any, to: int, *, tag: int = 0) -> None:
        """Send an array to rank ``to``, which calls :meth:`recv` with an equal tag and an array of equal dtype and
        size.

        Tags are numbers below 2^62. Higher numbers are reserved.
        """
        self.send_async(array, to, tag=tag).wait()

    def send_async(self, array: Any, to: int, *, tag: int = 0) -> CollectiveTicket:
        """See :meth:`send`."""
        self._check_alive()
        memory = ArrayMemory(array)
        pending = self._connections.point_to_point().send(memory.view(), to, tag, f"{memory.dtype}[{memory.count}]")
        return MessageTicket(self._operations.record_message(pending, "send", memory, to), self.timeout, memory)

    def recv(self, out: Any, source: int | None = None, *, tag: int = 0) -> int:
        """Receive a message with this tag from `source` (or any rank) into `out`, and return the sender's rank."""
        return int(self.recv_async(out, source, tag=tag).result())

    def recv_async(self, out: Any, source: int | None = None, *, tag: int = 0) -> CollectiveTicket:
        """See :meth:`recv`."""
        self._check_alive()
        memory = ArrayMemory(out, target=True)
        description = f"{memory.dtype}[{memory.count}]"
        pending = self._connections.point_to_point().receive(memory.view(), source, tag, description)
        return MessageTicket(self._operations.record_message(pending, "recv", memory, source), self.timeout, memory)

    def subgroup(self, ranks: Iterable[int], *, timeout: Timeout | None = None) -> Group | None:
        """Return a new group of some ranks of this group. The first rank in `ranks` is rank 0 of the new group.

        All ranks of the new group must call this method. Other ranks may call it too, and get None.
        """
        chosen = tuple(ranks)
        if len(set(chosen)) != len(chosen) or not all(0 <= rank < self.size for rank in chosen) or not chosen:
            raise UsageError(f"got ranks {list(chosen)}, expected different ranks from 0 to {self.size - 1}")
        return self._create_subgroup(tuple(self.ranks[rank] for rank in chosen), timeout)

    def split(self, color: int | None, key: int = 0) -> Group | None:
        """Divide this group by `color`, and return the new group of the ranks that passed this rank's `color`.

        The ranks of a new group are ordered by `key`, then by their rank in this group. A rank with the color None gets
        None. Every rank of this group must make this call.
        """
        try:
            own = np.array([[color is not None, color or 0, key]], np.int64)
        except (OverflowError, TypeError, ValueError) as error:
            raise UsageError(f"got color {color!r} and key {key!r}, expected integers of 64 bits ({error})") from None
        colors = self.all_gather(own)
        if color is None:
            return None
        same = [rank for rank in range(self.size) if colors[rank, 0] and colors[rank, 1] == color]
        same.sort(key=lambda rank: (int(colors[rank, 2]), rank))
        return self._create_subgroup(tuple(self.ranks[rank] for rank in same), label="split")

    def union(self, other: Group | Iterable[int]) -> Group | None:
        """Return a new group of all ranks in this group or `other`, in the order of world ranks.

        `other` is a group or a list of world ranks. All ranks of the new group must call this method, on this group or
        on `other`.
        """
        return self._create_subgroup(tuple(sorted({*self.ranks, *_world_ranks(other)})))

    def intersection(self, other: Group | Iterable[int]) -> Group | None:
        """Return a new group of the ranks in this group and in `other`, in the order of world ranks.

        Ranks that are not in the new group get None.

        All ranks of the new group must call this method.
        """
        return self._create_subgroup(tuple(sorted({*self.ranks} & {*_world_ranks(other)})))

    def difference(self, other: Group | Iterable[int]) -> Group | None:
        """Return a new group of the ranks of this group that are not in `other`. Ranks in `other` get None.

        All ranks of the new group must call this method.
        """
        return self._create_subgroup(tuple(sorted({*self.ranks} - {*_world_ranks(other)})))

    def explain(self, nbytes: int, operation: str = "all_reduce") -> str:
        """Return a text table of the algorithms for an operation on arrays of ``nbytes`` bytes.

        The table has the predicted and measured time of each algorithm, and the algorithm that the group chooses.
        """
        return self.tuner.explain(operation, nbytes)

    def candidates(self, nbytes: int, operation: str = "all_reduce") -> list[Candidate]:
        """Return the algorithms that :meth:`explain` lists. A time of None is unknown."""
        return self.tuner.candidates(operation, nbytes)

    def close(self) -> None:
        """Leave the group. The next call of the other ranks raises RankLostError. Idempotent.

        If this is the group of all ranks, its subgroups are closed too. In a forked child process this method has no
        effect.
        """
        if self._failure == _FORKED:
            return
        with self._submitting:  # no other thread may queue a call after the end marker
            self._failure = self._failure or "it was closed"
            thread, self._thread = self._thread, None
            if thread is not None:
                self._queue.put(None)
            reporter = self._reporter
        self._connections.close()
        if reporter is not None:
            reporter.join()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._world.leave(self)
        if self._owns_world:
            self._world.close()

    def abort(self) -> None:
        """End all work in progress on this rank. Its current and later calls and messages raise GroupClosedError.

        The other ranks raise RankLostError in their first call that needs this rank. The method returns immediately,
        and is thread-safe and idempotent. The caller must still call :meth:`close`.
        """
        with self._submitting:
            self._failure = self._failure or _ABORTED
        if self._failure != _FORKED:
            self._connections.end_all()

    def disown(self) -> None:
        """Make the group unusable in a forked child process, because its connections belong to the parent process."""
        self._failure = _FORKED

    def __repr__(self) -> str:
        return f"Group({self.name!r}, rank {self.rank} of {self.size})"

    def _check_alive(self) -> None:
        unreported, self._unreported = self._unreported, None
        if unreported is not None:
            raise unreported
        if self._failure:
            raise GroupClosedError(f"group {self.name!r} refuses further work: {self._failure}")

    def _run(self, work: Work) -> Any:
        with self._lock:
            self._check_alive()
            self._sequence += 1
            try:
                result = work(self._sequence)
                self._operations.finished()
                self._connections.at = (self._sequence, None)
                return result
            except BaseException as error:
                self._operations.finished(has_failed=True)
                self._unreported = None
                if self._failure == _ABORTED and isinstance(error, CollectiveError):
                    raise GroupClosedError(f"group {self.name!r} ended this call: {_ABORTED}") from error
                self._failure = self._failure or f"a call failed: {error}"
                self._connections.abort(error, self._sequence)
                raise

    def _message_failed(self, error: CollectiveError, is_reported: bool) -> None:
        """Refuse further work after a failed send or receive, and end the current call.

        This method is the ``on_failure`` callback of :class:`PointToPoint`.
        """
        if not self._failure:
            self._unreported = None if is_reported else error
            self._failure = f"a message failed: {error}"
            self._reporter = threading.Thread(
                target=self._report_failure, args=(error,), name="paceline-spreader", daemon=True
            )
            self._reporter.start()

    def _report_failure(self, error: CollectiveError) -> None:
        self._connections.interrupt(error)
        with self._lock:  # the thread that runs the interrupted call holds this lock until the call ends
            self._connections.abort(error, self._sequence)

    def _run_blocking(self, work: Work) -> Any:
        if self._thread is not None:
            if self._thread is threading.current_thread():
                raise no_waiting_in_callbacks()
            if self._num_pending:
                return self._submit(work).result()
        return self._run(work)

    def _submit(self, work: Work) -> CollectiveTicket:
        with self._submitting:
            self._check_alive()
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=f"paceline-{self.name}", daemon=True)
                self._thread.start()
            ticket = CollectiveTicket(self._thread)
            self._num_pending += 1
            self._queue.put((work, ticket))
        return ticket

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            work, ticket = item
            result, error = None, None
            try:
                result = self._run(work)
            except BaseException as failure:
                error = failure
            with self._submitting:
                self._num_pending -= 1
            ticket._finish(result, error)
            del item, work, ticket, result, error

    def _create_subgroup(self, ranks: tuple[int, ...], timeout: Timeout | None = None, label: str = "") -> Group | None:
        world = self._world
        if world.is_closed:
            raise GroupClosedError(f"cannot create a subgroup of {self.name!r}: all groups of this program were closed")
        if not all(0 <= rank < world.size for rank in ranks):
            raise UsageError(f"got ranks {list(ranks)} of the world, which has ranks 0 to {world.size - 1}")
        if world.rank not in ranks:
            return None
        limit = self.timeout if timeout is None else timedelta_of(timeout)
        try:
            with (
                world.in_ranks("a part of " + repr(self.name)),
                world.group_names.next(ranks, label, limit.total_seconds()) as name,
            ):
                return Group(world, ranks, name, timeout=limit, algorithm=self.tuner.forced)
        except RankLostError as error:
            # If a rank of the subgroup is only late, this group continues, and the program may try again. This group
            # fails if a rank's process has ended, or if all ranks create their subgroups in one call (`label`).
            if label or (isinstance(error, EndedError) and set(error.ranks) & set(self.ranks)):
                self._subgroup_failed(error)
            raise RankLostError(str(error), error.ranks) from error.__cause__

    def _subgroup_failed(self, error: RankLostError) -> None:
        with self._lock:
            self._failure = self._failure or f"a subgroup could not be created: {error}"
            self._connections.abort(error, self._sequence)


def _world_ranks(other: Group | Iterable[int]) -> tuple[int, ...]:
    return other.ranks if isinstance(other, Group) else tuple(other)
