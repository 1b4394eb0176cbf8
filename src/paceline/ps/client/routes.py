"""Which server leads which buckets, as a client sees it: a map of the cluster made ready for use, and news of the next.

:class:`Routes` is one map. :class:`MapWatch` holds the newest, which comes in the thread of the line to the scheduler,
while the client still works by the one before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from paceline.errors import ConnectionLostError, DeadlineError, PacelineError, ProtocolError
from paceline.protocol import NUM_BUCKETS, Member, Role
from paceline.protocol.buckets import Buckets, count
from paceline.protocol.chains import ChainGroup, leads_of
from paceline.ps.messages import View
from paceline.tables.bucket_arrays import to_flags

CLUSTER_ENDED: Final = (
    "the cluster was closed, or told to end, and its tables are gone: use them before that (inside the with block of a "
    "local_cluster), and save what is to be kept"
)


@dataclass(frozen=True, eq=False)
class Routes:
    """A map of the cluster: the servers that are part of a chain, those that lead buckets first, each kind by rank."""

    version: int
    groups: tuple[ChainGroup, ...]
    servers: tuple[Member, ...]
    leads: tuple[Buckets, ...]
    """What each of `servers` leads; 0 for those that come last."""
    owners: npt.NDArray[np.int32]
    """Bucket → position in `servers` of who leads it; 0 where nobody does."""
    lost: Buckets
    """The buckets that nobody has."""
    lost_with: tuple[int, ...]
    """The ranks of the servers that died with them, as far as known."""
    has_ended: bool = False
    """Whether the cluster was told to end: then its servers have not died."""

    @property
    def server_ranks(self) -> tuple[int, ...]:
        """The ranks of the servers that lead buckets, rising."""
        return tuple(server.rank for server, led in zip(self.servers, self.leads, strict=True) if led)

    def has(self, incarnation: int) -> bool:
        """Whether a server is part of a chain."""
        return any(server.incarnation == incarnation for server in self.servers)

    def loss(self) -> ConnectionLostError:
        """Return what to raise for the buckets that are lost."""
        if self.has_ended:
            return ConnectionLostError(CLUSTER_ENDED)
        return ConnectionLostError(f"{self.describe_loss()}: start again from the last saved model")

    def describe_loss(self) -> str:
        """Say which buckets are lost, and with whom."""
        ranks = [str(rank) for rank in self.lost_with]
        many = len(ranks) > 1
        names = f"{', '.join(ranks[:-1])} and {ranks[-1]}" if many else "".join(ranks) or "(of unknown rank)"
        return (
            f"server{'s' if many else ''} {names} died, and with {'them' if many else 'it'} {count(self.lost)} of "
            f"{NUM_BUCKETS} buckets of the tables that had no replica left"
        )


def make_routes(cluster: View, before: Routes | None = None, known: Mapping[int, Member] | None = None) -> Routes:
    """Return the routes of a map that has chains; `before` and `known` (by incarnation) tell who had what is lost."""
    members = {**(known or {}), **{m.incarnation: m for m in cluster.members if m.role is Role.SERVER}}
    groups = cluster.groups
    led, lost = leads_of(groups)
    if not members.keys() >= led.keys():
        raise ProtocolError(f"map {cluster.version} of the cluster has servers in chains that are no members of it")
    servers = sorted((members[server] for server in led), key=lambda m: (not led[m.incarnation], m.rank))
    leads = tuple(led[server.incarnation] for server in servers)
    owners = np.zeros(NUM_BUCKETS, np.int32)
    for position, buckets in enumerate(leads):
        owners[to_flags(buckets)] = position
    lost_with = _lost_with(lost, before, members)
    has_ended = before is not None and before.has_ended
    return Routes(cluster.version, groups, tuple(servers), leads, owners, lost, lost_with, has_ended)


def _lost_with(lost: Buckets, before: Routes | None, members: Mapping[int, Member]) -> tuple[int, ...]:
    if not lost or before is None:
        return ()
    ranks = set(before.lost_with)
    for group in before.groups:
        if group.buckets & lost & ~before.lost:
            ranks.update(members[server].rank for server in group.members if server in members)
    return tuple(sorted(ranks))


class MapWatch:
    """The newest routes, and who waits for newer ones. `take` is called in the thread that maps come in."""

    def __init__(self) -> None:
        self.is_unsettled = False
        """Whether the client has to look: there are newer routes, or a server has refused a request."""
        self.newest: Routes | None = None
        self._known: dict[int, Member] = {}
        self._changed = threading.Condition()
        self._error: PacelineError | None = None

    def take(self, cluster: View) -> bool:
        """Take a map; return whether its chains are newer than those known."""
        with self._changed:
            self._known.update({m.incarnation: m for m in cluster.members if m.role is Role.SERVER})
            if not cluster.groups or (self.newest is not None and cluster.version <= self.newest.version):
                return False
            self.newest = make_routes(cluster, self.newest, self._known)
            self.is_unsettled = True
            self._changed.notify_all()
            return True

    def end(self) -> None:
        """Note that the cluster is told to end: servers that go from now on have not died."""
        with self._changed:
            if self.newest is not None:
                self.newest = replace(self.newest, has_ended=True)

    def fail(self, error: PacelineError) -> None:
        """Let all that wait for a map, now or later, raise this."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    @property
    def has_failed(self) -> bool:
        """Whether no map will come any more."""
        return self._error is not None

    def has(self, incarnation: int) -> bool:
        """Whether a server is part of a chain of the newest map."""
        return self.newest is None or self.newest.has(incarnation)

    def is_newer_than(self, version: int) -> bool:
        """Whether there are routes of a higher version."""
        return self.newest is not None and self.newest.version > version

    def pause(self, seconds: float) -> None:
        """Wait so long, or until there are newer routes than now."""
        with self._changed:
            known = self.newest
            self._changed.wait_for(lambda: self.newest is not known, seconds)

    def wait_newer(self, version: int, timeout_s: float, deadline: float | None = None) -> Routes:
        """Wait for routes of a higher version; return the newest. Raises DeadlineError, and what `fail` was told.

        With a `deadline`, a time of the monotonic clock, `timeout_s` is only what the error says.
        """
        deadline = time.monotonic() + timeout_s if deadline is None else deadline
        with self._changed:
            while not self.is_newer_than(version):
                if self._error is not None:
                    raise self._error
                if not self._changed.wait(max(deadline - time.monotonic(), 0.0)) and time.monotonic() >= deadline:
                    raise DeadlineError(
                        f"the scheduler has not told within {timeout_s:g} s which servers hold the tables now: the map "
                        f"that is known here is of version {version}, and no server works by it any more"
                    )
            assert self.newest is not None
            return self.newest


def no_routes() -> Routes:
    """Return what there is before the first map."""
    nobody: Sequence[Member] = ()
    return Routes(0, (), tuple(nobody), (), np.zeros(NUM_BUCKETS, np.int32), 0, ())
