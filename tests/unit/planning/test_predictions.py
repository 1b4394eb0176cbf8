"""Simulated steps against closed formulas, the order of strategies, and the changes that alter it."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import replace

import pytest

from paceline.errors import UsageError
from paceline.planning import steps
from paceline.planning.calibration import fit_cost
from paceline.planning.links import PAYLOAD, Curve, Machine, NodeLink, StrategyCost, format_speed, parse_link, ring_s
from paceline.planning.predictions import (
    Scenario,
    StrategyCandidate,
    candidates,
    choose,
    find_change,
    find_changes,
    parse_candidate,
    predict_all,
    predict_step,
)
from paceline.planning.steps import (
    ClusterShape,
    ServerGroup,
    buckets_of,
    simulate_all_reduce,
    simulate_hybrid,
    simulate_one_device,
    simulate_pipeline,
    simulate_servers,
    simulate_sharded,
)
from paceline.strategies.profile import LayerProfile, ModelProfile
from paceline.torch.strategies.all_reduce import AllReduce
from paceline.torch.strategies.pipeline.plan.splitting import LayerCost, split_layers
from paceline.torch.strategies.server.parameter_server import ParameterServer
from paceline.torch.strategies.sharded.units import LEAST_NUMEL

MB = 1 << 20
LINK = NodeLink(bytes_per_s=1.25e8, latency_s=0.0)
MACHINE = Machine(
    num_cores=4, ranks_per_node=1, all_reduce=Curve(((1, 0.0), (MB, 1e-3))), socket_s_per_byte=0.0, costs={}
)

COSTLY = replace(MACHINE, costs={"parameter-server": StrategyCost(step_s=1.0)})
"""A machine on which servers are slow."""


def model(compute_s: float = 0.0, layer_bytes: int = 8 * MB, num_layers: int = 10, rows: int = 0) -> ModelProfile:
    """Return a model of equal layers; one third of the time is the forward."""
    layers = [
        LayerProfile(
            name=f"layer {number}",
            forward_s=compute_s / num_layers / 3,
            backward_s=compute_s / num_layers * 2 / 3,
            num_parameters=2,
            parameter_bytes=layer_bytes,
            activation_bytes=1000,
            output_bytes=4000,
        )
        for number in range(num_layers)
    ]
    if rows:
        layers.insert(0, LayerProfile(name="rows", forward_s=0.0, backward_s=0.0, touched_rows=rows, row_bytes=56))
    return ModelProfile(
        layers=tuple(layers), steps_s=(max(compute_s, 1e-6),) * 5, program_s=0.0, update_s=0.0, batch_size=32
    )


def shape(nodes: int) -> ClusterShape:
    return ClusterShape(nodes=nodes, link=LINK)


def scenario(profile: ModelProfile, nodes: int = 8, machine: Machine = MACHINE) -> Scenario:
    return Scenario(profile=profile, alone=profile, machine=machine, shape=shape(nodes))


@pytest.mark.parametrize("nodes", [2, 8, 100])
def test_all_reduce_without_computing_takes_the_time_of_the_ring(nodes: int) -> None:
    profile = model()
    step_s = simulate_all_reduce(profile, shape(nodes), MACHINE).step_s
    assert step_s == pytest.approx(ring_s(profile.parameter_bytes, nodes, LINK.bytes_per_s))


@pytest.mark.parametrize("is_synchronous", [True, False])
@pytest.mark.parametrize("nodes", [2, 8])
def test_servers_without_computing_take_the_time_of_the_formulas(nodes: int, is_synchronous: bool) -> None:
    """Pulls follow pushes, so that separate servers need the formula's time once in each direction."""
    profile = model()
    num_bytes, speed = profile.parameter_bytes, LINK.bytes_per_s
    for servers in (1, nodes, 2 * nodes):
        simulated = simulate_servers(
            profile, shape(nodes), MACHINE, ServerGroup(count=servers, is_separate=True, is_synchronous=is_synchronous)
        )
        assert simulated.step_s == pytest.approx(2 * num_bytes / speed * max(1, nodes / servers))
    simulated = simulate_servers(
        profile, shape(nodes), MACHINE, ServerGroup(count=nodes, is_separate=False, is_synchronous=is_synchronous)
    )
    assert simulated.step_s == pytest.approx(ring_s(num_bytes, nodes, speed))


