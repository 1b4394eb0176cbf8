"""Exactly-once delivery: examples, and comparison with a filter of one number per incarnation and bucket."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.random_examples import num_examples

from paceline.errors import StaleEpochError, UsageError
from paceline.protocol.buckets import ALL, bucket_set, buckets_in
from paceline.protocol.delivery import Delivery


def last_push(delivery: Delivery, incarnation: int, bucket: int) -> int | None:
    filters = delivery.export(1 << bucket)
    return next((last for sender, last, _ in filters if sender == incarnation), None)


def test_a_push_is_new_once() -> None:
    delivery = Delivery()
    assert delivery.buckets == ALL
    assert delivery.admit(1, 0) == ALL
    assert delivery.admit(1, 0) == 0
    assert delivery.admit(1, 7) == ALL  # sequence numbers may have gaps
    assert delivery.admit(1, 3) == 0
    assert delivery.admit(2, 3) == ALL  # another incarnation has separate numbers


def test_each_bucket_has_its_own_last_push() -> None:
    delivery = Delivery(0b111)
    assert delivery.admit(1, 5, 0b001) == 0b001
    assert delivery.admit(1, 5, 0b011) == 0b010
    assert delivery.admit(1, 5) == 0b100
    assert delivery.admit(1, 5) == 0
    assert delivery.admit(1, 6, 0) == 0
    delivery.validate()


def test_the_last_push_of_a_bucket_never_falls() -> None:
    delivery = Delivery(0b111)
    delivery.admit(1, 5, 0b001)
    assert delivery.admit(1, 4) == 0b110
    assert last_push(delivery, 1, 0) == 5
    assert last_push(delivery, 1, 1) == 4
    assert delivery.admit(1, 5) == 0b110
    assert delivery.admit(1, 6) == 0b111


def test_missing_does_not_record_the_push() -> None:
    delivery = Delivery(0b11)
    delivery.admit(1, 5, 0b01)
    assert delivery.missing(1, 5, 0b11) == 0b10
    assert delivery.missing(1, 5) == 0b10
    assert last_push(delivery, 1, 1) is None


def test_the_filter_of_a_bucket_moves_with_the_bucket() -> None:
    source, target = Delivery(0b011), Delivery(0b100)
    source.admit(1, 5)
    target.admit(1, 3)
    target.adopt(0b010, source.export(0b011))  # the export has more buckets than the moved bucket
    source.release(0b010)
    assert source.buckets == 0b001
    assert target.buckets == 0b110
    assert target.admit(1, 5) == 0b100  # the former server has applied push 5 to bucket 1
    assert target.admit(1, 6) == 0b110
    target.validate()


def test_an_export_has_only_the_requested_buckets() -> None:
    delivery = Delivery(0b111)
    delivery.admit(2, 4)
    delivery.admit(1, 5)
    delivery.admit(1, 6, 0b110)
    assert delivery.export(0b011) == ((1, 6, 0b010), (1, 5, 0b001), (2, 4, 0b011))
    assert delivery.export(0) == ()


def test_a_new_bucket_has_an_empty_filter() -> None:
    delivery = Delivery(0b1)
    delivery.admit(1, 5)
    delivery.adopt(0b10, ())
    assert last_push(delivery, 1, 1) is None
    assert delivery.admit(1, 4) == 0b10
    assert delivery.admit(1, 5) == 0b10
    assert delivery.admit(1, 5) == 0


def test_an_absent_bucket_is_refused_completely() -> None:
    delivery = Delivery(0b1)
    with pytest.raises(StaleEpochError, match="names bucket 3"):
        delivery.admit(1, 0, 0b1001)
    with pytest.raises(StaleEpochError, match="names bucket 3"):
        delivery.missing(1, 0, 0b1001)
    assert delivery.admit(1, 0) == 0b1


def test_a_server_without_buckets_admits_no_push() -> None:
    delivery = Delivery(0)
    assert delivery.admit(1, 0) == 0
    delivery.validate()
    delivery.adopt(0b1, [(1, 0, 0b1)])
    assert delivery.admit(1, 0) == 0
    assert delivery.admit(1, 1) == 0b1


def test_impossible_moves_are_rejected() -> None:
    delivery = Delivery(0b1)
    delivery.admit(1, 5)
    with pytest.raises(UsageError, match="bucket 0"):
        delivery.adopt(0b11, ())
    with pytest.raises(UsageError, match="Bucket 1"):
        delivery.release(0b11)
    with pytest.raises(UsageError, match="Bucket 1"):
        delivery.export(0b11)
    assert delivery.buckets == 0b1
    assert last_push(delivery, 1, 0) == 5


def test_pushes_to_changing_sets_of_buckets_are_recorded() -> None:
    random, delivery = Random(1), Delivery()
    last: dict[int, int] = {}
    for sequence in range(500):
        pushed = random.sample(range(512), random.choice((1, 1, 2, 400)))
        assert delivery.admit(7, sequence, bucket_set(pushed)) == bucket_set(pushed)
        last |= dict.fromkeys(pushed, sequence)
        delivery.validate()
        old = random.randrange(sequence + 1)
        assert delivery.missing(7, old) == bucket_set(bucket for bucket in range(512) if last.get(bucket, -1) < old)
    state = delivery.export(ALL)
    assert sum(buckets.bit_count() for _, _, buckets in state) == len(last)
    assert {bucket: number for _, number, buckets in state for bucket in buckets_in(buckets)} == last


NUM_BUCKETS = 5
NUM_INCARNATIONS = 3
masks = st.integers(1, (1 << NUM_BUCKETS) - 1)
incarnations = st.integers(0, NUM_INCARNATIONS - 1)


class DeliveryMachine(RuleBasedStateMachine):
    """Buckets move between two servers, and pushes are resent: each push is applied once per bucket.

    The model is the last push per incarnation and bucket, on whichever server.
    """

    @initialize(split=masks)
    def start(self, split: int) -> None:
        self.servers = [Delivery(split), Delivery((1 << NUM_BUCKETS) - 1 - split)]
        self.lasts: dict[tuple[int, int], int] = {}

    @rule(
        incarnation=incarnations,
        sequence=st.integers(0, 6),
        buckets=masks,
        everything=st.booleans(),
        place=st.integers(0, 1),
    )
    def push(self, incarnation: int, sequence: int, buckets: int, everything: bool, place: int) -> None:
        server = self.servers[place]
        present = server.buckets if everything else buckets & server.buckets
        new = {b for b in buckets_in(present) if self.lasts.get((incarnation, b), -1) < sequence}
        assert server.missing(incarnation, sequence, present) == bucket_set(new)
        assert server.admit(incarnation, sequence, None if everything else present) == bucket_set(new)
        self.lasts |= {(incarnation, b): sequence for b in new}

    @rule(buckets=masks, source=st.integers(0, 1), in_halves=st.booleans())
    def move(self, buckets: int, source: int, in_halves: bool) -> None:
        giver, receiver = self.servers[source], self.servers[1 - source]
        buckets &= giver.buckets
        state = giver.export(buckets)
        if in_halves:
            receiver.adopt(buckets & 0b101, state)
            buckets_left = buckets & ~0b101
        else:
            buckets_left = buckets
        receiver.adopt(buckets_left, reversed(state))
        giver.release(buckets)

    @invariant()
    def check_last_of_every_bucket(self) -> None:
        seen: dict[tuple[int, int], int] = {}
        for server in self.servers:
            server.validate()
            exported = server.export(server.buckets)
            seen |= {(incarnation, b): last for incarnation, last, mask in exported for b in buckets_in(mask)}
        assert seen == self.lasts


TestDeliveryMachine = DeliveryMachine.TestCase
TestDeliveryMachine.settings = num_examples(150, stateful_step_count=30)
