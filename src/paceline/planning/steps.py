"""Simulate a step under each strategy: its tasks on the virtual clock. Pure.

All ranks are equal, so one rank is simulated. The cores and ports of its node have the load of all ranks on the node.
A server has the load of all ranks. Gradients are sent in buckets during the backward, which begins with the last layer.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from paceline.planning.clock import Kind, TaskList, critical_path, simulate_tasks
from paceline.planning.links import Machine, NodeLink, StrategyCost, all_reduce_s, gather_s
from paceline.strategies.pipeline import default_microbatches
from paceline.strategies.profile import LayerProfile, ModelProfile
from paceline.strategies.stage_cuts import cut_stages

_FIRST_BUCKET_BYTES: Final = 1 << 20
BUCKET_BYTES: Final = 25 << 20
"""DistributedDataParallel's buckets: the first one is small, so that communication begins early."""
SERVER_BUCKET_BYTES: Final = 4 << 20
UNIT_BYTES: Final = 4 << 16
_DIRECTIONS, _SIDES = 2, 2
"""Pushes and pulls; clients and servers."""
_MESSAGES: Final = _DIRECTIONS * _SIDES
_NEXT_SERVER: Final = 0.3
"""The cost of a message to each further server, as a fraction of the cost for the first one.

Fitted to measured steps between emulated hosts with links of 1 Gbit/s (``benchmarks/predictions.py``).
"""
_ITERATIONS: Final = 3
"""Pulls overlap with the next iteration, so several iterations are simulated, and the last one counts."""
CPU, OUT, IN, SERVER, SERVER_OUT, SERVER_IN = "cpu", "out", "in", "server", "server out", "server in"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterShape:
    """The processes and the network of a run."""

    nodes: int = 1
    ranks_per_node: int = 1
    link: NodeLink | None = None
    """The network; None for one node."""
    node_cores: float | None = None
    """The cores of each node, if they differ from the measured machine's. Emulated nodes share a machine's cores."""

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerGroup:
    """The servers of a step."""

    count: int = 1
    is_separate: bool = False
    """Whether they have machines of their own, rather than the nodes of the ranks."""
    is_synchronous: bool = True
    """Whether they update once per step, otherwise once per rank and step."""


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """The duration of a step without waiting for slower ranks, and the seconds of its critical path by kind."""

    step_s: float
    parts: dict[Kind, float]


