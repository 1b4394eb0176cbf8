"""Links, measured curves, closed formulas, and waiting for slow ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.collectives.schedules import ALGORITHMS, LinkCost, predict
from paceline.errors import UsageError
from paceline.planning.links import (
    PAYLOAD,
    Curve,
    NodeLink,
    all_reduce_s,
    byteps_optimum_s,
    format_speed,
    parse_link,
    ring_s,
)
from paceline.planning.waiting import barrier_s, expected_maximum, spread_of, without_drift
from paceline.strategies.profile import without_outliers

MB = 1 << 20


@pytest.mark.parametrize(
    ("speed", "latency", "bytes_per_s", "latency_s"),
    [("10Gbit", "20us", 1.25e9, 20e-6), ("100 Mbit/s", "0.5ms", 12.5e6, 5e-4), ("1.5gbps", "0s", 187.5e6, 0.0)],
)
def test_links_are_parsed(speed: str, latency: str, bytes_per_s: float, latency_s: float) -> None:
    link = parse_link(speed, latency)
    assert (link.bytes_per_s, link.latency_s) == pytest.approx((bytes_per_s * PAYLOAD, latency_s))


@pytest.mark.parametrize("speed", ["0Gbit", "-1Gbit", "10", "Gbit", "10GB", "1e400Gbit", "9999999Tbit", "nanGbit", ""])
def test_impossible_speeds_are_rejected(speed: str) -> None:
    with pytest.raises(UsageError, match=r"--link .*: expected a speed above 0, such as 10Gbit"):
        parse_link(speed, "50us")


@pytest.mark.parametrize("latency", ["20", "-1us", "1h", "11s", ""])
def test_impossible_latencies_are_rejected(latency: str) -> None:
    with pytest.raises(UsageError, match=r"--latency .*: expected a time of at most 10s, such as 20us"):
        parse_link("1Gbit", latency)


@given(st.floats(1e3, 1e13))
def test_formatted_speeds_can_be_parsed(bytes_per_s: float) -> None:
    assert parse_link(format_speed(bytes_per_s), "0s").bytes_per_s == pytest.approx(bytes_per_s, rel=0.06)


def test_a_curve_is_linear_between_its_points_and_never_falls() -> None:
    curve = Curve(((100, 2.0), (200, 4.0), (300, 3.0)))
    assert [curve.at(size) for size in (1, 100, 150, 200, 250, 300, 600)] == [2.0, 2.0, 3.0, 4.0, 4.0, 4.0, 8.0]


@pytest.mark.parametrize("nodes", [2, 3, 4, 7, 8])
def test_ring_formula_equals_the_evaluated_schedule(nodes: int) -> None:
    block, speed, latency_s = 1000, 1e9, 5e-5
    schedules = ALGORITHMS["all_reduce"]["ring"].schedules(nodes)
    assert ring_s(block * nodes, nodes, speed, latency_s) == pytest.approx(
        predict(schedules, block, LinkCost(latency_s, 1 / speed))
    )


@pytest.mark.parametrize("nodes", [2, 3, 5, 8])
@pytest.mark.parametrize("num_bytes", [100, 10_000, 300_000, 50 * MB])
def test_evaluated_all_reduce_is_as_fast_as_the_best_schedule(nodes: int, num_bytes: int) -> None:
    link = NodeLink(bytes_per_s=1.25e8, latency_s=5e-5)
    times = []
    for algorithm in ALGORITHMS["all_reduce"].values():
        if algorithm.supports(nodes) and not algorithm.hierarchical:
            schedules = algorithm.schedules(nodes, pieces=16 if algorithm.pipelined else 1)
            blocks = max(schedules[0].num_blocks, 1)
            times.append(predict(schedules, math.ceil(num_bytes / blocks), LinkCost(5e-5, 1 / 1.25e8)))
    assert all_reduce_s(num_bytes, nodes, link) == pytest.approx(min(times), rel=0.06)


def test_many_nodes_have_the_time_of_the_best_closed_formula() -> None:
    link = NodeLink(bytes_per_s=1e9, latency_s=1e-5)
    large = 1 << 34
    assert all_reduce_s(large, 1000, link) == pytest.approx(ring_s(large, 1000, 1e9, 1e-5), rel=0.01)
    assert all_reduce_s(8, 1024, link) == pytest.approx(10 * 1e-5, rel=0.01)  # recursive doubling
    assert all_reduce_s(1 << 22, 1024, link) < ring_s(1 << 22, 1024, 1e9, 1e-5) / 1.5  # halving and doubling
    assert all_reduce_s(1 << 30, 1, link) == 0.0


@given(st.integers(2, 500), st.floats(1, 1e12))
def test_byteps_optimum_contains_ring_and_servers(workers: int, num_bytes: float) -> None:
    speed = 1e9
    assert byteps_optimum_s(num_bytes, workers, 0, speed) == pytest.approx(ring_s(num_bytes, workers, speed))
    assert byteps_optimum_s(num_bytes, workers, workers, speed) == pytest.approx(num_bytes / speed)


@given(st.integers(2, 100), st.data())
def test_the_optimum_loads_all_links_equally(workers: int, data: st.DataObject) -> None:
    servers = data.draw(st.integers(1, workers))
    share = 2 * servers * (workers - 1) / (workers**2 + servers * workers - 2 * servers)  # of all bytes, by the paper
    optimum = byteps_optimum_s(1.0, workers, servers, 1.0)
    separate = workers * share / servers  # each of the servers receives its part from all workers
    # A worker sends everything except the part of its own server, which sends its part to all other workers.
    own = (1 - share) / workers
    assert optimum == pytest.approx(separate)
    assert optimum == pytest.approx(1 - own + (workers - 1) * own)


def test_expected_maximum() -> None:
    assert expected_maximum([1.0, 2.0], 1) == pytest.approx(1.5)
    assert expected_maximum([1.0, 2.0], 2) == pytest.approx(1.75)
    assert expected_maximum([3.0, 1.0, 2.0], 10_000) == pytest.approx(3.0)
    draws = np.random.default_rng(1).exponential(size=20_000)
    assert expected_maximum(draws.tolist(), 8) == pytest.approx(sum(1 / k for k in range(1, 9)), rel=0.03)


@pytest.mark.parametrize("ranks", [2, 8, 40])
def test_bounded_delay_lies_between_synchronous_and_asynchronous(ranks: int) -> None:
    draws = [1.0] * 9 + [3.0]
    synchronous, bounded, asynchronous = (barrier_s(draws, ranks, tau) for tau in (0, 4, None))
    assert synchronous == pytest.approx(3 - 2 * 0.9**ranks)
    assert asynchronous == pytest.approx(1.2)
    assert asynchronous < bounded < synchronous
    assert bounded < barrier_s(draws, ranks, 1)


def test_very_many_ranks_need_little_memory() -> None:
    assert barrier_s([1.0, 2.0], 102_400_000, 4) == pytest.approx(2.0, rel=0.2)


def test_equal_steps_need_no_waiting() -> None:
    assert [barrier_s([2.0] * 5, 16, tau) for tau in (0, 1, 4, None)] == pytest.approx([2.0] * 4)


def test_long_pauses_do_not_count() -> None:
    assert without_outliers([1.0, 1.1, 0.9, 50.0]) == [1.0, 1.1, 0.9]


def test_slow_changes_do_not_count_as_differences_between_ranks() -> None:
    """Ranks of one machine become slower together. A slow step of one rank remains."""
    slower = [1.0] * 50 + [2.0] * 50
    assert without_drift(slower)[10:40] == pytest.approx([1.5] * 30)
    assert expected_maximum(without_drift(slower), 2) < 1.52 < expected_maximum(slower, 2)
    draws = np.random.default_rng(2).uniform(1.0, 3.0, 2000)
    kept = without_drift(draws.tolist())
    assert np.mean(kept) == pytest.approx(draws.mean())
    assert np.std(kept) == pytest.approx(draws.std(), rel=0.15)


def test_spread_of_steps() -> None:
    """One slow step of many does not count."""
    assert spread_of([1.0] * 19 + [9.0]) == 1.0
    assert spread_of([1.0] * 5 + [5.0] * 5) == pytest.approx(5.0)
