"""Describe the machines and their network, and predict the time of collectives between them. Pure.

Sources of the formulas: Patarasuk and Yuan 2009 for the ring; Jiang et al., "A Unified Architecture for Accelerating
Distributed DNN Training in Heterogeneous GPU/CPU Clusters" (BytePS), OSDI 2020, for the optimum with servers.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from dataclasses import dataclass, field, replace
from typing import Final

from paceline.collectives.schedules import ALGORITHMS, LinkCost, fastest, predict
from paceline.errors import UsageError

_SPEED: Final = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]?)(?:bit|bps)(?:/s)?", re.IGNORECASE)
_LATENCY: Final = re.compile(r"(\d+(?:\.\d+)?) ?(us|µs|ms|s)")
_SECONDS: Final = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
PAYLOAD: Final = 0.94
"""The share of TCP's data in a link's traffic: 1,448 of the 1,538 bytes of a packet on Ethernet."""
_MOST_BITS_PER_S: Final = 1e14
_MOST_LATENCY_S: Final = 10.0
_MOST_EVALUATED: Final = 8
"""Schedules of more nodes are not evaluated, because that would take minutes. Closed formulas give almost the same time
for large messages, and up to twice the time for small ones if the number of nodes is not a power of two."""
_PIECES: Final = 16
_LEAST_RATIO: Final = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLink:
    """The network connection of each node."""

    bytes_per_s: float
    """Bytes per second, in each direction at the same time."""
    latency_s: float
    """Seconds until an empty message arrives."""
    processor_s_per_byte: float = 0.0
    """Processor time for each byte that a node sends or receives, in addition to that of sockets inside of a node."""

    def with_speed(self, factor: float) -> NodeLink:
        return replace(self, bytes_per_s=self.bytes_per_s * factor)

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


def parse_link(speed: str, latency: str) -> NodeLink:
    """Return a link from texts such as ``10Gbit`` and ``20us``. Raises UsageError for other texts, and for no speed."""
    found = _SPEED.fullmatch(speed.strip())
    bits = float(found[1]) * 1000 ** " kmgt".index(found[2].lower() or " ") if found else math.nan
    if not 0 < bits <= _MOST_BITS_PER_S:
        raise UsageError(f"--link {speed}: expected a speed above 0, such as 10Gbit, 1Gbit or 100Mbit")
    delay = _LATENCY.fullmatch(latency.strip())
    latency_s = float(delay[1]) * _SECONDS[delay[2]] if delay else math.nan
    if not 0 <= latency_s <= _MOST_LATENCY_S:
        raise UsageError(f"--latency {latency}: expected a time of at most 10s, such as 20us or 0.5ms")
    return NodeLink(bytes_per_s=bits / 8 * PAYLOAD, latency_s=latency_s)


def format_speed(bytes_per_s: float) -> str:
    """Return a speed as :func:`parse_link` accepts it, with two digits: ``2.3 Gbit/s``."""
    bits = bytes_per_s / PAYLOAD * 8
    for prefix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if bits >= 0.995 * size or prefix == "k":
            value = bits / size
            return f"{value:.0f} {prefix}bit/s" if value >= 9.95 else f"{value:.1f} {prefix}bit/s"
    raise AssertionError


@dataclass(frozen=True, slots=True)
class Curve:
    """Measured times by size. Between the sizes the time is linear in the size; beyond them it is proportional."""

    points: tuple[tuple[int, float], ...]
    """Pairs of bytes and seconds, with increasing bytes."""

    def at(self, num_bytes: float) -> float:
        """Return the seconds for a size. A larger size never takes less time."""
        points = self.points
        if num_bytes <= points[0][0]:
            return points[0][1]
        times = list(itertools.accumulate((seconds for _, seconds in points), max))
        for (small, _), (large, _), low_s, high_s in zip(points, points[1:], times, times[1:], strict=False):
            if num_bytes <= large:
                return low_s + (high_s - low_s) * (num_bytes - small) / (large - small)
        return times[-1] * num_bytes / points[-1][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyCost:
    """The processor time of a strategy on this machine, in addition to computing and to the messages' bytes."""

    step_s: float = 0.0
    """Seconds per step."""
    parameter_s: float = 0.0
    """Seconds per parameter (tensor) and step."""
    byte_s: float = 0.0
    """Seconds per byte of gradients and step, for copying and, with servers, for sending."""
    row_s: float = 0.0
    """Seconds per row of an embedding that a step looks up, for the lookup and the gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The measured costs of this machine. Predictions assume that all nodes are equal to it."""

    num_cores: int
    ranks_per_node: int
    all_reduce: Curve
    """All-reduce between the ranks of one node, through shared memory."""
    socket_s_per_byte: float
    """Processor time of a rank for each byte that it sends and receives over the network."""
    server_update_share: float = 1.0
    """The time of a server's update, as a fraction of the time that an optimizer of the ranks takes."""
    filter_s_per_byte: float = 0.0
    """Processor time for each byte of float32 values that the filter ``quantize:8`` encodes and decodes."""
    costs: dict[str, StrategyCost] = field(default_factory=dict)
    """By the name of the strategy, with ``:eventual`` for asynchronous servers."""

    def cost(self, name: str) -> StrategyCost:
        return self.costs.get(name, StrategyCost())


