"""Messages to the scheduler arrive once, also at another scheduler."""

from __future__ import annotations

from paceline.protocol.scheduler.numbered_messages import MemberEnd, SchedulerEnd, SentMessage


def numbers(messages: list[SentMessage]) -> list[int]:
    return [message.number for message in messages]


def test_received_messages_are_not_resent() -> None:
    end = MemberEnd()
    for number in range(1, 5):
        end.add(number, is_call=bool(number % 2))
    assert numbers(end.since(0)) == [1, 2, 3, 4]
    assert numbers(end.since(2)) == [3, 4]
    end.received(2)
    assert numbers(end.since(0)) == [1, 3, 4]
    assert end.take(1) is not None
    assert end.take(1) is None
    assert numbers(end.calls()) == [3]
    assert end.lowest == 3


def test_messages_possibly_missing_at_the_new_scheduler_are_resent() -> None:
    """The scheduler may have taken over with the facts that the process sent on an earlier connection."""
    end = MemberEnd()
    end.add("call", is_call=True)
    end.add("told before")
    end.received(2)
    end.add("told while the scheduler recovers")
    assert [message.content for message in end.since(-1)] == ["call", "told while the scheduler recovers"]


def test_an_unnumbered_message_is_resent_until_the_reply() -> None:
    end = MemberEnd()
    message = end.add("leave", is_call=True, is_numbered=False)
    assert end.since(100) == [message]


def test_only_the_newest_of_superseding_notices_is_kept() -> None:
    end = MemberEnd()
    end.add("older", supersedes="progress")
    end.add("other")
    end.add("newer", supersedes="progress")
    assert [message.content for message in end.since(0)] == ["other", "newer"]


def test_a_member_of_a_former_cluster_has_no_welcome_number_before_the_first_message() -> None:
    end = SchedulerEnd(is_foreign=True)
    assert (end.welcome_number, SchedulerEnd().welcome_number) == (-1, 0)
    assert end.receive(0, 1)
    assert end.welcome_number == -1
    assert end.receive(7, 1)
    assert not end.receive(7, 1)
    assert end.welcome_number == 7
