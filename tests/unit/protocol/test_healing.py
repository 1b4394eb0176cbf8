"""The state reaches newcomers in bounded parts, and is equal to the other ranks' state when they are ready."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from tests.random_examples import num_examples

from paceline.protocol import healing
from paceline.protocol.healing import MOST_BYTES, SMALL_BYTES, Chunk, HealingProgress, divide_state, next_part

LARGE = [healing.CHUNK_BYTES] * (2 * SMALL_BYTES // healing.CHUNK_BYTES)


def test_chunks_cover_each_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healing, "CHUNK_BYTES", 32)
    assert [*divide_state([(10, 8), (3, 4), (16, 2)])] == [
        Chunk(0, 0, 4), Chunk(0, 4, 8), Chunk(0, 8, 10), Chunk(1, 0, 3), Chunk(2, 0, 16),
    ]  # fmt: skip


def test_a_small_state_is_sent_at_once() -> None:
    assert next_part([HealingProgress()], [SMALL_BYTES], is_urgent=False) is None
    assert next_part([HealingProgress()], [SMALL_BYTES, 1], is_urgent=False) == range(1)


def test_the_slowest_newcomer_determines_the_part() -> None:
    size = LARGE[0]
    progress = [HealingProgress(5, 3 * size), HealingProgress(3, 2 * size)]
    assert next_part(progress, LARGE, is_urgent=False) == range(3, 5)
    assert next_part([*progress, HealingProgress()], LARGE, is_urgent=False) == range(2)
    assert next_part(progress, LARGE, is_urgent=True) is None
    assert next_part([HealingProgress(len(LARGE))], LARGE, is_urgent=False) is None


def test_parts_grow_until_a_newcomer_waits_for_them() -> None:
    progress = HealingProgress(0, 1000.0)
    assert progress.after_part(4, 1000, 0.0) == HealingProgress(4, 2000.0)
    assert progress.after_part(4, 1000, 0.12).most_bytes == pytest.approx(250.0)
    assert progress.after_part(4, MOST_BYTES, 0.0).most_bytes == MOST_BYTES
    assert HealingProgress(9).after_part(4, 1000, 0.0).num_received == 9


@given(sizes=st.lists(st.integers(1, MOST_BYTES), min_size=1, max_size=60))
def test_parts_are_bounded_and_complete(sizes: list[int]) -> None:
    parts = [*healing.split_into_parts(range(len(sizes)), sizes)]
    assert [*itertools.chain(*parts)] == [*range(len(sizes))]
    assert all(sum(sizes[number] for number in part) <= MOST_BYTES for part in parts)
    progress = HealingProgress()
    while (part := next_part([progress], sizes, is_urgent=False)) is not None:
        num_bytes = sum(sizes[part.start : part.stop])
        assert num_bytes <= MOST_BYTES
        progress = progress.after_part(part.stop, num_bytes, 0.0)


class Newcomer:
    def __init__(self, number: int) -> None:
        self.state = [-number] * NUM_CHUNKS
        self.progress = HealingProgress()


NUM_CHUNKS = 6
UNSAFE = {1: 4, 2: 0}
"""The updates of these chunks depend on another chunk, which may arrive earlier or later."""


def update(state: list[int], gradient: int) -> list[int]:
    return [hash((value, state[UNSAFE.get(number, number)], gradient)) for number, value in enumerate(state)]


class Healing(RuleBasedStateMachine):
    """Newcomers join and die, rank 0 dies, and parts are lost."""

    def __init__(self) -> None:
        super().__init__()
        self.ready = [[*range(NUM_CHUNKS)] for _ in range(2)]
        self.newcomers: list[Newcomer] = []
        self.number = 0

    @precondition(lambda self: len(self.newcomers) < 3)
    @rule()
    def join(self) -> None:
        self.number += 1
        self.newcomers.append(Newcomer(self.number))

    @precondition(lambda self: self.newcomers)
    @rule(data=st.data())
    def kill_newcomer(self, data: st.DataObject) -> None:
        self.newcomers.remove(data.draw(st.sampled_from(self.newcomers)))

    @precondition(lambda self: len(self.ready) > 1)
    @rule()
    def kill_rank_0(self) -> None:
        del self.ready[0]

    @rule(gradient=st.integers(0, 9), is_urgent=st.booleans(), lost=st.sets(st.integers(0, 2)))
    def train(self, gradient: int, is_urgent: bool, lost: set[int]) -> None:
        """Share a part, and make a step."""
        source = self.ready[0]
        if self.newcomers:
            sizes = [SMALL_BYTES] * NUM_CHUNKS
            part = next_part([each.progress for each in self.newcomers], sizes, is_urgent=is_urgent)
            for number, newcomer in enumerate(self.newcomers):
                if part is None:
                    self.finish(newcomer, source)
                elif number not in lost:
                    newcomer.state[part.start : part.stop] = source[part.start : part.stop]
                    newcomer.progress = newcomer.progress.after_part(part.stop, len(part) * SMALL_BYTES, 0.0)
            if part is None:
                self.newcomers = []
        self.ready = [update(state, gradient) for state in self.ready]
        for newcomer in self.newcomers:
            newcomer.state = update(newcomer.state, gradient)
        assert all(state == self.ready[0] for state in self.ready)

    def finish(self, newcomer: Newcomer, source: list[int]) -> None:
        received = newcomer.progress.num_received or 0
        for number in range(NUM_CHUNKS):
            is_equal = newcomer.state[number] == source[number]
            # A chunk is sent once, unless its update depends on a chunk that has arrived later.
            assert is_equal or number >= received or number in UNSAFE
            if number >= received or not is_equal:
                newcomer.state[number] = source[number]
        self.ready.append(newcomer.state)


Healing.TestCase.settings = num_examples(100, stateful_step_count=40)
TestHealing = Healing.TestCase