def ring_s(num_bytes: float, workers: int, bytes_per_s: float, latency_s: float = 0.0) -> float:
    """Return the seconds of an all-reduce by the ring: 2 (n - 1) (α + M / (n B))."""
    return 2 * (workers - 1) * (latency_s + num_bytes / (workers * bytes_per_s))


def byteps_optimum_s(num_bytes: float, workers: int, servers: int, bytes_per_s: float) -> float:
    """Return the shortest time with k separate servers and a server on each worker's machine, for k up to n.

    It is 2n (n - 1) M / ((n² + kn - 2k) B).
    """
    denominator = workers * workers + servers * workers - 2 * servers
    return 2 * workers * (workers - 1) * num_bytes / (denominator * bytes_per_s)


def all_reduce_s(num_bytes: float, nodes: int, link: NodeLink) -> float:
    """Return the time of the fastest all-reduce between nodes, without the part inside of the nodes.

    Up to 8 nodes, the evaluator of ``paceline.collectives`` predicts all schedules. The ranks of a node reduce inside
    of the node first, so that each node sends and receives as one rank.
    """
    if nodes == 1:
        return 0.0
    if nodes > _MOST_EVALUATED or not link.latency_s:
        return _closed_all_reduce_s(num_bytes, nodes, link)
    # Times depend on the ratio of bandwidth time and latency only, so a few evaluated ratios serve all links and sizes.
    ratio = num_bytes / (link.bytes_per_s * link.latency_s)
    exponent = math.floor(math.log2(max(ratio, _LEAST_RATIO)))
    low, high = (_evaluate(nodes, power) for power in (exponent, exponent + 1))
    share = max(ratio / 2.0**exponent - 1, 0.0)
    return link.latency_s * (low + (high - low) * share)


@functools.cache
def _evaluate(nodes: int, exponent: int) -> float:
    """Return the time of the fastest all-reduce, as a multiple of the latency.

    The transfer of the data takes 2^exponent latencies.
    """
    num_bytes, times = 1 << 30, dict[str, float]()
    cost = LinkCost(1.0, 2.0**exponent / num_bytes)
    for name, algorithm in ALGORITHMS["all_reduce"].items():
        if algorithm.supports(nodes) and not algorithm.hierarchical:
            schedules = algorithm.schedules(nodes, pieces=_PIECES if algorithm.pipelined else 1)
            times[name] = predict(schedules, num_bytes // max(schedules[0].num_blocks, 1), cost)
    return times[fastest(times)]


def _closed_all_reduce_s(num_bytes: float, nodes: int, link: NodeLink) -> float:
    rounds = math.ceil(math.log2(nodes))
    halving = 2 * rounds * link.latency_s + 2 * (nodes - 1) / nodes * num_bytes / link.bytes_per_s
    doubling = rounds * link.seconds(num_bytes)
    if nodes & (nodes - 1):  # two more rounds between the surplus ranks and their partners
        halving, doubling = (seconds + 2 * link.seconds(num_bytes) for seconds in (halving, doubling))
    return min(ring_s(num_bytes, nodes, link.bytes_per_s, link.latency_s), halving, doubling)


def gather_s(num_bytes: float, nodes: int, link: NodeLink) -> float:
    """Return the time of an all-gather, or of a reduce-scatter, of `num_bytes` in total, by the ring."""
    return ring_s(num_bytes, nodes, link.bytes_per_s, link.latency_s) / 2