class RankTasks(TaskList):
    """The tasks of one rank's step. The methods add the tasks that several strategies have in common."""

    def __init__(self, profile: ModelProfile, shape: ClusterShape, machine: Machine, cost: StrategyCost) -> None:
        super().__init__()
        self.profile, self.shape, self.machine, self.cost = profile, shape, machine, cost
        ranks, cores = shape.ranks_per_node, shape.node_cores or machine.num_cores
        self.cores = cores
        self._computing = {} if profile.is_on_gpu else {CPU: ranks * profile.busy_cores / cores}
        self._one_core = {CPU: ranks / cores}
        """The load of a task in which each rank of the node uses one core."""
        self._running = {} if profile.is_on_gpu else self._one_core

    def compute(self, seconds: float, *after: int) -> int:
        return self.add("compute", seconds, self._computing, *after)

    def run(self, seconds: float, *after: int) -> int:
        """Add the program's own code, or the optimizer."""
        return self.add("compute", seconds, self._running, *after)

    def communicate(self, seconds: float, *after: int) -> int:
        """Add the processor time of a rank for communication."""
        return self.add("communication CPU", seconds, self._one_core, *after)

    def join(self, *after: int) -> int:
        """Add a task without duration, which waits for several tasks."""
        return self.communicate(0.0, *after)

    def overhead(self, *after: int) -> int:
        """Add the strategy's own work per step and per parameter."""
        return self.communicate(self.cost.step_s + self.cost.parameter_s * self.profile.num_parameters, *after)

    def copy(self, *after: int) -> int:
        """Add the strategy's own work per byte of gradients."""
        return self.communicate(self.cost.byte_s * self.profile.parameter_bytes, *after)

    def all_reduce(self, num_bytes: float, *after: int) -> int:
        """Add an all-reduce between all ranks: inside of the nodes, then between them. Without bytes, only wait."""
        if not num_bytes:
            return self.join(*after)
        local_s = self.machine.all_reduce.at(num_bytes) if self.shape.ranks_per_node > 1 else 0.0
        last = self.communicate(local_s, *after)
        if self.shape.link is None:
            return last
        seconds = all_reduce_s(num_bytes, self.shape.nodes, self.shape.link)
        return self._network(seconds, 4 * num_bytes, last)

    def gather(self, num_bytes: float, *after: int) -> int:
        """Add an all-gather or a reduce-scatter of `num_bytes` in total. Without bytes, only wait."""
        if not num_bytes:
            return self.join(*after)
        if self.shape.link is None:
            return self.communicate(self.machine.all_reduce.at(num_bytes) / 2, *after)
        return self._network(gather_s(num_bytes, self.shape.nodes, self.shape.link), 2 * num_bytes, *after)

    def exchange_rows(self, *after: int) -> int:
        """Add an all-gather of the rows' gradients, and the work for them: each rank applies those of all ranks."""
        profile, num_ranks = self.profile, self.shape.num_ranks
        sent = self.gather(num_ranks * profile.sparse_bytes, *after)
        return self.communicate(self.cost.row_s * profile.sparse_rows * num_ranks / self.machine.ranks_per_node, sent)

    def _network(self, seconds: float, num_bytes: float, *after: int) -> int:
        """Add a transfer between n nodes. Each node sends and receives (n - 1) / n of `num_bytes` together."""
        moved = num_bytes * (self.shape.nodes - 1) / self.shape.nodes
        assert self.shape.link is not None
        byte_s = self.machine.socket_s_per_byte + self.shape.link.processor_s_per_byte
        busy = byte_s * moved / seconds if seconds else 0.0
        loads = {OUT: 1.0, IN: 1.0, CPU: min(busy, 1.0) / self.cores}
        return self.add("wire", seconds * max(busy, 1.0), loads, *after)

    def forward(self, *after: int, pulled: Mapping[int, int] | None = None) -> int:
        """Add the program's own code and the forward. A layer waits for its task in `pulled`."""
        last = self.run(self.profile.program_s, *after)
        for number, layer in enumerate(self.profile.layers):
            last = self.compute(layer.forward_s, last, (pulled or {}).get(number, -1))
        return last

    def backward(self, last: int) -> dict[int, int]:
        """Add the backward after the task `last`. Return the task of each layer; the task of layer 0 ends last."""
        tasks: dict[int, int] = {}
        for number in reversed(range(len(self.profile.layers))):
            tasks[number] = last = self.compute(self.profile.layers[number].backward_s, last)
        return tasks

    def simulate(self, last: int, begins_after: int = -1) -> SimulatedStep:
        """Simulate the tasks. The step is the time from the end of task `begins_after` to the end of task `last`."""
        times = simulate_tasks(self.tasks)
        begin_s = times[begins_after].end_s if begins_after >= 0 else 0.0
        return SimulatedStep(times[last].end_s - begin_s, critical_path(self.tasks, times, last, begin_s))


def simulate_one_device(profile: ModelProfile, shape: ClusterShape, machine: Machine) -> SimulatedStep:
    """Simulate a step of one process on one node."""
    rank = RankTasks(profile, shape, machine, StrategyCost())
    return rank.simulate(rank.run(profile.update_s, rank.backward(rank.forward())[0]))


def buckets_of(layers: Sequence[LayerProfile], first_bytes: int, most_bytes: int) -> list[tuple[int, float]]:
    """Divide gradients into buckets in the order of the backward.

    Return for each bucket the number of the last layer whose gradients it needs, and its bytes. A bucket ends with the
    layer that makes it reach the limit.
    """
    buckets: list[tuple[int, float]] = []
    size, limit = 0, first_bytes
    for number in reversed(range(len(layers))):
        size += layers[number].parameter_bytes
        if size >= limit or (number == 0 and size):
            buckets.append((number, size))
            size, limit = 0, most_bytes
    return buckets


def simulate_all_reduce(profile: ModelProfile, shape: ClusterShape, machine: Machine) -> SimulatedStep:
    """Simulate a step under ``all-reduce``: buckets are reduced in their order while the backward continues."""
    rank = RankTasks(profile, shape, machine, machine.cost("all-reduce"))
    return rank.simulate(_add_all_reduce(rank, has_rows=bool(profile.sparse_bytes)))


