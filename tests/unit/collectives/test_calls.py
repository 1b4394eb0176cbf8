from __future__ import annotations

from paceline.collectives.calls import CollectiveCall, describe_mismatch, shorten
from paceline.collectives.network.frames import Heads
from paceline.errors import name_ranks


def test_equal_calls_have_equal_signatures_and_different_calls_differ() -> None:
    call = CollectiveCall("all_reduce", "float32", (3, 4), "sum")
    assert call.signature == CollectiveCall("all_reduce", "float32", (3, 4), "sum").signature
    variants = [
        CollectiveCall("all_reduce", "float32", (4, 3), "sum"),
        CollectiveCall("all_reduce", "float64", (3, 4), "sum"),
        CollectiveCall("all_reduce", "float32", (3, 4), "max"),
        CollectiveCall("reduce", "float32", (3, 4), "sum", 0),
        CollectiveCall("reduce", "float32", (3, 4), "sum", 1),
        CollectiveCall("barrier"),
    ]
    assert len({call.signature, *(other.signature for other in variants)}) == 7


def test_a_mismatch_names_ranks_and_both_calls() -> None:
    one, other = CollectiveCall("all_reduce", "float32", (3,), "sum"), CollectiveCall("broadcast", "int64", (), root=2)
    text = str(describe_mismatch({0: one, 1: one, 2: other}, "world", 17))
    assert "ranks 0 and 1 called all_reduce(float32[3], sum)" in text
    assert "rank 2 called broadcast(int64[], root=2)" in text
    assert "call 17" in text
    assert "'world'" in text


def test_long_lists_of_ranks_are_cut() -> None:
    assert name_ranks(range(20)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"


def test_the_sizes_of_thousands_of_ranks_fit_into_a_message() -> None:
    sizes = tuple(range(1 << 40, (1 << 40) + 5000))
    call, other = (
        CollectiveCall("all_gather (uneven)", "float32", (3, *sizes)),
        CollectiveCall("all_gather (uneven)", "float32", (4, *sizes)),
    )
    last = CollectiveCall("all_gather (uneven)", "float32", (3, *sizes[:-1], 0))
    assert shorten(call) == shorten(CollectiveCall("all_gather (uneven)", "float32", (3, *sizes)))
    assert len({shorten(variant).signature for variant in (call, other, last)}) == 3
    for variant in (call, other, last):
        assert Heads(shorten(variant), 1).head_bytes < 1000
    assert "all_gather (uneven) of 5001 sizes with hash " in str(shorten(call))
    few = CollectiveCall("all_gather (uneven)", "float32", (1 << 40,) * 128)
    assert shorten(few) is few
    assert Heads(few, 1).head_bytes < 1500
