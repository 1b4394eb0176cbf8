"""The state of each shard in each epoch, and the table of transitions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from paceline.protocol.jobs.records import Key
from paceline.protocol.transitions import OUTSIDE, StateTable, Transition

SHARD: Final = StateTable(
    "a shard in one epoch",
    ("free", "open", "returned", "done"),
    (
        Transition(OUTSIDE, "Shards", "free"),
        Transition(OUTSIDE, "restore", "free"),
        Transition(OUTSIDE, "restore", "open"),
        Transition(OUTSIDE, "restore", "done"),
        Transition("free", "want", "open", "Granted"),
        Transition("open", "finish", "done"),
        Transition("open", "worker_lost", "returned"),
        Transition("returned", "want", "open", "Granted"),
        Transition("free", "file_ended", OUTSIDE, when="before it"),
        Transition("open", "file_ended", OUTSIDE, when="before it"),
        Transition("returned", "file_ended", OUTSIDE, when="before it"),
        Transition("done", "file_ended", OUTSIDE, when="before it"),
    ),
)

# A shard's state is stored as one byte: its index in `SHARD.states`.
FREE, OPEN, RETURNED, DONE = range(len(SHARD.states))
_NEXT: Final = {
    (SHARD.states.index(row.source), row.event): SHARD.states.index(row.target)
    for row in SHARD.transitions
    if OUTSIDE not in (row.source, row.target)
}


class ShardStates:
    """The state of each shard. `sizes` are the numbers of shards of the files, None where unknown."""

    def __init__(self, sizes: Sequence[int | None], epochs: int) -> None:
        self.sizes: list[int | None] = list(sizes)
        self.epochs = epochs if sizes else 0
        self.num_done = 0
        self._states: dict[tuple[int, int], bytearray] = {}  # epoch, file → one state per shard

    def is_past(self, key: Key) -> bool:
        size = self.sizes[key[1]]
        return size is not None and key[2] >= size

    def exists(self, key: Key) -> bool:
        """Whether the shard may exist. In a file of unknown size every shard may exist."""
        epoch, file, shard = key
        return 0 <= epoch < self.epochs and 0 <= file < len(self.sizes) and shard >= 0 and not self.is_past(key)

    def of(self, key: Key) -> int:
        states = self._states.get(key[:2], b"")
        return states[key[2]] if key[2] < len(states) else FREE

    def move(self, key: Key, event: str) -> None:
        self.set(key, _NEXT[self.of(key), event])

    def set(self, key: Key, state: int) -> None:
        epoch, file, shard = key
        states = self._states.setdefault((epoch, file), bytearray())
        if shard >= len(states):
            states.extend(bytes(shard + 1 - len(states)))
        self.num_done += (state == DONE) - (states[shard] == DONE)
        states[shard] = state

    def end(self, file: int, num_shards: int) -> None:
        self.sizes[file] = num_shards
        for (_, of), states in self._states.items():
            if of == file:
                self.num_done -= states.count(DONE, num_shards)
                del states[num_shards:]

    def all(self, state: int) -> Iterator[Key]:
        """Yield the shards in this state, which must not be "free"."""
        for (epoch, file), states in self._states.items():
            yield from ((epoch, file, shard) for shard, known in enumerate(states) if known == state)

    def validate(self) -> None:
        assert self.num_done == sum(states.count(DONE) for states in self._states.values())
