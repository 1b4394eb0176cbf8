"""Which push is new: the filter that makes delivery exactly once, however often a push is sent.

A server holds one :class:`Delivery` and asks it before it applies a push. The sender numbers its pushes; each
bucket remembers, per incarnation of a sender, the number of the last push applied. The filter of a bucket
travels with the bucket's data, so a push that is sent again after a move is still known. Sets of buckets are
masks, see :mod:`paceline.protocol.buckets`.

Source: OSDI'14 "Scaling Distributed Machine Learning with the Parameter Server", sections 4.1 (vector clocks,
one per key range) and 4.3 (consistent migration).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from paceline.errors import StaleEpochError, UsageError
from paceline.protocol.buckets import ALL, buckets_in

_MANY: Final = 64
"""Whenever there are so many more sets, they are made disjoint."""
_NOTHING: Final[dict[int, int]] = {}


class Delivery:
    """The filter of the buckets that one server holds.

    What it relies on: sequence numbers are at least 0; those of one incarnation reach *each bucket* in rising
    order, apart from repeats (a client has the acknowledgement of a bucket before it sends that bucket a
    later push, or sends them on one ordered connection); an incarnation is never reused. Gaps are legal.

    Incarnations that are gone are kept, some 200 bytes for each set of buckets that they pushed to last: what the
    servers behind have of their pushes may still be on its way along a chain.
    """

    def __init__(self, buckets: int = ALL) -> None:
        self._buckets = buckets
        # Incarnation → sets of buckets, and the last push that they have seen, in rising order. Of a bucket that is in
        # several sets the last one counts; one in none has seen nothing. No set is empty, and there is one at least.
        # Sets are made disjoint when there are many: to do so with every push would take as long as there are sets.
        self._seen: dict[int, dict[int, int]] = {}

    @property
    def buckets(self) -> int:
        """The buckets that this server holds."""
        return self._buckets

    def admit(self, incarnation: int, sequence: int, buckets: int | None = None) -> int:
        """The buckets, of those given, for which a push is new; it is remembered as applied. 0: a duplicate.

        ``buckets=None`` means all buckets of this server. The push counts as delivered to all buckets given,
        those included in which it has no key. O(1), on the average, if it is newer than what any has seen.

        Raises:
            StaleEpochError: a bucket given is not held here; nothing is remembered.
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
        """The same answer as :meth:`admit`'s, and nothing is remembered.

        Raises:
            StaleEpochError: a bucket given is not held here.
        """
        if buckets is None:
            buckets = self._buckets
        alien = 0 if buckets == self._buckets else buckets & ~self._buckets
        if alien:
            raise StaleEpochError(
                f"Push {sequence} of incarnation {incarnation} names bucket {next(buckets_in(alien))}, which this "
                "server does not hold; nothing was applied. Fetch the current map and send the push again."
            )
        # Rule 1: a push is new to a bucket if its number exceeds the last one applied there.
        for seen, last in reversed(self._seen.get(incarnation, _NOTHING).items()):
            if last < sequence:
                break
            buckets &= ~seen
        return buckets

    def _newest(self, incarnation: int) -> int:
        """The number of the last push that any bucket has seen; -1 if there was none."""
        seen = self._seen.get(incarnation)
        return -1 if seen is None else next(reversed(seen.values()))

    def _remember(self, incarnation: int, sequence: int, new: int) -> None:
        """Raise the last push of buckets, all of which have seen less."""
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
        """Yield (last sequence, the buckets that have seen it), disjoint, the highest sequence first."""
        later = 0
        for seen, last in reversed(self._seen[incarnation].items()):
            if left := seen & ~later:
                yield last, left
                later |= seen

    def last(self, incarnation: int, bucket: int) -> int | None:
        """The number of the last push of this incarnation applied to the bucket; None if there was none."""
        for seen, last in reversed(self._seen.get(incarnation, _NOTHING).items()):
            if seen >> bucket & 1:
                return last
        return None

    def export(self, buckets: int) -> tuple[tuple[int, int, int], ...]:
        """The filter of some buckets, to travel with their data: (incarnation, last sequence, its buckets).

        The buckets stay until they are released.

        Raises:
            UsageError: a bucket is not held here.
        """
        self._check_held(buckets)
        return tuple(
            (incarnation, last, part)
            for incarnation in sorted(self._seen)
            for last, seen in self._runs(incarnation)
            if (part := seen & buckets)
        )

    def adopt(self, buckets: int, state: Iterable[tuple[int, int, int]]) -> None:
        """Take over buckets with the filter that their former server exported (empty for new buckets).

        What ``state`` says of other buckets is left aside; of two numbers for one bucket the higher holds.

        Raises:
            UsageError: a bucket is held here already; nothing has changed.
        """
        twice = buckets & self._buckets
        if twice:
            raise UsageError(
                f"Bucket {next(buckets_in(twice))} is held here already; adopting it again would lose its filter."
            )
        self._buckets |= buckets
        # Rule 2: a bucket's filter is what came with it, whatever this server's other buckets have seen.
        for incarnation, last, seen in state:
            self.admit(incarnation, last, seen & buckets)

    def release(self, buckets: int) -> None:
        """Drop buckets and what they have seen.

        Raises:
            UsageError: a bucket is not held here; nothing has changed.
        """
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
            raise UsageError(f"Bucket {next(buckets_in(alien))} is not held here; it cannot be exported or released.")

    def validate(self) -> None:
        """Assert the invariants."""
        assert self._buckets >= 0
        for seen in self._seen.values():
            assert seen, "an empty dictionary has no newest push"
            lasts = list(seen.values())
            assert lasts == sorted(lasts), "sets are out of order"
            for part in seen:
                assert part > 0, "an empty set"
                assert not part & ~self._buckets, "a set of buckets that are not held"
