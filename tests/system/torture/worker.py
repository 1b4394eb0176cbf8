"""A worker process: it pushes and reads until a stop signal, and checks every value.

Its first argument is its :class:`Part`, as JSON. It ends with WRONG and one line after an impossible value, and with
FAILED after a failed operation.
"""

from __future__ import annotations

import faulthandler
import signal
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import paceline
from paceline.errors import AddressError, ConnectionLostError, PacelineError
from paceline.protocol import Sequential

from .ledger import (
    BUSY_SINCE,
    CLOCK,
    GOING,
    GROWN,
    GROWN_ACKNOWLEDGED,
    GROWN_SENT,
    JOINED,
    LEFT,
    LIVE,
    LOADS,
    MOST_WORKERS,
    OPERATIONS,
    STATE,
    TICKS,
    Integers,
    Ledger,
    Load,
    grown_keys,
)

WRONG, FAILED = 3, 4
OPERATION = struct.Struct("<dd")
"""The start (monotonic) and the duration of an operation: one record for each in the file of operations."""
_MOST_PENDING = 6
_PAUSE_S = 0.005  # a pause between iterations leaves other processes time to answer
_STEPS = 7.0
"""Under `sequential` an iteration of a rank adds at most this number times the rank plus one to a key."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The program of one worker process."""

    number: int
    seed: int
    folder: str
    scheduler: str
    timeout_s: float
    rank: int | None = None
    """In lockstep mode, the rank of the worker."""
    ranks: int = 0
    iterations: int = 0
    """In lockstep mode, the number of iterations in which the worker takes part."""
    visits: bool = False
    """Whether the worker only connects, pushes once, reads the value and leaves."""


class WrongError(Exception):
    """A worker read an impossible value."""