def test_sharded_without_computing_gathers_twice_and_scatters_once() -> None:
    profile = model()
    step_s = simulate_sharded(profile, shape(4), MACHINE).step_s
    assert step_s == pytest.approx(1.5 * ring_s(profile.parameter_bytes, 4, LINK.bytes_per_s))


def test_parameters_outside_of_units_are_gathered_twice_too() -> None:
    profile = model(layer_bytes=1 << 16)
    step_s = simulate_sharded(profile, shape(4), MACHINE).step_s
    assert step_s == pytest.approx(1.5 * ring_s(profile.parameter_bytes, 4, LINK.bytes_per_s))


def test_servers_update_once_per_step_or_once_per_rank() -> None:
    profile = replace(model(), update_s=2000.0)  # much longer than the messages
    for is_synchronous, update_s in ((True, 1000.0), (False, 8000.0)):
        group = ServerGroup(count=2, is_separate=True, is_synchronous=is_synchronous)
        assert simulate_servers(profile, shape(8), MACHINE, group).step_s == pytest.approx(update_s, rel=0.01)


def test_computing_hides_communication() -> None:
    """With a long backward, only the last bucket is exposed: the first layers' gradients come last."""
    profile = model(compute_s=30.0)
    simulated = simulate_all_reduce(profile, shape(8), MACHINE)
    last = buckets_of(profile.layers, MB, 25 * MB)[-1][1]
    assert simulated.step_s == pytest.approx(30.0 + ring_s(last, 8, LINK.bytes_per_s))
    assert simulated.parts["compute"] == pytest.approx(30.0)
    servers = simulate_servers(profile, shape(8), MACHINE, ServerGroup(count=8, is_separate=True, is_synchronous=False))
    assert 30.0 < servers.step_s < 30.3
    assert simulate_one_device(profile, ClusterShape(), MACHINE).step_s == pytest.approx(30.0)


def test_cores_are_shared_by_computing_and_messages() -> None:
    """On one node with busy cores nothing is hidden: the step is the sum."""
    profile = model(compute_s=1.0)
    node = ClusterShape(ranks_per_node=2)
    machine = replace(MACHINE, num_cores=2, ranks_per_node=2)
    expected = 1.0 + sum(machine.all_reduce.at(size) for _, size in buckets_of(profile.layers, MB, 25 * MB))
    assert simulate_all_reduce(profile, node, machine).step_s == pytest.approx(expected)
    idle = simulate_all_reduce(profile, node, replace(machine, num_cores=8)).step_s
    assert 1.0 < idle < expected


def test_hybrid_does_not_send_rows_between_ranks() -> None:
    """Servers move 2aM bytes of rows per rank, an all-gather (n - 1)aM."""
    profile = model(rows=100_000, layer_bytes=4, num_layers=1)
    rows_s = profile.sparse_bytes / LINK.bytes_per_s
    gathered = simulate_all_reduce(profile, shape(16), MACHINE).step_s
    hybrid = simulate_hybrid(
        profile, shape(16), MACHINE, ServerGroup(count=16, is_separate=True, is_synchronous=True)
    ).step_s
    assert gathered == pytest.approx(15 * rows_s, rel=1e-3)
    assert hybrid == pytest.approx(2 * rows_s, rel=1e-3)
    ahead = simulate_hybrid(
        profile, shape(16), MACHINE, ServerGroup(count=16, is_separate=True, is_synchronous=False)
    ).step_s
    assert ahead == pytest.approx(rows_s, rel=1e-3)


