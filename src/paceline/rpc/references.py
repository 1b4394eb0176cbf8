"""References to objects of other processes (RRefs), and the table of them that each process has.

An object lives as long as somebody holds it: the owner counts (`counting`). All RRefs of one process to one object
share a :class:`Holding`; when the last of them goes, the owner is told. A holder that dies is noticed by the end of its
connection.
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
    """That this process holds an object, and how many times its owner has counted that."""

    def __init__(self, reference: ReferenceId, table: ObjectTable) -> None:
        self.reference = reference
        self.times = 0
        self.made: Future[Any] | None = None
        """The answer to the call that made it, where this process has made it elsewhere."""
        self._dropped = table.dropped

    def __del__(self) -> None:
        # From wherever the garbage collector runs: only an append that takes no lock.
        if self.times:
            self._dropped.put((self.reference, self.times))


class ObjectTable:
    """What this process owns and what it holds of others. For several threads at once."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.dropped: queue.SimpleQueue[tuple[ReferenceId, int] | None] = queue.SimpleQueue()
        """What is held no more, to be given back; ``None`` at the end."""
        self._lock = threading.RLock()
        self._owned = OwnedObjects()
        self._values: dict[ReferenceId, Future[Any]] = {}
        self._held: weakref.WeakValueDictionary[ReferenceId, Holding] = weakref.WeakValueDictionary()
        self._numbers = itertools.count(1)

    @property
    def num_owned(self) -> int:
        """How many objects others or this process itself hold here."""
        return len(self._owned)

    def holders(self, reference: ReferenceId) -> set[int]:
        """Return which workers hold an object of this process."""
        with self._lock:
            return set(self._owned.holders(reference))

    def new_id(self, owner: int) -> ReferenceId:
        """Return the name of an object that is to be made."""
        return ReferenceId(owner, self.rank, next(self._numbers))

    def own(self, reference: ReferenceId, holder: int, value: Future[Any]) -> None:
        """Keep an object, or what is to become one, for its first holder."""
        with self._lock:
            self._owned.create(reference, holder)
            self._values[reference] = value

    def hold(self, reference: ReferenceId) -> Holding:
        """Return the holding of an object for which the owner has counted this process once more."""
        with self._lock:
            holding = self._held.get(reference)
            if holding is None:
                holding = self._held[reference] = Holding(reference, self)
            holding.times += 1
            return holding

    def receive(self, parts: Any) -> Holding:
        """Return the holding for a reference that came in a message. Raises ProtocolError or UsageError (gone)."""
        if not (isinstance(parts, list) and len(parts) == 3 and all(type(part) is int for part in parts)):
            raise ProtocolError("got a reference that cannot be read")
        reference = ReferenceId(*parts)
        if reference.owner == self.rank:
            self.share([reference], self.rank)
        return self.hold(reference)

    def share(self, references: Sequence[ReferenceId], holder: int) -> None:
        """Count a worker as a holder of these objects of this process. Raises UsageError if one is gone."""
        with self._lock:
            for reference in references:
                if not self._owned.share(reference, holder):
                    raise gone()

    def value(self, reference: ReferenceId) -> Future[Any]:
        """Return the value of an object of this process. Raises UsageError if it is gone."""
        with self._lock:
            value = self._values.get(reference)
        if value is None:
            raise gone()
        return value

    def release(self, reference: ReferenceId, holder: int, times: int) -> None:
        """Count a holder less; the object may go."""
        with self._lock:
            if not self._owned.release(reference, holder, times):
                return
            value = self._values.pop(reference, None)
        del value  # outside the lock: what it takes with it may call us

    def lose(self, holder: int) -> None:
        """Forget a holder that has died."""
        with self._lock:
            values = [self._values.pop(reference, None) for reference in self._owned.lose(holder)]
        del values


def gone() -> UsageError:
    """Return the error for an object that its owner does not have any more."""
    return UsageError(
        "the object of this RRef is gone: nobody held it any more, or its owner took this process for dead when their "
        "connection broke; make it again"
    )
