"""The client's protocol: the requests of a worker or observer, retries, retained pushes and iterations.

A client has one view at a time, and splits each push and pull into one request for each server of the view. If a server
rejects a request because of the client's old view, the request waits for the newer view. Then the client resends all
unanswered requests in order, followed by a *resync* to each server: a message with the worker's clock.

Servers detect duplicate pushes by number, so a repeated push is harmless, but a later push to a bucket must not
overtake an earlier push. The parts of one push for the same server are merged into one request, because the server
would treat a second frame with the same number as a duplicate. After a view change, a push and a pull replace a request
that does both. They do not end the iteration, even if the request did, because the resync sends the clock.

Source: for views, see :mod:`paceline.protocol.replication`. The clocks are those of Ho et al. 2013 "More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from paceline.errors import UsageError
from paceline.protocol.buckets import Buckets
from paceline.protocol.chains import ChainGroup, has_followers, leads_of
from paceline.protocol.client.session import PUSHES, READS, Request, RequestKind, ServerSession


@dataclass(frozen=True, slots=True)
class Connect:
    """Connect to a server that is new in the view."""

    server: int


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the connection to a server that has left all chains. Pending calls to this server fail."""

    session: ServerSession


@dataclass(frozen=True, slots=True)
class Transmit:
    """Send a request in the current view.

    A request without `pieces` is resent unchanged. Otherwise its payload is composed of `pieces`: former requests, each
    with the buckets to take from the former payload.
    """

    request: Request
    pieces: tuple[tuple[Request, Buckets], ...] = ()


@dataclass(frozen=True, slots=True)
class Discard:
    """Free the memory of a retained push."""

    request: Request


@dataclass(frozen=True, slots=True)
class Resync:
    """Send a server the worker's clock, after all resent requests of this view."""

    server: int
    version: int
    clock: int
    takes_part: bool


@dataclass(frozen=True, slots=True)
class RequestJoin:
    """Call a server, so that this worker joins its iterations at `clock` or later. Pass its answer to
    :meth:`ClientCore.joined`."""

    server: int
    round: int
    clock: int


Instruction: TypeAlias = Connect | Disconnect | Transmit | Discard | Resync | RequestJoin


@dataclass(eq=False, slots=True)
class _Push:
    unanswered: list[Request] = field(default_factory=list)
    retained: list[tuple[ServerSession, Request]] = field(default_factory=list)


def replace(
    given_up: Iterable[Request], before: Iterable[ServerSession], after: Mapping[int, ServerSession], follows: bool
) -> Iterator[Transmit]:
    """Yield the replacements of abandoned requests, and of the pushes that the sessions `before` retain.

    A replacement goes to the sessions of the new view (`after`) that lead its buckets. `follows` is true if this client
    received the view just before the new view. A retained push is not resent to a server that still leads its buckets.
    """
    pushes: dict[int, _Push] = {}
    pulls: list[Request] = []
    for session in before:
        for request in session.retained:
            pushes.setdefault(request.sequence, _Push()).retained.append((session, request))
    for request in given_up:
        request.replacements = []
        if request.kind in PUSHES:
            pushes.setdefault(request.sequence, _Push()).unanswered.append(request)
        if request.kind in READS:
            pulls.append(request)
    # A pull has the number of the last push before it, so it follows this push.
    ordered: list[tuple[int, int, _Push | Request]] = [(sequence, 0, push) for sequence, push in pushes.items()]
    ordered += [(pull.sequence, 1, pull) for pull in pulls]
    ordered.sort(key=lambda entry: entry[:2])
    for _, _, item in ordered:
        yield from _push_again(item, after, follows) if isinstance(item, _Push) else _pull_again(item, after)


