"""The checker rejects every kind of faulty schedule, and every schedule in which one action is changed or missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from tests.reference.schedules import check

from paceline.collectives.schedules import (
    ALGORITHMS,
    Action,
    Algorithm,
    Copy,
    Receive,
    Round,
    Schedule,
    ScheduleError,
    Send,
)
from paceline.errors import PacelineError, UsageError

EVERY = [
    pytest.param(algorithm, id=f"{collective}-{name}")
    for collective, algorithms in ALGORITHMS.items()
    for name, algorithm in algorithms.items()
]
HOSTS = (0, 0, 0, 1, 1, 2, 2, 2)

ALL = ((0, 1),)


def two_ranks(first: Sequence[Round], second: Sequence[Round], num_blocks: int = 1) -> list[Schedule]:
    return [Schedule(num_blocks, tuple(first)), Schedule(num_blocks, tuple(second))]


def mutants(
    schedules: Sequence[Schedule], change: Callable[[int, Action], Action | None]
) -> Iterator[tuple[str, list[Schedule]]]:
    """Yield the schedules with one changed action, for each action that ``change`` changes. It removes one by None."""
    for rank, schedule in enumerate(schedules):
        for number, actions in enumerate(schedule.rounds):
            for index, action in enumerate(actions):
                changed = change(rank, action)
                if changed == action:
                    continue
                replacements = () if changed is None else (changed,)
                changed_actions = (*actions[:index], *replacements, *actions[index + 1 :])
                rounds = (*schedule.rounds[:number], changed_actions, *schedule.rounds[number + 1 :])
                mutant = list(schedules)
                mutant[rank] = replace(schedule, rounds=rounds)
                yield f"rank {rank} round {number}: {action} -> {changed}", mutant


def dropped(rank: int, action: Action) -> Action | None:
    return None


def to_another_peer(size: int) -> Callable[[int, Action], Action]:
    def change(rank: int, action: Action) -> Action:
        if isinstance(action, Copy):
            return action
        peers = [peer for peer in range(size) if peer not in (rank, action.peer)]
        return action._replace(peer=peers[0])

    return change


def to_itself(rank: int, action: Action) -> Action:
    return action if isinstance(action, Copy) else action._replace(peer=rank)


def with_inverted_reduce(rank: int, action: Action) -> Action:
    return action._replace(reduce=not action.reduce) if isinstance(action, Receive) else action


def shortened(rank: int, action: Action) -> Action:
    if isinstance(action, Copy) or not action.spans:
        return action
    start, stop = action.spans[-1]
    last = ((start, stop - 1),) if stop - start > 1 else ()
    return action._replace(spans=(*action.spans[:-1], *last))


def to_next_blocks(num_blocks: int) -> Callable[[int, Action], Action]:
    """Return a change that shifts the blocks of an action by one."""

    def moved(spans: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        blocks = [(block + 1) % num_blocks for start, stop in spans for block in range(start, stop)]
        return tuple((block, block + 1) for block in blocks)

    def change(rank: int, action: Action) -> Action:
        if isinstance(action, Copy):
            return action._replace(source=moved(action.source))
        whole = sum(stop - start for start, stop in action.spans) == num_blocks
        return action if whole and num_blocks == 1 else action._replace(spans=moved(action.spans))

    return change


@pytest.mark.parametrize("size", [4, pytest.param(8, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("algorithm", EVERY)
def test_every_single_change_of_an_action_is_found(algorithm: Algorithm, size: int) -> None:
    schedules = algorithm.schedules(size, pieces=2, hosts=HOSTS[:size])
    check(algorithm.collective, schedules)
    changes = [
        dropped,
        to_another_peer(size),
        to_itself,
        shortened,
        to_next_blocks(max(schedules[0].num_blocks, 1)),
    ]
    if algorithm.collective != "barrier":
        changes.append(with_inverted_reduce)
    num_found = 0
    for change in changes:
        for change_text, mutant in mutants(schedules, change):
            try:
                check(algorithm.collective, mutant)
            except ScheduleError:
                num_found += 1
            else:
                pytest.fail(f"not found: {change_text}")
    assert num_found >= 3 * size


@pytest.mark.parametrize("algorithm", [param for param in EVERY if param.values[0].rooted])  # type: ignore[union-attr]
def test_the_wrong_root_is_found(algorithm: Algorithm) -> None:
    schedules = algorithm.schedules(6, root=2)
    check(algorithm.collective, schedules, root=2)
    with pytest.raises(ScheduleError, match="rank"):
        check(algorithm.collective, schedules, root=3)


def test_a_missing_send_and_receive_are_found_at_the_end() -> None:
    first, second = ALGORITHMS["all_reduce"]["recursive-doubling"].schedules(2)
    with pytest.raises(ScheduleError, match=r"rank 0 ends with block 0 of ranks \[0\] in block 0, .*\[0, 1\]"):
        check("all_reduce", [replace(first, rounds=()), replace(second, rounds=())])


def test_a_block_added_twice_is_found() -> None:
    (first,), (second,) = (s.rounds for s in ALGORITHMS["all_reduce"]["recursive-doubling"].schedules(2))
    with pytest.raises(ScheduleError, match=r"rank [01] in round 1: block 0 counts ranks \[0, 1\] twice"):
        check("all_reduce", two_ranks([first, first], [second, second]))


def test_a_barrier_with_a_missing_wait_is_found() -> None:
    schedules = ALGORITHMS["barrier"]["dissemination"].schedules(5)
    shorter = [replace(schedule, rounds=schedule.rounds[:-1]) for schedule in schedules]
    with pytest.raises(ScheduleError, match=r"rank 0 leaves the barrier without .*ranks \[1\]"):
        check("barrier", shorter)


def test_a_deadlock_of_waiting_sends_is_found() -> None:
    # With buffers this would end with the right result, but a schedule must not rely on buffers.
    rounds: list[list[Round]] = [[(Send(peer, ALL),), (Receive(peer, ALL, reduce=True),)] for peer in (1, 0)]
    with pytest.raises(ScheduleError, match=r"rank 0 in round 0 waits forever for rank 1 in round 1.*\[0, 1\]"):
        check("all_reduce", two_ranks(rounds[0], rounds[1]))


def test_a_deadlock_of_receives_is_found() -> None:
    rounds: list[list[Round]] = [[(Receive(peer, ALL, reduce=True),), (Send(peer, ALL),)] for peer in (1, 0)]
    with pytest.raises(ScheduleError, match="waits forever"):
        check("all_reduce", two_ranks(rounds[0], rounds[1]))


def test_a_round_sends_the_values_of_its_start() -> None:
    swap = [(Receive(1, ALL, reduce=True), Send(1, ALL))], [(Send(0, ALL), Receive(0, ALL, reduce=True))]
    check("all_reduce", two_ranks(*swap))


@pytest.mark.parametrize(
    ("actions", "match"),
    [
        ((Send(2, ALL),), r"rank 0 in round 0: .* no peer among the other ranks of 2"),
        ((Send(-1, ALL),), "no peer"),
        ((Send(0, ALL),), "no peer"),
        ((Send(1, ((0, 3),)),), "span 0:3 of 2 blocks"),
        ((Send(1, ((1, 1),)),), "span 1:1"),
        ((Send(1, ((-1, 1),)),), "span -1:1"),
        ((Receive(1, ALL), Receive(1, ALL)), "rank 0 in round 0 writes block 0 twice"),
        ((Receive(1, ((0, 1), (0, 1))),), "block 0 twice"),
        ((Receive(1, ((1, 2),)), Copy(ALL, ((1, 2),))), "block 1 twice"),
        ((Copy(((0, 2),), ALL),), "spans of different length"),
        ((Send(1, ALL),), "rank 0 in round 0 sends to rank 1, which never receives"),
        ((Receive(1, ALL),), "rank 0 in round 0 receives from rank 1, which never sends"),
        ((Copy(ALL, ((1, 2),)),), r"rank 0 in round 0: block 1 gets block 0 of ranks \[0\]"),
    ],
)
def test_faults_of_one_round_are_named(actions: Round, match: str) -> None:
    with pytest.raises(ScheduleError, match=match):
        check("all_reduce", two_ranks([actions], [], num_blocks=2))


def test_a_send_and_a_receive_of_different_lengths_are_found() -> None:
    schedules = two_ranks([(Send(1, ((0, 2),)),)], [(Receive(0, ALL),)], num_blocks=2)
    with pytest.raises(ScheduleError, match="rank 0 in round 0 sends 2 blocks; rank 1 in round 0 expects 1"):
        check("broadcast", schedules)


def test_reading_unwritten_values_is_found() -> None:
    schedules = two_ranks([(Receive(1, ALL),)], [(Send(0, ALL),)])
    with pytest.raises(ScheduleError, match="rank 1 in round 0: block 0 is read, but is still empty"):
        check("broadcast", schedules)


def test_reducing_into_an_empty_block_is_found() -> None:
    schedules = two_ranks([(Send(1, ALL),)], [(Receive(0, ALL, reduce=True),)])
    with pytest.raises(ScheduleError, match="rank 1 in round 0: block 0 is reduced into, but is empty"):
        check("broadcast", schedules)


def test_an_all_to_all_must_not_write_to_its_input() -> None:
    (schedule,) = ALGORITHMS["all_to_all"]["pairwise"].schedules(1)
    worse = replace(schedule, rounds=(*schedule.rounds, (Copy(((1, 2),), ((0, 1),)),)))
    with pytest.raises(ScheduleError, match=r"rank 0 in round 1 writes block 0 .*input"):
        check("all_to_all", [worse])


@pytest.mark.parametrize(("collective", "wrong"), [("all_gather", 3), ("all_to_all", 4), ("barrier", 1), ("reduce", 0)])
def test_a_wrong_number_of_blocks_for_a_collective_is_found(collective: str, wrong: int) -> None:
    with pytest.raises(ScheduleError, match=f"rank 0 has {wrong} blocks.* {collective}"):
        check(collective, two_ranks([], [], num_blocks=wrong))


def test_ranks_with_different_numbers_of_blocks_are_found() -> None:
    with pytest.raises(ScheduleError, match="rank 1 has 2 blocks"):
        check("all_reduce", [Schedule(1, ()), Schedule(2, ())])


def test_invalid_arguments_are_rejected() -> None:
    with pytest.raises(UsageError, match="No collective 'allreduce'"):
        check("allreduce", [Schedule(1, ())])
    with pytest.raises(UsageError, match="at least one"):
        check("all_reduce", [])
    with pytest.raises(UsageError, match="root 1"):
        check("reduce", [Schedule(1, ())], root=1)


def test_the_error_is_a_paceline_error_and_an_assertion() -> None:
    assert issubclass(ScheduleError, PacelineError)
    assert issubclass(ScheduleError, AssertionError)
