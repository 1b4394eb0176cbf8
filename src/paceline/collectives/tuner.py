"""Choose the algorithm of each operation of a group, and explain the choice.

On one host there are two algorithms: ``shared`` copies data through a segment of shared memory, and ``direct`` (for
large all-reduces only) reads the arrays in the other ranks' memory. Which algorithm is faster depends on the distance
of the processor cores, so the ranks time both algorithms once.

Between hosts the tuner chooses the schedule with the shortest predicted time, or the ring if it is close. A message of
n bytes is predicted to take α + nβ, and its reduction nγ. At the first call the ranks measure α, β and γ in 10 ms to
1 s. All ranks use the values of the slowest rank, so that their choices are equal.

If some ranks know the values from an earlier group (:meth:`Tuner.reuse`), all ranks use these, and measure nothing.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from paceline.collectives.calls import CollectiveCall
from paceline.collectives.engine import Area, Engine, Order, Reduction
from paceline.collectives.network.blocks import Blocks
from paceline.collectives.network.engine import COMBINER, NetworkEngine, num_pieces
from paceline.collectives.schedules import ALGORITHMS, LinkCost, Receive, Schedule, Send, fastest, predict
from paceline.collectives.shared.engine import DIRECT_BYTES, SharedMemory
from paceline.errors import UsageError
from paceline.kernels import combine

if TYPE_CHECKING:
    from paceline.collectives.connections import Connections

SHARED, DIRECT = "shared", "direct"
_NAMES: Final = sorted({name for found in ALGORITHMS.values() for name in found} | {SHARED, DIRECT})
_REPEATS: Final = {DIRECT_BYTES: 25, 1 << 20: 21, 1 << 22: 13, 1 << 24: 9, 1 << 26: 5}
"""The array sizes in bytes for which ``shared`` and ``direct`` are timed, and the number of repetitions per size."""
_LIMITS: Final = {DIRECT_BYTES: 0.8, 1 << 24: 1.1, 1 << 26: 1.5}
"""For arrays of at least this size in bytes: choose ``direct`` if its time divided by the time of ``shared`` is below
this limit.

