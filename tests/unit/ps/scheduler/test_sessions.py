"""A session: what a process says to the scheduler counts once, and is answered, however often the connection breaks."""

from __future__ import annotations

from concurrent.futures import Future
from random import Random

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import PeerError
from paceline.protocol.scheduler.line import MemberEnd
from paceline.ps import messages
from paceline.ps.messages import CALL, NOTICE, RESULT
from paceline.ps.scheduler.outgoing import add, send
from paceline.ps.scheduler.sessions import PendingCall, ProcessSession, notify_all

from .lines import End, Sent


def call(number: int, *, unanswered: int | None = None) -> Sent:
    return Sent(CALL, request=number, sequence=number, clock=number if unanswered is None else unanswered)


def test_a_call_that_comes_again_is_answered_again_and_counts_once() -> None:
    end = End()
    session = ProcessSession(end.peer)
    assert session.is_new(call(1).header)
    PendingCall(session, 1).answer("one")
    assert not session.is_new(call(1).header)
    first, again = end.take()
    assert first == again
    assert (first.kind, first.request, first.sequence) == (RESULT, 1, 1)
    assert msgspec.msgpack.decode(first.meta) == "one"


def test_a_call_that_comes_again_before_it_is_answered_is_answered_once() -> None:
    end = End()
    session = ProcessSession(end.peer)
    assert session.is_new(call(1).header)
    assert not session.is_new(call(1).header)
    assert end.take() == []
    PendingCall(session, 1).refuse(error := PeerError("no"))
    assert [(each.request, each.error) for each in end.take()] == [(1, error)]


def test_an_answer_is_kept_until_it_is_known_to_have_come() -> None:
    session = ProcessSession(End().peer)
    for number in (1, 2):
        session.is_new(call(number, unanswered=1).header)
        PendingCall(session, number).answer(number)
    session.peer = None
    session.is_new(call(3, unanswered=1).header)
    PendingCall(session, 3).answer(3)  # it waits for the process
    end = End()
    session.peer = end.peer
    session.answer_again()
    assert [each.request for each in end.take()] == [1, 2, 3]
    session.is_new(Sent(NOTICE, clock=3).header)
    session.answer_again()
    assert [each.request for each in end.take()] == [3]


def test_what_has_no_number_is_new_every_time() -> None:
    session = ProcessSession(End().peer)
    assert [session.is_new(Sent(NOTICE).header) for _ in range(2)] == [True, True]
    assert session.end.received == 0


def test_of_the_answers_the_oldest_are_forgotten_first() -> None:
    end = End()
    session = ProcessSession(end.peer)
    for number in range(1, 301):
        session.is_new(call(number, unanswered=1).header)
        PendingCall(session, number).answer(None)
    end.take()
    session.answer_again()
    kept = [each.request for each in end.take()]
    assert kept == list(range(301 - len(kept), 301))
    assert len(kept) < 300


def test_a_notice_says_what_has_come_and_is_lost_without_a_connection() -> None:
    ends = End(), End()
    sessions = [ProcessSession(end.peer, incarnation) for incarnation, end in enumerate(ends)]
    sessions[0].is_new(call(7).header)
    sessions[1].peer = None
    notify_all(sessions, messages.Ended(reason="done"))
    (told,) = ends[0].take()
    assert (told.kind, told.sequence) == (NOTICE, 7)
    assert messages.encode(messages.Ended(reason="done")) == told.meta
    assert ends[1].take() == []


def test_a_message_that_wants_no_answer_gets_none() -> None:
    end = End()
    session = ProcessSession(end.peer)
    PendingCall(session, 0).answer("nobody waits")
    PendingCall(session, 0).refuse(PeerError("nobody waits"))
    assert end.take() == []


@given(seed=st.integers(0, 2**32), lossy=st.floats(0, 0.4))
def test_everything_counts_once_and_every_call_is_answered(seed: int, lossy: float) -> None:
    """A process speaks, the line breaks with all that is on it, both go on where they were."""
    random = Random(seed)
    up, down = End(), End()
    outgoing, session = MemberEnd(), ProcessSession(down.peer)
    taken: list[int] = []
    answers: dict[int, int] = {}

    def deliver(frame: Sent) -> None:
        if session.is_new(frame.header):
            taken.append(msgspec.msgpack.decode(frame.meta)["job"])
            PendingCall(session, frame.request).answer(10 * taken[-1])

    def hear(frame: Sent) -> None:
        outgoing.received(frame.sequence)
        message = outgoing.take(frame.request)
        if message is not None:
            assert message.number not in answers
            answers[message.number] = msgspec.msgpack.decode(frame.meta)

    def reconnect() -> None:
        up.sent.clear()
        down.sent.clear()
        session.answer_again()
        for message in outgoing.since(session.end.received):
            send(outgoing, up.channel, message)

    asked = []
    for number in range(1, 21):
        wants_answer = random.random() < 0.6
        message = add(outgoing, messages.LeaseDone(job=number, lease=0), answer=Future() if wants_answer else None)
        asked += [number] if wants_answer else []
        send(outgoing, up.channel, message)
        for line, take in ((up, deliver), (down, hear)):
            while line.sent and random.random() < 0.7:
                take(line.sent.popleft())
        if random.random() < lossy:
            reconnect()
    reconnect()
    for line, take in ((up, deliver), (down, hear)):
        while line.sent:
            take(line.sent.popleft())
    assert taken == list(range(1, 21))
    assert answers == {number: 10 * number for number in asked}
    assert outgoing.calls() == []
