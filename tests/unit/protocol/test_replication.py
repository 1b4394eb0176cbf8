"""Replication by one server in its chains. The servers of a test share a view and exchange messages."""

from __future__ import annotations

from random import Random

import pytest
from tests.unit.protocol.pushes import Pushed, handle

from paceline.protocol.buckets import to_bytes
from paceline.protocol.chains import chain_group
from paceline.protocol.replication import (
    AGGREGATE,
    Acknowledge,
    Acknowledged,
    Apply,
    Change,
    Confirmed,
    CreateBuckets,
    Drop,
    Filled,
    Forget,
    Forward,
    Forwarded,
    Instruction,
    Lead,
    Links,
    LinkUp,
    Load,
    Ready,
    RefusePush,
    Replication,
    StateReceived,
    Withhold,
)

A, B, C = 1, 2, 3


def change(version: int, *groups: tuple[tuple[int, ...], int | None, int]) -> Change:
    return Change(version, tuple(chain_group(*group) for group in groups))


def server(me: int, *groups: tuple[tuple[int, ...], int | None, int], version: int = 1) -> Replication:
    replication = Replication(me)
    handle(replication, change(version, *groups))
    return replication


def only(kind: type, instructions: list[Instruction]) -> list[Instruction]:
    return [instruction for instruction in instructions if isinstance(instruction, kind)]


def test_empty_servers_are_members_in_the_first_view() -> None:
    replication = Replication(A)
    instructions = handle(replication, change(1, ((A, B), None, 0b01), ((B, A), None, 0b10), ((B,), None, 0b100)))
    assert instructions == [CreateBuckets(0b11), Links(frozenset({B})), Lead(0b01, 0b01, frozenset({B}))]
    assert replication.primary == 0b01
    assert replication.held == 0b11
    assert handle(replication, change(1, ((B,), None, 0b111))) == []  # not a newer version


def test_a_push_is_acknowledged_when_all_successors_have_it() -> None:
    first, last = server(A, ((A, B), None, 0b11)), server(B, ((A, B), None, 0b11))
    assert handle(first, Pushed("push", 9, 0, 0b11)) == [Forward("push", B, 1, 0b11), Apply("push", 0b11)]
    assert handle(last, Forwarded("copy", A, 9, 0, 1, 0b11)) == [Acknowledge("copy"), Apply("copy", 0b11)]
    assert handle(first, Acknowledged(B, 7)) == []
    assert handle(first, Acknowledged(B, 1)) == [Acknowledge("push")]
    assert first.pushes.num_pending == 0


def test_a_push_without_successors_is_acknowledged_immediately() -> None:
    alone = server(A, ((A,), None, 0b11))
    assert not alone.has_successors
    assert handle(alone, Pushed("push", 9, 0, 0b01)) == [Apply("push", 0b01), Acknowledge("push")]
    assert handle(alone, Pushed("again", 9, 0, 0b11)) == [Apply("again", 0b10), Acknowledge("again")]
    assert alone.delivery.admit(9, 1, 0b11) == 0b11
    assert alone.delivery.missing(9, 1, 0b10) == 0


def test_a_repeated_push_is_applied_once_and_acknowledged_by_the_chain() -> None:
    first = server(A, ((A, B), None, 0b1))
    handle(first, Pushed("push", 9, 0, 0b1))
    assert handle(first, Pushed("again", 9, 0, 0b1)) == [Forward("again", B, 2, 0b1)]
    assert handle(first, Acknowledged(B, 1)) == [Acknowledge("push")]
    assert handle(first, Acknowledged(B, 2)) == [Acknowledge("again")]
    assert handle(first, Pushed("third", 9, 0, 0b1)) == [Forward("third", B, 3, 0b1)]


def test_a_push_repeated_after_a_view_change_replaces_the_pending_part() -> None:
    # Found by the simulation: with every view a server stored one more copy of each push, and forwarded all copies.
    first = server(A, ((A, B), None, 0b11))
    handle(first, Pushed("push", 9, 0, 0b11))
    handle(first, change(2, ((A, B), None, 0b11)))
    assert handle(first, Pushed("half", 9, 0, 0b01)) == [Forward("half", B, 3, 0b01)]
    assert handle(first, Pushed("rest", 9, 0, 0b10)) == [Forget("push"), Forward("rest", B, 4, 0b10)]
    assert handle(first, Acknowledged(B, 2)) == []
    assert handle(first, Acknowledged(B, 4)) == [Acknowledge("rest")]
    assert first.pushes.num_pending == 1


