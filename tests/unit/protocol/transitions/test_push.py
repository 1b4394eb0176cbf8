"""Check that a server makes exactly the transitions of the state table of pushes."""

from __future__ import annotations

from random import Random

from tests.unit.protocol.pushes import Pushed, handle

from paceline.protocol.chains import chain_group
from paceline.protocol.replication import (
    AGGREGATE,
    PUSH,
    Acknowledge,
    Acknowledged,
    Change,
    Confirmed,
    Forget,
    Forward,
    Forwarded,
    LinkUp,
    RefusePush,
    Replication,
    StateReceived,
    Withhold,
)
from paceline.protocol.replication.events import Event
from paceline.protocol.transitions import OUTSIDE

from .watching import Watch

ME, PEERS = 1, (2, 3, 4)
NUM_BUCKETS = 3
ENDS = {Acknowledge: "acknowledged", Withhold: "withheld", RefusePush: "refused", Forget: "forgotten"}


class Run:
    """One server. Each push is a token, and the state of a push follows from the instructions with its token."""

    def __init__(self, random: Random, watch: Watch, min_replicas: int = 0) -> None:
        self.random, self.watch = random, watch
        self.replication = Replication(ME, min_replicas)
        self.states: dict[object, str] = {}  # token → pending, left or withheld
        self.senders: dict[int, list[int]] = {AGGREGATE: [], 8: [], 9: []}  # incarnation → the buckets of each push
        self.weights = [scale * random.random() for scale in (0.3, 0.5, 0.5, 0.5, 0.5, 0.1, 0.05)]
        self.chains: list[list[int]] = [[]] * NUM_BUCKETS
        self.forwards: dict[tuple[object, int], int] = {}  # token, target → the number of the unanswered message
        self.fills: list[tuple[int, int]] = []
        self.next_token = 0

    def step(self) -> None:
        actions = [self.change, self.push, self.answer, self.link, self.fill, self.state, self.give_up]
        event = self.random.choices(actions, self.weights)[0]()
        if event is not None:
            self.feed(event)

    def give_up(self) -> None:
        """Abandon a push whose answer is withheld."""
        token = next((token for token, state in self.states.items() if state == "withheld"), None)
        if token is not None:
            self.replication.pushes.give_up(token)
            self.replication.validate()
            self.watch.saw((self.states.pop(token),), "give_up", (OUTSIDE,))

    def feed(self, event: Event | Pushed) -> None:
        """Record the new state of each push after an event."""
        replies: dict[object, object] = {}
        for action in handle(self.replication, event):
            if isinstance(action, Forward):
                self.forwards[action.token, action.target] = action.number
                replies.setdefault(action.token, action)
            elif isinstance(action, Acknowledge | Withhold | RefusePush | Forget):
                assert not isinstance(replies.get(action.token), tuple(ENDS)), "two answers to one token"
                replies[action.token] = action
        new = [event.token] if isinstance(event, Pushed | Forwarded) else []
        for token in [*self.states, *new]:
            before = self.states.pop(token, OUTSIDE)
            token_reply = replies.pop(token, None)
            after = self.after(before, event, token_reply)
            self.watch.saw((before,), "push" if isinstance(event, Pushed) else event, (after,), token_reply)
            if after in ("pending", "left", "withheld"):
                self.states[token] = after
        self.forwards = {push: number for push, number in self.forwards.items() if push[0] in self.states}
        assert all(isinstance(action, Forget) for action in replies.values()), "a reply to a push that is not pending"
        assert self.replication.pushes.num_pending == len([s for s in self.states.values() if s in ("pending", "left")])

    def after(self, before: str, event: Event | Pushed, reply: object) -> str:
        for kind, end in ENDS.items():
            if isinstance(reply, kind):
                return end
        if isinstance(event, Change) and before == "pending" and event.version == self.replication.version:
            return "left" if reply else before
        if before == OUTSIDE:
            assert reply, "a push has no next state"
            return "pending"
        return before

    def change(self) -> Event:
        """Change to random chains, often equal chains for several buckets. This server is among the first members."""
        version = self.replication.version + self.random.choice([0, 1, 1, 1, 2])
        servers: list[int] = []
        groups = []
        for bucket in range(NUM_BUCKETS):
            if not servers or self.random.random() < 0.5:
                servers = self.random.sample(PEERS, self.random.randrange(4))
                servers.insert(self.random.randrange(2), ME)
            is_filled = len(servers) > 1 and self.random.random() < 0.4
            members, filling = (servers[:-1], servers[-1]) if is_filled else (servers, None)
            groups.append(chain_group(tuple(members), filling, 1 << bucket))
            if version > self.replication.version:
                self.chains[bucket] = servers
        return Change(version, tuple(groups))

    def push(self) -> Event | Pushed:
        """Push from a client or from the predecessor, with the current or another version; repeat some pushes."""
        self.next_token += 1
        version = self.replication.version + self.random.choice([-1, 0, 0, 0, 0, 0, 0, 1])
        incarnation = self.random.choice(sorted(self.senders))
        pushes = self.senders[incarnation]
        if not pushes or self.random.random() < 0.4:
            pushes.append(self.random.randrange(1, 1 << NUM_BUCKETS))
        sequence = self.random.randrange(max(0, len(pushes) - 2), len(pushes))
        led = self.replication.primary & pushes[sequence]
        if led and self.random.random() < 0.5:
            return Pushed(self.next_token, incarnation, sequence, led)
        source = self.random.choice(PEERS)
        before = sum(1 << bucket for bucket, chain in enumerate(self.chains) if [source, ME] == chain[:2])
        return Forwarded(self.next_token, source, incarnation, sequence, version, pushes[sequence] & before or 1)

    def answer(self) -> Event:
        if not self.forwards:
            return self.link()
        key = self.random.choice(list(self.forwards))
        return Acknowledged(key[1], self.forwards.pop(key))

    def link(self) -> Event:
        return LinkUp(self.random.choice(PEERS))

    def fill(self) -> Event:
        for target in sorted(self.replication.filling):
            fill = self.replication.next_fill(target)
            if fill is not None:
                self.fills.append((target, fill[0]))
        if self.fills and self.random.random() < 0.3:
            return Confirmed(*self.random.choice(self.fills[-4:]))
        return self.link()

    def state(self) -> Event:
        source, bucket = self.random.choice(PEERS), self.random.randrange(NUM_BUCKETS)
        return StateReceived("state", source, self.replication.version, bucket, ())


