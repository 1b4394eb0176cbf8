"""Count the references that workers hold to the objects of this process, their owner. Pure.

Before a worker sends an RRef to another worker, the owner counts the receiver as a holder
(:meth:`OwnedObjects.share`). So the count includes references in flight. A holder may release its references together
or in parts. If a holder dies, the owner releases all its references.
"""

from __future__ import annotations

from typing import NamedTuple

from paceline.errors import ProtocolError


class ReferenceId(NamedTuple):
    """The identity of an object: the ranks of its owner and its creator, and a number that the creator uses once."""

    owner: int
    creator: int
    number: int


class OwnedObjects:
    """The objects of this process, with a count of references for each holder."""

    def __init__(self) -> None:
        self._counts: dict[ReferenceId, dict[int, int]] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, reference: object) -> bool:
        return reference in self._counts

    def holders(self, reference: ReferenceId) -> dict[int, int]:
        return dict(self._counts.get(reference, {}))

    def create(self, reference: ReferenceId, holder: int) -> None:
        if reference in self._counts:
            raise ProtocolError(
                f"worker {holder} created object {reference.number} of worker {reference.creator} twice"
            )
        self._counts[reference] = {holder: 1}

    def share(self, reference: ReferenceId, holder: int) -> bool:
        counts = self._counts.get(reference)
        if counts is None:
            return False
        counts[holder] = counts.get(holder, 0) + 1
        return True

    def release(self, reference: ReferenceId, holder: int, times: int) -> bool:
        """Subtract `times` from a holder's count. Return whether the object now has no holder.

        Raises ProtocolError if the holder has fewer references.
        """
        counts = self._counts.get(reference, {})
        held = counts.get(holder, 0)
        if not 1 <= times <= held:
            raise ProtocolError(
                f"worker {holder} released object {reference.number} of worker {reference.creator} {times} times, "
                f"but holds {held} references to it"
            )
        if times < held:
            counts[holder] = held - times
            return False
        del counts[holder]
        return self._free_if_unheld(reference)

    def remove_holder(self, holder: int) -> list[ReferenceId]:
        held = [reference for reference, counts in self._counts.items() if counts.pop(holder, 0)]
        return [reference for reference in held if self._free_if_unheld(reference)]

    def _free_if_unheld(self, reference: ReferenceId) -> bool:
        if self._counts[reference]:
            return False
        del self._counts[reference]
        return True
