"""What an outbox that takes over what is under way bids to send again at a change of the map."""

from __future__ import annotations

from paceline.protocol.chains import ChainGroup
from paceline.protocol.outbox import Outbox, Send

FILLING = 9  # somebody is behind all of them, so that pushes are kept


def groups(**leads: int) -> tuple[ChainGroup, ...]:
    return tuple(ChainGroup((int(name[1:]),), FILLING, buckets) for name, buckets in leads.items())


def sends(outbox: Outbox, version: int, **leads: int) -> list[tuple[object, int, int]]:
    return [(send.token, send.server, send.buckets) for send in outbox.change(version, groups(**leads))]


def test_what_was_adopted_goes_out_in_order_once_for_each_server() -> None:
    outbox = Outbox(4)
    outbox.adopt("first", 0b1111)
    outbox.adopt("second", 0b0100)
    outbox.adopt("nothing", 0)
    assert sends(outbox, 4, s1=0b1111) == []  # no newer map
    assert sends(outbox, 5, s1=0b0011, s2=0b1100) == [("first", 1, 0b0011), ("first", 2, 0b1100), ("second", 2, 0b0100)]
    assert outbox.num_waiting == 3
    assert outbox.lost == 0
    assert sends(outbox, 6, s2=0b1100)[0] == ("first", 2, 0b1100)
    assert outbox.lost == 0b0011


def test_what_is_kept_goes_out_where_another_leads_now() -> None:
    outbox = Outbox(4)
    outbox.adopt("push", 0b1000, kept={1: 0b0011, 2: 0b0100}, keep_clock=7)
    outbox.adopt("done", 0, kept={2: 0b0100}, keep_clock=7)
    assert sends(outbox, 5, s1=0b0001, s3=0b1110) == [("push", 3, 0b1110), ("done", 3, 0b0100)]
    # All that is answered is kept again by its new server, and 1 keeps what it had.
    number = 3
    assert outbox.answered(number - 2)
    assert sends(outbox, 6, s3=0b1111) == [("push", 3, 0b0001), ("done", 3, 0b0100)]


def test_after_a_map_that_was_missed_all_that_is_kept_goes_out() -> None:
    outbox = Outbox(4)
    outbox.adopt("push", 0, kept={1: 0b11}, keep_clock=7)
    assert outbox.change(6, groups(s1=0b11)) == [Send("push", 1, 1, 0b11)]