def _push_again(push: _Push, after: Mapping[int, ServerSession], follows: bool) -> Iterator[Transmit]:
    wanted = 0
    for request in push.unanswered:
        assert request.payload is not None
        wanted |= request.payload.buckets
    for session, request in push.retained:
        # A server that still leads a bucket has this push. But if the client missed a view (`follows` is false), the
        # server may have lost the bucket in between, so the push is sent again.
        wanted |= request.held_buckets & ~(_leads(session, after) if follows else 0)
    sent = 0
    for session in after.values():
        buckets = wanted & session.leads
        if buckets:
            sent |= buckets
            yield _push_to(session, push, buckets)
    for session, request in push.retained:
        request.held = request.held_buckets & _leads(session, after) & ~sent


def _push_to(session: ServerSession, push: _Push, buckets: Buckets) -> Transmit:
    pieces: list[tuple[Request, Buckets]] = []
    parents: list[Request] = []
    for request in push.unanswered:
        assert request.payload is not None
        if request.payload.buckets & buckets:
            pieces.append((request, request.payload.buckets & buckets))
            parents.append(request)
    for _, request in push.retained:
        if request.held_buckets & buckets:
            pieces.append((request, request.held_buckets & buckets))
    former = pieces[0][0]
    request = session.request(RequestKind.PUSH, former.clock, former.sequence)
    return _in_place_of(parents, request, pieces)


def _pull_again(former: Request, after: Mapping[int, ServerSession]) -> Iterator[Transmit]:
    assert former.payload is not None
    for session in after.values():
        buckets = former.payload.buckets & session.leads
        if buckets:
            request = session.request(RequestKind.PULL, former.clock + former.ends_iteration, former.sequence)
            yield _in_place_of([former], request, [(former, buckets)])


def _in_place_of(parents: list[Request], request: Request, pieces: list[tuple[Request, Buckets]]) -> Transmit:
    request.parents = parents
    for parent in parents:
        assert parent.replacements is not None
        parent.replacements.append(request)
    return Transmit(request, tuple(pieces))


def _leads(session: ServerSession, after: Mapping[int, ServerSession]) -> Buckets:
    return session.leads if session.server in after else 0