If the ranks' cores share a cache, ``direct`` is up to three times slower for small data, and equally fast for large
data. If the cores are distant, ``direct`` is equally fast for small data, and 1.5 to 4 times faster for large data (2
and 4 ranks, 1 to 100 MB). A virtual machine may move to other cores while a program runs. So the limits favour the
algorithm that would lose less time after such a move.
"""
_MIN_TIMED_S: Final = 0.05
_MAX_TIMED_BYTES: Final = 1 << 24
_NUM_RECENT: Final = 32


class Model(NamedTuple):
    """The measured cost of messages and reductions between the ranks of a group."""

    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float


class Candidate(NamedTuple):
    """One algorithm for an operation, with its predicted and measured time, if known."""

    name: str
    predicted_s: float | None
    measured_s: float | None


def check_algorithm(name: str | None) -> None:
    if name is not None and name not in _NAMES:
        raise UsageError(f"got algorithm {name!r}, expected one of {', '.join(_NAMES)}")


class Tuner:
    """Chooses the algorithms of one group."""

    def __init__(self, connections: Connections, timeout_s: float, algorithm: str | None) -> None:
        """If `algorithm` is not None, every operation that supports this algorithm uses it."""
        self.forced = algorithm
        self.model: Model | None = None
        """The measured constants α, β and γ; None before the first operation between hosts."""
        self._connections = connections
        self._timeout_s = timeout_s
        self._local: dict[int, dict[str, float]] = {}
        self._earlier_model: Model | None = None
        self._earlier_local: dict[int, dict[str, float]] = {}
        self._chosen: dict[tuple[str, int], str] = {}
        self._measured: dict[tuple[str, str, int], deque[float]] = {}

    def reuse(self, earlier: Tuner) -> None:
        """Use the values of an earlier group instead of measurements. Some ranks may be new, and know no values.

        All ranks that were in the earlier group must make this call before the first operation.
        """
        self._earlier_model = earlier.model or earlier._earlier_model
        self._earlier_local = earlier._earlier_local | earlier._local

    def choose(self, operation: str, num_bytes: int, order: Order) -> tuple[Engine, str]:
        """Return the engine and the algorithm for an operation. All ranks must call this method.

        The first call may measure the candidates. Before the measurement, a barrier checks that all ranks make the call
        `order`.
        """
        name, _ = self._known_choice(operation, num_bytes)
        shared = self._preferred()
        if shared is not None:
            return shared, name or self._fastest_local(shared, num_bytes, order)
        network = self._connections.network(self._choose_schedule)
        if name is None:
            network.barrier(order)
            self.model = self.measure()
        return network, name or self._choose_schedule(operation, num_bytes)

    def record(self, operation: str, algorithm: str, num_bytes: int, seconds: float) -> None:
        key = (operation, algorithm, num_bytes.bit_length())
        recent = self._measured.get(key)
        if recent is None:
            recent = self._measured[key] = deque(maxlen=_NUM_RECENT)
        recent.append(seconds)

    def candidates(self, operation: str, num_bytes: int) -> list[Candidate]:
        found: list[Candidate] = []
        shared = self._shared()
        if shared is not None:
            names = [SHARED, DIRECT] if self._may_be_direct(shared, operation, num_bytes) else [SHARED]
            timed_size = self._timed_size(num_bytes)
            for name in names:
                times = self._local.get(timed_size, {}).get(name)
                predicted = None if times is None else times * max(num_bytes, 1) / timed_size
                found.append(Candidate(name, predicted, self._median(operation, name, num_bytes)))
        for name in ALGORITHMS.get(operation, ()):
            if ALGORITHMS[operation][name].supports(self._connections.layout.size):
                predicted = None if self.model is None else self.predict(operation, name, num_bytes)
                found.append(Candidate(name, predicted, self._median(operation, name, num_bytes)))
        return found

    def explain(self, operation: str, num_bytes: int) -> str:
        """Return a text table of the candidate algorithms, with the chosen algorithm and the reason for the choice.

        `num_bytes` is the size of the whole result for all_gather, and of this rank's array for the other operations.
        """
        if operation not in ALGORITHMS:
            raise UsageError(f"got operation {operation!r}, expected one of {', '.join(ALGORITHMS)}")
        candidates = self.candidates(operation, num_bytes)
        chosen, reason = self._known_choice(operation, num_bytes)
        if self._connections.layout.size == 1:
            chosen, reason = "nothing", "the group has one rank"
        chosen = chosen or ("none yet" if self._preferred() is None else SHARED)
        lines = [f"{operation} of {num_bytes:,} bytes on {self._connections.layout.size} ranks: {chosen} ({reason})"]
        lines.append(f"  {'algorithm':<20}{'predicted':>12}{'measured':>12}")
        for name, predicted, measured in candidates:
            mark = "*" if name == chosen else " "
            lines.append(f"{mark} {name:<20}{_time(predicted):>12}{_time(measured):>12}")
        return "\n".join(lines)

    def predict(self, operation: str, name: str, num_bytes: int) -> float:
        assert self.model is not None
        size, algorithm = self._connections.layout.size, ALGORITHMS[operation][name]
        pieces = num_pieces(operation, name, num_bytes)
        schedules = algorithm.schedules(size, pieces=pieces, hosts=self._connections.layout.hosts)
        num_blocks = schedules[0].num_blocks
        if operation == "all_to_all":
            num_blocks = size
        block = num_bytes // max(num_blocks, 1)
        link = LinkCost(self.model.alpha_s, self.model.beta_s_per_byte)
        gamma = self.model.gamma_s_per_byte
        return predict(schedules, block, link, gamma_s_per_byte=gamma, hosts=self._connections.layout.hosts)

    def _known_choice(self, operation: str, num_bytes: int) -> tuple[str | None, str]:
        """Return the algorithm for an operation and the reason. If a measurement is needed, the algorithm is None."""
        shared = self._preferred()
        if shared is not None:
            if not self._may_be_direct(shared, operation, num_bytes):
                return SHARED, "all ranks are on one host"
            if self.forced is not None:
                return self.forced, "set by PACELINE_ALGORITHM or the caller"
            timed_size = self._timed_size(num_bytes)
            times = self._local.get(timed_size)
            if times is None:
                return None, "all ranks are on one host; not yet timed against direct"
            return _faster(times, timed_size), "the fastest on this host, as timed"
        forced = self._forced_schedule(operation)
        if forced is not None:
            return forced, "set by PACELINE_ALGORITHM or the caller"
        if self.model is None and len(self._names(operation)) > 1:
            return None, "the first call measures the links, then chooses"
        return self._choose_schedule(operation, num_bytes), "the shortest predicted time, or the ring if it is close"

    def _forced_schedule(self, operation: str) -> str | None:
        known = ALGORITHMS[operation].get(self.forced or "")
        return known.name if known is not None and known.supports(self._connections.layout.size) else None

    def _shared(self) -> SharedMemory | None:
        return self._connections.shared if self._connections.layout.is_on_one_host else None

    def _preferred(self) -> SharedMemory | None:
        return self._shared() if self.forced in (None, SHARED, DIRECT) else None

    @staticmethod
    def _may_be_direct(shared: SharedMemory, operation: str, num_bytes: int) -> bool:
        return operation == "all_reduce" and num_bytes >= DIRECT_BYTES and shared.reads_peers

    def _median(self, operation: str, name: str, num_bytes: int) -> float | None:
        recent = self._measured.get((operation, name, num_bytes.bit_length()))
        return statistics.median(recent) if recent else None

    @staticmethod
    def _timed_size(num_bytes: int) -> int:
        return max((size for size in _REPEATS if size <= num_bytes), default=DIRECT_BYTES)

    def _fastest_local(self, shared: SharedMemory, num_bytes: int, order: Order) -> str:
        timed_size = self._timed_size(num_bytes)
        shared.barrier(order)
        earlier = self._earlier_local.get(timed_size, {SHARED: 0.0, DIRECT: 0.0})
        known = self._known(shared, [earlier[SHARED], earlier[DIRECT]])
        times = dict(zip((SHARED, DIRECT), known, strict=True)) if known else self._time_locally(shared, timed_size)
        self._local[timed_size] = times
        return _faster(times, timed_size)

    def _time_locally(self, shared: SharedMemory, num_bytes: int) -> dict[str, float]:
        array = np.ones(num_bytes // 4, np.float32)
        area = Area(array.ctypes.data, num_bytes)
        reduction = Reduction(combine.combiner("float32"), combine.MAX, 1.0, 4)
        times: dict[str, list[float]] = {SHARED: [], DIRECT: []}
        for _ in range(_REPEATS[num_bytes] + 1):
            for name, durations in times.items():
                order = self._order(name)
                shared.barrier(order)
                start = time.perf_counter()
                shared.all_reduce(order, area, area, reduction)
                durations.append(time.perf_counter() - start)
        medians = np.array([statistics.median(durations[1:]) for durations in times.values()])
        self._agree(shared, medians)
        return dict(zip(times, medians.tolist(), strict=True))

    def _choose_schedule(self, operation: str, num_bytes: int) -> str:
        names = self._names(operation)
        if len(names) == 1 or self.model is None:
            return names[0]
        key = (operation, num_bytes.bit_length())
        found = self._chosen.get(key)
        if found is None:
            found = fastest({name: self.predict(operation, name, num_bytes) for name in names})
            self._chosen[key] = found
        return found

    def _names(self, operation: str) -> list[str]:
        return [name for name, known in ALGORITHMS[operation].items() if known.supports(self._connections.layout.size)]

    def measure(self) -> Model:
        """Measure the time per message, per byte and per reduced byte, with messages around a ring of all ranks."""
        network = self._connections.network(self._choose_schedule)
        known = self._known(network, self._earlier_model or [0.0, 0.0, 0.0])
        if known:
            return Model(*known)
        alpha = self._time_shift(network, 8, 15)
        num_bytes, seconds = 1 << 16, 0.0
        while True:
            seconds = self._time_shift(network, num_bytes, 3)
            if seconds > _MIN_TIMED_S or num_bytes >= _MAX_TIMED_BYTES:
                break
            num_bytes *= 4
        gamma = np.array([_time_combining()])
        self._agree(network, gamma)
        return Model(alpha, max(seconds - alpha, 1e-9) / num_bytes, float(gamma[0]))

    def _time_shift(self, network: NetworkEngine, num_bytes: int, repeats: int) -> float:
        size, rank = self._connections.layout.size, self._connections.layout.rank
        memory = memoryview(bytearray(2 * num_bytes))
        blocks = Blocks([(memory, [num_bytes, num_bytes])])
        actions = (Send((rank + 1) % size, ((0, 1),)), Receive((rank - 1) % size, ((1, 2),)))
        schedule = Schedule(2, (actions,))
        times = []
        for _ in range(repeats + 1):
            order = self._order("")
            network.barrier(order)
            start = time.perf_counter()
            network.execute(order, schedule, blocks, None)
            times.append(time.perf_counter() - start)
        median = np.array([statistics.median(times[1:])])
        self._agree(network, median)
        return float(median[0])

    def _known(self, engine: Engine, values: Sequence[float]) -> list[float] | None:
        """Return the largest of all ranks' `values`; None if they are 0 on all ranks, because no rank knows them."""
        largest = np.array(values)
        self._agree(engine, largest)
        return largest.tolist() if largest.any() else None

    def _agree(self, engine: Engine, values: np.ndarray) -> None:
        area = Area(values.ctypes.data, values.nbytes)
        reduction = Reduction(combine.combiner("float64"), combine.MAX, 1.0, 8)
        engine.all_reduce(self._order("recursive-doubling"), area, area, reduction)

    def _order(self, algorithm: str) -> Order:
        return Order(_TUNE, _TUNE.signature, 0, self._timeout_s, algorithm)


_TUNE: Final = CollectiveCall("tune")


def _faster(times: dict[str, float], num_bytes: int) -> str:
    limit = next(limit for size, limit in reversed(_LIMITS.items()) if size <= num_bytes)
    return DIRECT if times[DIRECT] < limit * times[SHARED] else SHARED


def _time_combining() -> float:
    array = np.ones(1 << 18, np.float32)
    addend = np.ones(1 << 18, np.float32)
    table = (ctypes.c_uint64 * 2)(array.ctypes.data, addend.ctypes.data)
    function = COMBINER(combine.combiner("float32"))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        function(array.ctypes.data, ctypes.addressof(table), 2, array.size, combine.SUM, 1.0)
        times.append(time.perf_counter() - start)
    return statistics.median(times) / array.nbytes


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e6:,.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:,.2f} ms"