def _add_all_reduce(rank: RankTasks, *, has_rows: bool, after: int = -1) -> int:
    profile = rank.profile
    ready = rank.backward(rank.forward(rank.all_reduce(profile.buffer_bytes, rank.overhead(after))))
    reduced = -1
    for number, num_bytes in buckets_of(profile.layers, _FIRST_BUCKET_BYTES, BUCKET_BYTES):
        reduced = rank.all_reduce(num_bytes, ready[number], reduced)
    reduced = rank.copy(reduced)
    if has_rows:
        reduced = rank.exchange_rows(ready[0], reduced)
    return rank.run(profile.update_s, ready[0], reduced)


class ServerMessage(NamedTuple):
    """The numbers of the three tasks of one push or pull; -1 for no message."""

    by_client: int = -1
    """The client's work: it prepares a push, or stores a pull."""
    moved: int = -1
    """The transfer between the nodes."""
    by_server: int = -1
    """The server's work: it applies a push, or answers a pull."""


class ServerTasks(RankTasks):
    """The tasks of one rank's step with the messages between the rank and the servers."""

    def __init__(
        self, profile: ModelProfile, shape: ClusterShape, machine: Machine, cost: StrategyCost, group: ServerGroup
    ) -> None:
        super().__init__(profile, shape, machine, cost)
        self.group, servers = group, group.count
        ranks, measured = shape.ranks_per_node, machine.ranks_per_node
        # In this time, the cores of the measured machine worked for the messages of all ranks: half as servers.
        busy = min(machine.num_cores, measured + 1) / measured / (_DIRECTIONS * _SIDES)
        self._byte_s, self._row_s = cost.byte_s * busy, cost.row_s * busy
        self._ranks_per_server = shape.num_ranks / servers
        # A server updates its part of the parameters: once per step, or once per rank and step.
        updates = 1 if group.is_synchronous else shape.num_ranks
        num_bytes = max(profile.parameter_bytes + profile.sparse_bytes, 1)
        self._update_byte_s = profile.update_s * machine.server_update_share * updates / servers / num_bytes
        # The cost of a step contains four messages between each rank of one node and one server.
        self._client_more_s = _NEXT_SERVER * cost.step_s / _MESSAGES * (servers - 1)
        self._server_more_s = _NEXT_SERVER * cost.step_s / _MESSAGES * (shape.num_ranks - ranks)
        per_node = servers / shape.nodes
        self._serving = {SERVER: 1.0} if group.is_separate else {CPU: max(per_node, 1.0) / self.cores}

    def push(self, num_bytes: float, former: ServerMessage, *after: int, rows: int = 0) -> ServerMessage:
        """Add a push: the client's work, the transfer, the server's update. `former` is the message before it."""
        work_s = self._byte_s * num_bytes + self._row_s * rows
        sent = self._client(work_s, former.by_client, *after)
        moved = self._transfer(num_bytes, False, sent, former.moved)
        seconds = work_s * self._ranks_per_server + self._update_byte_s * num_bytes
        return ServerMessage(sent, moved, self._serve(seconds, moved, former.by_server))

    def pull(self, num_bytes: float, former: ServerMessage, *after: int, rows: int = 0) -> ServerMessage:
        """Add a pull: the server's work, the transfer, the client's work."""
        work_s = self._byte_s * num_bytes + self._row_s * rows
        served = self._serve(work_s * self._ranks_per_server, former.by_server, *after)
        moved = self._transfer(num_bytes, True, served, former.moved)
        return ServerMessage(self._client(work_s, moved, former.by_client), moved, served)

    def push_rows(self, former: ServerMessage, *after: int) -> ServerMessage:
        return self.push(self.profile.sparse_bytes, former, *after, rows=self.profile.sparse_rows)

    def pull_rows(self, former: ServerMessage, *after: int) -> ServerMessage:
        return self.pull(self.profile.sparse_bytes, former, *after, rows=self.profile.sparse_rows)

    def _serve(self, seconds: float, *after: int) -> int:
        return self.add("server CPU", seconds + self._server_more_s, self._serving, *after)

    def _client(self, seconds: float, *after: int) -> int:
        return self.communicate(seconds + self._client_more_s, *after)

    def _transfer(self, num_bytes: float, is_pull: bool, *after: int) -> int:
        shape, link = self.shape, self.shape.link
        if link is None:
            return self.add("wire", 0.0, {}, *after)
        node_bytes = num_bytes * shape.ranks_per_node
        if not self.group.is_separate:
            node_bytes *= (shape.nodes - 1) / shape.nodes
            # The node's ranks send, and its servers receive.
            busy = _SIDES * link.processor_s_per_byte * link.bytes_per_s
            seconds = node_bytes / link.bytes_per_s * max(busy, 1.0)
            return self.add("wire", seconds, {OUT: 1.0, IN: 1.0, CPU: min(busy, 1.0) / self.cores}, *after)
        node_s = node_bytes / link.bytes_per_s
        server_s = num_bytes * shape.num_ranks / self.group.count / link.bytes_per_s
        seconds = max(node_s, server_s)
        own, port = (IN, SERVER_OUT) if is_pull else (OUT, SERVER_IN)
        loads = {own: node_s / seconds, port: server_s / seconds} if seconds else {}
        return self.add("wire", seconds, loads, *after)

    def round_trip(self, *after: int) -> int:
        latency_s = 0.0 if self.shape.link is None else 2 * self.shape.link.latency_s
        return self.add("wire", latency_s, {}, *after)