class ClientCore:
    """One client's state.

    Observers (`is_worker` is False) take no part in iterations. With `is_sequential`, servers apply a push only when
    its iteration completes. So an answered push can be lost with its server, unless the client retains the push.
    """

    def __init__(self, *, is_worker: bool, is_sequential: bool) -> None:
        self.is_worker = is_worker
        self.version = 0
        self.sessions: dict[int, ServerSession] = {}
        self.lost: Buckets = 0
        self.clock = 0
        """The worker's current iteration, which is the number of its finished iterations."""
        self.sequence = 0
        self.takes_part = False
        """Whether servers wait for this worker's ticks."""
        self.failures: list[Request] = []
        self._is_sequential = is_sequential
        self._has_followers = False
        self._round = 0
        self._join_clock = 0
        self._joined: dict[int, int] | None = None  # server → iteration in its answer to the current call to join

    def report(self, request: Request) -> None:
        """Record that the caller receives the error of this request, so that no later call raises it again."""
        request.is_reported = True
        if request in self.failures:
            self.failures.remove(request)

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is unanswered, a push is retained, or an error of a request is unreported."""
        return bool(self.failures) or any(session.in_flight or session.retained for session in self.sessions.values())

    def unstable(self) -> ServerSession | None:
        """Return the session of a server with a retained push of a finished iteration, else None.

        The server answers a read of the current iteration once the finished iterations are stable.
        """
        for session in self.sessions.values():
            if any(push.clock < self.clock for push in session.retained):
                return session
        return None

    def connected(self, server: int) -> list[Instruction]:
        """Record a new connection to a server; return the messages to send."""
        session = self.sessions[server]
        session.is_connected = True
        requests = list(session.unanswered())
        out: list[Instruction] = [Transmit(request) for request in requests if request.kind is not RequestKind.CALL]
        # A server that has answered the call to join counts this worker. A resync would end this.
        if session.sends_clock and server not in (self._joined or ()):
            out.append(self._resync(session))
        # A resync and a call to join both decide whether the server counts this worker, so the call to join comes last.
        return out + [Transmit(request) for request in requests if request.kind is RequestKind.CALL]

    def change(self, version: int, groups: tuple[ChainGroup, ...], loss: Exception | None = None) -> list[Instruction]:
        """Apply a newer view; return the instructions, in order. Older views are ignored.

        A request for a bucket without servers fails with the error `loss`.
        """
        if version <= self.version:
            return []
        follows = version == self.version + 1
        self.version = version
        self._has_followers = has_followers(groups)
        before = self.sessions
        given_up = [request for session in before.values() for request in session.give_up_data()]
        self._enter(groups)
        out: list[Instruction] = list(replace(given_up, before.values(), self.sessions, follows))
        self._fail_lost(given_up, loss)
        out += self._retain(before)
        out += self._resync_all()
        out += [Disconnect(session) for server, session in before.items() if server not in self.sessions]
        out += [Connect(server) for server in self.sessions if server not in before]
        if self._joined is not None:
            out += self._request_join()
        return out

    def _enter(self, groups: tuple[ChainGroup, ...]) -> None:
        before, self.sessions = self.sessions, {}
        leads, self.lost = leads_of(groups)
        for server, led in leads.items():
            session = self.sessions[server] = before.get(server) or ServerSession(server, self.failures)
            session.leads = led

    def _fail_lost(self, given_up: list[Request], loss: Exception | None) -> None:
        for request in given_up:
            assert request.payload is not None
            if request.payload.buckets & self.lost:
                request.error = request.error or loss
            request.complete_if_replaced(self.failures)

    def _retain(self, before: dict[int, ServerSession]) -> Iterator[Instruction]:
        retains = self.takes_part and self._is_sequential and self._has_followers
        for session in {**before, **self.sessions}.values():
            session.retains = retains and session.server in self.sessions
            retained, session.retained = session.retained, deque()
            for push in retained:
                if session.retains and push.held != 0:
                    session.retained.append(push)
                else:
                    yield Discard(push)

    def check_takes_part(self) -> None:
        if not self.takes_part:
            problem = "this worker has retired: call join() first" if self.is_worker else "an observer cannot tick"
            raise UsageError(f"{problem}; it does not take part in the iterations")

    def tick(self) -> None:
        self.clock += 1

    def next_sequence(self) -> int:
        self.sequence += 1
        return self.sequence

    def join(self, clock: int = 0) -> list[Instruction]:
        """Join or rejoin the iterations at the servers' current iteration, or at `clock` if that is later."""
        self._join_clock, self._joined = max(self.clock, clock), {}
        return self._request_join()

    @property
    def is_joining(self) -> bool:
        return self._joined is not None

    def joined(self, server: int, round_: int, clock: int) -> list[Instruction]:
        """Record a server's answer to a call to join. If the servers' clocks differ, the highest is used."""
        if self._joined is None or round_ != self._round:
            return []  # obsolete: since the call, a view change has sent every server a resync without `takes_part`
        self._joined[server] = clock
        if self._joined.keys() < self.sessions.keys():
            return []
        highest = max(self._joined.values())
        if highest != self._join_clock or min(self._joined.values()) < highest:
            self._join_clock = highest
            return self._request_join()
        self.clock, self._joined = highest, None
        self.takes_part = True
        # Without a resync, a server with an older view would wait for this worker after its view change.
        return [*self._retain({}), *self._resync_all()]

    def stop_joining(self) -> None:
        self._joined = None

    def retire(self) -> list[Instruction]:
        """Leave the iterations: servers apply later pushes on arrival. The caller must notify the servers."""
        self.takes_part = False
        return list(self._retain({}))

    def _request_join(self) -> list[Instruction]:
        self._join_clock = max([self._join_clock, *(self._joined or {}).values()])
        self._round, self._joined = self._round + 1, {}
        return [RequestJoin(server, self._round, self._join_clock) for server in self.sessions]

    def _resync_all(self) -> Iterator[Instruction]:
        for session in self.sessions.values() if self.is_worker else ():
            session.sends_clock = True
            if session.is_connected:
                yield self._resync(session)

    def _resync(self, session: ServerSession) -> Resync:
        return Resync(session.server, self.version, self.clock, self.takes_part)