def rare(run: Run) -> None:
    """Create a rare case: some buckets of an abandoned push are repeated, and the other buckets have no replica."""
    steady = (((ME, 2), None, 0b1), ((ME,), 3, 0b10), ((4, ME, 2), None, 0b1000), ((4, ME), 3, 0b10000))
    run.feed(Change(1, tuple(chain_group(*chain) for chain in (*steady, ((ME,), None, 0b100)))))
    for sequence, buckets in enumerate([0b101, 0b101, 0b11, 0b11, 0b111]):
        run.feed(Pushed(sequence, 9, sequence, buckets))
    run.feed(Forwarded(5, 4, 9, 5, 1, 0b11000))
    run.feed(Change(2, tuple(chain_group(*chain) for chain in (*steady, ((4,), None, 0b100)))))
    run.feed(Pushed("0 again", 9, 0, 0b1))
    run.feed(Forwarded("1 again", 2, 9, 1, 2, 0b1))
    run.feed(Forwarded("2 again", 2, 9, 2, 2, 0b1))
    # The last three pushes wait for a bucket in transfer when the connection breaks.
    run.feed(LinkUp(3))
    assert run.replication.next_fill(3)
    run.feed(LinkUp(2))
    run.feed(Pushed("3 again", 9, 3, 0b1))
    run.feed(Pushed("4 again", 9, 4, 0b1))
    run.feed(LinkUp(3))
    number, _, _ = run.replication.next_fill(3) or (0, 0, ())
    run.feed(Confirmed(3, number))
    assert run.replication.next_fill(3)
    run.feed(LinkUp(2))
    run.feed(Forwarded("5 again", 4, 9, 5, 2, 0b1000))
    run.feed(LinkUp(3))
    left = [token for token, state in run.states.items() if state != "withheld" and not isinstance(token, str)]
    assert not left, "a push is still pending"


def half_again(run: Run) -> None:
    """Repeat an abandoned push with the buckets that have a replica; the other buckets have too few replicas."""
    chains = tuple(chain_group(*chain) for chain in (((ME, 2), None, 0b1), ((ME,), None, 0b10)))
    run.feed(Change(1, chains))
    run.feed(Pushed("whole", 9, 0, 0b11))
    run.feed(Change(2, chains))
    run.feed(Pushed("half", 9, 0, 0b1))
    assert run.states == {"whole": "withheld", "half": "pending"}


def test_a_server_follows_the_table() -> None:
    watch, random = Watch(PUSH), Random(5)
    rare(Run(random, watch))
    rare(Run(random, watch, min_replicas=2))
    half_again(Run(random, watch, min_replicas=1))
    for number in range(2000):
        if number >= 80 and watch.has_seen_all:
            break
        run = Run(random, watch, min_replicas=random.choice((0, 0, 1, 2)))
        for _ in range(150):
            run.step()
    watch.ends()
