"""What one client has under way: which part of which request waits for which server, and what is sent again.

A client holds one :class:`Outbox`. A request covers buckets; the outbox cuts it by the server that leads each, and
after a cut connection, a refusal or a new map says what goes out again, to whom and in which order. Servers tell a push
that comes twice by its number, so to send too much is never wrong; to send a later push of a bucket before an earlier
one would be.

Under sequential consistency a push is answered when it is in the primary's memory, before the servers behind it have
it: it is *kept* until its iteration is known to be durable, and goes out again if another server leads its bucket by
then. While no server is behind any primary there is nobody who could lead it next, and nothing is kept.

Source: as :mod:`paceline.protocol.replication`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from paceline.protocol.chains import ChainGroup, has_followers


@dataclass(frozen=True, slots=True)
class Send:
    """Send that part of the request `token` that falls into `buckets` to `server`, as number `number`."""

    token: object
    server: int
    number: int
    buckets: int


@dataclass(frozen=True, slots=True)
class Done:
    """All parts of the request are answered."""

    token: object


@dataclass(eq=False, slots=True)
class _Request:
    token: object
    buckets: int
    """What is not answered."""
    keep_clock: int | None
    """The iteration until whose completion its parts are kept; None: no longer than they are answered."""
    parts: dict[int, tuple[int, int]] = field(default_factory=dict)  # number → server, buckets
    kept: dict[int, int] = field(default_factory=dict)  # server → buckets that it has answered
    is_done: bool = False


class Outbox:
    """The requests of one client that are not answered, or not durable, in the order in which they were made.

    A client may keep the books itself while nothing goes wrong, and only at a change of the map make an outbox of the
    `version` before, have it adopt what is under way, and do as :meth:`change` bids.
    """

    def __init__(self, version: int = 0) -> None:
        self._version = version
        self._leads: dict[int, int] = {}  # server → the buckets that it leads
        self._requests: dict[_Request, None] = {}
        self._by_number: dict[int, _Request] = {}
        self._number = 0
        self._unsettled = False
        self._keeps = False  # as the map says

    @property
    def version(self) -> int:
        """The version of the map that requests are cut by; 0 before the first."""
        return self._version

    @property
    def servers(self) -> frozenset[int]:
        """The servers that lead a bucket."""
        return frozenset(self._leads)

    @property
    def lost(self) -> int:
        """The buckets of unanswered requests that nobody leads."""
        led = 0
        for buckets in self._leads.values():
            led |= buckets
        missing = 0
        for request in self._requests:
            missing |= request.buckets & ~led
        return missing

    @property
    def needs_map(self) -> bool:
        """Whether a server has refused a request as one of an old map, and no newer one has come since."""
        return self._unsettled

    @property
    def num_waiting(self) -> int:
        """How many parts wait for an answer."""
        return len(self._by_number)

    def start(self, token: object, buckets: int, *, keep_clock: int | None = None) -> list[Send]:
        """Begin a request; return its parts. Under sequential consistency a push is kept until `keep_clock` is over."""
        request = _Request(token, buckets, keep_clock)
        self._requests[request] = None
        return list(self._cut(request, buckets))

    def adopt(
        self, token: object, buckets: int, *, kept: Mapping[int, int] | None = None, keep_clock: int | None = None
    ) -> None:
        """Take over a request, later than all before: `buckets` of it are not answered, `kept` are, by whom.

        Of one push there must be one request only, whatever its parts: two frames of one number to one server, and the
        server would take the second for a repetition.
        """
        self._requests[_Request(token, buckets, keep_clock, kept=dict(kept or {}), is_done=not buckets)] = None

    def answered(self, number: int) -> list[Done]:
        """Note the answer to a part; one that was sent again since is ignored."""
        request = self._by_number.pop(number, None)
        if request is None:
            return []
        server, buckets = request.parts.pop(number)
        request.buckets &= ~buckets
        if request.keep_clock is not None and self._keeps:
            request.kept[server] = request.kept.get(server, 0) | buckets
        return self._look(request)

    def failed(self, number: int) -> object | None:
        """Give up the whole request that a part belongs to; return its token, None if it is not under way."""
        request = self._by_number.get(number)
        if request is None:
            return None
        self._forget_parts(request)
        self._requests.pop(request, None)
        return request.token

    def refused(self, number: int) -> None:
        """Note that a server has a newer map: the part goes out again when that map is here."""
        if number in self._by_number:
            self._unsettled = True

    def durable(self, server: int, clock: int) -> None:
        """Note that at `server` all iterations below `clock` are complete and safe: their pushes need not be kept."""
        for request in list(self._requests):
            if request.keep_clock is not None and request.keep_clock < clock and server in request.kept:
                del request.kept[server]
                self._look(request)

    def change(self, version: int, groups: tuple[ChainGroup, ...]) -> list[Send]:
        """Take a newer map; return what goes out again, in order. An older one is ignored."""
        if version <= self._version:
            return []
        follows = version == self._version + 1
        self._version = version
        self._unsettled = False
        self._leads = {}
        self._keeps = has_followers(groups)
        for group in groups:
            if group.members:
                first = group.members[0]
                self._leads[first] = self._leads.get(first, 0) | group.buckets
        sends: list[Send] = []
        for request in list(self._requests):
            self._forget_parts(request)
            for server, buckets in list(request.kept.items()):
                # What its server still leads it still has; unless a map was missed in which it did not.
                has = buckets & self._leads.get(server, 0) if follows else 0
                request.buckets |= buckets & ~has
                if has and self._keeps:
                    request.kept[server] = has
                else:
                    del request.kept[server]
            if not request.buckets and not request.kept:
                del self._requests[request]
            sends += self._cut(request, request.buckets)
        return sends

    def send_again(self, server: int) -> list[Send]:
        """Return what goes out again, in order, after the connection to a server was made anew."""
        sends: list[Send] = []
        for request in self._requests:
            again = 0
            for number, (target, buckets) in list(request.parts.items()):
                if target == server:
                    again |= buckets
                    del request.parts[number], self._by_number[number]
            if again:
                sends.append(self._part(request, server, again))
        return sends

    def _cut(self, request: _Request, buckets: int) -> Iterator[Send]:
        for server, led in self._leads.items():
            if buckets & led:
                yield self._part(request, server, buckets & led)

    def _part(self, request: _Request, server: int, buckets: int) -> Send:
        self._number += 1
        request.parts[self._number] = (server, buckets)
        self._by_number[self._number] = request
        return Send(request.token, server, self._number, buckets)

    def _forget_parts(self, request: _Request) -> None:
        for number in request.parts:
            del self._by_number[number]
        request.parts = {}

    def _look(self, request: _Request) -> list[Done]:
        if request.buckets:
            return []
        if not request.kept:
            self._requests.pop(request, None)
        if request.is_done:
            return []
        request.is_done = True
        return [Done(request.token)]
