"""Each message of a session is processed once, and each call gets a reply, even if connections break."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import PeerError
from paceline.protocol.scheduler.events import SendMessage
from paceline.protocol.scheduler.messages import Ended
from paceline.protocol.scheduler.numbered_messages import MemberEnd, SentMessage
from paceline.protocol.scheduler.sessions import Session, Sessions


def test_a_repeated_call_is_answered_again() -> None:
    session = Session("peer")
    assert session.end.receive(1, 1)
    assert session.answer(1, "one", b"body") == [SendMessage("peer", "one", 1, 1, b"body")]
    assert not session.end.receive(1, 1)
    assert session.repeat(1) == [SendMessage("peer", "one", 1, 1, b"body")]


def test_a_call_repeated_before_the_reply_has_one_reply() -> None:
    session = Session("peer")
    assert session.end.receive(1, 1)
    assert not session.end.receive(1, 1)
    assert session.repeat(1) == []
    error = PeerError("no")
    assert session.answer(1, error) == [SendMessage("peer", error, 1, 1)]


def test_a_reply_is_stored_until_its_receipt_is_acknowledged() -> None:
    session = Session("peer")
    for number in (1, 2):
        session.end.receive(number, 1)
        session.answer(number, number)
    session.peer = None
    session.end.receive(3, 1)
    assert session.answer(3, 3) == []  # the reply waits for the process
    session.peer = "another"
    assert [(send.peer, send.request) for send in session.repeat_all()] == [("another", number) for number in (1, 2, 3)]
    session.end.receive(0, 3)
    assert [send.request for send in session.repeat_all()] == [3]


def test_every_message_without_a_number_is_new() -> None:
    session = Session("peer")
    assert [session.end.receive(0, 0) for _ in range(2)] == [True, True]
    assert session.end.received == 0


def test_the_oldest_replies_are_dropped_first() -> None:
    session = Session("peer")
    for number in range(1, 301):
        session.end.receive(number, 1)
        session.answer(number, None)
    numbers = [send.request for send in session.repeat_all()]
    assert numbers == list(range(301 - len(numbers), 301))
    assert len(numbers) < 300


def test_a_notice_has_the_last_number_and_is_lost_without_a_connection() -> None:
    session = Session("peer")
    session.end.receive(7, 7)
    notice = Ended(reason="done")
    assert session.notify(notice) == [SendMessage("peer", notice, 0, 7)]
    session.peer = None
    assert session.notify(notice) == []


def test_a_notice_has_no_answer() -> None:
    session = Session("peer")
    assert session.answer(0, "unexpected") == []


def test_a_member_continues_the_session_on_another_connection() -> None:
    sessions = Sessions()
    sessions.connect("first")
    found = sessions.welcome("first", 7)
    assert found is not None
    member, is_resumed = found
    assert not is_resumed
    sessions.connect("second")
    assert sessions.welcome("second", 7) == (member, True)
    assert sessions.disconnect("first") is member
    assert (member.peer, member.incarnation) == ("second", 7)
    sessions.disconnect("second")
    assert member.peer is None
    assert sessions.welcome("second", 7) is None


def test_a_request_to_join_is_answered_once() -> None:
    sessions = Sessions()
    sessions.connect("peer")
    sessions.join("peer", 3)
    assert sessions.has_joined("peer")
    assert sessions.answer_joining("peer", "welcome") == [SendMessage("peer", "welcome", 3)]
    assert sessions.answer_joining("peer", "welcome") == []
    assert sessions.notify(["peer", "another"], "notice") == [SendMessage("peer", "notice")]


@given(seed=st.integers(0, 2**32), lossy=st.floats(0, 0.4))
def test_every_message_is_processed_once_and_every_call_gets_a_reply(seed: int, lossy: float) -> None:
    """Connections break and lose all messages in flight. Both ends continue the session."""
    random = Random(seed)
    up: deque[SentMessage] = deque()
    down: deque[SendMessage] = deque()
    outgoing, session = MemberEnd(), Session("peer")
    received: list[int] = []
    answers: dict[int, Any] = {}

    def deliver(message: SentMessage) -> None:
        if session.end.receive(message.number, outgoing.lowest):
            received.append(message.content)
            down.extend(session.answer(outgoing.numbers(message).request, 10 * message.content))
        elif message.answer:
            down.extend(session.repeat(message.number))

    def receive(send: SendMessage) -> None:
        outgoing.received(send.received)
        message = outgoing.take(send.request)
        if message is not None:
            assert message.number not in answers
            answers[message.number] = send.message

    def reconnect() -> None:
        up.clear()
        down.clear()
        down.extend(session.repeat_all())
        up.extend(outgoing.since(session.end.received))

    def run(share: float) -> None:
        while up and random.random() < share:
            deliver(up.popleft())
        while down and random.random() < share:
            receive(down.popleft())

    calls = []
    for number in range(1, 21):
        is_call = random.random() < 0.6
        calls += [number] if is_call else []
        up.append(outgoing.add(number, answer="call" if is_call else None))
        run(0.7)
        if random.random() < lossy:
            reconnect()
    reconnect()
    run(1.0)
    assert received == list(range(1, 21))
    assert answers == {number: 10 * number for number in calls}
    assert outgoing.calls() == []
