"""The state reaches newcomers in bounded parts, and is equal to the other ranks' state when they are ready."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from tests.random_examples import num_examples

from paceline.protocol import healing
from paceline.protocol.healing import (
    MOST_BYTES,
    SMALL_BYTES,
    Chunk,
    HealingProgress,
    HealingStep,
    divide_state,
    next_step,
)

LARGE = [healing.CHUNK_BYTES] * (2 * SMALL_BYTES // healing.CHUNK_BYTES)


def test_chunks_cover_each_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healing, "CHUNK_BYTES", 32)
    assert [*divide_state([(10, 8), (3, 4), (16, 2)])] == [
        Chunk(0, 0, 4), Chunk(0, 4, 8), Chunk(0, 8, 10), Chunk(1, 0, 3), Chunk(2, 0, 16),
    ]  # fmt: skip


def test_a_small_state_is_sent_at_once() -> None:
    assert next_step([HealingProgress()], [SMALL_BYTES], 1, is_urgent=False) == HealingStep(is_last=True)
    assert next_step([HealingProgress()], [SMALL_BYTES, 1], 2, is_urgent=False) == HealingStep(range(1))


def test_the_slowest_newcomer_determines_the_part() -> None:
    size = LARGE[0]
    progress = [HealingProgress(5, 3 * size), HealingProgress(3, 2 * size)]
    assert next_step(progress, LARGE, len(LARGE), is_urgent=False) == HealingStep(range(3, 5))
    assert next_step([*progress, HealingProgress()], LARGE, len(LARGE), is_urgent=False) == HealingStep(range(2))
    assert next_step(progress, LARGE, len(LARGE), is_urgent=True) == HealingStep(compared=range(5), is_last=True)


def test_received_chunks_are_compared_between_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    total = len(LARGE)
    monkeypatch.setattr(healing, "COMPARED_BYTES", LARGE[0] * (total - 1))

    def step(*progress: HealingProgress, is_urgent: bool = False, num_updated: int = total) -> HealingStep:
        return next_step(progress, LARGE, num_updated, is_urgent=is_urgent)

    received = HealingProgress(total)
    assert step(received) == HealingStep(compared=range(total - 1))
    begun = received.after_comparison(total - 1, is_equal=True)
    assert step(begun) == HealingStep(compared=range(total - 1, total))
    assert step(begun, received).compared == range(total - 1)
    for is_urgent, num_updated in ((True, total), (False, total - 1)):
        last = step(begun, is_urgent=is_urgent, num_updated=num_updated)
        assert last == HealingStep(compared=range(total - 1, total), is_last=True)
    assert step(begun.after_comparison(total, is_equal=True)) == HealingStep(compared=range(total, total), is_last=True)
    unequal = begun.after_comparison(total, is_equal=False)
    assert step(unequal) == HealingStep(compared=range(total), is_last=True)
    assert step(unequal, HealingProgress()).part


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
    while part := next_step([progress], sizes, len(sizes), is_urgent=False).part:
        num_bytes = sum(sizes[part.start : part.stop])
        assert num_bytes <= MOST_BYTES
        progress = progress.after_part(part.stop, num_bytes, 0.0)


class Newcomer:
    def __init__(self, number: int) -> None:
        self.state = [-number] * NUM_CHUNKS
        self.progress = HealingProgress()


NUM_CHUNKS, NUM_UPDATED = 6, 5
UNSAFE = {1: 4, 2: 0}
"""The updates of these chunks depend on another chunk, which may arrive earlier or later."""


def update(state: list[int], gradient: int, *, is_ready: bool = True) -> list[int]:
    """Only ready ranks change the last chunk, by their own code, and not in each step."""
    values = [hash((value, state[UNSAFE.get(number, number)], gradient)) for number, value in enumerate(state)]
    return values[:NUM_UPDATED] + ([state[-1] + gradient // 8] if is_ready else state[-1:])


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
            step = next_step([each.progress for each in self.newcomers], sizes, NUM_UPDATED, is_urgent=is_urgent)
            part, compared = (slice(numbers.start, numbers.stop) for numbers in (step.part, step.compared))
            is_equal = all(newcomer.state[compared] == source[compared] for newcomer in self.newcomers)
            for number, newcomer in enumerate(self.newcomers):
                if step.is_last:
                    self.finish(newcomer, source, step.compared)
                elif step.compared:
                    newcomer.progress = newcomer.progress.after_comparison(compared.stop, is_equal=is_equal)
                elif number not in lost:
                    newcomer.state[part] = source[part]
                    newcomer.progress = newcomer.progress.after_part(part.stop, len(step.part) * SMALL_BYTES, 0.0)
            if step.is_last:
                self.newcomers = []
        self.ready = [update(state, gradient) for state in self.ready]
        for newcomer in self.newcomers:
            newcomer.state = update(newcomer.state, gradient, is_ready=False)
        assert all(state == self.ready[0] for state in self.ready)

    def finish(self, newcomer: Newcomer, source: list[int], compared: range) -> None:
        received = newcomer.progress.num_received or 0
        for number in range(NUM_CHUNKS):
            is_equal = newcomer.state[number] == source[number]
            # A chunk is sent once, unless its update depends on a chunk that has arrived later.
            assert is_equal or number >= received or number in UNSAFE or number >= NUM_UPDATED
            if number >= received or (number in compared and not is_equal):
                newcomer.state[number] = source[number]
        self.ready.append(newcomer.state)


Healing.TestCase.settings = num_examples(100, stateful_step_count=40)
TestHealing = Healing.TestCase
