"""The servers that the cluster is to do without: those that are suspected, and those that want to leave."""

from __future__ import annotations

from collections.abc import Collection, Iterable, KeysView

from paceline.protocol.chains import ChainGroup
from paceline.protocol.membership import Member
from paceline.protocol.reachability import Reachability
from paceline.protocol.scheduler.events import Note, waits_for


class Suspects:
    """The members that may live, though the scheduler does not hear them, or other servers do not reach them.

    `timeout_s` is how long a member may be silent.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._reachability = Reachability(timeout_s / 2)
        self._doubts: dict[int, str] = {}  # members that count as silent before they are overdue → why
        self._silent: dict[int, bool] = {}  # servers that are overdue → whether it was told that they are waited for
        self._cut_off: dict[int, str] = {}  # servers that are heard, and others do not reach; why they have to go
        self.needed: tuple[Member, ...] = ()
        """The servers without which nothing can be done: too many are silent."""

    @property
    def servers(self) -> Collection[int]:
        """The servers that are suspected."""
        return self._silent.keys() | self._cut_off.keys()

    @property
    def silent(self) -> KeysView[int]:
        """The servers that are not heard, in the order in which they fell silent."""
        return self._silent.keys()

    @property
    def at_odds(self) -> frozenset[int]:
        """The servers that complain of others, or that others complain of: any of them may be suspected next."""
        return self._reachability.in_doubt

    def reasons(self) -> dict[int, str]:
        """Why each of the servers has to go, if it has to."""
        return {**{each: self.reason(each) for each in self._silent}, **self._cut_off}

    def reason(self, incarnation: int) -> str:
        """Why a member that is not heard is given up."""
        return self._doubts.get(incarnation, f"nothing was heard from it for {self._timeout_s:g} s")

    def doubt(self, incarnation: int, reason: str) -> None:
        """Note why a member counts as silent before it is overdue."""
        self._doubts[incarnation] = reason

    def take_over(self, absent: Iterable[int]) -> None:
        """Suspect the servers that have not come to this scheduler, which takes over."""
        for each in absent:
            self._silent[each] = False
            self._doubts[each] = "it has not come to the scheduler that took over"

    def heard(self, incarnation: int) -> bool | None:
        """Note a sign of life: None if it was not silent, else whether it was told that it is waited for."""
        self._doubts.pop(incarnation, None)
        return self._silent.pop(incarnation, None)

    def report(self, server: int, unreachable: Collection[int], now_s: float) -> None:
        """Note which others a server does not reach."""
        self._reachability.record_heartbeat(server, unreachable, now_s)

    def forget_reports(self) -> None:
        """Forget what servers have said of one another."""
        self._reachability = Reachability(self._timeout_s / 2)

    def removed(self, incarnation: int) -> None:
        """Forget one that is no member any more."""
        for known in (self._silent, self._cut_off, self._doubts):
            known.pop(incarnation, None)

    def look_at_links(self, ranks: dict[int, int], groups: Iterable[ChainGroup], now_s: float) -> bool:
        """Suspect a server that others cannot reach, though the scheduler hears all of them; return whether one is."""
        cut_off = self._reachability.decide(ranks.keys() - self._cut_off.keys(), groups, now_s)
        if cut_off is None:
            return False
        others = " and ".join(f"server {ranks[other]}" for other in cut_off.peers)
        reason = f"it and {others} could not reach each other for {self._timeout_s:g} s, though all of them live"
        self._cut_off[cut_off.server] = reason
        return True

    def fall_silent(self, servers: Collection[int]) -> None:
        """Suspect these servers, which are overdue: the others go on without them."""
        self._silent = {**dict.fromkeys(servers, False), **self._silent}

    def wait_for(self, servers: tuple[Member, ...]) -> list[Note]:
        """Wait for these servers, which are overdue: the others may not go on without them. It is said once."""
        was_told, self.needed = servers == self.needed, servers
        return [] if was_told else [waits_for(servers, "to go on without them")]

    def wait_no_more(self) -> list[Note]:
        """Wait for no server that is overdue."""
        was_needed, self.needed = self.needed, ()
        return [Note("hears enough of the servers that have buckets again, and goes on")] if was_needed else []

    def tell(self, servers: Iterable[int]) -> list[int]:
        """Return those of these servers that are silent, and of which it was not told yet that they are waited for."""
        news = [each for each in servers if not self._silent.get(each, True)]
        self._silent.update(dict.fromkeys(news, True))
        return news


class Drains:
    """The servers that want to leave once their buckets are on others."""

    def __init__(self) -> None:
        self.servers: set[int] = set()
        self._are_all = False  # since the last that wanted to, while none died
        self._released: set[int] = set()  # where all are draining

    def take_over(self, leaving: Iterable[int], servers: Collection[int], num_expected: int) -> None:
        """Go on from what the members say: these want to leave, of these servers.

        Where some are missing they may have died, though they did not want to leave: what is left is not given up.
        """
        self.servers = set(leaving) & set(servers)
        self._are_all = set(servers) <= self.servers and len(servers) >= num_expected

    def add(self, server: int, servers: Collection[int]) -> None:
        """Note that one of these servers wants to leave."""
        self.servers.add(server)
        self._are_all = set(servers) <= self.servers

    def connected(self, incarnation: int) -> None:
        """Note that a member is connected anew: it may not have heard of its release."""
        self._released.discard(incarnation)

    def removed(self, incarnation: int) -> None:
        """Forget one that is no member any more."""
        self.servers.discard(incarnation)
        self._released.discard(incarnation)

    def release_all(self, servers: Collection[int], connected: Collection[int]) -> list[int]:
        """Return the servers to be released though nobody relieves them: all want to go.

        Not those that are left alone since the others died: with them would go what nobody else has.
        """
        self._are_all = self._are_all and set(servers) <= self.servers
        released = [each for each in sorted(set(servers) - self._released) if each in connected and self._are_all]
        self._released.update(released)
        return released