def test_messages_of_another_version_are_ignored() -> None:
    last = server(B, ((A, B), None, 0b1), version=2)
    assert handle(last, Forwarded("old", A, 9, 0, 1, 0b1)) == [Forget("old")]
    assert handle(last, Forwarded("stranger", C, 9, 0, 2, 0b1)) == [Forget("stranger")]
    assert handle(last, StateReceived("early state", A, 3, 0, ())) == [Forget("early state")]


def test_a_new_connection_gets_pending_pushes_in_order() -> None:
    first = server(A, ((A, B), None, 0b11))
    handle(first, Pushed("one", 9, 0, 0b01))
    handle(first, Pushed("two", 9, 1, 0b11))
    assert handle(first, LinkUp(B)) == [Forward("one", B, 3, 0b01), Forward("two", B, 4, 0b11)]
    assert handle(first, Acknowledged(B, 1)) == []
    assert handle(first, Acknowledged(B, 4)) == [Acknowledge("two")]


def test_a_repeated_push_stays_before_later_pushes() -> None:
    # Found by the simulation: the successor would take the earlier push for a repetition.
    first = server(A, ((A, B), None, 0b1))
    for sequence in (0, 1):
        handle(first, Pushed(sequence, 9, sequence, 0b1))
    handle(first, change(2, ((A, B), None, 0b1)))
    handle(first, Pushed("again", 9, 0, 0b1))
    assert handle(first, LinkUp(B)) == [Forward("again", B, 6, 0b1), Forward(1, B, 7, 0b1)]


def test_a_push_does_not_wait_for_a_dead_successor() -> None:
    first = server(A, ((A, B), None, 0b1))
    handle(first, Pushed("push", 9, 0, 0b1))
    instructions = handle(first, change(2, ((A,), None, 0b1)))
    assert instructions == [Links(frozenset()), Acknowledge("push"), Lead(0b1, 0)]


def test_a_former_primary_rejects_pushes_but_forwards_pending_pushes() -> None:
    first = server(A, ((A, B), None, 0b11))
    handle(first, Pushed("one", 9, 0, 0b11))
    handle(first, Pushed("two", 9, 1, 0b10))
    instructions = handle(first, change(2, ((C,), None, 0b01), ((A, B), None, 0b10)))
    assert instructions == [
        Drop(0b01),
        Links(frozenset({B})),
        Forward("one", B, 3, 0b10),
        Forward("two", B, 4, 0b10),
        Lead(0b10, 0, frozenset({B})),
    ]
    assert handle(first, Acknowledged(B, 3)) == [RefusePush("one")]
    assert handle(first, Acknowledged(B, 4)) == [Acknowledge("two")]


def test_after_a_change_a_replica_does_not_acknowledge_earlier_pushes() -> None:
    # Found by the simulation: the predecessor may still have the old view, in which it would acknowledge the push to
    # the client, although the new primary has not received the push.
    middle = server(B, ((A, B, C), None, 0b1))
    handle(middle, Forwarded("push", A, 9, 0, 1, 0b1))
    instructions = handle(middle, change(2, ((C,), None, 0b1)))
    assert only(Acknowledge, instructions) == []
    assert only(Forget, instructions) == [Forget("push")]


def test_a_new_primary_forwards_the_former_primarys_pending_pushes() -> None:
    # Found by the simulation: no process resends the sum of an iteration after its primary has died.
    middle = server(B, ((A, B, C), None, 0b1))
    handle(middle, Forwarded("sum", A, AGGREGATE, 5, 1, 0b1))
    assert [middle.pushes.inherited] == [None]  # another server leads
    instructions = handle(middle, change(2, ((B, C), None, 0b1)))
    assert instructions == [Links(frozenset({C})), Forward("sum", C, 2, 0b1), Lead(0b1, 0b1, frozenset({C}))]
    assert [middle.pushes.inherited] == [5]
    assert middle.num_complete == 5
    assert handle(middle, Acknowledged(C, 2)) == [Forget("sum")]
    assert [middle.pushes.inherited] == [None]


def test_lead_is_sent_after_the_forwarded_pushes() -> None:
    # Otherwise a sum that is pushed at the Lead would overtake the previous sum.
    first = server(A, ((A, B), None, 0b1))
    handle(first, Pushed("sum", AGGREGATE, 1, 0b1))
    kinds = [type(action) for action in handle(first, change(2, ((A, B), None, 0b1)))]
    assert kinds.index(Forward) < kinds.index(Lead)


