"""Find live servers that cannot reach each other, although the scheduler reaches both.

Forwarded pushes between such servers are never acknowledged, and workers would wait forever. So each server watches its
links (:class:`Silence`) and lists unreachable servers in its heartbeats. The scheduler decides with
:class:`Reachability` which server to expel.

Expelling a live server is as safe as declaring a silent server dead. The next view excludes the server, every message
about tables is checked against the receiver's view, and an acknowledgement needs the whole chain. So pushes that the
server accepts before it receives its expulsion are never acknowledged.

Source: as in Suresh et al. 2018 "Stable and Consistent Membership at Scale with Rapid", the reports of several servers
are combined before one server is removed; here one scheduler decides. Comments refer to the rules of section "Cut
cables" in docs/explanation/protocol.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.protocol.chains import ChainGroup


class Silence:
    """Finds the links of one server on which no messages arrive.

    A server is unreachable after ``num_polls`` consecutive silent polls. Polls are counted instead of seconds, because
    a pause of this process then counts as only one silent poll.
    """

    def __init__(self, num_polls: int = 5) -> None:
        self._num_polls = num_polls
        # target → number of its consecutive silent polls (no message since the poll before); 0 after its first poll
        self._silent: dict[int, int] = {}
        self.unreachable: tuple[int, ...] = ()
        """The unreachable servers, ascending; may be read in any thread."""

    def received(self, target: int) -> None:
        self._silent.pop(target, None)
        if target in self.unreachable:  # update now, because the next heartbeat may precede the next poll
            self.unreachable = tuple(server for server in self.unreachable if server != target)

    def poll(self, targets: Iterable[int]) -> tuple[int, ...]:
        """Poll these links and drop all other links; return the unreachable servers, ascending."""
        self._silent = {target: self._silent.get(target, -1) + 1 for target in targets}
        self.unreachable = tuple(sorted(target for target, num in self._silent.items() if num >= self._num_polls))
        return self.unreachable


@dataclass(frozen=True, slots=True)
class Unreachable:
    """Expel this server, because the server and the live `peers` cannot reach each other."""

    server: int
    peers: tuple[int, ...]


class Reachability:
    """The scheduler's record of unreachable pairs of servers, by incarnation.

    If a pair was reported for ``patience_s``, and both servers sent heartbeats, one of the two is expelled. Raises
    UsageError if the patience is not positive.
    """

    def __init__(self, patience_s: float) -> None:
        if not patience_s > 0:
            raise UsageError(f"Reachability(patience_s={patience_s}): expected more than 0.")
        self._patience_s = patience_s
        self._complaints: dict[int, dict[int, float]] = {}  # server → unreachable server → time of the first report
        self._since_s: dict[int, float] = {}  # start of a server's uninterrupted heartbeats
        self._last_s: dict[int, float] = {}

    def record_heartbeat(self, server: int, unreachable: Collection[int], time_s: float) -> None:
        if self._silence_s(server, time_s) > self._patience_s:
            self._since_s[server] = time_s
        self._last_s[server] = time_s
        former = self._complaints.get(server, {})
        self._complaints[server] = {other: former.get(other, time_s) for other in unreachable if other != server}

    def decide(self, living: Collection[int], groups: Iterable[ChainGroup], time_s: float) -> Unreachable | None:
        """Return the server to expel, if any.

        A call returns one server, because the next decision needs the chains without this server. `living` are the
        members; records of other servers are dropped. `groups` are the current chains.
        """
        for known in (self._complaints, self._since_s, self._last_s):
            for dead in known.keys() - set(living):
                del known[dead]
        pairs = self._reported_pairs(time_s)
        due = {server for pair, reported_s in pairs.items() if reported_s >= self._patience_s for server in pair}
        if not due:
            return None
        # Rule 2: the last server with a bucket is never expelled: waiting for the network is better than data loss.
        expendable = due - self._last_to_have(groups, time_s)
        if not expendable:
            return None
        # Rule 1: expel the server that is in the most pairs, because its own link is probably cut.
        num_pairs = Counter(server for pair in pairs for server in pair)
        # Rule 3: of several such servers expel the youngest, because it has the least data.
        expelled = max(expendable, key=lambda server: (num_pairs[server], server))
        return Unreachable(expelled, tuple(sorted(sum(pair) - expelled for pair in pairs if expelled in pair)))

    @property
    def in_doubt(self) -> frozenset[int]:
        """The servers in any reported pair. Each of these servers may be expelled later."""
        pairs = ((server, other) for server, complaints in self._complaints.items() for other in complaints)
        return frozenset(end for pair in pairs for end in pair)

    def _last_to_have(self, groups: Iterable[ChainGroup], time_s: float) -> set[int]:
        """Return the servers whose removal could lose a bucket.

        A member without a recent heartbeat does not count as a copy, because the member may be dead.
        """
        silent_s = self._patience_s / 2
        last: set[int] = set()
        for group in groups:
            alive = {member for member in group.members if self._silence_s(member, time_s) <= silent_s}
            last.update(member for member in group.members if not alive - {member})
        return last

    def _silence_s(self, server: int, time_s: float) -> float:
        return time_s - self._last_s.get(server, -float("inf"))

    def _reported_pairs(self, time_s: float) -> dict[tuple[int, int], float]:
        """Return the pairs in which one server does not reach the other server, with the duration of the reports.

        Rule 4: a pair counts only while both servers send heartbeats without interruption, and its duration does not
        begin before these heartbeats. Servers without heartbeats are removed by the heartbeat timeout, and a
        server that resumes needs time to answer its peers.

        Rule 5: the duration ends with the last report, because the servers may have connected since.
        """
        pairs: dict[tuple[int, int], float] = {}
        for server, complaints in self._complaints.items():
            for other, since_s in complaints.items():
                if all(self._silence_s(end, time_s) <= self._patience_s for end in (server, other)):
                    pair = min(server, other), max(server, other)
                    since_s = max(since_s, self._since_s[server], self._since_s[other])
                    pairs[pair] = max(self._last_s[server] - since_s, pairs.get(pair, 0.0))
        return pairs

    def validate(self) -> None:
        assert self._complaints.keys() == self._since_s.keys() == self._last_s.keys()
        assert all(self._since_s[server] <= last_s for server, last_s in self._last_s.items())
        assert all(server not in complaints for server, complaints in self._complaints.items())
