"""The duplicate filter: each push is applied exactly once, even if it is sent several times.

The sender numbers its pushes; each bucket stores, per incarnation of a sender, the number of the last applied push. If
a bucket moves to another server, its filter moves too, so the new server recognizes repeated pushes.

Source: OSDI'14 "Scaling Distributed Machine Learning with the Parameter Server", sections 4.1 (vector clocks, one per
key range) and 4.3 (consistent migration). Comments refer to the rules of section "Delivery" in
docs/explanation/protocol.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from paceline.errors import StaleEpochError, UsageError
from paceline.protocol.buckets import ALL, buckets_in

_MANY: Final = 64
"""When the number of an incarnation's sets reaches a multiple of this number, the sets are made disjoint."""
_NOTHING: Final[dict[int, int]] = {}


class Delivery:
    """The duplicate filters of one server's buckets.

    Preconditions: sequence numbers are at least 0. The pushes of one incarnation reach each bucket in ascending order,
    apart from repeats: before a later push to a bucket, a client waits for the acknowledgement of the earlier push, or
    it sends both on one ordered connection. An incarnation is never reused. Numbers may be skipped.

    Incarnations of dead processes are retained, because their pushes may still be in flight along a chain. Each
    incarnation needs about 200 bytes for each set of buckets in its last pushes.
    """

    def __init__(self, buckets: int = ALL) -> None:
        self._buckets = buckets
        # Incarnation → set of buckets → its last push, in ascending order. If a bucket is in several sets, the last set
        # counts; a bucket in no set has had no push. No set and no inner dictionary is empty. The sets are rarely made
        # disjoint, because this takes time proportional to their number.
        self._seen: dict[int, dict[int, int]] = {}

    @property
    def buckets(self) -> int:
        return self._buckets

    def admit(self, incarnation: int, sequence: int, buckets: int | None = None) -> int:
        """Record a push as applied; return the given buckets for which the push is new (0 if it is a duplicate).

        ``buckets=None`` means all buckets of this server. The push counts as delivered to all given buckets, including
        buckets without any of its keys. If the push is newer than all earlier pushes, this takes O(1) on average.

        Raises StaleEpochError, and records nothing, for a bucket of another server.
        """
        held = self._buckets
        if buckets is None or buckets == held:
            seen = self._seen.get(incarnation)
            if held and (seen is None or next(reversed(seen.values())) < sequence):
                self._seen[incarnation] = {held: sequence}
                return held
            buckets = held
        new = self.missing(incarnation, sequence, buckets)
        if new:
            self._remember(incarnation, sequence, new)
        return new

    def missing(self, incarnation: int, sequence: int, buckets: int | None = None) -> int:
        """Return the result of :meth:`admit` without recording the push. Raises StaleEpochError like :meth:`admit`."""
        if buckets is None:
            buckets = self._buckets
        alien = 0 if buckets == self._buckets else buckets & ~self._buckets
        if alien:
            raise StaleEpochError(
                f"Push {sequence} of incarnation {incarnation} names bucket {next(buckets_in(alien))}, which this "
                "server does not hold; nothing was applied. Fetch the current view and send the push again."
            )
        # Rule 1: a push is new to a bucket if its number exceeds the number of the last push applied to the bucket.
        for seen, last in reversed(self._seen.get(incarnation, _NOTHING).items()):
            if last < sequence:
                break
            buckets &= ~seen
        return buckets

    def _newest(self, incarnation: int) -> int:
        seen = self._seen.get(incarnation)
        return -1 if seen is None else next(reversed(seen.values()))

    def _remember(self, incarnation: int, sequence: int, new: int) -> None:
        """Set the last push of the buckets `new`, whose earlier pushes have lower numbers."""
        if self._newest(incarnation) > sequence:
            runs = [(last, left) for last, part in self._runs(incarnation) if (left := part & ~new)]
            self._seen[incarnation] = {part: last for last, part in sorted([*runs, (sequence, new)])}
            return
        seen = self._seen.setdefault(incarnation, {})
        is_more = seen.pop(new, None) is None
        seen[new] = sequence
        if is_more and not len(seen) % _MANY:
            self._seen[incarnation] = {part: last for last, part in reversed(list(self._runs(incarnation)))}

    def _runs(self, incarnation: int) -> Iterator[tuple[int, int]]:
        """Yield (sequence, the buckets whose last push has this sequence), the highest sequence first."""
        later = 0
        for seen, last in reversed(self._seen[incarnation].items()):
            if left := seen & ~later:
                yield last, left
                later |= seen

    def export(self, buckets: int) -> tuple[tuple[int, int, int], ...]:
        """Return the filter of some buckets, to send with their data: (incarnation, last sequence, buckets).

        Raises UsageError for a bucket of another server.
        """
        self._check_held(buckets)
        return tuple(
            (incarnation, last, part)
            for incarnation in sorted(self._seen)
            for last, seen in self._runs(incarnation)
            if (part := seen & buckets)
        )

    def adopt(self, buckets: int, state: Iterable[tuple[int, int, int]]) -> None:
        """Add buckets to this server.

        ``state`` is the duplicate filter of the buckets that their former server exported; it is empty for new buckets.
        Other buckets in ``state`` are ignored; the higher of two numbers for one bucket is used.

        Raises UsageError if this server already has one of the buckets; nothing is changed.
        """
        twice = buckets & self._buckets
        if twice:
            raise UsageError(
                f"This server already holds bucket {next(buckets_in(twice))}; adopting it again would lose its filter."
            )
        self._buckets |= buckets
        # Rule 2: a bucket's filter moves with the bucket, and does not depend on this server's other buckets.
        for incarnation, last, seen in state:
            self.admit(incarnation, last, seen & buckets)

    def release(self, buckets: int) -> None:
        """Drop buckets and their filters. Raises UsageError for a bucket of another server; nothing is changed."""
        self._check_held(buckets)
        self._buckets &= ~buckets
        for incarnation in list(self._seen):
            kept = [(left, last) for last, seen in self._runs(incarnation) if (left := seen & ~buckets)]
            if kept:
                self._seen[incarnation] = dict(reversed(kept))
            else:
                del self._seen[incarnation]

    def _check_held(self, buckets: int) -> None:
        alien = buckets & ~self._buckets
        if alien:
            raise UsageError(f"Bucket {next(buckets_in(alien))} is not on this server: cannot export or release it.")

    def validate(self) -> None:
        assert self._buckets >= 0
        for seen in self._seen.values():
            assert seen, "an empty dictionary has no newest push"
            lasts = list(seen.values())
            assert lasts == sorted(lasts), "sets are out of order"
            for part in seen:
                assert part > 0, "an empty set"
                assert not part & ~self._buckets, "a set with buckets of other servers"