def test_own_sums_continue_under_another_primary() -> None:
    first = server(A, ((A, B), None, 0b11))
    handle(first, Pushed("sum", AGGREGATE, 1, 0b11))
    instructions = handle(first, change(2, ((C, A, B), None, 0b01), ((A, B), None, 0b10)))
    assert only(Forward, instructions) == [Forward("sum", B, 2, 0b10), Forward("sum", C, 3, 0b01)]
    assert handle(first, Acknowledged(B, 2)) == []
    assert handle(first, Acknowledged(C, 3)) == [Acknowledge("sum")]


def test_a_former_primary_sends_pending_pushes_to_the_new_primary_and_then_ready() -> None:
    # Found by the simulation: a filled server becomes primary. The former primary's pushes in flight to it were lost,
    # and later only its successor had the pushes.
    first, new = server(A, ((A, B), None, 0b1)), server(B, ((A, B), None, 0b1))
    handle(first, LinkUp(B))
    handle(first, Pushed("sum", AGGREGATE, 1, 0b1))
    turned = change(2, ((B, A), None, 0b1))
    assert handle(first, turned) == [
        Links(frozenset({B})),
        Forward("sum", B, 2, 0b1),
        Ready(B, 2),
        Lead(0, 0),
    ]
    assert Lead(0b1, 0b1, frozenset({A})) in handle(new, turned)
    assert handle(new, Forwarded("up", A, AGGREGATE, 1, 2, 0b1)) == [Forward("up", A, 1, 0b1), Apply("up", 0b1)]
    assert new.pushes.inherited == 1
    assert handle(first, Forwarded("down", B, AGGREGATE, 1, 2, 0b1)) == [Acknowledge("down")]
    assert handle(first, Acknowledged(B, 2)) == [Acknowledge("sum")]
    assert handle(new, Acknowledged(A, 1)) == [Acknowledge("up")]


def test_a_push_sent_up_the_chain_is_not_acknowledged_to_the_client() -> None:
    # Found by the simulation: after a missed view, the replica sent one bucket of a push up to its primary, which had
    # the push pending too. The primary then took the reply for the other bucket as the reply for the whole push.
    first = server(A, ((A, B, C), None, 0b01), ((A, C), None, 0b10))
    handle(first, Pushed("push", 9, 0, 0b11))
    again = only(Forward, handle(first, change(3, ((A, B, C), None, 0b01), ((A, C), None, 0b10))))
    assert again == [Forward("push", B, 3, 0b01), Forward("push", C, 4, 0b10)]
    assert handle(first, Forwarded("up", B, 9, 0, 3, 0b01)) == [Forward("up", B, 5, 0b01)]
    assert handle(first, Acknowledged(C, 4)) == [RefusePush("push")]
    assert handle(first, Acknowledged(B, 5)) == [Acknowledge("up")]


def test_pushes_are_sent_up_the_chain_until_acknowledged() -> None:
    first = server(A, ((A, B, C), None, 0b1))
    handle(first, Pushed("push", 9, 0, 0b1))
    assert only(Forward, handle(first, change(2, ((B, A), None, 0b1)))) == [Forward("push", B, 2, 0b1)]
    assert handle(first, LinkUp(B)) == [Forward("push", B, 3, 0b1), Ready(B, 2)]
    assert only(Forward, handle(first, change(3, ((B, A), None, 0b1)))) == [Forward("push", B, 4, 0b1)]
    # The primary is another server, which may lack the push too.
    assert only(Forward, handle(first, change(4, ((C, B, A), None, 0b1)))) == [Forward("push", C, 5, 0b1)]
    assert handle(first, Acknowledged(C, 5)) == [RefusePush("push")]
    # Pushes that are pending under the same primary are not sent up.
    handle(first, Forwarded("down", B, 9, 1, 4, 0b1))
    assert only(Forward, handle(first, change(5, ((C, B, A), None, 0b1)))) == []


