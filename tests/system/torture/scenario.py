"""One run: a cluster with a load, faults chosen by a seed, and the final checks."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from paceline.errors import PacelineError

from .audit import differences, read_all, wrong_values
from .cluster import TIMEOUT_S, Cluster, Node, Settings
from .faults import Fault, Faults
from .ledger import BUSY_SINCE, CLOCK, LIVE, LOADS, MOST_WORKERS, OPERATIONS, STATE
from .worker import FAILED, OPERATION, WRONG, lockstep_sum

_START_S = 60.0
_HEAL_S = 60.0
_HANG_S = TIMEOUT_S + 10.0
_ITERATIONS_PER_S = 40
_ENDANGERED_S = 15.0  # after this time, a server in danger is no longer declared dead


class Outcome(msgspec.Struct, kw_only=True):
    """The result of a run."""

    violations: list[str]
    operations: int
    faults: list[tuple[str, float]]
    """The kind of each fault, and the time of the slowest operation until the next fault, in s."""
    seconds: float


class Run:
    """A run."""

    def __init__(self, settings: Settings, report: Callable[[str], None]) -> None:
        self._settings = settings
        self._report = report
        self._chance = random.Random(settings.seed)
        self._violations: list[str] = []
        self._seen = (0, 0)
        self._began = time.monotonic()
        self.cluster = Cluster(settings, self._chance)
        self._faults = Faults(self.cluster, self._chance)

    def carry_out(self) -> Outcome:
        """Execute the run; return its result."""
        try:
            self._work()
        except PacelineError as error:
            self._violate(f"{type(error).__name__}: {error}")
        finally:
            self.cluster.close()
        pauses = self._pauses()
        return Outcome(
            violations=self._violations,
            operations=int(self.cluster.ledger.board[:, OPERATIONS].sum()),
            faults=[(fault.kind, pause) for fault, pause in zip(self._faults.made, pauses, strict=True)],
            seconds=time.monotonic() - self._began,
        )

    def _work(self) -> None:
        iterations = int(self._settings.duration_s * _ITERATIONS_PER_S) if self._settings.mode == "lockstep" else 0
        for rank in range(self._settings.workers):
            self.cluster.start_worker(rank=rank if iterations else None, iterations=iterations)
        busy = self._settings.workers
        if not self._wait(lambda: int((self.cluster.ledger.board[:, CLOCK] > 2).sum()) >= busy, _START_S, "no start"):
            return
        self._report("under way")
        if not self._torment():
            return
        self._report("the faults are over")
        self._faults.end_due(end_all=True)
        if self.cluster.network is not None:
            self.cluster.network.heal()
        if not self._wait(self._is_healed, _HEAL_S, "not every bucket had its replicas again"):
            return
        self._report("every bucket has its replicas")
        self.cluster.ledger.stop[0] = 1
        if self._wait(lambda: not self.cluster.of_role("worker"), _HANG_S + 60.0, "a worker did not end"):
            self._report("the workers have ended")
            self._check_tables()

    def _torment(self) -> bool:
        """Inject faults until the run is complete; return whether no check has failed."""
        storm = self._settings.num_faults
        deadline = time.monotonic() + self._settings.duration_s + (30.0 if storm else 0.0)
        next_fault = time.monotonic() + self._chance.uniform(0.0, 1.0)
        while time.monotonic() < deadline and (not storm or len(self._faults.made) < storm):
            self._watch()
            if self._violations:
                return False
            if time.monotonic() >= next_fault:
                fault = self._faults.make()
                if fault is None:
                    continue
                self._report(f"{fault.kind}: {', '.join(fault.victims)}" + _for_s(fault))
                next_fault = time.monotonic() + (self._chance.uniform(0.0, 0.3) if storm else self._pause_s())
        return True

    def _pause_s(self) -> float:
        if self._settings.pause_s:
            return self._chance.uniform(0.0, 2 * self._settings.pause_s)
        return self._chance.choice([self._chance.uniform(0.0, 0.5), self._chance.uniform(0.5, 3.0)])

    def _watch(self) -> None:
        """Check that no process has ended unexpectedly, no operation hangs and no row is lost."""
        self._faults.end_due()
        found = self.cluster.map()
        if (found.term, found.version) != self._seen:
            self._seen = found.term, found.version
            self._report(f"  map {found.term}.{found.version}: {self._chains()}")
            if found.num_lost:
                self._violate(f"{found.num_lost} buckets are lost")
        for node in self.cluster.nodes:
            if not node.ended_at and not node.is_alive():
                node.ended_at = time.monotonic()
                self._check_end(node)
        since = self.cluster.ledger.board[:, BUSY_SINCE].copy()
        late = np.flatnonzero((since > 0) & (time.monotonic() * 1000 - since > _HANG_S * 1000))
        alive = {node.number for node in self.cluster.of_role("worker") if not node.is_stopped}
        for worker in late:
            if int(worker) in alive:
                self._violate(f"an operation of worker {worker} has been under way for more than {_HANG_S:g} s")
        time.sleep(0.02)

    def _check_end(self, node: Node) -> None:
        status = node.process.returncode
        in_danger = node.doomed or time.monotonic() < node.risk_until + _ENDANGERED_S
        if node.role == "worker":
            self.cluster.ledger.board[node.number, BUSY_SINCE] = 0
        if status == WRONG and node.role == "worker":
            self._violate(f"{node.name}: {node.tail()}")
        elif not in_danger and not (node.role == "worker" and status == 0):
            self._violate(f"{node.name} ended with status {status}: {node.tail()}")
        elif "Traceback" in node.log.read_text(errors="replace"):
            self._violate(f"{node.name} has failed within: {node.tail()}")
        elif node.role == "server" and not node.doomed:
            self._report(f"{node.name} has ended: {node.tail()}")
            self.cluster.start_server(joins=True)
        elif status == FAILED:
            self._report(f"{node.name}: {node.tail()}")

    def _is_healed(self) -> bool:
        servers = [node for node in self.cluster.of_role("server") if not node.doomed]
        if len(servers) <= self._settings.replicas:
            self.cluster.start_server(joins=True)
        return not self._faults.num_open and self.cluster.is_whole()

    def _wait(self, condition: Callable[[], bool], timeout_s: float, otherwise: str) -> bool:
        """Wait for a condition; every new view extends the time, up to five times, because machines differ in speed."""
        start = deadline = time.monotonic()
        view = None
        while not condition():
            self._watch()
            if self._violations:
                return False
            if view != self._seen:
                view, deadline = self._seen, min(time.monotonic() + timeout_s, start + 5 * timeout_s)
            if time.monotonic() > deadline:
                self._violate(f"{otherwise} within {time.monotonic() - start:.0f} s; {self._describe()}")
                return False
        return True

    def _describe(self) -> str:
        clocks = self.cluster.ledger.board[:, [STATE, CLOCK]][: self._settings.workers + 4].tolist()
        return f"chains {self._chains()}; states and clocks of workers {clocks}"

    def _chains(self) -> str:
        """Return the number of buckets by number of servers, and the number of buckets that are moving."""
        having: Counter[int] = Counter()
        num_filling = 0
        for group in self.cluster.map().groups:
            size = group.buckets.bit_count()
            having[len(group.members)] += size
            num_filling += size if group.filling is not None else 0
        servers = ", ".join(f"{number}" for number in sorted(node.number for node in self.cluster.members().values()))
        description = ", ".join(f"{number} on {servers}" for servers, number in sorted(having.items()))
        return f"buckets {description}; {num_filling} on their way; servers {servers}"

    # Final checks after the faults.

    def _check_tables(self) -> None:
        client = self.cluster.observer
        if self._settings.mode == "lockstep":
            self._check_lockstep()
        else:
            for wrong in wrong_values(client, self.cluster.ledger):
                self._violate(wrong)
        if self._violations or not self._settings.replicas:
            return
        self._report("every value is right")
        before = read_all(client)
        for victims in self._rounds():
            names = ", ".join(victim.name for victim in victims)
            for victim in victims:
                self.cluster.doom(victim, "killed")
                victim.kill()
            for _ in victims:
                self.cluster.start_server(joins=True)
            if not self._wait(self._is_healed, _HEAL_S, "servers killed for comparison were not replaced"):
                return
            for wrong in differences(before, read_all(client), self.cluster.ledger):
                self._violate(f"after {names} was killed, when all was quiet: {wrong}")
            self._report(f"the replicas of {names} are the same")

    def _rounds(self) -> Iterator[list[Node]]:
        """Yield groups of servers. The size of a group is the number of servers that may die together."""
        servers = [node for node in self.cluster.of_role("server") if not node.doomed]
        size = self._settings.replicas
        for start in range(0, len(servers), size):
            yield [node for node in servers[start : start + size] if node.is_alive()]

    def _check_lockstep(self) -> None:
        import paceline

        iterations = int(self._settings.duration_s * _ITERATIONS_PER_S)
        table = self.cluster.observer.sparse_table("lockstep", dim=2, update=paceline.SGD(lr=1.0))
        found = table.pull(LOADS[0].keys(MOST_WORKERS))
        right = np.float32(sum(lockstep_sum(iteration, self._settings.workers) for iteration in range(iterations)))
        if not (found == right).all():
            self._violate(f"the model holds {np.unique(found).tolist()}, right is {right:g}")

    def _violate(self, text: str) -> None:
        self._violations.append(text)
        self._report(f"VIOLATION: {text}")

    def _pauses(self) -> list[float]:
        """Return, for each fault, the time of the longest operation that began after it and before the next fault."""
        operations = []
        for path in sorted(Path(self._settings.folder).glob("operations-*")):
            data = np.frombuffer(
                path.read_bytes()[: path.stat().st_size // OPERATION.size * OPERATION.size], np.float64
            )
            operations.append(data.reshape(-1, 2))
        board = self.cluster.ledger.board
        unfinished = board[(board[:, BUSY_SINCE] > 0) & (board[:, STATE] == LIVE), BUSY_SINCE] / 1000
        now = time.monotonic()
        operations.append(np.array([(since, now - since) for since in unfinished]).reshape(-1, 2))
        every = np.concatenate(operations)
        starts = [fault.at for fault in self._faults.made]
        found = []
        for start, end in zip(starts, [*starts[1:], now], strict=False):
            during = every[(every[:, 0] < end) & (every[:, 0] + every[:, 1] > start)]
            waits = during[:, 0] + during[:, 1] - np.maximum(during[:, 0], start)
            found.append(float(waits.max(initial=0.0)))
        return found


def _for_s(fault: Fault) -> str:
    length_s = fault.ends_at - fault.at
    return f", for {length_s:.1f} s" if length_s > 0.01 else ""
