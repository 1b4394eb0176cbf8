"""A process's membership and its views, as a pure state machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from paceline.errors import ProtocolError
from paceline.protocol.jobs import JobMemory
from paceline.protocol.membership import Member, Role
from paceline.protocol.placement import NUM_BUCKETS
from paceline.protocol.scheduler.messages import (
    CommitView,
    Ended,
    Expelled,
    Prepared,
    PrepareView,
    Promise,
    Promised,
    Register,
    Rejoin,
    Welcome,
)
from paceline.protocol.scheduler.views import KnownViews, View, ViewChange

# The interval of heartbeats before the welcome, which contains the cluster's interval. Short enough for any timeout.
_FIRST_HEARTBEAT_S: Final = 0.1


class MemberState:
    """The membership of one process, which begins with its registration."""

    def __init__(self, num_buckets: int = NUM_BUCKETS) -> None:
        self.registration: Register | None = None
        self.welcome: Welcome | None = None
        """The newest answer to the registration; None before the process is a member."""
        self.heartbeat_s = _FIRST_HEARTBEAT_S
        self.views = KnownViews()
        self.is_leaving = False
        """Whether the member has requested its release."""
        self.is_released = False
        self.is_over = False
        """Whether the membership has ended, by release or expulsion."""
        self._num_buckets = num_buckets

    def welcomed(self, welcome: Welcome) -> View | None:
        """Apply a welcome; return its view if the view is new."""
        view = self._commit(welcome.view)
        self.welcome, self.heartbeat_s = welcome, welcome.heartbeat_s
        return view

    def take(self, notice: object) -> tuple[View | None, Prepared | Promised | None]:
        """Apply a notice of the scheduler; return the new view to act on, and the answer to the scheduler."""
        match notice:
            case View() | ViewChange():
                return self._commit(self._full_view(notice)), None
            case PrepareView(view):
                full = self._full_view(view)
                is_stored = self.views.prepare(full)
                return None, Prepared(full.term, full.epoch) if is_stored else None
            case Promise(term):
                return None, Promised(term) if self.views.promise(term) else None
            case CommitView(term, epoch):
                prepared = self.views.prepared
                if prepared is not None and prepared.order == (term, epoch):
                    return self._commit(prepared), None
            case Ended():
                self.is_released = self.is_over = True
            case Expelled():
                self.is_over = True
        return None, None

    def rejoin(self, tables: Iterable[Any], job: JobMemory | None) -> Rejoin:
        """Return the message to a scheduler that may not know this member."""
        registration, welcome, newest = self.registration, self.welcome, self.views.newest
        assert registration is not None
        assert welcome is not None
        assert newest is not None
        member = Member(
            registration.node,
            registration.role,
            welcome.rank,
            welcome.incarnation,
            registration.address,
            registration.process,
        )
        return Rejoin(
            member=member,
            settings=welcome.settings,
            view=newest,
            promised=self.views.promised,
            has_committed=self.views.is_committed,
            former=() if self.views.former is None else self.views.former.of_role(Role.SERVER),
            is_leaving=self.is_leaving,
            job=job,
            tables=tuple(tables),
        )

    def _commit(self, view: View) -> View | None:
        self._check(view)
        return view if self.views.commit(view) else None

    def _full_view(self, view: View | ViewChange) -> View:
        if isinstance(view, ViewChange):
            base = self.views.committed
            if base is None:
                raise ProtocolError("the scheduler has sent the change of a view, but not the view itself")
            view = view.apply(base)
        self._check(view)
        return view

    def _check(self, view: View) -> None:
        if view.num_buckets not in (0, self._num_buckets):
            raise ProtocolError(
                f"the scheduler has sent chains of {view.num_buckets} buckets: expected {self._num_buckets}"
            )