def test_pushes_sent_up_the_chain_are_forwarded_only_by_the_primary() -> None:
    # Found by the simulation: the connection to the primary was cut, so the last server had a sum that the primary
    # lacked, without a record of this. After the death of the server between them, the primary would have summed the
    # iteration again.
    first, tail = server(A, ((A, B), None, 0b1)), server(B, ((A, B), None, 0b1))
    handle(first, LinkUp(B))
    handle(first, Pushed("sum", AGGREGATE, 1, 0b1))
    assert first.checkable(B) == 0b1
    turned = change(3, ((C, A, B), None, 0b1))
    assert only(Forward, handle(first, turned)) == [Forward("sum", C, 2, 0b1)]
    assert first.checkable(B) == 0, "the successor lacks this server's push"
    handle(tail, turned)
    assert handle(first, Forwarded("down", C, AGGREGATE, 1, 3, 0b1)) == [Forward("down", B, 3, 0b1)]
    assert handle(tail, Forwarded("down", A, AGGREGATE, 1, 3, 0b1)) == [Acknowledge("down"), Apply("down", 0b1)]
    assert handle(first, Acknowledged(B, 3)) == [Acknowledge("down")]
    assert handle(first, Acknowledged(C, 2)) == [Acknowledge("sum")]
    assert first.checkable(B) == 0b1


def test_all_pushes_are_sent_up_the_chain_in_order() -> None:
    # Found by the simulation: pushes that an earlier server had resent were not sent up, but some later pushes were,
    # so the later pushes reached the primary first.
    tail = server(C, ((A, C), None, 0b1))
    for sequence in (0, 1):
        handle(tail, Forwarded(sequence, A, 9, sequence, 1, 0b1))
    assert tail.pushes.num_pending == 0
    middle = server(B, ((A, B, C), None, 0b1))
    for sequence in (0, 1):
        handle(middle, Forwarded(sequence, A, 9, sequence, 1, 0b1))
    assert len(only(Forward, handle(middle, change(2, ((C, A, B), None, 0b1))))) == 2
    assert handle(middle, Forwarded("again", A, 9, 0, 2, 0b1)) == [Acknowledge("again")]
    again = handle(middle, change(3, ((C, A, B), None, 0b1)))
    assert [action.token for action in again if isinstance(action, Forward)] == [0, 1]


@pytest.mark.parametrize(("version", "targets"), [(2, [C]), (3, [A])])
def test_after_a_missed_view_all_pending_pushes_are_sent_up_the_chain(version: int, targets: list[int]) -> None:
    middle = server(B, ((A, B, C), None, 0b1))
    handle(middle, Forwarded("push", A, 9, 0, 1, 0b1))
    # In the missed view, A may have dropped the bucket, and may have been filled with it again.
    again = handle(middle, change(version, ((A, B, C), None, 0b1)))
    assert [action.target for action in again if isinstance(action, Forward)] == targets


def test_view_changes_do_not_duplicate_a_pending_push() -> None:
    middle = server(B, ((A, B, C), None, 0b1))
    handle(middle, Forwarded("push", A, 9, 0, 1, 0b1))
    for version in range(2, 5):
        handle(middle, change(version, ((C, A, B), None, 0b1)))
        assert middle.pushes.num_pending == 1
        handle(middle, Forwarded("again", A, 9, 0, version, 0b1))
    assert middle.pushes.num_pending == 1


def test_a_fill_has_no_pushes_possibly_missing_at_the_primary() -> None:
    # Found by the simulation: the filled server becomes primary. It has the push, but other servers may lack it.
    tail = server(A, ((A, B), None, 0b11))
    handle(tail, Pushed("push", 9, 0, 0b01))
    handle(tail, change(2, ((B, A), C, 0b11)))
    handle(tail, LinkUp(C))
    found = tail.next_fill(C)
    assert found is not None
    assert found[1] == 1
    assert tail.next_fill(C) is None
    assert tail.filling == {C}
    handle(tail, Confirmed(C, found[0]))
    assert tail.next_fill(C) is None
    handle(tail, Acknowledged(B, 2))
    found = tail.next_fill(C)
    assert found is not None
    assert found[1] == 0
    assert tail.filling == frozenset()


