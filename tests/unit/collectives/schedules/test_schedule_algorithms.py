"""Properties of each algorithm (few rounds, few bytes or balanced ranks) and its limits."""

from __future__ import annotations

import math
from typing import Any

import pytest

from paceline.collectives.schedules import ALGORITHMS, Algorithm, Copy, Receive, Schedule, Send
from paceline.errors import UsageError

SIZES = [2, 3, 4, 7, 8, 16, 31, 32, 33, 64]


def num_sent(schedule: Schedule) -> int:
    """Return the number of blocks that the rank of a schedule sends."""
    actions = [action for actions in schedule.rounds for action in actions]
    return sum(stop - start for action in actions if isinstance(action, Send) for start, stop in action.spans)


def receivers(schedule: Schedule, block: int) -> set[int]:
    """Return the ranks to which a rank sends the block."""
    actions = [action for actions in schedule.rounds for action in actions if isinstance(action, Send)]
    return {send.peer for send in actions if any(start <= block < stop for start, stop in send.spans)}


@pytest.mark.parametrize("size", SIZES)
def test_ring_and_pairwise_move_the_fewest_bytes(size: int) -> None:
    for name, collective, expected in (
        ("ring", "all_reduce", 2 * (size - 1)),
        ("ring", "reduce_scatter", size - 1),
        ("ring", "all_gather", size - 1),
        ("pairwise", "reduce_scatter", size - 1),
        ("pairwise", "all_to_all", size - 1),
        ("bruck", "all_gather", size - 1),
    ):
        assert {num_sent(s) for s in ALGORITHMS[collective][name].schedules(size)} == {expected}


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64])
def test_halving_doubling_sends_as_many_bytes_as_the_ring_in_fewer_rounds(size: int) -> None:
    for schedule in ALGORITHMS["all_reduce"]["halving-doubling"].schedules(size):
        assert num_sent(schedule) == 2 * (size - 1)
        assert len(schedule.rounds) == 2 * math.log2(size)


@pytest.mark.parametrize("size", SIZES)
def test_the_number_of_rounds_is_logarithmic(size: int) -> None:
    log = math.ceil(math.log2(size))
    for name, collective, most in (
        ("recursive-doubling", "all_reduce", math.floor(math.log2(size)) + (2 if size & (size - 1) else 0)),
        ("bruck", "all_gather", log),
        ("bruck", "all_to_all", log),
        ("dissemination", "barrier", log),
        ("binomial-tree", "reduce", log),
        ("binomial-tree", "broadcast", 2 if size > 3 else 1),  # receive, and send to all children together
        ("binomial-tree", "gather", 2 if size > 3 else 1),
        ("binomial-tree", "scatter", 2 if size > 3 else 1),
    ):
        assert max(len(s.rounds) for s in ALGORITHMS[collective][name].schedules(size)) == most


@pytest.mark.parametrize("size", range(1, 65))
def test_no_rank_is_an_inner_node_of_both_binary_trees(size: int) -> None:
    algorithm = ALGORITHMS["all_reduce"]["double-binary-tree"]
    for rank, schedule in enumerate(algorithm.schedules(size)):
        # An inner node sends a block to its parent and to at most two children. A leaf sends only to its parent.
        peers = [receivers(schedule, block) for block in (0, 1)]
        takes = [
            {
                action.peer
                for actions in schedule.rounds
                for action in actions
                if isinstance(action, Receive) and action.reduce and action.spans == ((block, block + 1),)
            }
            for block in (0, 1)
        ]
        assert not (takes[0] and takes[1]), f"rank {rank} is an inner node of both trees"
        assert max(map(len, takes)) <= 2
        assert max(map(len, peers)) <= 3
        assert num_sent(schedule) <= 4


@pytest.mark.parametrize("size", [3, 8, 31, 64])
def test_the_double_binary_tree_balances_sends_and_receives(size: int) -> None:
    algorithm = ALGORITHMS["broadcast"]["double-binary-tree"]
    schedules = algorithm.schedules(size, root=1, pieces=4)
    assert all(schedule.num_blocks == 8 for schedule in schedules)
    assert max(num_sent(schedule) for schedule in schedules) <= 8
    log = math.ceil(math.log2(size))
    assert max(len(schedule.rounds) for schedule in schedules) <= log + 4 + 1


def test_pipelines_cut_the_vector_into_pieces_and_overlap_the_transfers() -> None:
    for name in ("binomial-tree", "central"):
        one, many = (ALGORITHMS["broadcast"][name].schedules(8, pieces=pieces) for pieces in (1, 10))
        assert many[0].num_blocks == 10
        longest = [max(len(schedule.rounds) for schedule in schedules) for schedules in (one, many)]
        assert longest[1] == longest[0] + 9


def test_only_leaders_of_hosts_send_to_other_hosts() -> None:
    hosts = [7, 7, 7, 2, 2, 2, 7, 5]
    crossing = set()
    for rank, schedule in enumerate(ALGORITHMS["all_reduce"]["hierarchical"].schedules(8, hosts=hosts)):
        for actions in schedule.rounds:
            for action in actions:
                assert not isinstance(action, Copy)
                if hosts[action.peer] != hosts[rank]:
                    crossing.add(rank)
    assert crossing == {0, 3, 7}


def test_hierarchical_with_one_rank_per_host_is_the_algorithm_of_the_leaders() -> None:
    table = ALGORITHMS["all_reduce"]
    for size, name in ((8, "halving-doubling"), (6, "ring")):
        assert table["hierarchical"].schedules(size, hosts=range(size)) == table[name].schedules(size)


@pytest.mark.parametrize(
    ("collective", "name", "options", "match"),
    [
        ("all_gather", "recursive-doubling", {"rank": 0, "size": 6}, "expected a power of two"),
        ("all_reduce", "hierarchical", {"rank": 0, "size": 4}, "pass hosts"),
        ("all_reduce", "hierarchical", {"rank": 0, "size": 4, "hosts": [0, 0]}, "2 host numbers for 4 ranks"),
        ("all_reduce", "ring", {"rank": 4, "size": 4}, "rank 4"),
        ("all_reduce", "ring", {"rank": -1, "size": 4}, "rank -1"),
        ("all_reduce", "ring", {"rank": 0, "size": 0}, "of 0 ranks"),
        ("broadcast", "central", {"rank": 0, "size": 4, "root": 4}, "root 4"),
        ("broadcast", "central", {"rank": 0, "size": 4, "pieces": 0}, "0 pieces"),
    ],
)
def test_invalid_arguments_are_rejected(collective: str, name: str, options: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        ALGORITHMS[collective][name].schedule(**options)


def test_supports_matches_the_rejections() -> None:
    algorithm = ALGORITHMS["all_gather"]["recursive-doubling"]
    assert [size for size in range(20) if algorithm.supports(size)] == [1, 2, 4, 8, 16]


def test_unused_options_are_ignored() -> None:
    algorithm: Algorithm = ALGORITHMS["all_reduce"]["ring"]
    assert algorithm.schedule(1, 4, root=2, pieces=5, hosts=[0, 0, 1, 1]) == algorithm.schedule(1, 4)


def test_only_all_to_all_of_bruck_needs_equal_blocks() -> None:
    every = [algorithm for algorithms in ALGORITHMS.values() for algorithm in algorithms.values()]
    unequal = [(algorithm.collective, algorithm.name) for algorithm in every if algorithm.equal_blocks_only]
    assert unequal == [("all_to_all", "bruck")]
