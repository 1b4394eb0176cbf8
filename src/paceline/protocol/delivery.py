"""Which push is new: the filter that makes delivery exactly once, however often a push is sent.

A server holds one :class:`Delivery` and asks it before it applies a push. The sender numbers its pushes; each
bucket remembers, per worker incarnation, the number of the last push applied. The filter of a bucket moves
with the bucket's data, so a push that is sent again after a move is still known.

Source: OSDI'14 "Scaling Distributed Machine Learning with the Parameter Server", sections 4.1 (vector clocks,
one per key range) and 4.3 (consistent migration).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from paceline.errors import StaleEpochError, UsageError


@dataclass(frozen=True, slots=True)
class Fresh:
    """Apply the whole push, then acknowledge it."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Apply nothing, acknowledge the push: it was applied before."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Apply the part of the push that falls into ``buckets`` (ascending), acknowledge it whole."""

    buckets: tuple[int, ...]


Verdict: TypeAlias = Fresh | Duplicate | Partial

_FRESH: Final = Fresh()
_DUPLICATE: Final = Duplicate()
_NEVER: Final = -1  # below every sequence number


class Delivery:
    """The filter of the buckets that one server holds.

    What it relies on: sequence numbers are at least 0; those of one incarnation reach *each bucket* in rising
    order, apart from repeats (a client has the acknowledgement of a bucket before it sends that bucket a
    later push, or sends them on one ordered connection); an incarnation is never reused. Gaps are legal.
    """

    def __init__(self, buckets: Iterable[int]) -> None:
        self._buckets: set[int] = set(buckets)
        # The last push applied to bucket b from incarnation i is _overrides[i].get(b, _floors[i]).
        self._floors: dict[int, int] = {}
        self._overrides: dict[int, dict[int, int]] = {}  # no empty inner dictionary: a miss is the fast path
        self._forgotten: set[int] = set()

    @property
    def buckets(self) -> frozenset[int]:
        """The buckets that this server holds."""
        return frozenset(self._buckets)

    def admit(self, incarnation: int, sequence: int, buckets: Collection[int] | None = None) -> Verdict:
        """Say what of a push is new, and remember it as applied.

        ``buckets=None`` means all buckets of this server, as the push's sender knows them by the same epoch;
        it takes O(1) unless buckets were moved here or pushed to singly. The push counts as delivered to all
        of them, those included in which it has no key.

        Raises:
            StaleEpochError: a bucket named is not held here; nothing is remembered.
        """
        if buckets is not None:
            return self._admit_some(incarnation, sequence, buckets)
        if incarnation in self._overrides or incarnation in self._forgotten:
            return self._admit_some(incarnation, sequence, self._buckets)
        if sequence <= self._floors.get(incarnation, _NEVER):
            return _DUPLICATE
        self._floors[incarnation] = sequence
        return _FRESH

    def _admit_some(self, incarnation: int, sequence: int, buckets: Collection[int]) -> Verdict:
        if not self._buckets.issuperset(buckets):
            alien = min(set(buckets) - self._buckets)
            raise StaleEpochError(
                f"Push {sequence} of incarnation {incarnation} names bucket {alien}, which this server "
                "does not hold; nothing was applied. Fetch the current map and send the push again."
            )
        # Rule 1: what a forgotten incarnation still has on the wire is not applied any more.
        if incarnation in self._forgotten:
            return _DUPLICATE
        # Rule 2: a push is new to a bucket if its number exceeds the last one applied there.
        floor = self._floors.setdefault(incarnation, _NEVER)
        overrides = self._overrides.get(incarnation, {})
        fresh = sorted({b for b in buckets if overrides.get(b, floor) < sequence})
        if buckets is self._buckets and sequence > floor:
            # All buckets reach at least this number: one floor says so, for those that are not ahead of it.
            self._floors[incarnation] = sequence
            overrides = {b: last for b, last in overrides.items() if last > sequence}
        else:
            overrides = {**overrides, **dict.fromkeys(fresh, sequence)}
        self._set_overrides(incarnation, overrides)
        if len(fresh) == len(buckets) and fresh:
            return _FRESH
        return Partial(tuple(fresh)) if fresh else _DUPLICATE

    def last(self, incarnation: int, bucket: int) -> int | None:
        """The number of the last push of this incarnation applied to the bucket; None if there was none."""
        last = self._overrides.get(incarnation, {}).get(bucket, self._floors.get(incarnation, _NEVER))
        return None if last == _NEVER else last

    def export(self, bucket: int) -> dict[int, int]:
        """The bucket's filter, incarnation → last number, to travel with its data.

        The bucket stays until it is released; admit no push to it between export and release.

        Raises:
            UsageError: the bucket is not held here.
        """
        self._check_held(bucket)
        lasts = ((incarnation, self.last(incarnation, bucket)) for incarnation in self._floors)
        return {incarnation: last for incarnation, last in lasts if last is not None}

    def adopt(self, bucket: int, state: Mapping[int, int]) -> None:
        """Take over a bucket with the filter that its former server exported (empty for a new bucket).

        Raises:
            UsageError: the bucket is held here already.
        """
        if bucket in self._buckets:
            raise UsageError(f"Bucket {bucket} is held here already; adopting it again would lose its filter.")
        self._buckets.add(bucket)
        # Rule 3: a bucket's filter is what came with it, whatever this server's other buckets have seen.
        for incarnation in (self._floors.keys() | state.keys()) - self._forgotten:
            floor = self._floors.setdefault(incarnation, _NEVER)
            last = state.get(incarnation, _NEVER)
            if last != floor:
                self._overrides.setdefault(incarnation, {})[bucket] = last

    def release(self, bucket: int) -> None:
        """Drop a bucket, after its new server has adopted it.

        Raises:
            UsageError: the bucket is not held here.
        """
        self._check_held(bucket)
        self._buckets.remove(bucket)
        for incarnation in list(self._overrides):
            overrides = {b: last for b, last in self._overrides[incarnation].items() if b != bucket}
            self._set_overrides(incarnation, overrides)

    def forget(self, incarnation: int) -> None:
        """Free what is kept for an incarnation that is gone for good.

        One integer stays, so that a late copy of its pushes is still not applied here. It does not travel
        with a bucket: forget an incarnation on all servers, or not before its connections are gone.
        """
        self._floors.pop(incarnation, None)
        self._overrides.pop(incarnation, None)
        self._forgotten.add(incarnation)

    def _set_overrides(self, incarnation: int, overrides: dict[int, int]) -> None:
        floor = self._floors[incarnation]
        overrides = {b: last for b, last in overrides.items() if last != floor}
        if len(overrides) == len(self._buckets) and len(set(overrides.values())) == 1:
            self._floors[incarnation] = overrides.popitem()[1]
            overrides = {}
        if overrides:
            self._overrides[incarnation] = overrides
        else:
            self._overrides.pop(incarnation, None)

    def _check_held(self, bucket: int) -> None:
        if bucket not in self._buckets:
            raise UsageError(f"Bucket {bucket} is not held here; it cannot be exported or released.")

    def validate(self) -> None:
        """Assert the invariants."""
        assert self._overrides.keys() <= self._floors.keys()
        assert not self._forgotten & self._floors.keys()
        for incarnation, overrides in self._overrides.items():
            assert overrides, "an empty dictionary would miss the fast path"
            assert overrides.keys() <= self._buckets
            assert self._floors[incarnation] not in overrides.values()
