"""The views that each connection was sent, so that the next one is sent as a difference."""

from __future__ import annotations

from paceline.protocol.membership import Role
from paceline.protocol.scheduler.messages import CommitView, PrepareView
from paceline.protocol.scheduler.views import View, ViewChange


class SentViews:
    """The views that were sent, by connection. Workers receive a view without workers, if its chains have changed."""

    def __init__(self) -> None:
        self._for_workers = View(is_partial=True)
        self._sent: dict[object, View] = {}  # the last committed view that was sent
        self._prepared: dict[object, View] = {}  # the last view that was sent to be prepared

    def forget(self, peer: object) -> None:
        """Forget a connection."""
        self._sent.pop(peer, None)
        self._prepared.pop(peer, None)

    def welcome(self, peer: object, role: Role, committed: View) -> View:
        """Return the committed view for a member that is welcomed."""
        view = self._sent[peer] = self._for_workers if role is Role.WORKER else committed
        return view

    def prepare(self, peer: object, view: View) -> PrepareView:
        """Return the message that has a view prepared."""
        sent = self._sent.get(peer)
        self._prepared[peer] = view
        return PrepareView(view if sent is None else ViewChange.between(sent, view))

    def commit(self, view: View) -> None:
        """Note that a view is committed."""
        partial = view.without_workers()
        if partial.term != self._for_workers.term or not partial.same_servers(self._for_workers):
            self._for_workers = partial

    def publish(self, peer: object, view: View) -> CommitView | ViewChange | None:
        """Return the message about the committed view for a member; None if nothing is new to it."""
        sent = self._sent.get(peer)
        if sent is None or sent is self._for_workers or sent.order >= view.order:
            return None
        new = self._sent[peer] = self._for_workers if sent.is_partial else view
        if self._prepared.get(peer) is view:
            return CommitView(view.term, view.epoch)
        return ViewChange.between(sent, new)
