"""Servers that live and cannot reach each other: a cable between two of them is cut, and the scheduler hears both.

Nobody dies of that, but what one of them forwards to the other is never acknowledged, and workers would wait for ever.
So servers watch their links (:class:`Silence`), name in their heartbeats whom they do not reach, and the scheduler
decides (:class:`Reachability`) which one goes, by the membership's ``Expel``.

To expel a server that lives is safe for the same reason as to take a silent one for dead: the map's next version leaves
it out, every message about tables is compared with the version of its receiver's map, and an acknowledgement is that of
the whole chain. So whatever it still takes, before it hears that it was declared dead, is acknowledged to nobody.

Source: what several say of one another is put together before anybody goes, as in Suresh et al. 2018 "Stable and
Consistent Membership at Scale with Rapid"; here one scheduler decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.protocol.chains import ChainGroup


class Silence:
    """Who has not been heard, as one server sees those that it is linked to.

    It counts looks, not seconds: a process that was stopped, or busy, has looked once meanwhile, and accuses nobody of
    its own sleep. ``num_looks`` silent ones in a row make a server unreachable.
    """

    def __init__(self, num_looks: int = 5) -> None:
        self._num_looks = num_looks
        self._silent: dict[int, int] = {}  # target → looks at which nothing had come since the one before

    def heard(self, target: int) -> None:
        """Note a sign of life on the link to a server."""
        self._silent.pop(target, None)

    def look(self, targets: Iterable[int]) -> tuple[int, ...]:
        """Look once at these links, forget all others; return which servers are unreachable, in ascending order."""
        self._silent = {target: self._silent.get(target, -1) + 1 for target in targets}
        return tuple(sorted(target for target, silent in self._silent.items() if silent >= self._num_looks))


@dataclass(frozen=True, slots=True)
class Unreachable:
    """Expel this server: it lives, and so do the `others`, and it and they do not reach each other."""

    server: int
    others: tuple[int, ...]


class Reachability:
    """The complaints of servers about one another; the scheduler holds it. Servers are known by their incarnations.

    ``patience_s`` is how long two servers must be at odds, both heard by the scheduler all the time, before one goes.

    Raises:
        UsageError: the patience is not positive.
    """

    def __init__(self, patience_s: float) -> None:
        if not patience_s > 0:
            raise UsageError(f"Reachability(patience_s={patience_s}): expected more than 0.")
        self._patience_s = patience_s
        self._complaints: dict[int, dict[int, float]] = {}  # server → whom it does not reach → since when
        self._since_s: dict[int, float] = {}  # since when a server was heard without a pause
        self._last_s: dict[int, float] = {}

    def heard(self, server: int, unreachable: Collection[int], now_s: float) -> None:
        """Take a heartbeat: these are all that the server does not reach now."""
        if now_s - self._last_s.get(server, -float("inf")) > self._patience_s:
            self._since_s[server] = now_s
        self._last_s[server] = now_s
        former = self._complaints.get(server, {})
        self._complaints[server] = {other: former.get(other, now_s) for other in unreachable if other != server}

    def decide(self, living: Collection[int], groups: Iterable[ChainGroup], now_s: float) -> Unreachable | None:
        """Return which server has to go, if any: one at a time, so that the chains without it are looked at next.

        `living` are the members, all others are forgotten; `groups` the chains as they are.
        """
        for known in (self._complaints, self._since_s, self._last_s):
            for gone in known.keys() - set(living):
                del known[gone]
        at_odds = self._at_odds(now_s)
        due = {server for pair, since_s in at_odds.items() if now_s - since_s >= self._patience_s for server in pair}
        if not due:
            return None
        # Rule 2: nobody goes that is the last to have a bucket: to wait for the cable is better than to lose it.
        expendable = due - self._last_to_have(groups, now_s)
        if not expendable:
            return None
        # Rule 1: who is at odds with most goes: its own cable is cut.
        num_pairs = Counter(server for pair in at_odds for server in pair)
        # Rule 3: of those that are alike the younger one goes: it has less.
        server = max(expendable, key=lambda each: (num_pairs[each], each))
        return Unreachable(server, tuple(sorted(sum(pair) - server for pair in at_odds if server in pair)))

    @property
    def in_doubt(self) -> frozenset[int]:
        """The servers that complain of others, or that others complain of: any of them may be the one that goes."""
        pairs = ((server, other) for server, complaints in self._complaints.items() for other in complaints)
        return frozenset(end for pair in pairs for end in pair)

    def _last_to_have(self, groups: Iterable[ChainGroup], now_s: float) -> set[int]:
        """Return the servers without which some bucket would be lost, or might be.

        A member that was not heard lately may be dead already, though nobody has declared it so: it counts for nothing.
        """
        silent_s = self._patience_s / 2
        last: set[int] = set()
        for group in groups:
            there = {each for each in group.members if now_s - self._last_s.get(each, -float("inf")) <= silent_s}
            last.update(member for member in group.members if not there - {member})
        return last

    def _at_odds(self, now_s: float) -> dict[tuple[int, int], float]:
        """Return the pairs of which one does not reach the other, and since when.

        Rule 4: only what is said of and by servers that the scheduler hears counts, and only since it hears both. Of
        one that is silent here too the heartbeats tell all; one that was stopped has yet to answer the others.
        """
        pairs: dict[tuple[int, int], float] = {}
        for server, complaints in self._complaints.items():
            for other, since_s in complaints.items():
                if all(now_s - self._last_s.get(end, -float("inf")) <= self._patience_s for end in (server, other)):
                    pair = min(server, other), max(server, other)
                    since_s = max(since_s, self._since_s[server], self._since_s[other])
                    pairs[pair] = min(since_s, pairs.get(pair, since_s))
        return pairs

    def validate(self) -> None:
        """Assert the invariants."""
        assert self._complaints.keys() == self._since_s.keys() == self._last_s.keys()
        assert all(self._since_s[server] <= last_s for server, last_s in self._last_s.items())
        assert all(server not in complaints for server, complaints in self._complaints.items())