class Worker:
    """A connected worker."""

    def __init__(self, part: Part, client: paceline.Client, ledger: Ledger, operations: Any) -> None:
        self._part, self._client, self._ledger, self._operations = part, client, ledger, operations
        self._board_row = ledger.board[part.number]
        self._chance = np.random.default_rng(part.seed)
        self._tau = client.consistency.tau
        self._is_sequential = isinstance(client.consistency, Sequential)
        self._tables: dict[str, Any] = {}
        self._pending: list[tuple[Any, Load | None, Integers]] = []
        self._visible: dict[str, Integers] = {}
        """With sequential consistency, the number of pushes to each key at the last tick."""

    def work(self) -> None:
        """Push and read until the stop signal."""
        for load in (*LOADS, TICKS, GROWN):
            with self._operation():
                self._tables[load.name] = load.open(self._client)
        for load in (*LOADS, TICKS):
            self._note_visible(load)
        while not self._ledger.stop[0]:
            for place in self._chance.permutation(len(LOADS))[: self._chance.integers(1, 4)]:
                self._step(LOADS[place])
            if self._chance.random() < 0.2:
                self._grow()
            self._tick()
            time.sleep(_PAUSE_S)
            if self._part.visits:
                self._read_all()
                break
        with self._operation():
            self._resolve()
        self._read_all()

    def _read_all(self) -> None:
        for load in LOADS:
            self._read(load, np.arange(load.num_keys))

    def _step(self, load: Load) -> None:
        if load.is_dense and self._chance.random() < 0.7:
            start = int(self._chance.integers(0, load.num_keys))
            chosen = np.arange(start, int(self._chance.integers(start, load.num_keys)) + 1)
        else:
            count = self._chance.integers(1, min(load.num_keys, 64) + 1)
            chosen = self._chance.choice(load.num_keys, count, replace=False)
        match self._chance.integers(0, 4):
            case 0:
                self._read(load, chosen)
            case 1:
                self._push(load, chosen)
            case 2:
                self._push(load, chosen)
                with self._operation():
                    self._resolve()
            case _:
                self._push(load, chosen)
                self._read(load, chosen)

    def _push(self, load: Load, chosen: Integers) -> None:
        table, number = self._tables[load.name], self._part.number
        self._ledger.sent[load.name][number, chosen] += 1
        with self._operation():
            if len(self._pending) >= _MOST_PENDING:
                self._resolve()
            ticket = load.push(table, load.keys(number)[chosen])
            self._pending.append((ticket, load, chosen))

    def _resolve(self) -> None:
        """Wait until all pushes are acknowledged."""
        for ticket, load, chosen in self._pending:
            ticket.wait()
            if load is None:
                self._board_row[GROWN_ACKNOWLEDGED] += not self._is_sequential
            elif not self._is_sequential:
                self._ledger.acknowledged[load.name][self._part.number, chosen] += 1
        self._pending.clear()

    def _grow(self) -> None:
        push = int(self._board_row[GROWN_SENT])
        self._board_row[GROWN_SENT] = push + 1
        keys = grown_keys(self._part.number, push)
        with self._operation():
            ticket = self._tables["grown"].push(keys, GROWN.grads(len(keys)))
            self._pending.append((ticket, None, np.empty(0, np.int64)))

    def _tick(self) -> None:
        number = self._part.number
        self._ledger.sent["ticks"][number, 0] += 1
        self._board_row[CLOCK] = self._client.clock + 1
        table, keys = self._tables["ticks"], TICKS.keys(number)
        with self._operation():
            if self._chance.random() < 0.5:
                self._pending.append((table.push(keys, TICKS.grads(1), tick=True), TICKS, np.zeros(1, np.int64)))
            else:
                self._pending.append((table.push(keys, TICKS.grads(1)), TICKS, np.zeros(1, np.int64)))
                self._client.tick()
            if len(self._pending) >= _MOST_PENDING:
                self._resolve()
        for load in (*LOADS, TICKS):
            self._note_visible(load)
        if self._chance.random() < 0.3:
            self._read_ticks()

    def _note_visible(self, load: Load) -> None:
        self._visible[load.name] = self._ledger.sent[load.name][self._part.number].copy()

    def _read(self, load: Load, chosen: Integers) -> None:
        """Read values and compare them with the possible values. The worker's own keys have exactly its pushes."""
        number, ledger = self._part.number, self._ledger
        low, _ = ledger.bounds(load, number)
        visible = self._visible[load.name].copy()
        with self._operation():
            found = load.counts(load.pull(self._tables[load.name], load.keys(number)[chosen]))
        _, high = ledger.bounds(load, number)
        if not load.is_shared:
            low = high = visible if self._is_sequential else high
        elif self._is_sequential:
            low = np.maximum(low, visible)
        wrong = (found < low[chosen]) | (found > high[chosen])
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            raise WrongError(
                f"{int(wrong.sum())} of {len(chosen)} values of table {load.name!r} are wrong in iteration "
                f"{self._client.clock}: key {int(chosen[at])} was pushed to {int(found[at])} times (-1: no such "
                f"value), right is {int(low[chosen[at]])} to {int(high[chosen[at]])}"
            )
        if self._is_sequential:  # the read values are durable
            board_row = ledger.acknowledged[load.name][number]
            board_row[chosen] = np.maximum(board_row[chosen], visible[chosen])

    def _read_ticks(self) -> None:
        """Check, by clocks and pushes, that no worker is slower than the consistency permits."""
        board = self._ledger.board
        live = (board[:, STATE] == LIVE).copy()
        iteration = self._client.clock
        keys = np.concatenate([TICKS.keys(number) for number in range(MOST_WORKERS)])
        with self._operation():
            found = TICKS.counts(self._tables["ticks"].pull(keys))
        live &= board[:, STATE] == LIVE
        if self._tau is None:
            return
        for label, clocks in (("has ended", board[:, CLOCK].copy()), ("shows", board[:, JOINED] + found)):
            late = np.flatnonzero(live & (clocks < iteration - self._tau))
            if len(late):
                raise WrongError(
                    f"iteration {iteration} has begun here, and worker {late[0]} {label} only {clocks[late[0]]} "
                    f"iterations: {self._client.consistency} allows {iteration - self._tau}"
                )

    @contextmanager
    def _operation(self) -> Iterator[None]:
        began = time.monotonic()
        self._board_row[BUSY_SINCE] = int(began * 1000)
        yield
        self._board_row[BUSY_SINCE] = 0
        self._board_row[OPERATIONS] += 1
        self._operations.write(OPERATION.pack(began, time.monotonic() - began))


