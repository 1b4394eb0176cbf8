"""Rules of a pipeline, without processes: cuts, order of actions, times, transferred values."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import msgspec
import pytest

from paceline.errors import UsageError
from paceline.strategies import (
    SCHEDULES,
    PipelineFlags,
    PipelineOptions,
    StrategyFlags,
    choose_pipeline,
    choose_strategy,
)
from paceline.torch.strategies.pipeline.plan.choosing import (
    Measured,
    Measurements,
    PipelinePlan,
    describe_measured,
    describe_plan,
    make_plan,
)
from paceline.torch.strategies.pipeline.plan.orders import (
    all_forward_first,
    most_in_flight,
    orders_of,
    place_stages,
)
from paceline.torch.strategies.pipeline.plan.splitting import (
    LayerCost,
    MessageCost,
    StageLimits,
    split_layers,
    stage_bytes,
)
from paceline.torch.strategies.pipeline.plan.timeline import StageTimes, bubble_bound, play
from paceline.torch.strategies.pipeline.run.actions import Action
from paceline.torch.strategies.pipeline.run.partition import ValueRoute, route_values, shared_parameters


def layers_of(times: list[float], parameter_bytes: int = 0) -> list[LayerCost]:
    return [
        LayerCost(name=f"layers.{k}", forward_s=t / 3, backward_s=2 * t / 3, parameter_bytes=parameter_bytes)
        for k, t in enumerate(times)
    ]


def slowest(times: list[float], crossing: list[float], cuts: tuple[int, ...]) -> float:
    bounds = [0, *cuts, len(times)]
    return max(sum(times[a:b]) + crossing[a] + crossing[b] for a, b in itertools.pairwise(bounds))


def test_the_split_is_the_best_of_all_splits() -> None:
    rng = random.Random(0)
    for _ in range(60):
        count = rng.randint(1, 9)
        stages = rng.randint(1, count)
        times = [rng.random() for _ in range(count)]
        crossing = [0.0, *(rng.random() / 2 for _ in range(count - 1)), 0.0]
        cuts = split_layers(layers_of(times), stages, lambda cut, costs=crossing: costs[cut])  # type: ignore[misc]
        best = min(
            slowest(times, crossing, combination) for combination in itertools.combinations(range(1, count), stages - 1)
        )
        assert len(cuts) == stages - 1
        assert slowest(times, crossing, tuple(cuts)) == pytest.approx(best)


def test_a_split_keeps_the_memory_limit_or_names_the_oversized_layer() -> None:
    layers = layers_of([9.0, 1.0, 1.0, 1.0], parameter_bytes=1 << 20)
    assert split_layers(layers, 2, lambda cut: 0.0) == [1]
    limits = StageLimits(memory_bytes=4 << 20, bytes_per_parameter_byte=2.0)
    assert split_layers(layers, 2, lambda cut: 0.0, limits) == [2]
    assert stage_bytes(layers[:2], limits) == 4 << 20
    with pytest.raises(UsageError, match=r"all of it takes 8 MiB .* each of 2 stages may take 3 MiB"):
        split_layers(layers, 2, lambda cut: 0.0, StageLimits(memory_bytes=3 << 20))
    with pytest.raises(UsageError, match="5 stages were requested, and the model has no more than 4 layers"):
        split_layers(layers, 5, lambda cut: 0.0)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_torch_schedules_are_complete_and_can_be_simulated(schedule: str, num_ranks: int) -> None:
    count = 2 * num_ranks
    orders = orders_of(schedule, num_ranks, count)
    places = place_stages(schedule, num_ranks)
    assert all(places[action.stage] == rank for rank, row in enumerate(orders) for action in row)
    times = [StageTimes(forward_s=1.0, backward_s=2.0)] * len(places)
    line = play(orders, places, times, lambda stage: 0.0)
    assert line.busy_s == pytest.approx([3.0 * count * len(places) / num_ranks] * num_ranks)
    if schedule in ("gpipe", "1f1b"):
        assert line.bubble == pytest.approx(bubble_bound(num_ranks, count))
    else:
        assert line.bubble < bubble_bound(num_ranks, count) + 1e-9


def test_1f1b_keeps_fewer_microbatches_than_gpipe() -> None:
    in_flight = {name: [most_in_flight(row) for row in orders_of(name, 4, 8)] for name in ("1f1b", "gpipe")}
    assert in_flight == {"1f1b": [4, 3, 2, 1], "gpipe": [8, 8, 8, 8]}


def test_limits_of_schedules_are_reported() -> None:
    with pytest.raises(UsageError, match=r"1f1b needs a microbatch per stage, but a batch has 2 .* 4 stages"):
        orders_of("1f1b", 4, 2)
    with pytest.raises(UsageError, match="dualpipev does not support 5 microbatches over 4 processes"):
        orders_of("dualpipev", 4, 5)


def test_all_forward_first_accepts_any_number_of_microbatches() -> None:
    places = place_stages("zbv", 2)
    assert places == [0, 1, 1, 0]
    orders = all_forward_first(places, 2, 1)
    assert orders[0] == (Action("F", 0, 0), Action("F", 3, 0), Action("B", 3, 0), Action("B", 0, 0))
    line = play(orders, places, [StageTimes(forward_s=1, backward_s=1)] * 4, lambda stage: 0.5)
    assert line.step_s == pytest.approx(8 + 4 * 0.5)  # two transfers in each direction


def test_the_time_of_a_step_includes_sends_first_gradients_and_the_update() -> None:
    plain = StageTimes(forward_s=1.0, backward_s=2.0)
    orders, places = orders_of("1f1b", 2, 2), [0, 1]

    def step_s(times: StageTimes, transfer_s: float = 0.0, sending_s: float = 0.0) -> float:
        return play(orders, places, [times] * 2, lambda stage: transfer_s, lambda stage: sending_s).step_s

    assert step_s(plain) == 9.0
    assert step_s(replace(plain, update_s=0.5)) == 9.5
    assert step_s(replace(plain, first_s=0.25)) == 9.25  # only rank 1's time adds up: rank 0 waits anyway
    # While rank 1 sends its first gradient, it does not compute the forward of the second microbatch.
    assert step_s(plain, transfer_s=1.0) == 11.0
    assert step_s(plain, transfer_s=1.0, sending_s=0.5) == 11.5


def test_times_of_a_split_backward() -> None:
    times = StageTimes(forward_s=1.0, backward_s=2.0, weights_s=0.5, halving_s=0.25, first_s=4.0)
    assert [times.of(Action(kind, 0, 1)) for kind in ("F", "B", "I", "W")] == [1.0, 2.0, 1.75, 0.5]
    assert [times.of(Action(kind, 0, 0)) for kind in ("F", "B", "I", "W")] == [1.0, 6.0, 1.75, 4.5]


def test_deadlocked_orders_are_found() -> None:
    orders = ((Action("B", 0, 0), Action("F", 0, 0)),)
    with pytest.raises(ValueError, match="deadlock in the schedule"):
        play(orders, [0], [StageTimes(forward_s=1, backward_s=1)], lambda stage: 0.0)


def test_a_value_is_sent_once_to_every_process() -> None:
    made = {"a": 0, "b": 1, "c": 2}
    used = [("a", 0), ("a", 1), ("a", 2), ("a", 3), ("b", 2), ("c", 3), ("a", 3)]
    routes = route_values(made, used, [0, 1, 1, 0])
    first = ValueRoute("a", 0, (1, 2, 3))
    assert routes.routes == (first, ValueRoute("b", 1, (2,)), ValueRoute("c", 2, (3,)))
    assert [routes.destinations(route) for route in routes.routes] == [[1], [], [0]]
    assert (routes.first_user_on(first, 1), routes.last_user_on(first, 1), routes.first_user_on(first, 0)) == (1, 2, 3)
    assert shared_parameters({"w": [0, 1], "v": [0, 3], "u": [2]}, [0, 1, 1, 0]) == {"w": [0, 1]}


def options_of(**flags: object) -> PipelineOptions:
    return choose_pipeline(PipelineFlags(**flags), None)  # type: ignore[arg-type]


def test_options_are_checked_and_sent_as_text() -> None:
    options = options_of(stages=2, schedule="1f1b", microbatches="8", split="layers.4", stage_memory="2G")
    assert options.stage_memory == 2 << 30
    assert PipelineOptions.decode(options.encode()) == options
    assert choose_pipeline(PipelineFlags(data_parallel=2), 6).stages == 3
    for flags, message in (
        ({}, "pass --stages"),
        ({"stages": 0}, "expected 1 or more"),
        ({"stages": 2, "schedule": "2f2b"}, "expected one of gpipe"),
        ({"stages": 2, "microbatches": "many"}, "whole number"),
        ({"stages": 2, "stage_memory": "lots"}, "500M or 4G"),
        ({"stages": 3, "split": "a", "schedule": "1f1b"}, "makes 2 stages"),
        ({"stages": 2, "split": "a,,b"}, "different module names"),
        ({"stages": 2, "data_parallel": 0}, "1 or more pipelines"),
    ):
        with pytest.raises(UsageError, match=message):
            options_of(**flags)
    with pytest.raises(UsageError, match=r"4 processes, but there are 3"):
        choose_pipeline(PipelineFlags(stages=4), 3)
    with pytest.raises(UsageError, match="Leave --stages 2 out"):
        choose_strategy("all-reduce", processes=2, flags=StrategyFlags(pipeline=PipelineFlags(stages=2)))
    chosen = choose_strategy("pipeline", processes=2)
    assert isinstance(chosen.options, PipelineOptions)
    assert chosen.options.stages == 2


def measured(times: list[float]) -> Measured:
    layers = layers_of(times, parameter_bytes=1 << 20)
    return Measured({4: layers}, {4: [0] + [1 << 10] * (len(times) - 1)})


def test_the_chosen_plan_has_the_shortest_predicted_time() -> None:
    link = MessageCost(latency_s=0.0, seconds_per_byte=0.0)
    plan = make_plan(measured([1.0] * 8), options_of(stages=2), 32, link, 2.0, lambda stages: None)
    assert plan.microbatches == 16  # if messages take no time, smaller microbatches are always faster
    slow = MessageCost(latency_s=100.0, seconds_per_byte=0.0)
    other = make_plan(measured([1.0] * 8), options_of(stages=2), 32, slow, 2.0, lambda stages: None)
    assert (other.schedule, other.microbatches) == ("1f1b", 2)
    named = make_plan(measured([1.0] * 8), options_of(stages=2, schedule="1f1b"), 32, link, 2.0, lambda stages: [3])
    assert named.cuts == (3,)
    assert msgspec.convert(msgspec.to_builtins(named), PipelinePlan) == named
    text = describe_plan(named, ["layers.0 to layers.2", "layers.3 to layers.7"], [0, 1])
    assert "schedule 1f1b, 16 microbatches a batch" in text
    assert "layers.3 to layers.7" in text
    tight = options_of(stages=2, schedule="1f1b", stage_memory="9M")
    with pytest.raises(UsageError, match=r"stage 1 of --split takes 10 MiB"):
        make_plan(measured([1.0] * 8), tight, 32, link, 2.0, lambda stages: [3])


def test_measured_times_are_shown_next_to_predictions() -> None:
    link = MessageCost(latency_s=0.0, seconds_per_byte=0.0)
    options = options_of(stages=2, schedule="1f1b", microbatches="2")
    plan = make_plan(measured([1.0] * 8), options, 8, link, 2.0, lambda stages: None)
    found = Measurements(2)
    ranks = [Measurements(2), Measurements(2)]
    assert describe_measured(plan, found) is None
    for _ in range(6):
        for rank, entry in enumerate(ranks):
            entry.add(10.0, {f"F{rank}": 2.0, f"B{rank}": 6.0}, 2, is_whole=True)
            found.by_rank[rank] = entry.own
    for rank, entry in enumerate(ranks):
        entry.begin_update()
        entry.end_update()
        assert entry.own[1] > 40.0
        found.by_rank[rank] = [4, 40.0, entry.own[2]]
    text = describe_measured(plan, found)
    assert text is not None
    assert "measured over 4 steps: step 10000.00 ms" in text
    assert "bubble 20.0% (33.3%)" in text
    assert "stage 1: forward 1000.000 ms" in text


def test_costs_are_interpolated_between_two_sizes_of_microbatches() -> None:
    small = [LayerCost(name="a", forward_s=2.0, backward_s=4.0, activation_bytes=100)]
    large = [LayerCost(name="a", forward_s=3.0, backward_s=6.0, activation_bytes=300)]
    found = Measured({1: small, 3: large}, {3: [0]}).at(2)[0]
    assert (found.forward_s, found.backward_s, found.activation_bytes) == (2.5, 5.0, 200)
