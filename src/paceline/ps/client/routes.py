"""Routes: the primaries of all buckets, computed from a view for a client.

:class:`RouteWatch` has the routes of the newest view, which the thread of the scheduler link receives while the client
may still use the previous view.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from paceline.errors import ConnectionLostError, DeadlineError, PacelineError, ProtocolError
from paceline.protocol import NUM_BUCKETS, Member, Role
from paceline.protocol.buckets import Buckets
from paceline.protocol.chains import ChainGroup, leads_of
from paceline.ps.messages import View
from paceline.tables.bucket_arrays import to_flags

CLUSTER_ENDED: Final = (
    "the cluster has ended, and its tables were deleted: use them inside the with block of local_cluster, and save "
    "the model before the cluster ends"
)


@dataclass(frozen=True, eq=False)
class Routes:
    """The servers in any chain of a view: first the primaries by rank, then the other servers by rank."""

    version: int
    groups: tuple[ChainGroup, ...]
    servers: tuple[Member, ...]
    leads: tuple[Buckets, ...]
    owners: npt.NDArray[np.int32]
    """Bucket → position of its primary in `servers`; 0 for lost buckets."""
    lost: Buckets
    lost_with: tuple[int, ...]
    """The ranks, if known, of the servers that died with the lost buckets."""
    has_ended: bool = False
    """Whether a process requested the end of the cluster. In this case, servers that stop have not died."""

    @property
    def server_ranks(self) -> tuple[int, ...]:
        return tuple(server.rank for server, led in zip(self.servers, self.leads, strict=True) if led)

    def has(self, incarnation: int) -> bool:
        return any(server.incarnation == incarnation for server in self.servers)

    def loss(self) -> ConnectionLostError:
        if self.has_ended:
            return ConnectionLostError(CLUSTER_ENDED)
        return ConnectionLostError(f"{self.describe_loss()}: start again from the last saved model")

    def describe_loss(self) -> str:
        ranks = [str(rank) for rank in self.lost_with]
        many = len(ranks) > 1
        names = f"{', '.join(ranks[:-1])} and {ranks[-1]}" if many else "".join(ranks) or "(of unknown rank)"
        return (
            f"server{'s' if many else ''} {names} died: {self.lost.bit_count()} of "
            f"{NUM_BUCKETS} buckets of the tables were lost, because they had no replica"
        )


def make_routes(view: View, before: Routes | None = None, known: Mapping[int, Member] | None = None) -> Routes:
    """Return the routes of a view with chains.

    `before` (the former routes) and `known` (servers by incarnation) identify the servers that had the lost buckets.
    """
    members = {**(known or {}), **{m.incarnation: m for m in view.members if m.role is Role.SERVER}}
    groups = view.groups
    led, lost = leads_of(groups)
    if not members.keys() >= led.keys():
        raise ProtocolError(f"view {view.version} has chains with servers that are not members")
    servers = sorted((members[server] for server in led), key=lambda m: (not led[m.incarnation], m.rank))
    leads = tuple(led[server.incarnation] for server in servers)
    owners = np.zeros(NUM_BUCKETS, np.int32)
    for position, buckets in enumerate(leads):
        owners[to_flags(buckets)] = position
    lost_with = _lost_with(lost, before, members)
    has_ended = before is not None and before.has_ended
    return Routes(view.version, groups, tuple(servers), leads, owners, lost, lost_with, has_ended)


def _lost_with(lost: Buckets, before: Routes | None, members: Mapping[int, Member]) -> tuple[int, ...]:
    if not lost or before is None:
        return ()
    ranks = set(before.lost_with)
    for group in before.groups:
        if group.buckets & lost & ~before.lost:
            ranks.update(members[server].rank for server in group.members if server in members)
    return tuple(sorted(ranks))


class RouteWatch:
    """The newest routes, and waits for newer routes. :meth:`take` is called in the thread that receives views."""

    def __init__(self) -> None:
        self.must_follow = False
        """Whether the client must call :meth:`Servers.follow`: newer routes came, or a server rejected a request."""
        self.newest: Routes | None = None
        self._known: dict[int, Member] = {}
        self._changed = threading.Condition()
        self._error: PacelineError | None = None

    def take(self, view: View) -> bool:
        """Receive a view; return whether its chains are newer than the known chains."""
        with self._changed:
            self._known.update({m.incarnation: m for m in view.members if m.role is Role.SERVER})
            if not view.groups or (self.newest is not None and view.version <= self.newest.version):
                return False
            self.newest = make_routes(view, self.newest, self._known)
            self.must_follow = True
            self._changed.notify_all()
            return True

    def end(self) -> None:
        """Record that a process requested the end of the cluster. Servers that stop after this have not died."""
        with self._changed:
            if self.newest is not None:
                self.newest = replace(self.newest, has_ended=True)

    def fail(self, error: PacelineError) -> None:
        """Make all current and later waits raise `error`."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def has(self, incarnation: int) -> bool:
        return self.newest is None or self.newest.has(incarnation)

    def is_newer_than(self, version: int) -> bool:
        return self.newest is not None and self.newest.version > version

    def pause(self, seconds: float) -> None:
        with self._changed:
            known = self.newest
            self._changed.wait_for(lambda: self.newest is not known, seconds)

    def wait_newer(self, version: int, timeout_s: float, deadline: float | None = None) -> Routes:
        """Wait for routes of a higher version; return the newest. Raises DeadlineError, or the error of :meth:`fail`.

        With a `deadline` (monotonic clock) the wait ends then, and `timeout_s` is used only in the error message.
        """
        deadline = time.monotonic() + timeout_s if deadline is None else deadline
        with self._changed:
            while not self.is_newer_than(version):
                if self._error is not None:
                    raise self._error
                if not self._changed.wait(max(deadline - time.monotonic(), 0.0)) and time.monotonic() >= deadline:
                    raise DeadlineError(
                        f"no view after version {version} came from the scheduler within {timeout_s:g} s, and servers "
                        f"reject requests of version {version}: check that the scheduler runs"
                    )
            assert self.newest is not None
            return self.newest


def no_routes() -> Routes:
    return Routes(0, (), (), (), np.zeros(NUM_BUCKETS, np.int32), 0, ())