@pytest.mark.parametrize("microbatches", [4, 16])
def test_pipeline_of_equal_stages_has_the_bubble_of_the_formula(microbatches: int) -> None:
    profile = replace(model(compute_s=12.0, num_layers=12), batch_size=microbatches)
    simulated = simulate_pipeline(profile, ClusterShape(ranks_per_node=4), MACHINE)
    # (p - 1) / (v m + p - 1) with v = 2 stages per rank (Narayanan et al., SC 2021, section 2.2)
    assert simulated.parts["bubble"] / simulated.step_s == pytest.approx(3 / (2 * microbatches + 3))
    assert simulated.parts["compute"] == pytest.approx(3.0)


def test_costly_microbatches_become_fewer() -> None:
    """With m microbatches and two stages on each of p ranks, a step takes m + (p - 1) / 2 times the time of one."""
    profile = model(compute_s=12.0, num_layers=12)
    for microbatch_s in (0.0, 1.0, 100.0):
        step_s = simulate_pipeline(replace(profile, microbatch_s=microbatch_s), ClusterShape(ranks_per_node=4), MACHINE)
        assert step_s.step_s == pytest.approx(min((m + 3 / 2) * (3.0 / m + microbatch_s / 4) for m in (4, 8, 16, 32)))


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_need_processor_time(ranks: int) -> None:
    """Under all-reduce and sharded, a rank works for the rows of all ranks; it was measured with two ranks."""
    profile = model(rows=1000, layer_bytes=4, num_layers=1)
    names = ("all-reduce", "sharded", "parameter-server")
    free = replace(MACHINE, num_cores=8, ranks_per_node=2, all_reduce=Curve(((1, 0.0),)))
    machine = replace(free, costs={name: StrategyCost(row_s=1e-3) for name in names})
    node = ClusterShape(ranks_per_node=ranks)
    assert simulate_all_reduce(profile, node, machine).step_s == pytest.approx(ranks / 2)
    assert simulate_sharded(profile, node, machine).step_s == pytest.approx(ranks / 2)
    # Three of the cores worked for the two ranks, which had two messages each. A server works for all ranks.
    simulated = simulate_servers(profile, node, machine, ServerGroup())
    assert simulated.step_s == pytest.approx(2 * (3 / 8 + 3 / 8 * ranks))


def test_a_fast_server_updates_faster_than_the_ranks() -> None:
    profile = replace(model(), update_s=2000.0)
    group = ServerGroup(count=2, is_separate=True, is_synchronous=True)
    simulated = simulate_servers(profile, shape(8), replace(MACHINE, server_update_share=0.25), group)
    assert simulated.step_s == pytest.approx(250.0, rel=0.02)


@pytest.mark.parametrize(
    "times_s", [(1.0, 1.0, 1.0, 1.0), (5.0, 1.0, 1.0, 1.0), (4.0, 1.0, 1.0, 1.0, 1.0, 4.0), (1.0, 5.0, 2.0)]
)
def test_stages_are_those_of_the_strategy(times_s: tuple[float, ...]) -> None:
    """Two ranks with two microbatches have one or two stages each. The second rank waits for the first microbatch."""
    steps_s = []
    for parts in (1, 2) if len(times_s) > 3 else (1,):
        costs = [LayerCost(name="", forward_s=time_s, backward_s=0.0) for time_s in times_s]
        bounds = [0, *split_layers(costs, 2 * parts, lambda cut: 0.0), len(times_s)]
        stages_s = [sum(times_s[first:end]) for first, end in itertools.pairwise(bounds)]
        slowest_s = max(sum(stages_s[rank::2]) for rank in range(2))
        steps_s.append(slowest_s + slowest_s / (2 * parts))
    layers = [LayerProfile(name="", forward_s=time_s, backward_s=0.0) for time_s in times_s]
    profile = replace(model(), layers=tuple(layers), batch_size=2)
    simulated = simulate_pipeline(profile, ClusterShape(ranks_per_node=2), MACHINE)
    assert simulated.step_s == pytest.approx(min(steps_s))


