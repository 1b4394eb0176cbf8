"""Graphs of names, without tensors, are cut over devices: segments, transfers, placement, drawings."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.random_examples import num_examples

from paceline.errors import UsageError
from paceline.torch.partitioning.drawing import describe_cut, draw_cut, find_rows
from paceline.torch.partitioning.graph import CALLER, Arrivals, CutGraph, Operation, Transfer, cut_graph
from paceline.torch.partitioning.placing import Cost, TransferTimes, check_together, place_by_name, place_evenly, plan


def chain(*names: str) -> list[Operation]:
    return [Operation(names[0], ("x",)), *(Operation(b, (a,)) for a, b in pairwise(names))]


@st.composite
def placed_graphs(draw: st.DrawFn) -> tuple[list[Operation], dict[str, int], list[str]]:
    count, num_devices = draw(st.integers(1, 16)), draw(st.integers(1, 4))
    operations = []
    for number in range(count):
        before = [f"n{i}" for i in range(number)]
        inputs = draw(st.lists(st.sampled_from([*before, "x", "y"]), max_size=3, unique=True))
        after = draw(st.lists(st.sampled_from(before), max_size=1)) if before else []
        operations.append(Operation(f"n{number}", tuple(inputs), tuple(name for name in after if name not in inputs)))
    devices = {operation.name: draw(st.integers(0, num_devices - 1)) for operation in operations}
    outputs = draw(st.lists(st.sampled_from([operation.name for operation in operations]), min_size=1, unique=True))
    return operations, devices, outputs


@num_examples(100)
@given(placed_graphs(), st.randoms(use_true_random=False))
def test_every_operation_runs_once_after_the_inputs(
    graph: tuple[list[Operation], dict[str, int], list[str]], chance: random.Random
) -> None:
    operations, devices, outputs = graph
    cut = cut_graph(operations, devices, outputs)
    by_name = {operation.name: operation for operation in operations}
    arrivals, available = Arrivals(cut.segments), {("x", CALLER), ("y", CALLER)}
    ran: set[str] = set()
    ready = arrivals.first()
    while ready:
        number = ready.pop(chance.randrange(len(ready)))
        segment = cut.segments[number]
        available |= {(t.value, t.destination) for t in cut.transfers if (t.value, t.source) in available}
        assert all((value, segment.device) in available for value in segment.inputs)
        for name in segment.operations:
            assert devices[name] == segment.device
            assert name not in ran
            assert ran.issuperset(by_name[name].after)
            inside = {name for name in by_name[name].inputs if name in segment.operations}
            assert inside <= ran
            assert set(by_name[name].inputs) - inside <= set(segment.inputs)
            ran.add(name)
        available |= {(name, segment.device) for name in segment.outputs}
        ready += arrivals.ended(number)
    assert ran == by_name.keys()
    assert arrivals.num_left == 0
    assert {(name, devices[name]) for name in outputs} <= available


@num_examples(50)
@given(placed_graphs())
def test_a_value_is_sent_once_to_every_consuming_device(
    graph: tuple[list[Operation], dict[str, int], list[str]],
) -> None:
    operations, devices, outputs = graph
    expected = {
        (value, devices[operation.name])
        for operation in operations
        for value in operation.inputs
        if devices.get(value, CALLER) != devices[operation.name]
    }
    found = [(transfer.value, transfer.destination) for transfer in cut_graph(operations, devices, outputs).transfers]
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_a_sent_value_ends_the_segment() -> None:
    operations = [*chain("a", "b", "c"), Operation("far", ("a",)), Operation("sum", ("c", "far"))]
    cut = cut_graph(operations, {"a": 0, "b": 0, "c": 0, "far": 1, "sum": 0}, ["sum"])
    assert [(segment.device, segment.operations) for segment in cut.segments] == [
        (0, ("a",)), (0, ("b", "c")), (1, ("far",)), (0, ("sum",)),
    ]  # fmt: skip
    assert cut.transfers == (Transfer("x", CALLER, 0), Transfer("a", 0, 1), Transfer("far", 1, 0))
    assert cut.destinations["a"] == [1]


def test_operations_without_inputs_run_with_the_consumers() -> None:
    operations = [Operation("weight"), *chain("a", "b"), Operation("c", ("b", "weight"))]
    cut = cut_graph(operations, {"weight": 0, "a": 0, "b": 1, "c": 0}, ["c"])
    assert [segment.operations for segment in cut.segments] == [("a",), ("b",), ("weight", "c")]


def test_places_by_name() -> None:
    operations = [*chain("a", "b", "c", "d"), Operation("weight"), Operation("e", ("d", "weight"))]
    paths = {"a": "first.0", "b": "first.1", "c": "", "d": "last", "e": "last.more"}
    assert place_by_name(operations, paths, {"first": 1, "first.1": 2, "last": 0, "e": 3}) == {
        "a": 1, "b": 2, "c": 2, "d": 0, "weight": 3, "e": 3,
    }  # fmt: skip
    assert set(place_by_name(operations, paths, {"": 1}).values()) == {1}
    assert set(place_by_name(operations, paths, {}).values()) == {0}
    with pytest.raises(UsageError, match=r"got 'fist', expected the name of a module or .*; near it are first"):
        place_by_name(operations, paths, {"fist": 0})


def test_a_module_runs_on_one_device() -> None:
    check_together({"a": 0, "b": 0}, [["a", "b"]])
    with pytest.raises(UsageError, match="a is on device 0, b is on device 1"):
        check_together({"a": 0, "b": 1}, [["a", "b"]])


def test_a_planner_runs_branches_in_parallel_if_faster() -> None:
    operations = [
        Operation("in", ("x",)), Operation("left", ("in",)), Operation("right", ("in",)),
        Operation("out", ("left", "right")),
    ]  # fmt: skip
    groups, sizes = [["left"], ["right"]], [8, 8]

    def devices(seconds: float) -> dict[str, int]:
        costs = {operation.name: Cost(seconds, 4) for operation in operations}
        return plan(operations, costs, groups, sizes, [100, 100], TransferTimes(seconds=1e-3, bytes_per_s=1e9))

    assert len(set(devices(1e-4).values())) == 1
    assert devices(1.0)["left"] != devices(1.0)["right"]


def test_a_planner_respects_the_memory() -> None:
    names = [f"layer{i}" for i in range(8)]
    operations = chain(*names)
    costs, groups = {name: Cost(1e-3, 4) for name in names}, [[name] for name in names]
    times = TransferTimes()
    even = place_evenly(operations, costs, groups, [10] * 8, 2, times)
    assert [even[name] for name in names] == [0] * 4 + [1] * 4
    uneven = place_evenly(operations, costs, groups, [70, 1, 1, 1, 1, 1, 1, 1], 2, times)
    assert len(set(uneven.values())) == 2
    assert plan(operations, costs, groups, [10] * 8, [20, 60], times) == dict(
        zip(names, [0] * 2 + [1] * 6, strict=True)
    )
    with pytest.raises(UsageError, match="needs 10 bytes, but the devices have 0, 5 left"):
        plan(operations, costs, groups, [10] * 8, [20, 55], times)
    tied = plan(operations, costs, [[names[0], names[7]]], [10], [10, 0], times)
    assert tied[names[0]] == tied[names[7]] == 0


def two_devices() -> CutGraph:
    operations = [*chain("a", "b<0>"), Operation("c", ("b<0>", "a"))]
    return cut_graph(operations, {"a": 0, "b<0>": 1, "c": 0}, ["c"])


def test_describes_a_cut_graph() -> None:
    assert describe_cut(two_devices(), ["device 0: cpu", "device 1: cpu"], {"a": "float32 [2]"}).splitlines() == [
        "device 0: cpu",
        "  segment 0: a",
        "    receives x from the caller",
        "    sends a (float32 [2]) to device 1",
        "  segment 2: c",
        "    receives b<0> from device 1",
        "device 1: cpu",
        "  segment 1: b<0>",
        "    receives a (float32 [2]) from device 0",
        "    sends b<0> to device 0",
        "2 transfers between devices in a forward; in backward, the gradient of each value is sent back, if the value "
        "has a gradient",
    ]


def test_draws_a_cut_graph() -> None:
    drawn = draw_cut(two_devices(), ["device 0: cpu", "device 1: cpu"], {"a": "float32 [2]"})
    texts = [element.text for element in ET.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert {"device 0: cpu", "device 1: cpu", "segment 0", "segment 1", "segment 2", "b<0>", "a"} <= set(texts)


@num_examples(50)
@given(placed_graphs())
def test_no_two_segments_overlap_in_the_drawing(graph: tuple[list[Operation], dict[str, int], list[str]]) -> None:
    cut = cut_graph(*graph)
    rows = find_rows(cut.segments)
    places = [(segment.device, row) for segment, row in zip(cut.segments, rows, strict=True)]
    assert len(set(places)) == len(places)
    assert all(rows[name] < row for segment, row in zip(cut.segments, rows, strict=True) for name in segment.waits_for)
