"""Processes that wait for admission, and the connections of members."""

from __future__ import annotations

from collections.abc import Iterable, KeysView
from typing import Final

from paceline.protocol.membership import Role
from paceline.protocol.scheduler.messages import Register
from paceline.protocol.transitions import OUTSIDE, StateTable, Transition

MEMBER: Final = StateTable(
    "an incarnation of a node",
    ("live", "silent", "gone"),
    (
        Transition(OUTSIDE, "Register", OUTSIDE, "Reject", when="rank taken or negative"),
        Transition(OUTSIDE, "form", OUTSIDE, "Reject", when="the same"),
        Transition(OUTSIDE, "publish", OUTSIDE, "Reject", when="the same"),
        Transition(OUTSIDE, "Register", "live"),
        Transition(OUTSIDE, "form", "live", when="it has registered before"),
        Transition(OUTSIDE, "publish", "live", when="it has registered while members were awaited"),
        Transition(OUTSIDE, "Rejoin", "live", when="in no view, and it has not worked"),
        Transition(OUTSIDE, "take over", "live", when="it is back"),
        Transition(OUTSIDE, "take over", "silent", when="an absent server"),
        Transition(OUTSIDE, "take over", "gone", when="absent"),
        Transition(OUTSIDE, "take over", "gone", "DeclareDead", when="back, but not in the newest view"),
        Transition(OUTSIDE, "Rejoin", "gone", "DeclareDead", when="not in the newest view"),
        Transition(OUTSIDE, "Leave", "gone", "DeclareDead", when="while members are awaited"),
        Transition(OUTSIDE, "give up", "gone", "DeclareDead"),
        Transition(OUTSIDE, "take over", "gone", "ReleaseServer", when="not in the newest view, and was draining"),
        Transition(OUTSIDE, "Rejoin", "gone", "ReleaseServer", when="the same"),
        Transition("live", "Register", "live"),
        Transition("live", "Rejoin", "live"),
        Transition("live", "Heartbeat", "live"),
        Transition("live", "welcome", "live", "Admit", when="it is in the committed view"),
        Transition("live", "publish", "live", "ReleaseServer", when="all servers drain"),
        Transition("live", "TimePassed", "silent", when="an overdue server"),
        Transition("live", "Suspected", "silent", when="a server"),
        Transition("live", "TimePassed", "gone", "DeclareDead", when="overdue, and not a server"),
        Transition("live", "Suspected", "gone", "DeclareDead", when="not a server"),
        Transition("live", "ProcessEnded", "gone", "DeclareDead"),
        Transition("live", "publish", "gone", "DeclareDead", when="cut off from others, or silent and in no chain"),
        Transition("live", "publish", "gone", "ReleaseServer", when="it drains, and no chain needs it"),
        Transition("live", "TimePassed", "gone", when="not connected"),
        Transition("live", "Suspected", "gone", when="not connected"),
        Transition("live", "ProcessEnded", "gone", when="not connected"),
        Transition("live", "publish", "gone", when="not connected"),
        Transition("live", "Leave", "gone"),
        Transition("silent", "Register", "live"),
        Transition("silent", "Rejoin", "live"),
        Transition("silent", "Heartbeat", "live"),
        Transition("silent", "welcome", "silent", "Admit", when="it is in the committed view"),
        Transition("silent", "publish", "silent", "ReleaseServer", when="all servers drain"),
        Transition("silent", "ProcessEnded", "gone", "DeclareDead"),
        Transition("silent", "publish", "gone", "DeclareDead", when="no chain needs it"),
        Transition("silent", "publish", "gone", "ReleaseServer", when="it drains, and no chain needs it"),
        Transition("silent", "ProcessEnded", "gone", when="not connected"),
        Transition("silent", "publish", "gone", when="not connected"),
        Transition("silent", "Leave", "gone"),
        Transition("gone", "take over", "silent", when="no known view shows its removal"),
        Transition("gone", "Heartbeat", "gone", "DeclareDead"),
        Transition("gone", "Rejoin", "gone", "DeclareDead"),
        Transition("gone", "Rejoin", "gone", "ReleaseServer", when="it was draining"),
        Transition("gone", "Rejoin", "live", when="an observer"),
    ),
)
"""The states of processes that register or rejoin, and the instructions about them.

Names in lower case are conditions, which may become true at any event: the scheduler forms a cluster, takes over, gives
up a cluster without live servers, publishes a view, or welcomes the members of a published view.
"""


class Newcomers:
    """The processes that have registered and wait for a cluster."""

    def __init__(self) -> None:
        self._waiting: dict[object, Register] = {}  # connection → registration
        self._peers: dict[str, object] = {}  # node → connection
        self.num_servers = 0
        """The number of servers that count towards the start of the cluster."""

    @property
    def nodes(self) -> KeysView[str]:
        return self._peers.keys()

    @property
    def highest_term(self) -> int:
        return max((registration.highest_term for registration in self._waiting.values()), default=0)

    def add(self, peer: object, registration: Register) -> None:
        """Add a process that registers; a node's newest connection replaces its earlier one."""
        self.forget(self._peers.get(registration.node))
        self.forget(peer)
        self._waiting[peer] = registration
        self._peers[registration.node] = peer
        self.num_servers += _counts(registration)

    def forget(self, peer: object) -> None:
        registration = self._waiting.pop(peer, None)
        if registration is not None:
            del self._peers[registration.node]
            self.num_servers -= _counts(registration)

    def take(self) -> list[tuple[object, Register]]:
        """Remove and return all processes: first the processes with a requested rank, last the extra servers."""
        waiting = list(self._waiting.items())
        self._waiting, self._peers, self.num_servers = {}, {}, 0
        return sorted(waiting, key=lambda item: (item[1].is_extra, item[1].rank is None))

    def take_nodes(self, nodes: Iterable[str]) -> list[tuple[object, Register]]:
        found = [(peer, registration) for peer, registration in self._waiting.items() if registration.node in nodes]
        for peer, _ in found:
            self.forget(peer)
        return found


def _counts(registration: Register) -> bool:
    return registration.role is Role.SERVER and not registration.is_extra


class MemberPeers:
    """The connections of members."""

    def __init__(self) -> None:
        self._peers: dict[int, object] = {}  # incarnation → connection
        self._incarnations: dict[object, int] = {}  # connection → incarnation; includes removed members

    def connect(self, incarnation: int, peer: object) -> None:
        former = self._peers.get(incarnation)
        if former is not None:
            self._incarnations.pop(former, None)
        self._peers[incarnation] = peer
        self._incarnations[peer] = incarnation

    def disconnect(self, peer: object) -> None:
        incarnation = self._incarnations.pop(peer, None)
        if incarnation is not None and self._peers.get(incarnation) is peer:
            del self._peers[incarnation]

    def remove(self, incarnation: int) -> object | None:
        """Remove a member; return its connection, for which :meth:`incarnation_of` still returns the member."""
        return self._peers.pop(incarnation, None)

    def incarnation_of(self, peer: object) -> int | None:
        """Return the incarnation of the member on a connection, which may be a removed member."""
        return self._incarnations.get(peer)

    @property
    def connected(self) -> KeysView[int]:
        return self._peers.keys()

    def of(self, incarnations: Iterable[int]) -> tuple[object, ...]:
        return tuple(self._peers[incarnation] for incarnation in incarnations if incarnation in self._peers)

    def validate(self) -> None:
        assert all(self._incarnations.get(peer) == incarnation for incarnation, peer in self._peers.items())