def test_stages_are_cut_where_little_crosses() -> None:
    """Like the strategy, the prediction moves a cut to a layer with a small result."""
    layers = [
        LayerProfile(name=str(number), forward_s=0.1, backward_s=0.0, output_bytes=num_bytes)
        for number, num_bytes in enumerate((100, 10**8, 10**8, 100))
    ]
    profile = replace(model(), layers=tuple(layers), batch_size=2)
    simulated = simulate_pipeline(profile, ClusterShape(nodes=2, link=LINK), MACHINE)
    assert simulated.parts["wire"] < 0.01
    assert simulated.parts["compute"] == pytest.approx(0.3)


def test_buckets_follow_the_backward() -> None:
    layers = model(layer_bytes=10 * MB, num_layers=7).layers
    assert buckets_of(layers, MB, 25 * MB) == [(6, 10 * MB), (3, 30 * MB), (0, 30 * MB)]


def test_slow_steps_make_synchronous_ranks_wait() -> None:
    profile = replace(model(compute_s=1.0, layer_bytes=4), steps_s=(1.0, 1.0, 1.0, 2.0))
    waits = [
        predict_step(
            scenario(profile), StrategyCandidate(strategy="parameter-server", consistency=text, servers=8)
        ).parts["slow ranks"]
        for text in ("sequential", "bounded:4", "eventual")
    ]
    assert waits[0] == pytest.approx(2 - 0.75**8 - 1.25)
    assert waits[0] > waits[1] > waits[2] == 0.0


def test_slow_sockets_are_busy_for_all_bytes_that_a_node_sends_and_receives() -> None:
    """All-reduce of M bytes sends and receives 2 (n - 1) / n M each; sharded gathers twice and scatters once."""
    profile, byte_s = model(), 1e-6
    machine = replace(MACHINE, socket_s_per_byte=byte_s)
    for nodes in (2, 8):
        moved = 2 * (nodes - 1) / nodes * profile.parameter_bytes
        assert simulate_all_reduce(profile, shape(nodes), machine).step_s == pytest.approx(byte_s * 2 * moved)
        assert simulate_sharded(profile, shape(nodes), machine).step_s == pytest.approx(byte_s * 3 * moved)


def test_buckets_and_units_are_those_of_the_strategies() -> None:
    """The planning does not import torch, so it has its own copy of these sizes."""
    defaults = {
        kind: inspect.signature(kind).parameters["bucket_mb"].default * MB for kind in (AllReduce, ParameterServer)
    }
    assert defaults[AllReduce] == steps.BUCKET_BYTES
    assert defaults[ParameterServer] == steps.SERVER_BUCKET_BYTES
    assert steps.UNIT_BYTES == 4 * LEAST_NUMEL


def test_tables_need_memory() -> None:
    """A dense embedding with sparse gradients is complete on each rank."""
    profile = model()
    table = LayerProfile(name="rows", forward_s=0.0, backward_s=0.0, touched_rows=2, num_rows=1000, row_bytes=64)
    with_table = replace(profile, layers=(table, *profile.layers))
    for candidate in (StrategyCandidate(strategy="all-reduce"), StrategyCandidate(strategy="sharded")):
        less, more = (predict_step(scenario(each), candidate).memory_bytes for each in (profile, with_table))
        assert more - less == 64_000


def test_one_slow_step_does_not_change_the_times() -> None:
    profile = replace(model(compute_s=3.0), steps_s=(1.0, 1.0, 1.0, 3.1))
    assert profile.scaled_to_steps().compute_s == pytest.approx(1.0)
    assert profile.scaled_to_steps().layers[0].forward_s == pytest.approx(1 / 30)