def test_a_server_is_filled_and_reported() -> None:
    first, new = server(A, ((A,), B, 0b11)), server(B, ((A,), B, 0b11))
    assert new.held == 0
    handle(first, Pushed("before", 9, 0, 0b11))
    assert first.next_fill(B) is None  # server A has no connection to B
    handle(first, LinkUp(B))
    number, bucket, state = first.next_fill(B) or (0, 0, ())
    assert (bucket, state) == (0, ((9, 0, 0b01),))
    assert handle(new, StateReceived("state", A, 1, bucket, state)) == [Load("state", 0)]
    # From now on B receives pushes to its buckets, and these pushes wait for B.
    assert handle(first, Pushed("push", 9, 1, 0b11)) == [Forward("push", B, 2, 0b01), Apply("push", 0b11)]
    assert handle(new, Forwarded("copy", A, 9, 1, 1, 0b01)) == [Acknowledge("copy"), Apply("copy", 0b01)]
    assert handle(new, Forwarded("too much", A, 9, 2, 1, 0b11)) == [Forget("too much")]
    assert handle(first, Confirmed(B, number)) == []  # more buckets follow
    last = first.next_fill(B)
    assert last is not None
    assert first.next_fill(B) is None
    assert handle(first, Confirmed(B, last[0])) == [Filled(1, B, to_bytes(0b11))]
    assert handle(first, Confirmed(B, last[0])) == []


def test_a_bucket_is_sent_with_the_duplicate_filter() -> None:
    first, new = server(A, ((A,), B, 0b11)), server(B, ((A,), B, 0b11))
    for sequence in (0, 2):
        handle(first, Pushed(sequence, 9, sequence, 0b11))
    handle(first, LinkUp(B))
    _, bucket, state = first.next_fill(B) or (0, 0, ())
    handle(new, StateReceived("state", A, 1, bucket, state))
    assert new.applied_to(bucket) == first.applied_to(bucket) == ((9, 2),)
    assert handle(new, Forwarded("again", A, 9, 2, 1, 1 << bucket)) == [Acknowledge("again")]


@pytest.mark.parametrize("seed", range(3))
def test_only_confirmed_buckets_are_reported(seed: int) -> None:
    random, buckets = Random(seed), (1 << 200) - 1
    first = server(A, ((A,), B, buckets))
    handle(first, LinkUp(B))
    sent: list[tuple[int, int]] = []
    reports: list[int] = []
    confirmed = 0
    while confirmed != buckets:
        if random.random() < 0.6 and (found := first.next_fill(B)) is not None:
            sent.append(found[:2])
        elif sent:
            number, bucket = sent.pop(random.randrange(len(sent)))
            confirmed |= 1 << bucket
            for report in handle(first, Confirmed(B, number)):
                assert report == Filled(1, B, to_bytes(confirmed))
                reports.append(confirmed)
    assert reports[-1] == buckets
    assert len(reports) > 1, "buckets must be reported before the end of the fill"


def test_a_server_is_filled_only_by_its_predecessor() -> None:
    new = server(B, ((A,), B, 0b001), ((C,), B, 0b010), ((A, B), None, 0b100))
    for source, bucket in ((C, 0), (A, 1), (A, 2), (4, 0)):
        assert handle(new, StateReceived("state", source, 1, bucket, ((9, 5, 1 << bucket),))) == [Forget("state")]
    assert new.held == 0b100
    assert new.delivery.missing(9, 5, 0b100) == 0b100
    for source, bucket in ((A, 0), (C, 1)):
        assert handle(new, StateReceived("state", source, 1, bucket, ())) == [Load("state", bucket)]
    assert new.held == 0b111


def test_a_fill_continues_after_a_lost_connection_and_after_a_view_change() -> None:
    first = server(A, ((A,), B, 0b111))
    handle(first, LinkUp(B))
    done = first.next_fill(B)
    assert done is not None
    assert first.next_fill(B) is None  # one bucket at a time
    handle(first, Confirmed(B, done[0]))
    cut = first.next_fill(B)
    assert cut is not None
    handle(first, LinkUp(B))
    assert handle(first, Confirmed(B, cut[0])) == []  # a confirmation of the former connection is ignored
    again = first.next_fill(B)
    assert again is not None
    assert again[1] == cut[1]
    instructions = handle(first, change(2, ((A,), B, 0b011), ((A, C), None, 0b100)))
    assert only(Filled, instructions) == []
    # Found by the simulation: a report came for a server that was no longer being filled.
    assert handle(first, Confirmed(B, again[0])) == []
    left = first.next_fill(B)
    assert left is not None
    assert left[1] == 1
    instructions = handle(first, change(3, ((A,), B, 0b001), ((A, C), None, 0b110)))
    assert only(Filled, instructions) == [
        Filled(3, B, to_bytes(0b001))
    ]  # filled buckets are reported again with every version
    assert handle(first, change(4, ((A,), None, 0b111))) == [Links(frozenset()), Lead(0b111, 0)]
    assert first.filling == frozenset()
    assert handle(first, Confirmed(B, left[0])) == []


