"""Check that a client makes exactly the transitions of the state table of requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from types import SimpleNamespace

from paceline.protocol.chains import chain_group
from paceline.protocol.client import REQUEST, ClientCore, Discard, Request, RequestKind, ServerSession, Transmit
from paceline.protocol.transitions import OUTSIDE

from .watching import Sight, Watch

SERVERS = (1, 2, 3)


class Run:
    """One client with one request, to server 1."""

    def __init__(self, random: Random, watch: Watch) -> None:
        self.random, self.watch = random, watch
        self.core = ClientCore(is_worker=True, is_sequential=True)
        self.core.takes_part = True
        self.change(1, first=1)
        self.session = self.core.sessions[1]
        if random.random() < 0.5:
            self.core.connected(1)
        self.session.awaits_view = random.random() < 0.2
        kind = random.choice([RequestKind.PUSH, RequestKind.PULL])
        self.request = self.session.request(kind, 5, 1, SimpleNamespace(buckets=0b11))
        self.do("start", lambda: [self.session.start(self.request)][:0])

    def sight(self) -> Sight:
        session, request = self.session, self.request
        if request.replacements and not request.is_done:
            return ("replaced",)
        if request.number in session.in_flight and session.in_flight[request.number] is request:
            return ("waiting" if request in session.unanswered() else "blocked",)
        return ("retained",) if request in session.retained else (OUTSIDE,)

    def do(self, name: str, action: Callable[[], Sequence[object] | None]) -> None:
        before = self.sight()
        relevant = [message for message in action() or [] if self._is_relevant(message)]
        self.watch.saw(before, name, self.sight(), relevant[0] if relevant else None)

    def _is_relevant(self, instruction: object) -> bool:
        if isinstance(instruction, Transmit):
            return instruction.request is self.request or any(piece is self.request for piece, _ in instruction.pieces)
        return isinstance(instruction, Discard) and instruction.request is self.request

    def step(self) -> None:
        """Execute a random action, and record the new state of the request."""
        match self.random.choice(["change", "connected", "stabilize", "refused", "failed", *["answered"] * 2]):
            case "change":
                self.do("change", lambda: self.change(self.core.version + self.random.choice([0, 1, 1, 2])))
            case "connected" if 1 in self.core.sessions:
                self.session.disconnected()
                self.do("connected", lambda: self.core.connected(1))
            case "stabilize":
                self.do("stabilize", self.stabilize)
            case name if name in ("refused", "answered", "failed"):
                found = self.any_in_flight()
                if found is not None:
                    self.answer(name, *found)

    def stabilize(self) -> None:
        """Answer a tick of server 1 with the number of its stable iterations."""
        tick = self.session.request(RequestKind.TICK, 5, 1)
        self.session.start(tick)
        self.session.stabilize(tick.number, self.random.choice([5, 6]))
        self.session.answered(tick)

    def any_in_flight(self) -> tuple[ServerSession, Request] | None:
        under_way = [(session, request) for session in self.core.sessions.values() for request in session.unanswered()]
        return self.random.choice(under_way) if under_way else None

    def answer(self, name: str, session: ServerSession, request: Request) -> None:
        if name == "failed":
            self.do(name, lambda: session.failed(request, ValueError()))
        elif name == "refused":
            self.do(name, lambda: session.refused(request))
        else:
            self.do(name, lambda: [session.answered(request)][:0])

    def change(self, version: int, first: int | None = None) -> Sequence[object]:
        """Change to a random view; a third of the views have no replicas, so that no push has to be retained."""
        replicas = self.random.choice([(), (8,), (9,)])
        leaders = [first or self.random.choice([*SERVERS, 1, None]) for _ in range(2)]
        chains = [() if leader is None else (leader, *replicas) for leader in leaders]
        out = self.core.change(version, tuple(chain_group(chain, None, 1 << b) for b, chain in enumerate(chains)))
        for message in out:
            if isinstance(message, Transmit):
                message.request.payload = SimpleNamespace(buckets=sum(buckets for _, buckets in message.pieces))
                self.core.sessions[message.request.server].start(message.request)
        return out


def test_a_client_follows_the_table() -> None:
    watch, random = Watch(REQUEST), Random(6)
    for _ in range(500):
        run = Run(random, watch)
        for _ in range(20):
            run.step()
    watch.ends()