def test_order_memory_and_bottleneck() -> None:
    found = {
        (prediction.candidate.label, prediction.candidate.is_separate): prediction
        for prediction in predict_all(scenario(model(compute_s=0.05), machine=COSTLY))
    }
    wire = found["all-reduce", False]
    assert wire.bottleneck == "wire"
    assert wire.memory_bytes == 160 * MB + 10_000
    assert found["sharded", False].memory_bytes == 20 * MB + 16 * MB + 10_000
    assert found["one-device", False].bottleneck == "compute"
    assert found["one-device", False].examples_per_s == pytest.approx(32 / 0.05)
    assert choose([*found.values()]).candidate.label == "one-device"


def test_a_faster_link_changes_the_choice() -> None:
    start = scenario(model(compute_s=0.05), machine=COSTLY)
    sentences = find_changes(start)
    speed = next(sentence for sentence in sentences if sentence.startswith("On links faster than "))
    assert speed.endswith(" Gbit/s, all-reduce is fastest.")
    factor = float(speed.split()[4]) * 1e9 / 8 * PAYLOAD / LINK.bytes_per_s
    assert choose(predict_all(start.with_link_speed(factor * 1.1))).candidate.label == "all-reduce"
    assert choose(predict_all(start.with_link_speed(factor / 1.1))).candidate.label == "one-device"
    assert any("or more examples per batch and rank, all-reduce is fastest." in sentence for sentence in sentences)


@pytest.mark.parametrize("label", ["all-reduce", "parameter-server"])
def test_a_filter_shortens_messages_and_needs_processor_time(label: str) -> None:
    """``quantize:8`` sends 260 instead of 1,024 bytes per block of values."""
    profile = model()
    num_bytes = profile.parameter_bytes
    plain, filtered = (parse_candidate(text, 8) for text in (label, f"{label}+quantize:8"))
    assert filtered.words()[-2:] == ["--filters", "quantize:8"]
    free = scenario(profile)
    plain_s, filtered_s = (predict_step(free, candidate).step_s for candidate in (plain, filtered))
    assert filtered_s == pytest.approx(plain_s * 260 / 1024, rel=1e-3)
    costly = scenario(profile, machine=replace(MACHINE, filter_s_per_byte=1e-8))
    assert filtered in candidates(costly)
    assert filtered not in candidates(free)  # without a measured filter
    found = predict_step(costly, filtered)
    if label == "all-reduce":  # the ranks encode and decode after the last message
        assert found.step_s == pytest.approx(filtered_s + 1.5e-8 * num_bytes)
    else:  # the first push, and the last pull
        assert found.step_s > filtered_s
    assert found.memory_bytes == predict_step(costly, plain).memory_bytes
    assert not found.candidate.is_choosable


ONLY_ALL_REDUCE = replace(
    MACHINE, costs={"parameter-server": StrategyCost(step_s=9.0), "sharded": StrategyCost(step_s=9.0)}
)
"""A machine on which only one device and all-reduce are fast."""


@pytest.mark.parametrize("is_faster", [True, False])
def test_changes_are_those_of_the_formula(is_faster: bool) -> None:
    """With one layer nothing is hidden, so n ranks are faster than one if 2 (n - 1) M / (n B) < (n - 1) C.

    The speed of the link is then B > 2 M / (n C). With k times as many examples, C is k times as long.
    """
    nodes, num_bytes, compute_s = 8, 8 * MB, 0.1
    limit = 2 * num_bytes / (nodes * compute_s)
    distance = 3.0 if is_faster else 1 / 3
    start = replace(
        scenario(model(compute_s, num_bytes, 1), nodes, ONLY_ALL_REDUCE),
        shape=ClusterShape(nodes=nodes, link=NodeLink(bytes_per_s=limit / distance, latency_s=0.0)),
    )
    winner, speed, count = ("all-reduce", "faster", "more") if is_faster else ("one-device", "slower", "fewer")
    link, batch = find_changes(start)
    value = parse_link(f"{link.split()[4]} {link.split()[5].strip(',')}", "0s").bytes_per_s
    assert value == pytest.approx(limit, rel=0.02)
    assert link == f"On links {speed} than {format_speed(value)}, {winner} is fastest."
    number = int(batch.split()[1])
    assert batch == f"With {number} or {count} examples per batch and rank, {winner} is fastest."
    assert number == pytest.approx(32 * distance, rel=0.02, abs=1)