def test_a_fill_restarts_after_a_missed_view() -> None:
    first = server(A, ((A,), B, 0b1))
    handle(first, LinkUp(B))
    number = (first.next_fill(B) or (0,))[0]
    handle(first, Confirmed(B, number))
    assert only(Filled, handle(first, change(3, ((A,), B, 0b1)))) == []
    assert first.next_fill(B) is not None


def test_a_server_drops_the_bucket_after_leaving_a_chain() -> None:
    last = server(B, ((A, B), None, 0b11))
    assert Drop(0b10) in handle(last, change(2, ((A, B), None, 0b01), ((A,), B, 0b10)))
    assert last.held == 0b01


@pytest.mark.parametrize("merged", [False, True])
def test_a_repeated_push_does_not_wait_for_other_buckets(merged: bool) -> None:
    # Found by the simulation: servers made a repeated push wait for its earlier copies, and so waited for one another
    # in a circle.
    middle = server(B, ((A, B, C), None, 0b11))
    handle(middle, Forwarded("old", A, 9, 0, 1, 0b11))
    handle(middle, change(2, ((A, B, C), None, 0b01), ((B, C), None, 0b10)))
    instructions = handle(middle, Forwarded("new", A, 9, 0, 2, 0b01))
    assert instructions == [Forward("new", C, 3, 0b01)]
    if merged:
        assert handle(middle, Pushed("client", 9, 0, 0b10)) == [Forget("old"), Forward("client", C, 4, 0b10)]
    assert handle(middle, Acknowledged(C, 3)) == [Acknowledge("new")]


def test_a_chain_with_too_few_replicas_acknowledges_no_push() -> None:
    first = Replication(A, min_replicas=1)
    handle(first, change(1, ((A, B), None, 0b01), ((A,), C, 0b10)))
    assert first.place.short == 0b10
    assert first.place.shortage(0b11) == (1, 0)
    assert first.place.shortage(0b01) is None
    assert handle(first, Pushed("short", 9, 0, 0b10)) == [Apply("short", 0b10), Withhold("short")]
    handle(first, Pushed("whole", 9, 1, 0b01))
    assert handle(first, Acknowledged(B, 1)) == [Acknowledge("whole")]
    handle(first, Pushed("both", 9, 2, 0b11))
    assert handle(first, Acknowledged(B, 2)) == [Withhold("both")]
    # C was filled with a bucket that contains the earlier pushes, so it has these pushes when it becomes a member.
    instructions = handle(first, change(2, ((A, B), None, 0b01), ((A, C), None, 0b10)))
    assert only(Acknowledge, instructions) == [Acknowledge("short"), Acknowledge("both")]
    assert first.place.short == 0


def test_a_dying_replica_delays_the_reply_to_a_push_until_a_new_replica() -> None:
    first = Replication(A, min_replicas=1)
    handle(first, change(1, ((A, B), None, 0b1)))
    handle(first, Pushed("push", 9, 0, 0b1))
    assert only(Withhold, handle(first, change(2, ((A,), None, 0b1)))) == [Withhold("push")]
    assert only(Withhold, handle(first, Pushed("again", 9, 0, 0b1))) == [Withhold("again")]
    first.pushes.give_up("push")
    assert only(Acknowledge, handle(first, change(3, ((A, C), None, 0b1)))) == [Acknowledge("again")]


def test_the_sender_of_a_withheld_push_retries_at_the_new_primary() -> None:
    first = Replication(A, min_replicas=1)
    handle(first, change(1, ((A,), B, 0b1)))
    handle(first, Pushed("push", 9, 0, 0b1))
    assert only(RefusePush, handle(first, change(2, ((B, A), None, 0b1)))) == [RefusePush("push")]


def test_forwards_and_sums_are_acknowledged_in_short_chains() -> None:
    last = Replication(B, min_replicas=2)
    handle(last, change(1, ((A, B), None, 0b01), ((B,), None, 0b10)))
    assert handle(last, Forwarded("copy", A, 9, 0, 1, 0b01)) == [Acknowledge("copy"), Apply("copy", 0b01)]
    assert handle(last, Pushed("sum", AGGREGATE, 1, 0b10)) == [Apply("sum", 0b10), Acknowledge("sum")]
