"""Predict and order the steps of all strategies, and find the change that alters the order. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from paceline.errors import UsageError
from paceline.filters import Quantize
from paceline.planning.clock import Kind
from paceline.planning.links import Machine, byteps_optimum_s, format_speed
from paceline.planning.steps import (
    ClusterShape,
    ServerGroup,
    simulate_all_reduce,
    simulate_hybrid,
    simulate_one_device,
    simulate_pipeline,
    simulate_servers,
    simulate_sharded,
    units_of,
)
from paceline.planning.waiting import barrier_s
from paceline.protocol.consistency import Sequential, parse_consistency
from paceline.strategies import check_strategy, default_strategy
from paceline.strategies.profile import ModelProfile

PREDICTED: Final = ("one-device", "all-reduce", "parameter-server", "hybrid", "sharded", "pipeline")
"""The strategies that have a prediction."""
FILTER: Final = Quantize(bits=8)
_FILTERS: Final = "quantize:8"
_FILTERED: Final = {"all-reduce": 1.5, "parameter-server": 2.0}
"""The strategies with a prediction for this filter: how many times each rank encodes and decodes its gradients.

Under all-reduce, a rank encodes and decodes its gradients, decodes the mean, and encodes its part of it. With servers,
both gradients and parameters are encoded and decoded.
"""
_TAU: Final = 4
_FILTER_VALUES: Final = 1 << 20
NOISY: Final = 2.0
"""From this factor on, a measurement is too noisy to order strategies whose speeds are similar."""
_LARGEST_CHANGE: Final = 1000.0
_CHANGES, _HALVINGS = 10, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyCandidate:
    """A strategy with the options that distinguish it from other lines of a table."""

    strategy: str
    consistency: str | None = None
    """``sequential``, ``bounded:N`` or ``eventual``, for strategies with servers."""
    servers: int = 0
    is_separate: bool = False
    """Whether the servers have machines of their own, rather than the nodes of the ranks."""
    needs_more_nodes: bool = False
    """Whether it needs machines for servers that the user has not named."""
    filters: str | None = None
    """Filters that compress gradients, as in ``paceline run --filters``."""

    @property
    def label(self) -> str:
        """The name of the strategy, with the consistency of its servers and the filters."""
        name = self.strategy if self.consistency is None else f"{self.strategy}:{self.consistency}"
        return name if self.filters is None else f"{name}+{self.filters}"

    @property
    def description(self) -> str:
        """The label, with the number and the place of the servers."""
        if not self.servers:
            return self.label
        count = f"{self.servers:,} {'separate ' if self.is_separate else ''}server{'' if self.servers == 1 else 's'}"
        return f"{self.label} with {count}{'' if self.is_separate else ' on the nodes'}"

    @property
    def tau(self) -> int | None:
        """The bound of the delay between ranks; None for no bound."""
        if self.strategy != "parameter-server" or self.consistency is None:
            return 0
        return parse_consistency(self.consistency).tau

    @property
    def is_exact(self) -> bool:
        """Whether the result equals the result of one device on the combined batches."""
        return self.consistency in (None, "sequential") and self.filters is None

    @property
    def is_choosable(self) -> bool:
        """Whether ``--strategy auto`` may choose this candidate.

        Stale gradients may learn more slowly although more examples are processed. Not every model can be divided into
        the stages of a pipeline.
        """
        return self.is_exact and self.strategy != "pipeline" and not self.needs_more_nodes

    def as_json(self) -> dict[str, Any]:
        """Return the fields of ``--json`` that identify the candidate."""
        return {"strategy": self.label, "servers": self.servers, "separate_servers": self.is_separate}

    def words(self) -> list[str]:
        """Return the options of ``paceline run`` that select this candidate."""
        words = ["--strategy", self.strategy]
        if self.consistency is not None:
            words += ["--consistency", self.consistency, "--servers", str(self.servers)]
        return words if self.filters is None else [*words, "--filters", self.filters]


def parse_candidate(text: str, servers: int | None = None) -> StrategyCandidate:
    """Return the candidate of a text such as ``parameter-server:bounded:4`` or ``all-reduce+quantize:8``.

    Raises UsageError.
    """
    text, _, filters = text.strip().partition("+")
    if filters:
        plain = parse_candidate(text, servers)
        if filters != _FILTERS or plain.strategy not in _FILTERED:
            raise UsageError(
                f"--strategies {text}+{filters}: has no prediction. Only +{_FILTERS} has one, after "
                f"{' or '.join(_FILTERED)}"
            )
        return replace(plain, filters=filters)
    name, _, consistency = text.partition(":")
    spec = check_strategy(name, "strategies")
    if name not in PREDICTED:
        raise UsageError(f"--strategies {text}: {name} has no prediction. Choose from {', '.join(PREDICTED)}")
    if not spec.has_servers:
        if consistency:
            raise UsageError(f"--strategies {text}: {name} has no servers. Leave :{consistency} out")
        return StrategyCandidate(strategy=name)
    parsed = parse_consistency(consistency or spec.consistency or "")
    is_exact = isinstance(parsed, Sequential)
    return StrategyCandidate(strategy=name, consistency="sequential" if is_exact else str(parsed), servers=servers or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrediction:
    """The predicted step of one candidate."""

    candidate: StrategyCandidate
    step_s: float
    """Mean seconds per step."""
    examples_per_s: float
    """Examples per second of all ranks together."""
    memory_bytes: float
    """Bytes per rank for parameters, gradients, optimizer state and activations.

    Embeddings of ``paceline.torch`` are not counted, because the number of their rows is not known.
    """
    parts: dict[Kind, float]
    """Seconds of the step's critical path by kind."""

    @property
    def bottleneck(self) -> Kind:
        """The kind that takes most of the step. Computing is the bottleneck only if it takes at least half."""
        longest = {kind: seconds for kind, seconds in self.parts.items() if kind != "compute"}
        if self.parts.get("compute", 0.0) * 2 >= self.step_s or not longest:
            return "compute"
        return max(longest, key=lambda kind: longest[kind])


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The input of a prediction: the profiles of a script, the machine and the cluster."""

    profile: ModelProfile
    """Measured with the number of processes that a node has ranks."""
    alone: ModelProfile
    """Measured with one process on the machine, which has all cores."""
    machine: Machine
    shape: ClusterShape
    servers: int | None = None
    """Number of separate servers, if the user gives it; else the number of nodes."""

    @property
    def noise(self) -> float:
        """The factor by which other programs may have disturbed the measurements; 1 if it is small."""
        noise = max(self.profile.noise, self.alone.noise)
        return noise if noise >= NOISY else 1.0

    def with_link_speed(self, factor: float) -> Scenario:
        assert self.shape.link is not None
        return replace(self, shape=replace(self.shape, link=self.shape.link.with_speed(factor)))

    def with_compute_time(self, factor: float) -> Scenario:
        """Return a scenario in which computing takes `factor` times as long, as with a larger batch."""
        return replace(self, profile=_stretched(self.profile, factor), alone=_stretched(self.alone, factor))


def _stretched(profile: ModelProfile, factor: float) -> ModelProfile:
    stretched = profile.with_scaled_layers(factor)
    steps_s = tuple(max(step_s + stretched.compute_s - profile.compute_s, 1e-9) for step_s in profile.steps_s)
    return replace(stretched, steps_s=steps_s, batch_size=max(round(profile.batch_size * factor), 1))


def candidates(scenario: Scenario) -> Iterator[StrategyCandidate]:
    """Yield the candidates that the script and the cluster support."""
    profile, shape = scenario.profile, scenario.shape
    yield StrategyCandidate(strategy="one-device")
    if shape.num_ranks == 1:
        return
    yield StrategyCandidate(strategy="all-reduce")
    places = [(shape.nodes if shape.nodes > 1 else scenario.servers or 1, False)]
    if shape.nodes > 1:
        places.append((scenario.servers or shape.nodes, True))
    names = [("parameter-server", consistency) for consistency in ("sequential", f"bounded:{_TAU}", "eventual")]
    if profile.sparse_bytes:
        names += [("hybrid", "sequential"), ("hybrid", f"bounded:{_TAU}")]
    for (servers, is_separate), (name, consistency) in itertools.product(places, names):
        yield StrategyCandidate(
            strategy=name,
            consistency=consistency,
            servers=servers,
            is_separate=is_separate,
            needs_more_nodes=is_separate and scenario.servers is None,
        )
    if scenario.machine.filter_s_per_byte and shape.nodes > 1 and not profile.sparse_bytes:
        yield StrategyCandidate(strategy="all-reduce", filters=_FILTERS)
        yield StrategyCandidate(
            strategy="parameter-server", consistency="sequential", servers=shape.nodes, filters=_FILTERS
        )
    if profile.parameter_bytes:
        yield StrategyCandidate(strategy="sharded")
    if 2 <= shape.num_ranks <= len(profile.layers) and not profile.sparse_bytes:
        yield StrategyCandidate(strategy="pipeline")


def predict_step(scenario: Scenario, candidate: StrategyCandidate) -> StepPrediction:
    """Predict the step of a candidate: its critical path, and the waiting for slower ranks."""
    if candidate.filters is not None:
        scenario = _with_filter(scenario, candidate)
    profile, shape, machine = scenario.profile, scenario.shape, scenario.machine
    servers = ServerGroup(
        count=max(candidate.servers, 1), is_separate=candidate.is_separate, is_synchronous=candidate.tau == 0
    )
    replicas = shape.num_ranks
    match candidate.strategy:
        case "one-device":
            profile, replicas = scenario.alone, 1
            simulated = simulate_one_device(profile, ClusterShape(), machine)
        case "all-reduce":
            simulated = simulate_all_reduce(profile, shape, machine)
        case "parameter-server":
            simulated = simulate_servers(profile, shape, machine, servers)
        case "hybrid":
            simulated = simulate_hybrid(profile, shape, machine, replace(servers, is_synchronous=candidate.is_exact))
        case "sharded":
            simulated = simulate_sharded(profile, shape, machine)
        case "pipeline":
            if len(profile.layers) < shape.num_ranks:
                raise UsageError(
                    f"pipeline: {len(profile.layers)} layers for {shape.num_ranks} stages. Lower --nproc-per-node"
                )
            simulated = simulate_pipeline(profile, shape, machine)
        case other:
            raise AssertionError(other)
    is_divided = candidate.strategy == "pipeline"
    waiting_s = _waiting_s(profile, 1 if is_divided else replicas, candidate.tau)
    step_s = simulated.step_s + waiting_s
    return StepPrediction(
        candidate=candidate,
        step_s=step_s,
        examples_per_s=profile.batch_size * (1 if is_divided else replicas) / step_s,
        memory_bytes=_memory_bytes(candidate, profile, shape.num_ranks),
        parts={**simulated.parts, "slow ranks": waiting_s},
    )


def _with_filter(scenario: Scenario, candidate: StrategyCandidate) -> Scenario:
    """Return a scenario with faster links, because messages are shorter, and with the processor time of the filter.

    Ranks of one node do not reduce inside of the node first, so a node sends the gradients of each of them.
    """
    machine, shape = scenario.machine, scenario.shape
    name = "parameter-server:eventual" if candidate.tau is None or candidate.tau > 0 else candidate.strategy
    share = FILTER.num_bytes(_FILTER_VALUES) / (4 * _FILTER_VALUES)
    if candidate.strategy == "all-reduce":
        share *= shape.ranks_per_node
    cost = machine.cost(name)
    more_s = _FILTERED[candidate.strategy] * machine.filter_s_per_byte
    costs = {**machine.costs, name: replace(cost, byte_s=cost.byte_s + more_s)}
    changed = replace(machine, costs=costs, socket_s_per_byte=machine.socket_s_per_byte * share)
    link = None if shape.link is None else shape.link.with_speed(1 / share)
    return replace(scenario, machine=changed, shape=replace(shape, link=link))


def _waiting_s(profile: ModelProfile, ranks: int, tau: int | None) -> float:
    return max(barrier_s(profile.steps_s, ranks, tau) - statistics.fmean(profile.steps_s), 0.0)


def _memory_bytes(candidate: StrategyCandidate, profile: ModelProfile, ranks: int) -> float:
    parameters, state = profile.parameter_bytes, profile.optimizer_bytes
    other = profile.activation_bytes + profile.table_bytes
    complete = 2 * parameters + state
    if candidate.strategy == "parameter-server":
        complete = 2 * parameters  # the servers have the optimizer's state
    elif candidate.strategy == "sharded":
        units = [profile.layers[number].parameter_bytes for number in units_of(profile.layers)]
        return complete / ranks + 2 * max(units, default=0) + other
    elif candidate.strategy == "pipeline":
        return (complete + other) / ranks
    return complete + other


def predict_all(scenario: Scenario) -> list[StepPrediction]:
    """Return the predictions of all candidates, the one with the most examples per second first."""
    predictions = [predict_step(scenario, candidate) for candidate in candidates(scenario)]
    return sorted(predictions, key=lambda prediction: -prediction.examples_per_s)


def choose(predictions: Sequence[StepPrediction], noise: float = 1.0) -> StepPrediction:
    """Return the fastest prediction whose candidate may be chosen automatically.

    Return the launcher's default strategy instead, unless the fastest one is `noise` times as fast.
    """
    suitable = [prediction for prediction in predictions if prediction.candidate.is_choosable]
    best = max(suitable, key=lambda prediction: prediction.examples_per_s)
    name = default_strategy(has_servers=False, num_ranks=2)
    default = next((prediction for prediction in suitable if prediction.candidate.strategy == name), best)
    return best if best.examples_per_s >= noise * default.examples_per_s else default


def describe_server_bound(scenario: Scenario) -> str | None:
    """Return a sentence with the shortest time of any division of the traffic between servers (BytePS)."""
    shape = scenario.shape
    servers = min(scenario.servers or 0, shape.nodes)
    if shape.link is None or not servers or shape.nodes < 2:
        return None
    # The ranks of a node reduce inside of the node first, so a node sends the gradients once.
    seconds = byteps_optimum_s(scenario.profile.parameter_bytes, shape.nodes, servers, shape.link.bytes_per_s)
    return (
        f"lower bound of the communication with {servers} separate server{'s' if servers > 1 else ''}, if the nodes "
        f"run servers too (BytePS): {seconds * 1e3:,.2f} ms"
    )


def find_changes(scenario: Scenario) -> list[str]:
    """Return sentences about the smallest changes that make another strategy the choice.

    Return none if the measurements are noisy.
    """
    if scenario.noise > 1:
        return []
    choosable = [candidate for candidate in candidates(scenario) if candidate.is_choosable]

    def choice(changed: Scenario) -> StrategyCandidate:
        return choose([predict_step(changed, candidate) for candidate in choosable]).candidate

    winner, link, batch_size = choice(scenario), scenario.shape.link, scenario.profile.batch_size
    sentences: list[str] = []
    for word, is_up in (("faster", True), ("slower", False)) if link is not None else ():
        found = find_change(lambda factor: choice(scenario.with_link_speed(factor)), winner, is_up=is_up)
        if found is not None and link is not None:
            sentences.append(
                f"On links {word} than {format_speed(link.bytes_per_s * found[0])}, {found[1]} is fastest."
            )
    for word, is_up in (("more", True), ("fewer", False)):
        found = find_change(lambda factor: choice(scenario.with_compute_time(factor)), winner, is_up=is_up)
        size = batch_size * found[0] if found is not None else 0.0
        if found is not None and size >= 1:
            count = math.ceil(size) if is_up else math.floor(size)
            sentences.append(f"With {count:,} or {word} examples per batch and rank, {found[1]} is fastest.")
    return sentences


def find_change(
    winner_at: Callable[[float], StrategyCandidate], winner: StrategyCandidate, *, is_up: bool
) -> tuple[float, str] | None:
    """Return the smallest change (a factor above 1, or below 1) with another winner, and this winner's description.

    ``winner_at(factor)`` is the winner after a change. Return None if changes up to 1,000 times do not matter.
    """
    sign = 1.0 if is_up else -1.0
    low, step = 0.0, math.log(_LARGEST_CHANGE) / _CHANGES
    for _ in range(_CHANGES):
        high = low + step
        found = winner_at(math.exp(sign * high))
        if found != winner:
            break
        low = high
    else:
        return None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        other = winner_at(math.exp(sign * middle))
        low, high, found = (middle, high, found) if other == winner else (low, middle, other)
    return math.exp(sign * high), found.description