def simulate_servers(profile: ModelProfile, shape: ClusterShape, machine: Machine, group: ServerGroup) -> SimulatedStep:
    """Simulate steps under ``parameter-server``: pushes during the backward, pulls during the next forward."""
    is_synchronous = group.is_synchronous
    cost = machine.cost("parameter-server" if is_synchronous else "parameter-server:eventual")
    rank = ServerTasks(profile, shape, machine, cost, group)
    buckets = _parts(buckets_of(profile.layers, SERVER_BUCKET_BYTES, SERVER_BUCKET_BYTES))
    pulled, last, rows, ends = dict[int, int](), -1, -1, list[int]()
    for _ in range(_ITERATIONS):
        last = rank.join(last, rows)
        # The rows of the next batch are requested during this batch, or after the step if they must be exact.
        if profile.sparse_bytes and not is_synchronous:
            rows = rank.pull_rows(ServerMessage(), last).by_client
        ready, message = rank.backward(rank.forward(last, pulled=pulled)), ServerMessage()
        for number, num_bytes in buckets:
            message = rank.push(num_bytes, message, ready[number])
        if profile.sparse_bytes:
            message = rank.push_rows(message, ready[0])
        last = rank.overhead(ready[0], message.by_client)
        applied = rank.round_trip(last, message.by_server)
        message = ServerMessage()
        if profile.sparse_bytes and is_synchronous:
            message = rank.pull_rows(message, applied)
            rows = message.by_client
        pulled = {}
        for number, num_bytes in reversed(buckets):
            message = rank.pull(num_bytes, message, applied)
            pulled[number] = message.by_client
        ends.append(last)
    return rank.simulate(ends[-1], ends[-2])


