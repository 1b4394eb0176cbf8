"""How a scheduler that was started in the place of another learns what that one knew: from the nodes.

While it recovers it collects their :class:`messages.Rejoin` and holds whatever else they want. It is through when every
member of the latest map that any of them has seen is back, or when its time is over; who is not back then is dead.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline.protocol import ChainGroup, Member, Role
from paceline.ps import messages
from paceline.ps.account import Account
from paceline.ps.messages import JobMemory, KnownTable, MemberInfo, Rejoin
from paceline.transport import Header, Peer

ROLES = {"server": Role.SERVER, "worker": Role.WORKER, "observer": Role.OBSERVER}


class Returned(NamedTuple):
    """A node that came back."""

    peer: Peer
    header: Header
    rejoin: Rejoin


class Held(NamedTuple):
    """A frame that came meanwhile."""

    peer: Peer
    header: Header
    request: Any
    body: bytes


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the nodes know together."""

    settings: messages.Settings
    epoch: int
    """Of the latest map."""
    returned: tuple[Returned, ...]
    others: tuple[Returned, ...]
    """Nodes of another cluster than most servers are of."""
    expelled: tuple[Returned, ...]
    """Nodes that are not on the latest map: they were declared dead."""
    dead: tuple[MemberInfo, ...]
    """Members of the latest map that did not come back."""
    version: int
    """Of the latest map's chains; 0 if not all expected servers had joined."""
    groups: tuple[ChainGroup, ...]
    tables: tuple[KnownTable, ...]
    account: Account
    """Of the latest job; its number is 0 if there was none."""
    poster: Returned | None
    """Who has posted the latest job, if it is back."""

    @property
    def lost_all_servers(self) -> bool:
        """Whether there were servers and none came back."""
        return any(m.role == "server" for m in self.dead) and not any(map(_is_server, self.returned))

    def members(self) -> tuple[Member, ...]:
        """Those that came back."""
        return tuple(
            Member(each.rejoin.node, ROLES[each.rejoin.role], each.rejoin.rank, each.rejoin.incarnation, ())
            for each in self.returned
        )

    def memories(self) -> dict[int, tuple[int, JobMemory]]:
        """The incarnations of the workers that came back, and what each knows of the latest job, by rank."""
        found = {}
        for _, _, rejoin in self.returned:
            if rejoin.role == "worker":
                job = rejoin.job
                known = job is not None and job.number == self.account.number
                found[rejoin.rank] = (rejoin.incarnation, job if job is not None and known else JobMemory(number=0))
        return found

    def dead_workers(self) -> dict[int, int]:
        """The incarnations of the workers that did not come back, by rank."""
        return {member.rank: member.incarnation for member in self.dead if member.role == "worker"}


class Recovery:
    """Collects what the nodes say."""

    def __init__(self) -> None:
        self._rejoins: dict[Peer, Returned] = {}
        self._held: list[Held] = []

    @property
    def num_rejoined(self) -> int:
        """How many nodes have come back so far."""
        return len(self._rejoins)

    def add(self, peer: Peer, header: Header, rejoin: Rejoin) -> None:
        """Take note of a node that is back."""
        self._rejoins[peer] = Returned(peer, header, rejoin)

    def hold(self, peer: Peer, header: Header, request: Any, body: memoryview) -> None:
        """Keep a frame until all is known."""
        self._held.append(Held(peer, header, request, bytes(body)))

    def forget(self, peer: Peer) -> None:
        """Drop whatever came over a connection that broke."""
        self._rejoins.pop(peer, None)
        self._held = [each for each in self._held if each.peer is not peer]

    def held(self) -> list[Held]:
        """What was kept, in the order in which it came."""
        return self._held

    def is_complete(self) -> bool:
        """Whether everybody is back: the members of the latest map, and whoever has posted the latest job."""
        if not self._rejoins:
            return False
        ours = self._ours()
        back = {each.rejoin.incarnation for each in ours}
        jobs = [each.rejoin.job for each in ours if each.rejoin.job is not None]
        number = max((job.number for job in jobs), default=0)
        all_back = all(member.incarnation in back for member in _latest_map(ours).members)
        return all_back and (number == 0 or any(_has_posted(job, number) for job in jobs))

    def decide(self) -> Found:
        """Put together what is known. At least one node must be back."""
        ours = self._ours()
        cluster = ours[0].rejoin.settings.cluster
        latest = _latest_map(ours)
        alive = {member.incarnation for member in latest.members}
        returned = [each for each in ours if each.rejoin.role == "observer" or each.rejoin.incarnation in alive]
        back = {each.rejoin.incarnation for each in returned}
        account = _account_of(returned)
        posters = [each for each in returned if _has_posted(each.rejoin.job, account.number)]
        return Found(
            settings=ours[0].rejoin.settings,
            epoch=latest.epoch,
            returned=tuple(returned),
            others=tuple(each for each in self._rejoins.values() if each.rejoin.settings.cluster != cluster),
            expelled=tuple(each for each in ours if each.rejoin.incarnation not in back),
            dead=tuple(member for member in latest.members if member.incarnation not in back),
            version=latest.version,
            groups=latest.chain_groups(),
            tables=_tables_of(returned),
            account=account,
            poster=posters[0] if posters else None,
        )

    def _ours(self) -> list[Returned]:
        """The nodes of the cluster that most servers, or else most nodes, are of."""
        names = [each.rejoin.settings.cluster for each in self._rejoins.values()]
        votes = Counter(names)
        servers = Counter(each.rejoin.settings.cluster for each in self._rejoins.values() if _is_server(each))
        cluster = max(names, key=lambda name: (servers[name], votes[name]))
        return [each for each in self._rejoins.values() if each.rejoin.settings.cluster == cluster]


def _is_server(returned: Returned) -> bool:
    return returned.rejoin.role == "server"


def _latest_map(returned: list[Returned]) -> messages.ClusterMap:
    return max((each.rejoin.cluster for each in returned), key=lambda known: (known.epoch, known.version))


def _has_posted(job: JobMemory | None, number: int) -> bool:
    return job is not None and job.number == number and job.posted is not None


def _account_of(returned: list[Returned]) -> Account:
    jobs = [each.rejoin.job for each in returned if each.rejoin.job is not None]
    account = Account(max((job.number for job in jobs), default=0))
    for job in jobs:
        if job.number == account.number:
            account.merge(job)
    return account


def _tables_of(returned: list[Returned]) -> tuple[KnownTable, ...]:
    """The tables: as servers hold them, or else as clients have declared them."""
    tables: dict[int, KnownTable] = {}
    for each in sorted(returned, key=_is_server, reverse=True):
        for table in each.rejoin.tables:
            tables.setdefault(table.number, table)
    return tuple(table for _, table in sorted(tables.items()))
