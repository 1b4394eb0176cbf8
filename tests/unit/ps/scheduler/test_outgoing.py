"""Messages to the scheduler are kept until the scheduler confirms them."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from paceline.protocol.scheduler.numbered_messages import MemberEnd
from paceline.ps import messages
from paceline.ps.messages import CALL, NOTICE
from paceline.ps.scheduler.calls import add, send

from .lines import End


def lease_done(lease: int) -> messages.LeaseDone:
    return messages.LeaseDone(job=1, lease=lease)


def test_a_frame_has_a_number_and_the_lowest_pending_call() -> None:
    outgoing, end = MemberEnd(), End()
    messages_sent = [
        add(outgoing, messages.GetJob(after=0), answer=Future()),
        add(outgoing, lease_done(0)),
        add(outgoing, messages.Heartbeat()),
    ]
    for message in messages_sent:
        send(outgoing, end.channel, message)
    assert [(message.kind, message.request, message.sequence, message.clock) for message in end.take()] == [
        (CALL, 1, 1, 1),
        (NOTICE, 0, 2, 1),
        (NOTICE, 0, 0, 1),
    ]
    outgoing.take(1)
    send(outgoing, end.channel, messages_sent[1])
    assert end.take()[0].clock == 4  # no call with a lower number is pending


@pytest.mark.parametrize(("progress", "is_kept"), [({}, False), ({"examples": 1.0}, True)])
def test_a_sign_of_life_is_kept_if_it_shows_progress(progress: dict[str, float], is_kept: bool) -> None:
    outgoing = MemberEnd()
    message = add(outgoing, messages.Heartbeat(progress=progress))
    assert message.is_numbered == is_kept
    assert outgoing.since(0) == [message] * is_kept


def test_of_signs_of_life_the_newest_is_kept() -> None:
    outgoing = MemberEnd()
    add(outgoing, messages.Heartbeat(progress={"examples": 1.0}))
    kept = add(outgoing, lease_done(0))
    newest = add(outgoing, messages.Heartbeat(progress={"examples": 2.0}))
    add(outgoing, messages.Heartbeat())
    assert outgoing.since(0) == [kept, newest]


def test_a_leaving_member_may_report_it_twice() -> None:
    outgoing = MemberEnd()
    message = add(outgoing, messages.Leave(), answer=Future())
    assert not message.is_numbered
    assert outgoing.since(100) == [message]