def _parts(buckets: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Divide large buckets: a bucket of the servers may have a part of a parameter."""
    parts: list[tuple[int, float]] = []
    for number, num_bytes in buckets:
        count = max(round(num_bytes / SERVER_BUCKET_BYTES), 1)
        parts += [(number, num_bytes / count)] * count
    return parts


def simulate_hybrid(profile: ModelProfile, shape: ClusterShape, machine: Machine, group: ServerGroup) -> SimulatedStep:
    """Simulate steps under ``hybrid``: all-reduce for dense parameters, servers for rows."""
    cost, of_servers = machine.cost("all-reduce"), machine.cost("parameter-server:eventual")
    cost = replace(cost, byte_s=of_servers.byte_s, row_s=of_servers.row_s)
    rank, is_synchronous = ServerTasks(profile, shape, machine, cost, group), group.is_synchronous
    last, rows, ends = -1, -1, list[int]()
    for _ in range(_ITERATIONS):
        last = rank.join(last, rows)
        if not is_synchronous:
            rows = rank.round_trip(rank.pull_rows(ServerMessage(), last).by_client)
        last = _add_all_reduce(rank, has_rows=False, after=last)
        pushed = rank.push_rows(ServerMessage(), last)
        if is_synchronous:
            rows = rank.round_trip(rank.pull_rows(ServerMessage(), pushed.by_server).by_client)
        ends.append(last)
    return rank.simulate(ends[-1], ends[-2])


def units_of(layers: Sequence[LayerProfile]) -> list[int]:
    """Return the numbers of the layers that are gathered alone under ``sharded``: at least 65,536 parameters."""
    return [number for number, layer in enumerate(layers) if layer.parameter_bytes >= UNIT_BYTES]


def simulate_sharded(profile: ModelProfile, shape: ClusterShape, machine: Machine) -> SimulatedStep:
    """Simulate a step under ``sharded``: parameters are gathered before the forward and the backward of each unit.

    On a GPU the next unit is gathered during the computation of a unit. On a processor the computation waits.
    """
    rank = RankTasks(profile, shape, machine, machine.cost("sharded"))
    layers, units = profile.layers, set(units_of(profile.layers))
    remainder = sum(layer.parameter_bytes for number, layer in enumerate(layers) if number not in units)
    last = rank.overhead()
    sent = rank.gather(remainder, last)
    last = rank.run(profile.program_s, last, sent)

    def gathered(layer: LayerProfile, last: int, sent: int) -> tuple[int, int]:
        sent = rank.gather(layer.parameter_bytes, sent if rank.profile.is_on_gpu else last, sent)
        return rank.join(last, sent), sent

    for number, layer in enumerate(layers):
        if number in units:
            last, sent = gathered(layer, last, sent)
        last = rank.compute(layer.forward_s, last)
    sent = rank.gather(remainder, last, sent)
    last = rank.join(last, sent)
    for number in reversed(range(len(layers))):
        if number in units:
            last, sent = gathered(layers[number], last, sent)
        last = rank.compute(layers[number].backward_s, last)
        if number in units:
            sent = rank.gather(layers[number].parameter_bytes, last, sent)
    sent = rank.exchange_rows(last, rank.gather(remainder, last, sent))
    return rank.simulate(rank.run(profile.update_s / shape.num_ranks, rank.copy(last, sent)))


def simulate_pipeline(profile: ModelProfile, shape: ClusterShape, machine: Machine) -> SimulatedStep:
    """Predict a step under ``pipeline``, for a model whose layers run one after another.

    Like the strategy, this function cuts the layers into stages, and chooses the number of microbatches, and between
    one and two stages per rank. Computing of the ranks other than the slowest one is not on the critical path, except
    while the pipeline fills and drains.
    """
    ranks, link, cost = shape.num_ranks, shape.link, machine.cost("pipeline")
    layers, layers_s = profile.layers, [layer.forward_s + layer.backward_s for layer in profile.layers]
    # Each microbatch adds to all gradients, and is computed in smaller operations.
    of_parameters_s = cost.parameter_s * profile.num_parameters + cost.byte_s * profile.parameter_bytes
    microbatch_s = (of_parameters_s + profile.microbatch_s) / ranks

    @functools.cache
    def cuts_at(crossing_s: tuple[float, ...], num_stages: int) -> list[int]:
        cuts = cut_stages(layers_s, num_stages, crossing_s)
        assert cuts is not None
        return cuts

    def divided(microbatches: int, parts_per_rank: int) -> SimulatedStep:
        crossing_s = [0.0] * len(layers)
        if link is not None:
            crossing_s[1:] = [link.seconds(layer.output_bytes / microbatches) for layer in layers[:-1]]
        # The ratio of the times matters, so on one node the cuts are the same for all numbers of microbatches.
        cuts = cuts_at(tuple(seconds * microbatches for seconds in crossing_s), ranks * parts_per_rank)
        bounds = [0, *cuts, len(layers)]
        stages_s = [sum(layers_s[first:end]) for first, end in itertools.pairwise(bounds)]
        slowest_s = max(sum(stages_s[rank::ranks]) for rank in range(ranks))
        sent_s = 2 * parts_per_rank * max((crossing_s[cut] for cut in cuts), default=0.0)
        parts: dict[Kind, float] = {
            "compute": slowest_s + profile.program_s + profile.update_s / ranks,
            "communication CPU": cost.step_s + microbatches * microbatch_s,
            "wire": microbatches * sent_s,
            "bubble": (ranks - 1) / parts_per_rank * (slowest_s / microbatches + microbatch_s + sent_s),
        }
        return SimulatedStep(sum(parts.values()), parts)

    counts = default_microbatches(ranks, max(profile.batch_size, 1))
    most_parts = 2 if len(layers) >= 2 * ranks else 1
    found = [divided(count, parts) for count in counts for parts in range(1, most_parts + 1)]
    return min(found, key=lambda step: step.step_s)