def lockstep(part: Part, client: paceline.Client, ledger: Ledger) -> None:
    """Push values that depend only on rank and iteration, so every read has one correct value."""
    table = client.sparse_table("lockstep", dim=2, update=paceline.SGD(lr=1.0))
    keys = LOADS[0].keys(MOST_WORKERS)
    right = 0.0
    board_row = ledger.board[part.number]
    with open(Path(part.folder) / f"operations-{part.number}", "ab", buffering=0) as operations:
        for iteration in range(part.iterations):
            began = time.monotonic()
            board_row[BUSY_SINCE] = int(began * 1000)
            found = table.pull(keys)
            if not (found == np.float32(right)).all():
                raise WrongError(f"iteration {iteration}: {np.unique(found).tolist()} was read, right is {right:g}")
            step = float(part.rank or 0) + 1.0 + iteration % _STEPS
            table.push(keys, np.full((len(keys), 2), -step, np.float32), tick=True)
            right += lockstep_sum(iteration, part.ranks)
            board_row[BUSY_SINCE] = 0
            board_row[OPERATIONS] += 1
            board_row[CLOCK] = iteration + 1
            operations.write(OPERATION.pack(began, time.monotonic() - began))
            time.sleep(_PAUSE_S)


def lockstep_sum(iteration: int, ranks: int) -> float:
    """Return the sum of all ranks' gradients for a key in an iteration."""
    return sum(rank + 1.0 + iteration % _STEPS for rank in range(ranks))


def connect(part: Part) -> paceline.Client:
    """Join the cluster. The scheduler may be dead or unreachable at first."""
    deadline = time.monotonic() + part.timeout_s
    while True:
        try:
            return paceline.connect(part.scheduler, rank=part.rank, timeout_s=part.timeout_s)
        except (AddressError, ConnectionLostError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def main() -> int:
    """Run a worker; return the exit status."""
    faulthandler.register(signal.SIGUSR1)
    part = msgspec.json.decode(sys.argv[1], type=Part)
    ledger = Ledger(Path(part.folder) / "ledger")
    board_row = ledger.board[part.number]
    began = time.monotonic()
    board_row[BUSY_SINCE] = int(began * 1000)
    try:
        with (
            connect(part) as client,
            open(Path(part.folder) / f"operations-{part.number}", "ab", buffering=0) as operations,
        ):
            operations.write(OPERATION.pack(began, time.monotonic() - began))
            board_row[[JOINED, CLOCK]] = client.clock
            if board_row[STATE] < LIVE:
                board_row[STATE] = LIVE
            if part.rank is not None:
                lockstep(part, client, ledger)
            else:
                Worker(part, client, ledger, operations).work()
            board_row[BUSY_SINCE] = int(time.monotonic() * 1000)
            board_row[STATE] = max(board_row[STATE], GOING)
        board_row[STATE] = LEFT
        for load in (*LOADS, TICKS):  # the worker has waited until all its pushes are durable
            ledger.acknowledged[load.name][part.number] = ledger.sent[load.name][part.number]
        board_row[GROWN_ACKNOWLEDGED] = board_row[GROWN_SENT]
        board_row[BUSY_SINCE] = 0
    except WrongError as error:
        print(f"WRONG: {error}", flush=True)
        return WRONG
    except PacelineError as error:
        print(
            f"FAILED after {time.monotonic() - board_row[BUSY_SINCE] / 1000:.1f} s: {type(error).__name__}: {error}",
            flush=True,
        )
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
