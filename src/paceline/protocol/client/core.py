"""The client's protocol: what a worker or an observer sends to servers, sends again, and retains; its iterations.

A client holds one :class:`ClientCore`, and so does each simulated worker. Its runtime feeds it the answers and the
refusals of servers, what becomes of connections, and views, and does as the instructions bid. Payloads are tokens.

A client knows one view at a time and cuts its requests by it. A request that a server refuses as of an old view waits
until the newer one is here; then everything that is unanswered goes out again, in order, and behind it a *resync* says
to each server that this was all, and where the worker's clock is.

Source: as :mod:`paceline.protocol.replication`; the clocks as in Ho et al. 2013 "More Effective Distributed ML via a
Stale Synchronous Parallel Parameter Server".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from paceline.errors import UsageError
from paceline.protocol.buckets import Buckets
from paceline.protocol.chains import ChainGroup, has_followers, leads_of
from paceline.protocol.client.instructions import (
    AskToJoin,
    Connect,
    Discard,
    Disconnect,
    Instruction,
    Resync,
    Transmit,
)
from paceline.protocol.client.replacement import replace
from paceline.protocol.client.requests import Request, RequestKind
from paceline.protocol.client.session import ServerSession


class ClientCore:
    """One client's state.

    Arguments: `is_worker`, whether it may take part in iterations (an observer may not); `is_sequential`, whether
    pushes are applied when their iteration is complete, so that an answered one may be lost with its server.
    """

    def __init__(self, *, is_worker: bool, is_sequential: bool) -> None:
        self.is_worker = is_worker
        self.version = 0
        """The view that requests are cut by; 0 before the first."""
        self.sessions: dict[int, ServerSession] = {}
        """By server: those of all servers in the view's chains."""
        self.lost: Buckets = 0
        """The buckets that no server has."""
        self.clock = 0
        """The worker's current iteration: how many it has finished."""
        self.sequence = 0
        """The number of the last push."""
        self.takes_part = False
        """Whether servers wait for this worker's ticks."""
        self.failures: list[Request] = []
        """Requests that failed and whose failure nobody was told."""
        self._is_sequential = is_sequential
        self._has_followers = False
        self._round = 0
        self._join_clock = 0
        self._joined: dict[int, int] | None = None  # server → the iteration that it names in this round

    # Requests.

    def report(self, request: Request) -> None:
        """Take note that somebody is told of a request's failure: nobody else is."""
        request.is_reported = True
        if request in self.failures:
            self.failures.remove(request)

    @property
    def has_unfinished(self) -> bool:
        """Whether anything is unanswered or unstable, or failed and nobody was told."""
        return bool(self.failures) or any(each.in_flight or each.retained for each in self.sessions.values())

    def unstable(self) -> ServerSession | None:
        """A server that does not say yet that the iterations which this worker has finished are stable; None: all do.

        A read of the current iteration there is answered when they are.
        """
        for session in self.sessions.values():
            if any(each.clock < self.clock for each in session.retained):
                return session
        return None

    # Views and connections.

    def connected(self, server: int) -> list[Instruction]:
        """Take note of a new connection to a server; return what to send on it."""
        session = self.sessions[server]
        session.is_connected = True
        requests = list(session.unanswered())
        out: list[Instruction] = [Transmit(request) for request in requests if request.kind is not RequestKind.CALL]
        # A server that has answered the call to join counts this worker: it is not told otherwise.
        if session.says_clock and server not in (self._joined or ()):
            out.append(self._resync(session))
        # Of a worker's words the last counts: a call to join comes behind a resync that says that it takes no part.
        return out + [Transmit(request) for request in requests if request.kind is RequestKind.CALL]

    def change(self, version: int, groups: tuple[ChainGroup, ...], loss: Exception | None = None) -> list[Instruction]:
        """Take a newer view; return what to do, in order. An older one is ignored.

        Requests for buckets that no server has any more fail by `loss`.
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
            out += self._ask_all()
        return out

    def _enter(self, groups: tuple[ChainGroup, ...]) -> None:
        """Have one session for each server of these chains."""
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
        """Retain from now on what the view and the worker's part in iterations ask for; release the rest."""
        retains = self.takes_part and self._is_sequential and self._has_followers
        for session in {**before, **self.sessions}.values():
            session.retains = retains and session.server in self.sessions
            staying = [each for each in session.retained if session.retains and each.held != 0]
            yield from (Discard(each) for each in session.retained if not session.retains or each.held == 0)
            session.retained = deque(staying)

    # Iterations.

    def check_takes_part(self) -> None:
        """Raise UsageError unless this client takes part in iterations."""
        if not self.takes_part:
            what = "this worker has retired: call join() first" if self.is_worker else "an observer cannot tick"
            raise UsageError(f"{what}; it takes no part in the iterations")

    def tick(self) -> None:
        """End the worker's iteration."""
        self.clock += 1

    def next_sequence(self) -> int:
        """Return the number of the next push."""
        self.sequence += 1
        return self.sequence

    def join(self) -> list[Instruction]:
        """Begin to take part in iterations (again), with what servers say to be the current one."""
        self._join_clock, self._joined = self.clock, {}
        return self._ask_all()

    @property
    def is_joining(self) -> bool:
        """Whether servers are being asked."""
        return self._joined is not None

    def joined(self, server: int, round_: int, clock: int) -> list[Instruction]:
        """Take a server's answer: servers may differ for a moment, and the latest iteration counts."""
        if self._joined is None or round_ != self._round:
            return []  # the view has changed meanwhile, and every server was told that this worker takes no part
        self._joined[server] = clock
        if self._joined.keys() < self.sessions.keys():
            return []
        highest = max(self._joined.values())
        if highest != self._join_clock or min(self._joined.values()) < highest:
            self._join_clock = highest
            return self._ask_all()
        self.clock, self._joined = highest, None
        self.takes_part = True
        # A server that has not seen this view yet would wait for this worker when it does.
        return [*self._retain({}), *self._resync_all()]

    def stop_joining(self) -> None:
        """Ask no longer."""
        self._joined = None

    def retire(self) -> list[Instruction]:
        """Take part no longer: pushes are applied at once from now on. Calls have to tell the servers."""
        self.takes_part = False
        return list(self._retain({}))

    def _ask_all(self) -> list[Instruction]:
        self._join_clock = max([self._join_clock, *(self._joined or {}).values()])
        self._round, self._joined = self._round + 1, {}
        return [AskToJoin(server, self._round, self._join_clock) for server in self.sessions]

    def _resync_all(self) -> Iterator[Instruction]:
        for session in self.sessions.values() if self.is_worker else ():
            session.says_clock = True
            if session.is_connected:
                yield self._resync(session)

    def _resync(self, session: ServerSession) -> Resync:
        return Resync(session.server, self.version, self.clock, self.takes_part)
