"""A process's knowledge about its membership and the cluster's views."""

from __future__ import annotations

import pytest

from paceline.errors import ProtocolError
from paceline.protocol.scheduler import messages
from paceline.protocol.scheduler.member_state import MemberState
from paceline.protocol.scheduler.views import View, ViewChange


def view(epoch: int, term: int = 1) -> View:
    return View(term=term, epoch=epoch)


def test_a_prepared_view_is_acknowledged_and_applied_at_the_commit() -> None:
    state = MemberState()
    first, second = view(1), view(2)
    assert state.take(first) == (first, None)
    assert state.take(messages.PrepareView(second)) == (None, messages.Prepared(1, 2))
    assert state.views.committed is first
    assert state.take(messages.CommitView(1, 1)) == (None, None)  # the member already has this view
    assert state.take(messages.CommitView(1, 2)) == (second, None)
    assert state.take(first) == (None, None)  # an old view


def test_a_member_prepares_no_view_of_a_term_below_its_promise() -> None:
    state = MemberState()
    state.take(view(1))
    assert state.take(messages.Promise(3)) == (None, messages.Promised(3))
    assert state.take(messages.PrepareView(view(2, term=2))) == (None, None)


def test_a_change_of_an_unknown_view_is_an_error() -> None:
    change = ViewChange(base=1, term=1, epoch=2, version=0, last_incarnation=0)
    with pytest.raises(ProtocolError, match="not the view itself"):
        MemberState().take(change)


def test_released_and_expelled_members_do_not_return() -> None:
    released, expelled = MemberState(), MemberState()
    released.take(messages.Ended(reason="the end"))
    expelled.take(messages.Expelled(reason="silence"))
    assert (released.is_released, released.is_over) == (True, True)
    assert (expelled.is_released, expelled.is_over) == (False, True)
