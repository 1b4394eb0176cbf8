"""An outbox does to requests what its table says."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from random import Random

from paceline.protocol import ChainGroup, Outbox
from paceline.protocol.outbox import REQUEST, Done, Send
from paceline.protocol.transitions import OUTSIDE

from .watching import Sight, Watch

SERVERS = (1, 2, 3)
NUM_BUCKETS = 3


class Run:
    """One outbox with one request."""

    def __init__(self, random: Random, watch: Watch) -> None:
        self.random, self.watch = random, watch
        self.outbox = Outbox(1)
        self.is_done = False
        self.parts: list[Send] = []
        keep_clock = random.choice([None, 5])
        if random.random() < 0.5:
            self.change(2)
            self.note((OUTSIDE,), "start", self.outbox.start("request", random.randrange(1, 8), keep_clock=keep_clock))
        else:
            kept = {2: 0b10, 3: 0b100} if keep_clock else {}
            self.is_done = bool(kept) and random.random() < 0.5
            self.outbox.adopt("request", 0 if self.is_done else 0b1, kept=kept, keep_clock=keep_clock)
            self.note((OUTSIDE,), "adopt", [])

    def sight(self) -> Sight:
        if self.outbox.num_waiting or self.outbox.lost:
            return "again" if self.is_done else "waiting", self.outbox.num_waiting, self.outbox.lost
        # After a map that was missed all that is kept goes out again: a copy of the outbox shows whether it is.
        again = deepcopy(self.outbox).change(self.outbox.version + 2, (ChainGroup((1,), None, 0b111),))
        return ("kept",) if again else (OUTSIDE,)

    def note(self, before: Sight, name: str, told: Sequence[object]) -> None:
        self.parts = [*self.parts, *(each for each in told if isinstance(each, Send))][-4:]
        self.is_done = self.is_done or any(isinstance(each, Done) for each in told)
        self.watch.saw(before, name, self.sight(), told[0] if told else None)

    def step(self) -> None:
        """Do something, and watch what becomes of the request."""
        before, server = self.sight(), self.random.choice(SERVERS)
        name = self.random.choice(["change", "send_again", "durable", *["answered"] * 4, "failed"])
        if name == "change":
            self.note(before, name, self.change(self.outbox.version + self.random.choice([0, 1, 1, 2])))
        elif name == "send_again":
            self.note(before, name, self.outbox.send_again(server))
        elif name == "durable":
            self.outbox.durable(server, self.random.choice([5, 6]))
            self.note(before, name, [])
        elif self.parts and name == "answered":
            self.note(before, name, self.outbox.answered(self.random.choice(self.parts).number))
        elif self.parts and self.random.random() < 0.2:
            self.outbox.failed(self.random.choice(self.parts).number)
            self.note(before, name, [])

    def change(self, version: int) -> list[Send]:
        """Any map; in one of three no server is behind another, so that nothing need be kept."""
        behind = self.random.choice([(), (8,), (9,)])
        leaders = [self.random.choice([*SERVERS, None]) for _ in range(NUM_BUCKETS)]
        chains = [() if leader is None else (leader, *behind) for leader in leaders]
        return self.outbox.change(version, tuple(ChainGroup(chain, None, 1 << b) for b, chain in enumerate(chains)))


def test_an_outbox_does_what_its_table_says() -> None:
    watch, random = Watch(REQUEST), Random(6)
    for _ in range(500):
        run = Run(random, watch)
        for _ in range(30):
            run.step()
    watch.ends()
