"""The objects that a process owns, and the references (RRefs) that it holds to objects of any process.

An owner keeps an object as long as the object has holders, which are processes with a reference to it. All RRefs of a
process to one object share a :class:`Holding`. When the last RRef of the process is deleted, the process notifies the
owner. The owner detects the death of a holder by its closed connection.
"""

from __future__ import annotations

import itertools
import queue
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from paceline.errors import ProtocolError, UsageError
from paceline.rpc.counting import OwnedObjects, ReferenceId
from paceline.rpc.futures import Future


class Holding:
    """This process's reference to an object. All RRefs of this process to the object share it.

    `times` is the number of references that the owner counts for this process.
    """

    def __init__(self, reference: ReferenceId, table: ObjectTable) -> None:
        self.reference = reference
        self.times = 0
        self.creation: Future[Any] | None = None
        """The reply to the call that created the object; None if another process created it."""
        self._dropped = table.dropped

    def __del__(self) -> None:
        # The garbage collector may call this method at any time, so the method must not acquire a lock.
        if self.times:
            self._dropped.put((self.reference, self.times))


class ObjectTable:
    """The objects that this process owns, and the references that it holds. Thread-safe."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.dropped: queue.SimpleQueue[tuple[ReferenceId, int] | None] = queue.SimpleQueue()
        """The queue of references that a background thread releases at their owners. ``None`` ends the thread."""
        self._lock = threading.RLock()
        self._owned = OwnedObjects()
        self._values: dict[ReferenceId, Future[Any]] = {}
        self._held: weakref.WeakValueDictionary[ReferenceId, Holding] = weakref.WeakValueDictionary()
        self._numbers = itertools.count(1)

    @property
    def num_owned(self) -> int:
        return len(self._owned)

    def holders(self, reference: ReferenceId) -> set[int]:
        with self._lock:
            return set(self._owned.holders(reference))

    def new_id(self, owner: int) -> ReferenceId:
        return ReferenceId(owner, self.rank, next(self._numbers))

    def own(self, reference: ReferenceId, holder: int, value: Future[Any]) -> None:
        with self._lock:
            self._owned.create(reference, holder)
            self._values[reference] = value

    def hold(self, reference: ReferenceId) -> Holding:
        """Return this process's reference to an object, and increase its count.

        The caller must call this method once for each reference that the owner counts for this process.
        """
        with self._lock:
            holding = self._held.get(reference)
            if holding is None:
                holding = self._held[reference] = Holding(reference, self)
            holding.times += 1
            return holding

    def receive(self, parts: Any) -> Holding:
        if not (isinstance(parts, list) and len(parts) == 3 and all(type(part) is int for part in parts)):
            raise ProtocolError("got a reference that cannot be read")
        reference = ReferenceId(*parts)
        if reference.owner == self.rank:
            self.share([reference], self.rank)
        return self.hold(reference)

    def share(self, references: Sequence[ReferenceId], holder: int) -> None:
        with self._lock:
            for reference in references:
                if not self._owned.share(reference, holder):
                    raise freed_error()

    def value(self, reference: ReferenceId) -> Future[Any]:
        with self._lock:
            value = self._values.get(reference)
        if value is None:
            raise freed_error()
        return value

    def release(self, reference: ReferenceId, holder: int, times: int) -> None:
        with self._lock:
            if not self._owned.release(reference, holder, times):
                return
            value = self._values.pop(reference, None)
        del value  # outside the lock, because a destructor of the object may call this table

    def remove_holder(self, holder: int) -> None:
        with self._lock:
            values = [self._values.pop(reference, None) for reference in self._owned.remove_holder(holder)]
        del values


def freed_error() -> UsageError:
    return UsageError(
        "the object of this RRef was freed: it had no holder left, or its owner declared this process dead when their "
        "connection broke; create it again"
    )
