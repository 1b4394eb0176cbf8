"""The matching of messages and receives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.collectives.p2p.matching import Matching, Message, Posted


def posted(source: int | None, tag: int = 0, size: int = 0) -> Posted:
    return Posted(memoryview(bytearray(size)), source, tag, "")


def message(source: int, tag: int = 0, size: int = 0) -> Message:
    return Message(source, tag, "", size)


SOURCES = st.integers(0, 2)
EVENTS = st.lists(st.tuples(st.booleans(), st.none() | SOURCES, st.integers(0, 1)), max_size=40)


def test_a_dropped_message_leaves_no_state() -> None:
    matching = Matching()
    for tag in range(3):
        half = message(0, tag, 10)
        matching.add_buffered(half)
        matching.drop(half)
    assert not matching.buffered
    assert matching.has_room(message(0, 0, 64 << 20))


@given(EVENTS)
def test_matching_equals_a_search_in_two_lists(events: list[tuple[bool, int | None, int]]) -> None:
    matching = Matching()
    receives: list[Posted] = []
    messages: list[Message] = []
    for is_receive, source, tag in events:
        if is_receive:
            receive = posted(source, tag)
            expected = next((m for m in messages if m.tag == tag and source in (None, m.source)), None)
            assert matching.post(receive) is expected
            if expected is None:
                receives.append(receive)
            else:
                assert expected.receive is receive
                messages.remove(expected)
        else:
            arrived = message(source or 0, tag)
            taken = next((r for r in receives if r.tag == tag and r.source in (None, arrived.source)), None)
            assert matching.match(arrived) is (taken is not None)
            assert arrived.receive is taken
            if taken is None:
                matching.add_buffered(arrived)
                messages.append(arrived)
            else:
                receives.remove(taken)
        assert len(matching.posted()) == len(receives)


def test_each_rank_has_a_separate_limit_of_buffered_bytes() -> None:
    matching = Matching(max_buffered_bytes=100)
    first = message(1, size=60)
    assert matching.has_room(first)
    matching.add_buffered(first)
    assert not matching.has_room(message(1, size=60))
    assert matching.has_room(message(2, size=60))
    assert matching.post(posted(1)) is first
    assert matching.has_room(message(1, size=60))


def test_a_sender_has_room_while_a_receive_waits_for_another_of_its_messages() -> None:
    matching = Matching(max_buffered_bytes=10)
    other = posted(1, tag=7)
    matching.post(other)
    assert matching.has_room(message(1, tag=3, size=60))
    assert not matching.has_room(message(2, tag=3, size=60))
    assert matching.match(message(1, tag=7))
    assert not matching.has_room(message(1, tag=3, size=60))


def test_an_incomplete_message_is_not_received() -> None:
    matching = Matching()
    first, second = message(1), message(1)
    matching.add_buffered(first)
    matching.add_buffered(second)
    matching.drop(first)
    assert matching.post(posted(1)) is second
    assert matching.post(posted(1)) is None
