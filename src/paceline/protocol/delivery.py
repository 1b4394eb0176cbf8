"""Which push is new: the filter that makes delivery exactly once, however often a push is sent.

A server holds one :class:`Delivery` and asks it before it applies a push. The sender numbers its pushes; each
bucket remembers, per incarnation of a sender, the number of the last push applied. The filter of a bucket
travels with the bucket's data, so a push that is sent again after a move is still known. Sets of buckets are
masks, see :mod:`paceline.protocol.buckets`.

Source: OSDI'14 "Scaling Distributed Machine Learning with the Parameter Server", sections 4.1 (vector clocks,
one per key range) and 4.3 (consistent migration).
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.errors import StaleEpochError, UsageError
from paceline.protocol.buckets import ALL, buckets_in


class Delivery:
    """The filter of the buckets that one server holds.

    What it relies on: sequence numbers are at least 0; those of one incarnation reach *each bucket* in rising
    order, apart from repeats (a client has the acknowledgement of a bucket before it sends that bucket a
    later push, or sends them on one ordered connection); an incarnation is never reused. Gaps are legal.

    Incarnations that are gone are kept, some 200 bytes for each: what the servers behind have of their pushes may still
    be on its way along a chain.
    """

    def __init__(self, buckets: int = ALL) -> None:
        self._buckets = buckets
        # Incarnation → its runs (last sequence, the buckets that have seen it), the highest sequence first. Runs
        # are disjoint, none is empty, and no list is; a bucket in no run has seen nothing. The sender pushes to
        # all buckets of a server, or of a chain, in turn: there are as many runs as there are such sets.
        self._runs: dict[int, list[tuple[int, int]]] = {}

    @property
    def buckets(self) -> int:
        """The buckets that this server holds."""
        return self._buckets

    def admit(self, incarnation: int, sequence: int, buckets: int | None = None) -> int:
        """The buckets, of those given, for which a push is new; it is remembered as applied. 0: a duplicate.

        ``buckets=None`` means all buckets of this server. The push counts as delivered to all buckets given,
        those included in which it has no key. O(1) if it is to all of them and newer than what any has seen.

        Raises:
            StaleEpochError: a bucket given is not held here; nothing is remembered.
        """
        held = self._buckets
        if buckets is None or buckets == held:
            runs = self._runs.get(incarnation)
            if held and (runs is None or runs[0][0] < sequence):
                self._runs[incarnation] = [(sequence, held)]
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
        for last, seen in self._runs.get(incarnation, ()):
            if last < sequence:
                break
            buckets &= ~seen
        return buckets

    def _remember(self, incarnation: int, sequence: int, new: int) -> None:
        """Raise the last push of buckets, all of which have seen less."""
        runs = [(last, left) for last, seen in self._runs.get(incarnation, ()) if (left := seen & ~new)]
        at = 0
        while at < len(runs) and runs[at][0] > sequence:
            at += 1
        if at < len(runs) and runs[at][0] == sequence:
            runs[at] = sequence, runs[at][1] | new
        else:
            runs.insert(at, (sequence, new))
        self._runs[incarnation] = runs

    def last(self, incarnation: int, bucket: int) -> int | None:
        """The number of the last push of this incarnation applied to the bucket; None if there was none."""
        for last, seen in self._runs.get(incarnation, ()):
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
            for incarnation in sorted(self._runs)
            for last, seen in self._runs[incarnation]
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
        for incarnation, runs in list(self._runs.items()):
            kept = [(last, left) for last, seen in runs if (left := seen & ~buckets)]
            if kept:
                self._runs[incarnation] = kept
            else:
                del self._runs[incarnation]

    def _check_held(self, buckets: int) -> None:
        alien = buckets & ~self._buckets
        if alien:
            raise UsageError(f"Bucket {next(buckets_in(alien))} is not held here; it cannot be exported or released.")

    def validate(self) -> None:
        """Assert the invariants."""
        assert self._buckets >= 0
        for runs in self._runs.values():
            assert runs, "an empty list would break the fast path"
            lasts = [last for last, _ in runs]
            assert lasts == sorted(set(lasts), reverse=True), "runs are out of order or not merged"
            seen_before = 0
            for _, seen in runs:
                assert seen > 0, "an empty run"
                assert not seen & seen_before, "a bucket in two runs"
                seen_before |= seen
            assert not seen_before & ~self._buckets, "a run of buckets that are not held"
