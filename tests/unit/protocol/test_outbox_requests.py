"""What an outbox bids a client to send, and when a request is done or safe."""

from __future__ import annotations

from paceline.protocol.chains import ChainGroup
from paceline.protocol.outbox import Done, Outbox, Send


def outbox(filling: int | None = None, **leads: int) -> Outbox:
    made = Outbox()
    assert change(made, 1, filling, **leads) == []
    return made


def change(outbox: Outbox, version: int, filling: int | None = None, **leads: int) -> list[Send]:
    groups = (ChainGroup(() if name == "nobody" else (int(name[1:]),), filling, mask) for name, mask in leads.items())
    return outbox.change(version, tuple(groups))


def test_a_request_is_done_when_all_its_parts_are_answered() -> None:
    requests = outbox(s1=0b011, s2=0b100)
    assert requests.start("push", 0b110) == [Send("push", 1, 1, 0b010), Send("push", 2, 2, 0b100)]
    assert requests.servers == {1, 2}
    assert requests.answered(1) == []
    assert requests.answered(1) == []
    assert requests.answered(2) == [Done("push")]
    assert requests.num_waiting == 0
    assert requests.failed(2) is None


def test_a_new_connection_gets_again_what_is_not_answered_in_order() -> None:
    requests = outbox(s1=0b1, s2=0b10)
    for token in ("one", "two"):
        requests.start(token, 0b11)
    requests.answered(1)
    assert requests.send_again(1) == [Send("two", 1, 5, 0b1)]
    assert requests.answered(3) == []  # the former number: nobody waits for it
    assert requests.send_again(2) == [Send("one", 2, 6, 0b10), Send("two", 2, 7, 0b10)]
    assert requests.answered(6) == [Done("one")]


def test_a_newer_map_cuts_anew_and_an_older_one_does_not() -> None:
    requests = outbox(s1=0b11)
    requests.start("push", 0b11)
    requests.refused(1)
    assert [requests.needs_map] == [True]
    assert change(requests, 1, s2=0b11) == []
    assert [requests.needs_map] == [True]
    assert change(requests, 2, s1=0b01, s2=0b10) == [Send("push", 1, 2, 0b01), Send("push", 2, 3, 0b10)]
    assert [requests.needs_map] == [False]
    assert requests.answered(1) == []
    assert requests.lost == 0
    assert change(requests, 3, s1=0b01, nobody=0b10) == [Send("push", 1, 4, 0b01)]
    assert requests.lost == 0b10
    assert requests.failed(4) == "push"
    assert requests.lost == 0


def test_a_push_is_kept_until_its_iteration_is_durable() -> None:
    requests = outbox(9, s1=0b001, s2=0b110)
    requests.start("push", 0b111, keep_clock=3)
    requests.answered(1)
    assert requests.answered(2) == [Done("push")]
    # Another server leads: it gets what the one before had in memory; done it is only once.
    assert change(requests, 2, 9, s1=0b001, s3=0b110) == [Send("push", 3, 3, 0b110)]
    assert requests.answered(3) == []
    requests.durable(1, 3)
    requests.durable(3, 4)
    assert change(requests, 3, 9, s4=0b111) == [Send("push", 4, 4, 0b001)]
    requests.answered(4)
    requests.durable(4, 4)
    assert change(requests, 4, 9, s5=0b111) == []


def test_after_a_missed_map_everything_kept_goes_out_again() -> None:
    requests = outbox(9, s1=0b1)
    requests.start("push", 0b1, keep_clock=3)
    requests.answered(1)
    assert change(requests, 2, 9, s1=0b1) == []
    assert change(requests, 4, 9, s1=0b1) == [Send("push", 1, 2, 0b1)]


def test_while_nobody_is_behind_a_primary_nothing_is_kept() -> None:
    requests = outbox(s1=0b01, s2=0b10)
    for token in ("before", "waiting"):
        requests.start(token, 0b01, keep_clock=3)
    requests.answered(1)
    assert change(requests, 2, 9, s1=0b01, s2=0b10) == [Send("waiting", 1, 3, 0b01)]
    requests.start("begun", 0b10, keep_clock=3)
    for number in (3, 4):
        requests.answered(number)
    # The last map by which it keeps, and the first by which nobody does: what has moved goes out, the rest is let go.
    assert change(requests, 3, s1=0b01, s3=0b10) == [Send("begun", 3, 5, 0b10)]
    assert change(requests, 4, 9, s4=0b01, s3=0b10) == [Send("begun", 3, 6, 0b10)]
