"""Define groups: ranks that run collective operations together."""

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
from paceline.errors import CollectiveError, GroupClosedError, RankLostError, UsageError
from paceline.meeting.group_names import EndedError
from paceline.meeting.world import World

_ABORTED: Final = "it was aborted on this rank"
_FORKED: Final = "it belongs to the parent of this forked process; a forked process must create its own group"


class Group(Closing):
    """Ranks 0 to ``size - 1`` that make the same calls in the same order.

    Arrays are NumPy arrays or PyTorch CPU tensors of float16, bfloat16, float32, float64, any integer dtype or bool;
    results are of the same kind. Reductions: ``sum``, ``mean`` (floats), ``product``, ``min``, ``max``, and for
    integers and bool ``bitwise_and``, ``bitwise_or``, ``bitwise_xor``. On one host, half precision is reduced in
    float32. An all-reduce gives the same bits on every rank (if all hosts have the same kind of processor).

    Every call has a variant ``*_async`` that returns a :class:`CollectiveTicket`. All calls run in the order of their
    submission. A call waits at most :attr:`timeout`. If the calls of the ranks differ, all ranks raise MismatchError.
    If a rank dies, stops or is missing, the other ranks raise RankLostError, which names the rank. Later calls raise
    GroupClosedError.
    """

    def __init__(
        self, world: World, ranks: Sequence[int], name: str, *, timeout: timedelta, algorithm: str | None = None
    ) -> None:
        """Not for users: call :func:`init` or :meth:`subgroup`."""
        check_algorithm(algorithm)
        self._timeout_s = timeout.total_seconds()
        self.name = name
        self._world = world
        self._connections = Connections(world, ranks, name, self._timeout_s, self._message_failed)
        self.rank = self._connections.layout.rank
        """This process's rank in the group."""
        self.size = self._connections.layout.size
        self.ranks = self._connections.layout.ranks
        """World rank of every rank of the group."""
        self._tuner = Tuner(self._connections, self._timeout_s, algorithm)
        self._operations = Operations(self._connections, self._tuner, self._timeout_s)
        self._sequence = 0
        self._failure: str = ""
        self._unheard: CollectiveError | None = None
        """An error of a message, to be raised by the next call."""
        self._spreader: threading.Thread | None = None
        self._lock = threading.RLock()
        self._submitting = threading.Lock()
        self._num_pending = 0
        self._queue: SimpleQueue[tuple[Work, CollectiveTicket] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._owns_world = False
        world.enter(self)

    @property
    def timeout(self) -> timedelta:
        """Longest time that a call waits for the other ranks."""
        return timedelta(seconds=self._timeout_s)

    @property
    def num_pending(self) -> int:
        """Number of unfinished asynchronous calls, without sends and receives."""
        return self._num_pending

    # collectives

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self._now(self._operations.barrier())

    def barrier_async(self) -> CollectiveTicket:
        """See :meth:`barrier`."""
        return self._later(self._operations.barrier())

    def all_reduce(self, array: Any, op: str = "sum", *, out: Any = None) -> Any:
        """Return the reduction of `array` over all ranks; `out` may be `array` itself (in place)."""
        return self._now(self._operations.all_reduce(array, op, out))

    def all_reduce_async(self, array: Any, op: str = "sum", *, out: Any = None) -> CollectiveTicket:
        """See :meth:`all_reduce`."""
        return self._later(self._operations.all_reduce(array, op, out))

    def reduce(self, array: Any, op: str = "sum", *, root: int = 0, out: Any = None) -> Any:
        """Return the reduction over all ranks on `root`, None on other ranks."""
        return self._now(self._operations.reduce(array, op, root, out))

    def reduce_async(self, array: Any, op: str = "sum", *, root: int = 0, out: Any = None) -> CollectiveTicket:
        """See :meth:`reduce`."""
        return self._later(self._operations.reduce(array, op, root, out))

    def reduce_scatter(
        self, array: Any, op: str = "sum", *, sizes: Sequence[int] | None = None, out: Any = None
    ) -> Any:
        """Return this rank's part of the reduction; `array` is divided along its first axis.

        `sizes`: rows of every rank's part, equal on all ranks. Default: equal parts; the number of rows must then be a
        multiple of the group's size.
        """
        return self._now(self._operations.reduce_scatter(array, op, sizes, out))

    def reduce_scatter_async(
        self, array: Any, op: str = "sum", *, sizes: Sequence[int] | None = None, out: Any = None
    ) -> CollectiveTicket:
        """See :meth:`reduce_scatter`."""
        return self._later(self._operations.reduce_scatter(array, op, sizes, out))

    def broadcast(self, array: Any, *, root: int = 0) -> Any:
        """Copy the root's `array` into `array` on all ranks and return it; shapes and dtypes must be equal."""
        return self._now(self._operations.broadcast(array, root))

    def broadcast_async(self, array: Any, *, root: int = 0) -> CollectiveTicket:
        """See :meth:`broadcast`."""
        return self._later(self._operations.broadcast(array, root))

    def all_gather(self, array: Any, *, sizes: Sequence[int] | None = None, out: Any = None) -> Any:
        """Return the arrays of all ranks, concatenated along the first axis (0-d arrays as a vector).

        `sizes`: rows of every rank's array if they differ, equal on all ranks; :meth:`gather_sizes` collects them.
        """
        return self._now(self._operations.all_gather(array, sizes, out))

    def all_gather_async(self, array: Any, *, sizes: Sequence[int] | None = None, out: Any = None) -> CollectiveTicket:
        """See :meth:`all_gather`."""
        return self._later(self._operations.all_gather(array, sizes, out))

    def gather_sizes(self, array: Any) -> list[int]:
        """Return the number of rows of every rank's array."""
        shape = as_array(array).shape
        rows = np.array([shape[0] if len(shape) else 1], np.int64)
        return [int(number) for number in self.all_gather(rows)]

    def gather(self, array: Any, *, root: int = 0, sizes: Sequence[int] | None = None, out: Any = None) -> Any:
        """Like :meth:`all_gather`, on `root`; other ranks get None."""
        return self._now(self._operations.gather(array, root, sizes, out))

    def gather_async(
        self, array: Any, *, root: int = 0, sizes: Sequence[int] | None = None, out: Any = None
    ) -> CollectiveTicket:
        """See :meth:`gather`."""
        return self._later(self._operations.gather(array, root, sizes, out))

    def scatter(self, array: Any, out: Any, *, root: int = 0, sizes: Sequence[int] | None = None) -> Any:
        """Fill `out` with this rank's part of the root's `array`, divided along its first axis.

        On other ranks `array` is None.
        """
        return self._now(self._operations.scatter(array, out, root, sizes))

    def scatter_async(
        self, array: Any, out: Any, *, root: int = 0, sizes: Sequence[int] | None = None
    ) -> CollectiveTicket:
        """See :meth:`scatter`."""
        return self._later(self._operations.scatter(array, out, root, sizes))

    def all_to_all(
        self,
        array: Any,
        *,
        send_sizes: Sequence[int] | None = None,
        receive_sizes: Sequence[int] | None = None,
        out: Any = None,
    ) -> Any:
        """Send part d of `array` (along its first axis) to rank d; return the received parts in rank order.

        Without sizes all parts are equal. `send_sizes` are the rows for every rank. `receive_sizes`, the rows from
        every rank, are optional, because the ranks exchange them.
        """
        return self._now(self._operations.all_to_all(array, send_sizes, receive_sizes, out))

    def all_to_all_async(
        self,
        array: Any,
        *,
        send_sizes: Sequence[int] | None = None,
        receive_sizes: Sequence[int] | None = None,
        out: Any = None,
    ) -> CollectiveTicket:
        """See :meth:`all_to_all`."""
        return self._later(self._operations.all_to_all(array, send_sizes, receive_sizes, out))

    # objects

    def broadcast_object(self, value: Any = None, *, root: int = 0) -> Any:
        """Return the root's value: numbers, strings, bytes, lists and dicts. Nothing is pickled."""
        return _objects.broadcast(self, value, root)

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Return the values of all ranks; for their types see :meth:`broadcast_object`."""
        return _objects.all_gather(self, value)

    def gather_objects(self, value: Any, *, root: int = 0) -> list[Any] | None:
        """Return the values of all ranks on `root`, None on other ranks."""
        return _objects.gather(self, value, root)

    # send and receive

    def send(self, array: Any, to: int, *, tag: int = 0) -> None:
        """Send an array to a rank that calls :meth:`recv` with this tag and an array of the same dtype and size.

        Tags are numbers below 2^62; higher ones are reserved.
        """
        self.send_async(array, to, tag=tag).wait()

    def send_async(self, array: Any, to: int, *, tag: int = 0) -> CollectiveTicket:
        """See :meth:`send`."""
        self._check_alive()
        memory = ArrayMemory(array)
        what = f"{memory.dtype}[{memory.count}]"
        pending = self._connections.point_to_point().send(memory.view(), to, tag, what)
        return MessageTicket(pending, self.timeout, memory)

    def recv(self, out: Any, source: int | None = None, *, tag: int = 0) -> int:
        """Fill `out` with a message of this tag, from `source` or any rank; return the sender's rank."""
        return int(self.recv_async(out, source, tag=tag).result())

    def recv_async(self, out: Any, source: int | None = None, *, tag: int = 0) -> CollectiveTicket:
        """See :meth:`recv`."""
        self._check_alive()
        memory = ArrayMemory(out, target=True)
        what = f"{memory.dtype}[{memory.count}]"
        pending = self._connections.point_to_point().receive(memory.view(), source, tag, what)
        return MessageTicket(pending, self.timeout, memory)

    # groups

    def subgroup(self, ranks: Iterable[int], *, timeout: timedelta | None = None) -> Group | None:
        """Return the group of these ranks of this group, in this order; None on other ranks.

        All ranks of the new group must call it. Other ranks may call it, without cost.
        """
        chosen = tuple(ranks)
        if len(set(chosen)) != len(chosen) or not all(0 <= rank < self.size for rank in chosen) or not chosen:
            raise UsageError(f"got ranks {list(chosen)}, expected different ones from 0 to {self.size - 1}")
        return self._make(tuple(self.ranks[rank] for rank in chosen), timeout)

    def split(self, color: int | None, key: int = 0) -> Group | None:
        """Return the group of the ranks with the same `color`, ordered by `key`, then rank; None without a color.

        A collective call: every rank of this group must make it.
        """
        try:
            own = np.array([[color is not None, color or 0, key]], np.int64)
        except (OverflowError, TypeError, ValueError) as error:
            raise UsageError(f"got color {color!r} and key {key!r}, expected integers of 64 bits ({error})") from None
        told = self.all_gather(own)
        if color is None:
            return None
        same = [rank for rank in range(self.size) if told[rank, 0] and told[rank, 1] == color]
        same.sort(key=lambda rank: (int(told[rank, 2]), rank))
        return self._make(tuple(self.ranks[rank] for rank in same), label="split")

    def union(self, other: Group | Iterable[int]) -> Group | None:
        """Return the group of the ranks of both, in the order of the world.

        `other` is a group or a list of world ranks. All ranks of the new group must call it, on either group.
        """
        return self._make(tuple(sorted({*self.ranks, *_world_ranks(other)})))

    def intersection(self, other: Group | Iterable[int]) -> Group | None:
        """Return the group of the ranks in both, in the order of the world; None on other ranks."""
        return self._make(tuple(sorted({*self.ranks} & {*_world_ranks(other)})))

    def difference(self, other: Group | Iterable[int]) -> Group | None:
        """Return the group of this group's ranks that are not in `other`; None on other ranks."""
        return self._make(tuple(sorted({*self.ranks} - {*_world_ranks(other)})))

    def explain(self, nbytes: int, operation: str = "all_reduce") -> str:
        """Return a table of the algorithms for an operation: predicted and measured times, and the choice."""
        return self._tuner.explain(operation, nbytes)

    def candidates(self, nbytes: int, operation: str = "all_reduce") -> list[Candidate]:
        """Return the rows of :meth:`explain`: (name, predicted seconds, measured seconds); None if unknown."""
        return self._tuner.candidates(operation, nbytes)

    def close(self) -> None:
        """Leave the group; the other ranks' next call raises RankLostError. Idempotent.

        Closing the group of all ranks closes its subgroups. In a forked child it has no effect.
        """
        if self._failure == _FORKED:
            return
        with self._submitting:  # no call can be queued after the end marker
            self._failure = self._failure or "it was closed"
            thread, self._thread = self._thread, None
            if thread is not None:
                self._queue.put(None)
            spreader = self._spreader
        self._connections.close()
        if spreader is not None:
            spreader.join()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._world.leave(self)
        if self._owns_world:
            self._world.close()

    def abort(self) -> None:
        """End all work in progress: this rank's calls, tickets and messages raise GroupClosedError, also later ones.

        The other ranks raise RankLostError with this rank, in the first call that needs it. Returns immediately, may be
        called by any thread, and is idempotent. :meth:`close` must still be called.
        """
        with self._submitting:
            self._failure = self._failure or _ABORTED
        if self._failure != _FORKED:
            self._connections.cut()

    def disown(self) -> None:
        """Leave the group to this forked process's parent."""
        self._failure = _FORKED

    def __repr__(self) -> str:
        return f"Group({self.name!r}, rank {self.rank} of {self.size})"

    # execution

    def _check_alive(self) -> None:
        unheard, self._unheard = self._unheard, None
        if unheard is not None:
            raise unheard
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
                self._unheard = None
                if self._failure == _ABORTED and isinstance(error, CollectiveError):
                    raise GroupClosedError(f"group {self.name!r} ended this call: {_ABORTED}") from error
                self._failure = self._failure or f"a call failed: {error}"
                self._connections.abort(error, self._sequence)
                raise

    def _message_failed(self, error: CollectiveError, is_heard: bool) -> None:
        """Refuse further work and end the current call; see :class:`PointToPoint`."""
        if not self._failure:
            self._unheard = None if is_heard else error
            self._failure = f"a message failed: {error}"
            self._spreader = threading.Thread(target=self._spread, args=(error,), name="paceline-spreader", daemon=True)
            self._spreader.start()

    def _spread(self, error: CollectiveError) -> None:
        self._connections.interrupt(error)
        with self._lock:  # after the end of the interrupted call
            self._connections.abort(error, self._sequence)

    def _now(self, work: Work) -> Any:
        if self._thread is not None:
            if self._thread is threading.current_thread():
                raise no_waiting_in_callbacks()
            if self._num_pending:
                return self._later(work).result()
        return self._run(work)

    def _later(self, work: Work) -> CollectiveTicket:
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
        """Run asynchronous calls, in a thread."""
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

    # subgroups

    def _make(self, world_ranks: tuple[int, ...], timeout: timedelta | None = None, label: str = "") -> Group | None:
        """Return the group of these world ranks; None if this rank is not included."""
        world = self._world
        if world.is_closed:
            raise GroupClosedError(f"no group can be made of {self.name!r}: all groups of this program were closed")
        if not all(0 <= rank < world.size for rank in world_ranks):
            raise UsageError(f"got ranks {list(world_ranks)} of the world, which has 0 to {world.size - 1}")
        if world.rank not in world_ranks:
            return None
        timeout = timeout or self.timeout
        try:
            with (
                world.in_ranks("a part of " + repr(self.name)),
                world.group_names.next(world_ranks, label, timeout.total_seconds()) as name,
            ):
                return Group(world, world_ranks, name, timeout=timeout, algorithm=self._tuner.forced)
        except RankLostError as error:
            # A late rank may join the next attempt, except where all ranks have agreed on the group in a call.
            if label or (isinstance(error, EndedError) and set(error.ranks) & set(self.ranks)):
                self._part_failed(error)
            raise RankLostError(str(error), error.ranks) from error.__cause__

    def _part_failed(self, error: RankLostError) -> None:
        """Refuse further work and notify the other ranks: without the lost ranks this group is unusable."""
        with self._lock:
            self._failure = self._failure or f"a part of it could not be made: {error}"
            self._connections.abort(error, self._sequence)


def _world_ranks(other: Group | Iterable[int]) -> tuple[int, ...]:
    return other.ranks if isinstance(other, Group) else tuple(other)
