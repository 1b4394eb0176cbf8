"""Compare the evaluator with the closed forms of the literature; check its model of a rank's ports."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Final

import pytest

from paceline.collectives.schedules import (
    ALGORITHMS,
    Algorithm,
    Copy,
    LinkCost,
    Receive,
    Round,
    Schedule,
    ScheduleError,
    Send,
    fastest,
    predict,
)

A: Final = 1e-5
B: Final = 2e-10
G: Final = 1e-10
N: Final = 64 * 63 * 10_000
LINK: Final = LinkCost(A, B)

EVERY = [
    pytest.param(algorithm, id=f"{collective}-{name}")
    for collective, algorithms in ALGORITHMS.items()
    for name, algorithm in algorithms.items()
]
SIZES = [1, 2, 3, 4, 6, 8, 16, 63, 64]
POWERS = [1, 2, 4, 8, 16, 32, 64]
ONE = ((0, 1),)


def seconds(collective: str, name: str, size: int, num_bytes: int = N, gamma: float = G, pieces: int = 1) -> float:
    schedules = ALGORITHMS[collective][name].schedules(size, pieces=pieces)
    block_bytes = num_bytes // max(schedules[0].num_blocks, 1)
    return predict(schedules, block_bytes, LINK, gamma_s_per_byte=gamma)


def near(expected: float) -> object:
    return pytest.approx(expected, rel=1e-9, abs=0.0 if expected else 1e-15)


@pytest.mark.parametrize("p", SIZES)
def test_ring(p: int) -> None:
    n = N // p * p
    assert seconds("all_reduce", "ring", p) == near(2 * (p - 1) * (A + n / p * B) + (p - 1) * n / p * G)
    assert seconds("reduce_scatter", "ring", p) == near((p - 1) * (A + n / p * B + n / p * G))
    assert seconds("all_gather", "ring", p) == near((p - 1) * (A + n / p * B))


@pytest.mark.parametrize("p", POWERS)
def test_doubling(p: int) -> None:
    log, part = math.log2(p), (p - 1) / p * N
    assert seconds("all_reduce", "recursive-doubling", p) == near(log * (A + N * B + N * G))
    assert seconds("all_reduce", "halving-doubling", p) == near(2 * log * A + 2 * part * B + part * G)
    assert seconds("all_gather", "recursive-doubling", p) == near(log * A + part * B)


@pytest.mark.parametrize("p", [3, 5, 6, 7, 63])
def test_the_fold_costs_two_more_complete_messages(p: int) -> None:
    core = 1 << (p.bit_length() - 1)
    n = N // core * core
    for name in ("recursive-doubling", "halving-doubling"):
        extra = seconds("all_reduce", name, p, n) - seconds("all_reduce", name, core, n)
        # The cost is below the bound if the ranks outside of the fold have sent their messages before the fold ends.
        assert extra > A + n * B
        assert extra <= (2 * (A + n * B) + n * G) * (1 + 1e-9)


@pytest.mark.parametrize("p", SIZES)
def test_bruck_and_pairwise_and_dissemination(p: int) -> None:
    log, n = math.ceil(math.log2(p)), N // p * p
    assert seconds("all_gather", "bruck", p) == near(log * A + (p - 1) * n / p * B)
    assert seconds("all_gather", "pairwise", p) == near((p - 1) * (A + n / p * B))
    assert seconds("barrier", "dissemination", p) == near(log * A)
    assert seconds("all_to_all", "pairwise", p, 3 * n) == near((p - 1) * (A + n / p * B))


@pytest.mark.parametrize("p", POWERS)
def test_bruck_sends_half_of_the_input_in_every_round(p: int) -> None:
    assert seconds("all_to_all", "bruck", p, 3 * N) == near(math.log2(p) * (A + N / 2 * B))


@pytest.mark.parametrize("p", POWERS)
def test_binomial_tree(p: int) -> None:
    log = math.log2(p)
    assert seconds("broadcast", "binomial-tree", p) == near(log * (A + N * B))
    assert seconds("reduce", "binomial-tree", p) == near(log * (A + N * B + N * G))
    assert seconds("all_reduce", "binomial-tree", p) == near(log * (2 * A + 2 * N * B + N * G))
    assert seconds("scatter", "binomial-tree", p) == near(log * A + (p - 1) / p * N * B)


@pytest.mark.parametrize("p", [2, 3, 8, 64])
def test_central_grows_linearly(p: int) -> None:
    n = N // p * p
    assert seconds("broadcast", "central", p) == near(A + (p - 1) * N * B)
    # The root adds one vector while the next vector arrives, because γ < β.
    assert seconds("reduce", "central", p) == near(A + (p - 1) * N * B + N * G)
    assert seconds("all_reduce", "central", p) == near(2 * A + 2 * (p - 1) * N * B + N * G)
    assert seconds("reduce", "central", p, gamma=3 * B) == near(A + N * B + (p - 1) * 3 * N * B)
    for collective in ("gather", "scatter"):
        assert seconds(collective, "central", p) == near(A + (p - 1) * n / p * B)


def test_pieces_overlap() -> None:
    for p in (8, 64):
        whole, pipelined = (seconds("all_reduce", "double-binary-tree", p, pieces=pieces) for pieces in (1, 64))
        assert pipelined < 0.5 * whole
        # Full bandwidth: both ports of each rank are busy nearly all of the time.
        assert pipelined < 1.6 * (2 * N * B)
        assert seconds("broadcast", "double-binary-tree", p, pieces=64) < 1.25 * N * B
        assert seconds("broadcast", "binomial-tree", p, pieces=64) > math.log2(p) * N * B


def test_few_rounds_are_best_for_short_vectors_and_few_bytes_for_long_vectors() -> None:
    def fastest(size: int, num_bytes: int) -> str:
        return min(
            ("recursive-doubling", "ring", "binomial-tree"), key=lambda n: seconds("all_reduce", n, size, num_bytes)
        )

    assert fastest(64, 64) == "recursive-doubling"
    assert fastest(63, N) == "ring"
    assert seconds("all_reduce", "halving-doubling", 64) < seconds("all_reduce", "ring", 64)


def test_the_hierarchy_is_fastest_if_links_within_a_host_are_fast() -> None:
    hosts = [rank // 8 for rank in range(32)]

    def link(source: int, target: int) -> LinkCost:
        same = hosts[source] == hosts[target]
        return LinkCost(1e-7, 1e-12) if same else LinkCost(1e-4, 1e-9)

    times = {}
    for name in ("hierarchical", "ring", "recursive-doubling"):
        schedules = ALGORITHMS["all_reduce"][name].schedules(32, hosts=hosts)
        times[name] = predict(schedules, 64_000 // schedules[0].num_blocks, link, hosts=hosts)
    assert min(times, key=times.__getitem__) == "hierarchical"


def run(*ranks: Sequence[Round], block_bytes: list[int] | int = 100, gamma: float = 0.0) -> float:
    num_blocks = 4 if isinstance(block_bytes, int) else len(block_bytes)
    return predict([Schedule(num_blocks, tuple(rounds)) for rounds in ranks], block_bytes, LINK, gamma_s_per_byte=gamma)


def test_a_rank_sends_one_message_after_another() -> None:
    assert run([(Send(1, ONE), Send(2, ONE))], [(Receive(0, ONE),)], [(Receive(0, ONE),)]) == near(A + 2 * 100 * B)


def test_a_rank_receives_one_message_after_another() -> None:
    receives: Round = (Receive(0, ONE), Receive(1, ((1, 2),)))
    assert run([(Send(2, ONE),)], [(Send(2, ((1, 2),)),)], [receives]) == near(A + 2 * 100 * B)


def test_a_rank_sends_and_receives_concurrently() -> None:
    ranks: list[list[Round]] = [[(Send(peer, ONE), Receive(peer, ((1, 2),)))] for peer in (1, 0)]
    assert run(*ranks) == near(A + 100 * B)


def test_an_early_message_waits_for_the_round() -> None:
    # Rank 1 receives from rank 2 first. Meanwhile rank 0's message arrives, so later only its addition takes time.
    late = [(Receive(2, ((1, 4),)),), (Receive(0, ONE, reduce=True),)]
    assert run([(Send(1, ONE),)], late, [(Send(1, ((1, 4),)),)], gamma=G) == near(A + 400 * B + 100 * G)


def test_blocks_of_unequal_size() -> None:
    spans = ((0, 1), (2, 4))
    assert run([(Send(1, spans),)], [(Receive(0, spans),)], block_bytes=[5, 1000, 0, 7]) == near(A + 12 * B)


@pytest.mark.parametrize(
    ("hosts", "shares"),
    [(None, 1), ([0, 1, 2, 3], 1), ([0, 0, 1, 1], 2), ([0, 1, 2, 2], 2), ([5, 5, 9, 7], 2), ([0, 1, 0, 1], 1)],
)
def test_ranks_of_a_host_share_the_port_to_other_hosts(hosts: list[int] | None, shares: int) -> None:
    # Ranks 0 and 1 send concurrently, to ranks 2 and 3.
    rounds = [(Send(2, ONE),)], [(Send(3, ONE),)], [(Receive(0, ONE),)], [(Receive(1, ONE),)]
    schedules = [Schedule(1, tuple(rounds_of_rank)) for rounds_of_rank in rounds]
    assert predict(schedules, 100, LINK, hosts=hosts) == near(A + shares * 100 * B)


def test_a_port_within_the_host_is_separate_from_the_port_to_other_hosts() -> None:
    rounds: list[list[Round]] = [[(Send(1, ONE), Send(2, ONE))], [(Receive(0, ONE),)], [(Receive(0, ONE),)]]
    schedules = [Schedule(1, tuple(rounds_of_rank)) for rounds_of_rank in rounds]
    assert predict(schedules, 100, LINK, hosts=[0, 0, 0]) == near(A + 2 * 100 * B)
    assert predict(schedules, 100, LINK, hosts=[0, 0, 1]) == near(A + 100 * B)


def test_copies_and_empty_rounds_take_no_time() -> None:
    assert run([(Copy(ONE, ((1, 2),)),), ()]) == 0.0
    assert predict([], 8, LINK) == 0.0


def test_endless_waits_are_reported() -> None:
    with pytest.raises(ScheduleError, match="rank 1 in round 0 of 2 waits forever"):
        run([], [(Receive(0, ONE),), ()])


@pytest.mark.parametrize("algorithm", EVERY)
def test_predictions_are_reproducible_and_longer_vectors_take_longer(algorithm: Algorithm) -> None:
    schedules = algorithm.schedules(8, pieces=2, hosts=[0, 0, 0, 1, 1, 1, 1, 2])
    short, again, long = (predict(schedules, num_bytes, LINK, gamma_s_per_byte=G) for num_bytes in (10, 10, 10**6))
    assert short == again
    assert 0 < short < sys.float_info.max
    assert long > short or algorithm.collective == "barrier"


@pytest.mark.parametrize(("ring_s", "chosen"), [(1.0, "ring"), (1.09, "ring"), (1.11, "central"), (None, "central")])
def test_the_ring_is_chosen_if_it_is_close(ring_s: float | None, chosen: str) -> None:
    times_s = {"central": 1.0, "bruck": 2.0} | ({} if ring_s is None else {"ring": ring_s})
    assert fastest(times_s) == chosen
