"""All ranks run the same operations in the same order, for any order and time of their requests."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.protocol.negotiating import NegotiatingRanks, tensor

from paceline.errors import UsageError
from paceline.protocol.negotiation.negotiator import Negotiator
from paceline.protocol.negotiation.requests import (
    ADASUM,
    ADD_PROCESS_SET,
    ALLGATHER,
    ALLTOALL,
    BARRIER,
    BROADCAST,
    LARGE_BYTES,
    REDUCESCATTER,
    REMOVE_PROCESS_SET,
    NegotiationDecision,
    NegotiationReport,
    fuse,
)

NAMES = [f"t{number}" for number in range(6)]
SEEDS = st.integers(0, 2**32)


def arrivals_of(size: int, random: Random) -> list[tuple[int, str]]:
    """Return one request of each name by each rank, in random order."""
    arrivals = [(rank, name) for rank in range(size) for name in NAMES]
    random.shuffle(arrivals)
    return arrivals


def test_an_operation_runs_when_all_ranks_have_requested_it() -> None:
    ranks = NegotiatingRanks(3)
    ranks.request([tensor("x")], ranks=[0, 2])
    ranks.run()
    assert ranks.names(0) == []
    ranks.request([tensor("x")], ranks=[1])
    ranks.run()
    assert [ranks.names(rank) for rank in range(3)] == [["x"]] * 3
    assert not any(rank.has_pending for rank in ranks.ranks)


def test_the_steady_state_needs_no_coordinator() -> None:
    ranks = NegotiatingRanks(2)
    for _ in range(5):
        ranks.request(map(tensor, NAMES))
        ranks.run()
    assert ranks.num_reports == 1
    assert ranks.names(1) == NAMES * 5


@given(SEEDS, st.integers(2, 4), st.integers(0, 7))
def test_any_order_of_arrival_gives_one_order(seed: int, size: int, capacity: int) -> None:
    """The cache may be too small, and requests arrive in the middle of rounds. Steps follow one another."""
    random = Random(seed)
    ranks = NegotiatingRanks(size, capacity=capacity)
    arrivals: list[tuple[int, str]] = []

    def arrive() -> None:
        for _ in range(random.randint(0, min(2, len(arrivals)))):
            rank, name = arrivals.pop()
            ranks.request([tensor(name)], ranks=[rank])

    for _ in range(3):
        arrivals = arrivals_of(size, random)
        while arrivals:
            arrive()
            ranks.run_round(arrive)
        ranks.run()
    assert sorted(ranks.names(0)) == sorted(NAMES * 3)
    assert all(ranks.operations(rank) == ranks.operations(0) for rank in range(size))


@given(SEEDS, st.integers(2, 4), st.integers(5, 8))
def test_repeated_steps_have_one_order(seed: int, size: int, capacity: int) -> None:
    """Each rank repeats its requests in its own order. In some steps, a shape changes or there is one request more."""
    random = Random(seed)
    ranks = NegotiatingRanks(size, capacity=capacity)
    orders = [random.sample(NAMES, len(NAMES)) for _ in range(size)]
    lengths = dict.fromkeys([*NAMES, "extra"], 4)
    expected: list[str] = []
    for _ in range(10):
        lengths[random.choice([*NAMES, "extra", "extra", "extra"])] += 1
        extra = random.choice([[], [], ["extra"]])
        first = random.choice([0, 0, 3])
        for part in (slice(0, first), slice(first, None)):
            for rank in random.sample(range(size), size):
                for name in (orders[rank] + extra)[part]:
                    ranks.request([tensor(name, (lengths[name],))], ranks=[rank])
                if random.random() < 0.2:
                    ranks.run_round()
        ranks.run()
        expected += NAMES + extra
        assert sorted(ranks.names(0)) == sorted(expected)
    assert all(ranks.operations(rank) == ranks.operations(0) for rank in range(size))
    assert not any(rank.has_pending for rank in ranks.ranks)


@given(SEEDS, st.integers(2, 4), st.booleans())
def test_every_rank_gets_one_error_for_a_mismatch(seed: int, size: int, is_cached: bool) -> None:
    random = Random(seed)
    differing, wrong = random.choice(NAMES), random.randrange(size)
    ranks = NegotiatingRanks(size)
    if is_cached:  # the request is in the cache of all ranks, and one rank changes it
        ranks.request([tensor(differing)])
        ranks.run()
        ranks.clear()
    for rank, name in arrivals_of(size, random):
        ranks.request([tensor(name, (4 if (rank, name) != (wrong, differing) else 5,))], ranks=[rank])
        if random.random() < 0.5:
            ranks.run_round()
    ranks.run()
    expected = sorted(name for name in NAMES if name != differing)
    for rank in range(size):
        assert sorted(ranks.names(rank)) == expected
        assert list(ranks.errors(rank)) == [differing]
        assert f"rank {wrong}: [5]" in ranks.errors(rank)[differing]
    ranks.clear()
    ranks.request([tensor(differing)])
    ranks.run()
    assert ranks.names(0) == [differing]


@pytest.mark.parametrize(
    ("fields", "others", "words"),
    [
        ({"dtype": "int32"}, {}, ["Mismatched data types", "had type float32", "had type int32", "rank 1: int32"]),
        ({"operation": BROADCAST, "root": 0}, {}, ["Mismatched operations", "did an ALLREDUCE", "did an BROADCAST"]),
        ({"reduction": "max"}, {"reduction": "sum"}, ["Mismatched reduction operation", "max", "sum"]),
        ({"prescale": 2.0}, {}, ["Mismatched prescale and/or postscale factors", "(2.0, 1.0)"]),
        ({"shape": (5,)}, {}, ["Mismatched ALLREDUCE tensor shapes", "sent a tensor of shape [4]", "[5]"]),
        ({"device": "cuda"}, {"device": "cpu"}, ["Mismatched ALLREDUCE CPU/GPU device selection", "CUDA", "CPU"]),
        ({"group": "a"}, {"group": "b"}, ["Mismatched groups"]),
        (
            {"operation": BROADCAST, "root": 0},
            {"operation": BROADCAST, "root": 2},
            ["Mismatched BROADCAST root ranks", "specified root rank 2", "specified root rank 0", "ranks 0 and 2: 2"],
        ),
        (
            {"operation": ALLGATHER, "shape": (1, 3)},
            {"operation": ALLGATHER, "shape": (9, 4)},
            ["Mismatched ALLGATHER tensor shapes", "[*, 4]", "[*, 3]"],
        ),
    ],
)
def test_a_mismatch_has_the_words_of_horovod_and_the_ranks(
    fields: dict[str, Any], others: dict[str, Any], words: list[str]
) -> None:
    ranks = NegotiatingRanks(3)
    ranks.request([tensor("x", **others)], ranks=[0, 2])
    ranks.request([tensor("x", **fields)], ranks=[1])
    ranks.run()
    for rank in range(3):
        (error,) = ranks.errors(rank).values()
        assert [word for word in [*words, "'x'"] if word not in error] == []
    assert ranks.names(0) == []


@pytest.mark.parametrize("operation", [ALLGATHER, ALLTOALL])
def test_the_number_of_rows_may_differ_and_change(operation: str) -> None:
    ranks = NegotiatingRanks(2)
    for step in range(3):
        for rank in range(2):
            ranks.request([tensor("x", (rank + step, 3), operation=operation)], ranks=[rank])
        ranks.run()
    assert ranks.names(0) == ["x"] * 3
    assert ranks.num_reports == 1


@pytest.mark.parametrize("operation", [ALLGATHER, ALLTOALL, REDUCESCATTER])
def test_rows_of_a_scalar_cannot_be_divided(operation: str) -> None:
    ranks = NegotiatingRanks(2)
    ranks.request([tensor("x", (), operation=operation)])
    ranks.run()
    assert all("0 dimensions" in ranks.errors(rank)["x"] for rank in range(2))


@given(SEEDS, st.lists(st.integers(0, 3), min_size=2, max_size=4))
def test_joined_ranks_take_part(seed: int, num_steps: list[int]) -> None:
    """Ranks with fewer steps join. The other ranks continue, in the order that the joined ranks run too."""
    random, size = Random(seed), len(num_steps)
    ranks = NegotiatingRanks(size)
    last_to_join = []
    for step in range(max(num_steps) + 1):
        for rank in random.sample(range(size), size):
            if step == num_steps[rank]:
                ranks.ranks[rank].join()
                last_to_join.append(rank)
                ranks.run()
            elif step < num_steps[rank]:
                ranks.request(map(tensor, random.sample(NAMES, len(NAMES))), ranks=[rank])
        ranks.run()
    assert all(sorted(ranks.names(rank)) == sorted(NAMES * max(num_steps)) for rank in range(size))
    assert all(ranks.operations(rank) == ranks.operations(0) for rank in range(size))
    assert all(ranks.last_joined(rank) == last_to_join[-1:] for rank in range(size))
    ranks.clear()
    ranks.request(map(tensor, NAMES))
    ranks.run()
    assert sorted(ranks.names(0)) == NAMES


def test_the_root_of_a_broadcast_must_not_have_joined() -> None:
    ranks = NegotiatingRanks(2)
    for is_cached in (False, True):
        if is_cached:
            ranks.request([tensor("x", operation=BROADCAST, root=1)])
            ranks.run()
            ranks.clear()
        ranks.ranks[1].join()
        ranks.request([tensor("x", operation=BROADCAST, root=1)], ranks=[0])
        ranks.run()
        assert ranks.names(0) == []
        assert "rank 1, has joined" in ranks.errors(0)["x"]
        ranks.ranks[0].join()
        ranks.run()


def test_a_request_of_a_joined_rank_is_compared() -> None:
    ranks = NegotiatingRanks(3)
    ranks.request([tensor("x", (5,))], ranks=[1])
    ranks.ranks[1].join()
    ranks.run()
    ranks.request([tensor("x", (4,))], ranks=[0, 2])
    ranks.run()
    assert all("rank 1: [5]" in ranks.errors(rank)["x"] for rank in range(3))


@pytest.mark.parametrize("is_earlier", [False, True])
def test_a_cached_request_is_complete_when_all_ranks_have_joined(is_earlier: bool) -> None:
    ranks = NegotiatingRanks(2)
    ranks.request([tensor("x")])
    ranks.run()
    ranks.clear()
    ranks.request([tensor("x")], ranks=[0])
    ranks.ranks[0].join()
    if is_earlier:
        ranks.run()
    ranks.ranks[1].join()
    ranks.run()
    assert [ranks.names(rank) for rank in range(2)] == [["x"], ["x"]]
    assert not any(rank.has_pending for rank in ranks.ranks)


def test_the_requests_of_a_process_set_need_only_its_ranks() -> None:
    ranks = NegotiatingRanks(3)
    ranks.request([tensor("add", (0, 2), operation=ADD_PROCESS_SET)])
    ranks.run()
    number = ranks.ranks[1].find_process_set((0, 2))
    assert number == 1
    ranks.clear()
    for _ in range(2):
        ranks.request([tensor("x", process_set=number)], ranks=[2, 0])
        ranks.run()
    assert [ranks.names(rank) for rank in range(3)] == [["x", "x"], [], ["x", "x"]]
    assert ranks.num_reports == 2
    ranks.ranks[1].join()
    ranks.ranks[2].join()
    ranks.run()
    ranks.ranks[0].join()
    ranks.run()
    assert ranks.names(0) == ["x", "x"], "a cached operation of joined ranks runs without a request"
    ranks.clear()
    ranks.request([tensor("x", process_set=number)], ranks=[0])
    ranks.request([tensor("remove", (0, 2), operation=REMOVE_PROCESS_SET)])
    ranks.run()
    assert ranks.names(2) == ["remove"]
    assert list(ranks.errors(0)) == ["x"]
    with pytest.raises(UsageError, match="process set 1"):
        ranks.request([tensor("x", process_set=number)], ranks=[0])


@pytest.mark.parametrize("order", [["remove", "x"], ["x", "remove"]])
def test_no_request_of_a_removed_process_set_remains(order: list[str]) -> None:
    ranks = NegotiatingRanks(3)
    ranks.request([tensor("add", (0, 2), operation=ADD_PROCESS_SET)])
    ranks.run()
    ranks.clear()
    requests = {
        "remove": (tensor("remove", (0, 2), operation=REMOVE_PROCESS_SET), [0, 1, 2]),
        "x": (tensor("x", process_set=1), [0, 2]),
    }
    ranks.request([tensor("y", process_set=1)], ranks=[0])
    for name in order:
        request, members = requests[name]
        ranks.request([request], ranks=members)
    ranks.run()
    for rank in (0, 2):
        assert "x" in (ranks.names(rank) if order[0] == "x" else ranks.errors(rank))
    assert "y" in ranks.errors(0)
    assert ranks.ranks[0].missing() == {}
    ranks.ranks[1].join()
    ranks.request([tensor("z")], ranks=[0, 2])
    ranks.run()
    assert all("z" in ranks.names(rank) for rank in range(3))


@given(st.permutations([(0, 0), (1, 0), (2, 1), (3, 1), (0, 1), (1, 1)]))
def test_operations_of_overlapping_sets_have_one_order(arrivals: list[tuple[int, int]]) -> None:
    ranks = NegotiatingRanks(4)
    for members in ((0, 1), (0, 1, 2, 3)):
        ranks.request([tensor("add", members, operation=ADD_PROCESS_SET)])
        ranks.run()
    ranks.clear()
    for _ in range(2):
        for rank, number in arrivals:
            process_set = ranks.ranks[0].find_process_set(((0, 1), (0, 1, 2, 3))[number])
            assert process_set is not None
            ranks.request([tensor(f"set {number}", process_set=process_set)], ranks=[rank])
        ranks.run()
    assert sorted(ranks.names(0)) == ["set 0", "set 0", "set 1", "set 1"]
    assert ranks.names(1) == ranks.names(0)
    assert ranks.names(2) == ranks.names(3) == ["set 1", "set 1"]


def test_different_process_sets_are_an_error_not_a_wait() -> None:
    ranks = NegotiatingRanks(3)
    ranks.request([tensor("add", (0, 1), operation=ADD_PROCESS_SET)])
    ranks.run()
    ranks.request([tensor("x", process_set=1)], ranks=[0])
    ranks.request([tensor("x")], ranks=[2])
    ranks.run()
    assert ranks.errors(0) == {}
    ranks.request([tensor("x")], ranks=[1])
    ranks.run()
    assert all("ranks 1 and 2 used process set 0" in ranks.errors(rank)["x"] for rank in range(3))
    assert not any(rank.has_pending for rank in ranks.ranks)


def test_all_ranks_end_when_one_leaves() -> None:
    ranks = NegotiatingRanks(2)
    ranks.request([tensor("x")])
    ranks.request([tensor("y")], ranks=[0])
    ranks.run()
    ranks.request([tensor("x")])
    ranks.ranks[1].leave()
    ranks.run_round()
    assert ranks.names(0) == ["x", "x"]
    assert all(rank.is_over for rank in ranks.ranks)


def test_a_name_is_used_once_at_a_time() -> None:
    ranks = NegotiatingRanks(2)
    ranks.request([tensor("x")], ranks=[0])
    with pytest.raises(UsageError, match="same name as another tensor that is currently being processed: 'x'"):
        ranks.ranks[0].request({request.key: request for request in (tensor("y"), tensor("x"))})
    ranks.request([tensor("y")], ranks=[0])
    ranks.ranks[1].join()
    for call in (lambda: ranks.request([tensor("z")], ranks=[1]), ranks.ranks[1].join):
        with pytest.raises(UsageError, match="join"):
            call()


def test_a_name_is_in_use_until_its_operation_is_done() -> None:
    alone = Negotiator(0, 1, cache_capacity=8, fusion_threshold_bytes=0)
    request = {tensor("x").key: tensor("x")}
    for _ in range(2):  # by the coordinator's decision, then by the cache
        alone.request(request)
        alone.agreed(alone.vote())
        if alone.needs_reports:
            alone.decided(alone.decide([alone.report()]))
        assert not alone.has_pending
        with pytest.raises(UsageError, match="currently being processed"):
            alone.request(request)
        alone.finished(request)


@pytest.mark.parametrize("is_cached", [False, True])
def test_missing_ranks_are_known(is_cached: bool) -> None:
    ranks = NegotiatingRanks(3)
    if is_cached:
        ranks.request([tensor("x")])
        ranks.run()
        ranks.clear()
    ranks.request([tensor("x")], ranks=[1])
    ranks.run()
    for rank in ranks.ranks:
        rank.uncache_pending()
    ranks.run()
    assert ranks.ranks[0].missing() == {(0, "x"): (0, 2)}
    num_reports = ranks.num_reports
    ranks.ranks[0].request_reports()
    ranks.run()
    assert ranks.num_reports == num_reports + 1
    ranks.clear()
    ranks.request([tensor("x")], ranks=[0, 2])
    ranks.run()
    assert ranks.names(2) == ["x"]
    assert ranks.ranks[0].missing() == {}


def test_fusion() -> None:
    half: dict[str, Any] = {"dtype": "float16"}
    none: dict[str, Any] = {}
    requests = [
        *(tensor(name, **fields) for name, fields in (("a", none), ("h", half), ("b", none), ("c", none), ("i", half))),
        tensor("barrier", operation=BARRIER),
        tensor("adasum", reduction=ADASUM),
        tensor("adasum 2", reduction=ADASUM),
        *(tensor(name, num_bytes=LARGE_BYTES) for name in ("large", "large 2")),
    ]
    fused = [tuple(request.name for request in operation.requests) for operation in fuse(requests, 32)]
    assert fused == [("a", "b"), ("h", "i"), ("c",), ("barrier",), ("adasum",), ("adasum 2",), ("large",), ("large 2",)]
    grouped = [tensor(str(number), group="g" if number in (0, 4) else "") for number in range(5)]
    fused = [tuple(request.name for request in operation.requests) for operation in fuse(grouped, 16)]
    assert fused == [("0", "4"), ("1",), ("2",), ("3",)]
    separate = fuse(grouped, 1 << 10, fuses_groups=False)
    fused = [tuple(request.name for request in operation.requests) for operation in separate]
    assert fused == [("0", "4"), ("1", "2", "3")]


def test_messages_are_encoded_whole() -> None:
    report = NegotiationReport((tensor("x", process_set=3),), (1, 2), True)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=NegotiationReport) == report
    decision = NegotiationDecision((), (), (0, 2), 1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(decision), type=NegotiationDecision) == decision
