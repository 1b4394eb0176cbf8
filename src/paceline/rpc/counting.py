"""Who holds which object of this process: the owner's reference counts. Pure: no sockets, threads or clocks.

Whoever passes an RRef on has its owner count the new holder first (:meth:`OwnedObjects.share`), and only then sends
it: a count is never behind what is on the way. A holder gives back what it was given, all at once or in parts; one that
has died gives back everything.
"""

from __future__ import annotations

from typing import NamedTuple

from paceline.errors import ProtocolError


class ReferenceId(NamedTuple):
    """Which object: numbers of workers, and a number that its creator has given out once."""

    owner: int
    creator: int
    number: int


class OwnedObjects:
    """How often each holder holds each object that this process owns."""

    def __init__(self) -> None:
        self._counts: dict[ReferenceId, dict[int, int]] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, reference: object) -> bool:
        return reference in self._counts

    def holders(self, reference: ReferenceId) -> dict[int, int]:
        """Return how often each holder holds it; nobody, if it is gone."""
        return dict(self._counts.get(reference, {}))

    def create(self, reference: ReferenceId, holder: int) -> None:
        """Begin to count, with this holder once. Raises ProtocolError if the object is there already."""
        if reference in self._counts:
            raise ProtocolError(f"worker {holder} made object {reference.number} of worker {reference.creator} twice")
        self._counts[reference] = {holder: 1}

    def share(self, reference: ReferenceId, holder: int) -> bool:
        """Count a holder once more; return whether the object is still there."""
        counts = self._counts.get(reference)
        if counts is None:
            return False
        counts[holder] = counts.get(holder, 0) + 1
        return True

    def release(self, reference: ReferenceId, holder: int, times: int) -> bool:
        """Count a holder so many times less; return whether nobody holds the object any more, which is then gone.

        Raises ProtocolError if it holds it fewer times.
        """
        counts = self._counts.get(reference, {})
        held = counts.get(holder, 0)
        if not 1 <= times <= held:
            raise ProtocolError(f"worker {holder} gave an object back {times} times that it holds {held} times")
        if times < held:
            counts[holder] = held - times
            return False
        del counts[holder]
        return self._gone(reference)

    def lose(self, holder: int) -> list[ReferenceId]:
        """Forget a holder that has died; return the objects that nobody holds any more."""
        held = [reference for reference, counts in self._counts.items() if counts.pop(holder, 0)]
        return [reference for reference in held if self._gone(reference)]

    def _gone(self, reference: ReferenceId) -> bool:
        if self._counts[reference]:
            return False
        del self._counts[reference]
        return True
