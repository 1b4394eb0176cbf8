"""Exactly once: by example, and against a filter that remembers every push by itself."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from paceline.errors import StaleEpochError, UsageError
from paceline.protocol import Delivery
from paceline.protocol.delivery import Duplicate, Fresh, Partial


def test_a_push_is_fresh_once() -> None:
    delivery = Delivery(range(4))
    assert delivery.admit(1, 0) == Fresh()
    assert delivery.admit(1, 0) == Duplicate()
    assert delivery.admit(1, 7) == Fresh()  # gaps are legal
    assert delivery.admit(1, 3) == Duplicate()
    assert delivery.admit(2, 3) == Fresh()  # another incarnation counts for itself


def test_single_buckets_count_for_themselves() -> None:
    delivery = Delivery(range(3))
    assert delivery.admit(1, 5, [0]) == Fresh()
    assert delivery.admit(1, 5, [0, 1]) == Partial((1,))
    assert delivery.admit(1, 5) == Partial((2,))
    assert delivery.admit(1, 5) == Duplicate()
    assert delivery.admit(1, 5, []) == Duplicate()
    delivery.validate()


def test_a_bucket_that_is_ahead_stays_ahead() -> None:
    delivery = Delivery(range(3))
    delivery.admit(1, 5, [0])
    assert delivery.admit(1, 4) == Partial((1, 2))
    assert delivery.last(1, 0) == 5
    assert delivery.admit(1, 5) == Partial((1, 2))
    assert delivery.admit(1, 6) == Fresh()


def test_the_filter_moves_with_its_bucket() -> None:
    source, target = Delivery([0, 1]), Delivery([2])
    source.admit(1, 5)
    target.admit(1, 3)
    target.adopt(1, source.export(1))
    source.release(1)
    assert source.buckets == {0}
    assert target.admit(1, 5) == Partial((2,))  # bucket 1 has had push 5 at its former server
    assert target.admit(1, 6) == Fresh()
    target.validate()


def test_a_new_bucket_has_seen_nothing_whatever_its_server_has() -> None:
    delivery = Delivery([0])
    delivery.admit(1, 5)
    delivery.adopt(9, {})
    assert delivery.last(1, 9) is None
    assert delivery.admit(1, 4) == Partial((9,))
    assert delivery.admit(1, 5) == Partial((9,))
    assert delivery.admit(1, 5) == Duplicate()


def test_a_bucket_that_is_not_here_is_refused_whole() -> None:
    delivery = Delivery([0])
    with pytest.raises(StaleEpochError, match="names bucket 3"):
        delivery.admit(1, 0, [0, 3])
    assert delivery.admit(1, 0) == Fresh()


def test_a_forgotten_incarnation_stays_out() -> None:
    delivery = Delivery([0, 1])
    delivery.admit(1, 5)
    delivery.forget(1)
    assert delivery.admit(1, 5) == Duplicate()
    assert delivery.admit(1, 6) == Duplicate()
    assert delivery.export(0) == {}
    delivery.adopt(2, {1: 5, 2: 1})
    assert delivery.admit(1, 9) == Duplicate()
    assert delivery.last(2, 2) == 1
    delivery.validate()


def test_moves_that_cannot_be() -> None:
    delivery = Delivery([0])
    with pytest.raises(UsageError, match="held here already"):
        delivery.adopt(0, {})
    with pytest.raises(UsageError, match="not held here"):
        delivery.release(1)
    with pytest.raises(UsageError, match="not held here"):
        delivery.export(1)


NUM_BUCKETS = 5


class DeliveryMachine(RuleBasedStateMachine):
    """Two servers, buckets that move between them, pushes that are sent again: each applies once per bucket.

    The model is a set of (incarnation, sequence, bucket) that were applied.
    """

    @initialize(split=st.integers(0, NUM_BUCKETS))
    def start(self, split: int) -> None:
        self.servers = [Delivery(range(split)), Delivery(range(split, NUM_BUCKETS))]
        self.home = {bucket: int(bucket >= split) for bucket in range(NUM_BUCKETS)}
        self.applied: set[tuple[int, int, int]] = set()
        self.next_sequence = dict.fromkeys(range(3), 0)
        # The last push of each incarnation with all its buckets: all of it may be sent again, anywhere.
        self.last_push: dict[int, tuple[int, frozenset[int]]] = {}

    def send(self, incarnation: int, sequence: int, buckets: frozenset[int]) -> None:
        for place, server in enumerate(self.servers):
            here = {bucket for bucket in buckets if self.home[bucket] == place}
            everything = here == {bucket for bucket, home in self.home.items() if home == place}
            new = {bucket for bucket in here if (incarnation, sequence, bucket) not in self.applied}
            if not here:
                continue
            verdict = server.admit(incarnation, sequence, None if everything else here)
            if verdict == Fresh():
                assert new == here
            elif verdict == Duplicate():
                assert not new
            else:
                assert isinstance(verdict, Partial)
                assert verdict.buckets == tuple(sorted(new))
                assert new
                assert new != here
            self.applied |= {(incarnation, sequence, bucket) for bucket in new}

    @rule(
        incarnation=st.integers(0, 2),
        buckets=st.one_of(st.just(range(NUM_BUCKETS)), st.sets(st.integers(0, NUM_BUCKETS - 1), min_size=1)),
        gap=st.integers(0, 2),
        lost_at=st.sampled_from([None, None, 0, 1]),
    )
    def push(self, incarnation: int, buckets: set[int], gap: int, lost_at: int | None) -> None:
        """A push, of which one server's part may be lost on the way; :meth:`resend` sends the whole again."""
        if incarnation in self.last_push:
            self.send(incarnation, *self.last_push[incarnation])  # acknowledged before the next one goes out
        sequence = self.next_sequence[incarnation] + gap
        self.next_sequence[incarnation] = sequence + 1
        self.last_push[incarnation] = sequence, frozenset(buckets)
        self.send(incarnation, sequence, frozenset(b for b in buckets if self.home[b] != lost_at))

    @rule(incarnation=st.integers(0, 2))
    def resend(self, incarnation: int) -> None:
        if incarnation in self.last_push:
            self.send(incarnation, *self.last_push[incarnation])

    @rule(bucket=st.integers(0, NUM_BUCKETS - 1))
    def move(self, bucket: int) -> None:
        source = self.home[bucket]
        self.servers[1 - source].adopt(bucket, self.servers[source].export(bucket))
        self.servers[source].release(bucket)
        self.home[bucket] = 1 - source

    @invariant()
    def knows_the_last_of_each_bucket(self) -> None:
        for server in self.servers:
            server.validate()
        for incarnation in range(3):
            for bucket, home in self.home.items():
                applied = [s for i, s, b in self.applied if (i, b) == (incarnation, bucket)]
                last = self.servers[home].last(incarnation, bucket)
                assert last == max(applied, default=None)


TestDeliveryMachine = DeliveryMachine.TestCase
TestDeliveryMachine.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)