def test_bisection_finds_the_smallest_change() -> None:
    slow, fast = StrategyCandidate(strategy="one-device"), StrategyCandidate(strategy="all-reduce")
    found = find_change(lambda factor: fast if factor >= 7.0 else slow, slow, is_up=True)
    assert found is not None
    assert found[0] == pytest.approx(7.0, rel=0.02)
    assert found[1] == "all-reduce"
    assert find_change(lambda factor: slow, slow, is_up=False) is None


def test_a_single_rank_has_one_candidate() -> None:
    profile = model(compute_s=1.0)
    alone = Scenario(profile=profile, alone=profile, machine=MACHINE, shape=ClusterShape())
    assert [prediction.candidate.label for prediction in predict_all(alone)] == ["one-device"]


@pytest.mark.parametrize(
    ("text", "label", "words"),
    [
        ("all-reduce", "all-reduce", "--strategy all-reduce"),
        (
            "parameter-server",
            "parameter-server:sequential",
            "--strategy parameter-server --consistency sequential --servers 2",
        ),
        ("parameter-server:bounded:4", "parameter-server:bounded:4", None),
        ("hybrid", "hybrid:bounded:4", None),
    ],
)
def test_candidates_are_parsed(text: str, label: str, words: str | None) -> None:
    candidate = parse_candidate(text, 2)
    assert candidate.label == label
    assert words is None or candidate.words() == words.split()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ring", "strategies='ring': expected one of one-device"),
        ("mirrored", "--strategies mirrored: mirrored has no prediction. Choose from one-device, all-reduce"),
        ("all-reduce:bounded:4", "--strategies all-reduce:bounded:4: all-reduce has no servers. Leave :bounded:4 out"),
        ("parameter-server:fast", "'fast'"),
        (
            "sharded+quantize:8",
            "--strategies sharded+quantize:8: has no prediction. Only +quantize:8 has one, after all",
        ),
        (
            "all-reduce+zstd",
            "--strategies all-reduce+zstd: has no prediction. Only +quantize:8 has one, after all-reduce",
        ),
    ],
)
def test_wrong_candidates_are_rejected(text: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_candidate(text)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("name", "candidate"),
    [
        ("all-reduce", StrategyCandidate(strategy="all-reduce")),
        ("parameter-server", StrategyCandidate(strategy="parameter-server", consistency="sequential", servers=1)),
        ("sharded", StrategyCandidate(strategy="sharded")),
        ("pipeline", StrategyCandidate(strategy="pipeline")),
    ],
)
def test_costs_are_recovered_from_steps(name: str, candidate: StrategyCandidate) -> None:
    machine = replace(MACHINE, num_cores=2, ranks_per_node=2)
    cost = StrategyCost(step_s=1e-3, parameter_s=2e-5, byte_s=3e-10)
    profiles = {
        "few": model(1e-4, 256, 2),
        "many": model(1e-3, 1024, 40),
        "large": model(5e-3, 4 * MB, 4),
    }

    def steps(costs: dict[str, StrategyCost]) -> dict[str, float]:
        node = ClusterShape(ranks_per_node=2)
        costly = replace(machine, costs=costs)
        return {
            size: predict_step(Scenario(profile=profile, alone=profile, machine=costly, shape=node), candidate).step_s
            for size, profile in profiles.items()
        }

    wanted = steps({name: cost})
    fitted = fit_cost(machine, name, profiles, wanted)
    assert steps(fitted.costs) == pytest.approx(wanted, rel=0.02)
    assert fitted.costs[name].parameter_s == pytest.approx(2e-5, rel=0.1)
    assert fitted.costs[name].byte_s == pytest.approx(3e-10, rel=0.1)
