"""Run delayed block proximal gradient on one worker, with its columns, its margins and a copy of the weights.

All workers process the same blocks in the same order and read the same sums from the servers. Therefore they agree on
the schedule, the active columns and the end without a leader.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np

from paceline.errors import LostRowsError
from paceline.filters import Filter
from paceline.models.proximal import rules
from paceline.models.proximal.columns import ExampleColumns
from paceline.models.proximal.exchange import WIDTH, NumberExchange
from paceline.models.proximal.extrapolation import NUM_PRODUCTS, Iterates
from paceline.models.proximal.margins import Margins
from paceline.models.proximal.rules import Flags, Positions, ProximalBlocks
from paceline.models.proximal.schedule import Convergence, block_order, block_starts, count_blocks, moving_with
from paceline.ps import Client, Ticket
from paceline.tables.rules.proximal import START, ProximalNewton
from paceline.tables.types import Doubles, Floats

_AT_ONCE: Final = 1 << 18


class BlockPass(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a pass over the blocks."""

    number: int
    """The number of the pass, from 1."""
    objective: float
    """Summed loss and penalties after the pass."""
    change: float
    """Reduction of the objective in the pass, as a fraction of its new value."""
    loss: float
    nonzero: int
    """Number of nonzero weights, without the intercept."""
    active: float
    """The share of columns that this pass covered."""
    violation: float
    """The largest violation of an optimality condition in this pass, scaled to a mean value of 1 per column."""
    features: int
    blocks: int
    ended: str = ""
    """In the last report, the reason for the end: ``converged``, ``passes`` (the limit) or ``separable``."""


class SolveTask(msgspec.Struct, frozen=True, kw_only=True):
    """The task of a solver, equal for all workers."""

    table: str
    blocks: ProximalBlocks
    examples: int
    """The number of examples on all workers."""
    num_places: int
    """A number above the ranks of all workers."""
    offset: float
    """A constant added to each margin."""


class BlockSolver:
    """The solver on one worker. `offset` is added to each margin."""

    @classmethod
    def open(
        cls,
        client: Client,
        task: SolveTask,
        columns: ExampleColumns,
        filters: Sequence[Filter] = (),
        pull_filters: Sequence[Filter] | None = None,
    ) -> BlockSolver:
        rule = ProximalNewton(l1=task.blocks.l1, l2=task.blocks.l2)
        assert rule.row_dim is not None
        table = client.sparse_table(task.table, dim=rule.row_dim, update=rule)
        table.set_filters(filters, pull_filters)
        return cls(NumberExchange(client, table, task.num_places), columns, task.blocks, offset=task.offset)

    def __init__(
        self, exchange: NumberExchange, columns: ExampleColumns, blocks: ProximalBlocks, *, offset: float
    ) -> None:
        num = len(columns.keys)
        self._blocks = blocks
        self._columns = columns
        self._exchange = exchange
        self._margins = Margins(columns, offset)
        self._weights = np.zeros(num)
        self._l1, self._l2 = np.full(num, blocks.l1), np.full(num, blocks.l2)
        self._l1[-1] = self._l2[-1] = 0.0  # no penalty on the intercept
        self._is_penalized = np.arange(num) < num - 1
        self._units, self._radii = np.ones(num, np.float32), np.ones(num, np.float32)
        self._shares = np.zeros(num)
        """This worker's share of each column's values: the column's weight in sums over all workers."""

    @property
    def is_reporter(self) -> bool:
        """Whether this worker reports the passes; exactly one worker does."""
        return self._exchange.is_first

    def run(self, num_examples: int) -> Iterator[BlockPass | None]:
        """Yield None regularly, and a report after each pass. `num_examples` counts all workers' examples.

        Raises LostRowsError if examples of other workers were lost, DataError if values are too large.
        """
        examples, values, columns, positives, loss = self._sum_up(num_examples)
        yield from self._describe_columns(max(1, -(-columns // _AT_ONCE)))
        num_blocks = count_blocks(self._blocks.block_ratio, values, examples, columns)
        starts = np.append(block_starts(self._columns.places, num_blocks), len(self._columns.keys))
        movable = np.ones(len(self._weights), np.bool_)
        movable[-1] = 0 < positives < examples  # if all labels are equal, no intercept is optimal
        convergence = Convergence(loss, self._blocks.tolerance, self._blocks.max_passes)
        active, violation = movable, np.inf
        iterates, order = Iterates(self._weights), block_order(num_blocks + 1)
        while True:
            steps = [np.flatnonzero(active[starts[k] : starts[k + 1]]) + starts[k] for k in order]
            sweep = _Sweep(active, rules.filter_threshold(violation, examples))
            for _ in self._make_pass(steps, sweep):
                yield None
            iterates.add(self._weights)
            state = self._state(active, sweep.violation)
            if iterates.is_complete:
                state = self._extrapolate(iterates, state, active)
                iterates = Iterates(self._weights)
            report = self._end_pass(convergence, state, num_blocks + 1)
            yield report
            if report.ended:
                return
            violation = report.violation
            active = movable if convergence.is_over_all else sweep.left

    def _sum_up(self, num_examples: int) -> tuple[int, int, int, int, float]:
        """Return all workers' numbers of examples, values, columns and positives, and the loss if all weights are 0.

        A column counts once on each worker that has it.
        """
        columns = self._columns
        loss, _ = self._margins.losses()
        positives = int(np.count_nonzero(columns.labels))
        own = [1.0, columns.num_examples, columns.num_values, len(columns.places), positives, loss]
        found = self._gather(own).sum(axis=0)
        if round(found[1]) != num_examples:
            raise LostRowsError(
                f"workers hold {round(found[1]):,} of the {num_examples:,} examples that were read. The examples "
                "of lost workers are missing"
            )
        _, examples, values, num_columns, num_positives = (round(value) for value in found[:5])
        return examples, values, num_columns, num_positives, float(found[5])

    def _describe_columns(self, num_parts: int) -> Iterator[None]:
        """Send the columns' sums to the servers in parts, and read the sums over all workers."""
        columns = self._columns
        counts, sums = np.diff(columns.indptr).astype(np.float64), columns.magnitudes()
        sums[-1] *= -1  # a negative sum marks the intercept, which has no penalty
        starts = block_starts(columns.places, num_parts)
        starts[-1] += 1
        for first, last in itertools.pairwise(starts):
            own = np.stack([sums[first:last], -counts[first:last]], axis=1).astype(np.float32)
            magnitudes, totals = self._exchange.finish(self._exchange.start(columns.keys[first:last], own))
            with np.errstate(divide="ignore", invalid="ignore"):  # 0 / 0 on a worker without examples
                self._units[first:last] = np.abs(totals / magnitudes)
                self._shares[first:last] = counts[first:last] / totals
            yield None
        self._radii = (START * self._units).astype(np.float32)

    def _make_pass(self, steps: Sequence[Positions], sweep: _Sweep) -> Iterator[None]:
        """Process blocks of columns; a block waits for all earlier blocks except the last `max_delay`."""
        margins, delay = self._margins, self._blocks.max_delay
        under_way: deque[tuple[Positions, Ticket]] = deque()
        moving = range(0)
        for number, columns in enumerate(steps):
            if len(under_way) > delay:
                self._finish_block(*under_way.popleft(), sweep)
            former, moving = moving, moving_with(number, len(steps), delay)
            for step in range(former.start, moving.start):
                margins.end_moving(steps[step])
            for step in range(former.stop, moving.stop):
                margins.begin_moving(steps[step])
            pairs = margins.gradients(columns, self._radii)
            under_way.append((columns, self._exchange.start(self._columns.keys[columns], pairs)))
            yield None
        while under_way:
            self._finish_block(*under_way.popleft(), sweep)
        for step in moving:
            margins.end_moving(steps[step])

    def _finish_block(self, columns: Positions, ticket: Ticket, sweep: _Sweep) -> None:
        """Read the weights of a block and update everything that depends on them."""
        first, second = self._exchange.finish(ticket)
        before, after, gradients = self._weights[columns], first.astype(np.float64), second.astype(np.float64)
        l1, l2 = self._l1[columns], self._l2[columns]
        sweep.record(columns, before, after, gradients, l1, l2, self._units[columns])
        self._weights[columns] = after
        self._radii[columns] = rules.next_radii(after - before, self._units[columns])
        self._margins.move(columns, after - before)

    def _state(self, active: Flags, violation: float) -> _State:
        """Return the state of all workers: the sums of their numbers, and the maximum of the violations."""
        loss, num_wrong = self._margins.losses()
        penalty = float((rules.penalties(self._weights, self._l1, self._l2) * self._shares).sum())
        counted = self._shares[:-1]  # without the intercept
        nonzero, in_use = (float(counted[flags[:-1]].sum()) for flags in (self._weights != 0, active))
        found = self._gather([1.0, loss, num_wrong, penalty, nonzero, in_use, violation, float(counted.sum())])
        total = found.sum(axis=0)
        total[6] = found[:, 6].max()
        return _State(*total[1:8].tolist())

    def _extrapolate(self, iterates: Iterates, state: _State, active: Flags) -> _State:
        """Extrapolate the weights if this lowers the objective. Return the resulting state."""
        products = self._gather([1.0, *iterates.products(self._shares).tolist()]).sum(axis=0)[1 : 1 + NUM_PRODUCTS]
        found = iterates.extrapolate(products)
        if found is None:
            return state
        before, changed = self._weights, np.flatnonzero(found != self._weights)
        changes = (found - before)[changed]
        self._margins.move(changed, changes)
        self._weights = found
        after = self._state(active, state.violation)
        if not after.objective < state.objective:
            self._margins.move(changed, -changes)
            self._weights = before
            return state
        self._radii[changed] = rules.next_radii(changes, self._units[changed])
        units = np.copysign(self._units, np.where(self._is_penalized, 1.0, -1.0))
        records = np.stack([found[changed], np.zeros(len(changed)), self._radii[changed], units[changed]], axis=1)
        self._exchange.write(self._columns.keys[changed], records.astype(np.float32))
        self._gather([1.0])  # returns after all workers' writes
        return after

    def _end_pass(self, convergence: Convergence, state: _State, num_blocks: int) -> BlockPass:
        convergence.record_pass(state.objective)
        ended = ""
        if convergence.has_converged:
            ended = "converged"
        elif not state.num_wrong and not self._blocks.l1 and not self._blocks.l2:
            ended = "separable"
        elif convergence.is_over:
            ended = "passes"
        return BlockPass(
            number=convergence.num_passes,
            objective=state.objective,
            change=convergence.change,
            loss=state.loss,
            nonzero=round(state.nonzero),
            active=state.active / state.features if state.features else 0.0,
            violation=state.violation,
            features=round(state.features),
            blocks=num_blocks,
            ended=ended,
        )

    def _gather(self, numbers: Sequence[float]) -> Doubles:
        given = np.zeros(WIDTH)
        given[: len(numbers)] = numbers
        return self._exchange.gather(given)


class _State(NamedTuple):
    """The combined state of all workers."""

    loss: float
    num_wrong: float
    """The number of examples that are classified wrongly."""
    penalty: float
    nonzero: float
    active: float
    violation: float
    features: float

    @property
    def objective(self) -> float:
        return self.loss + self.penalty


class _Sweep:
    """Results of a pass: the largest violation, and the columns that the KKT filter keeps for the next pass."""

    def __init__(self, active: Flags, threshold: float) -> None:
        self.left = active.copy()
        self.violation = 0.0
        self._threshold = threshold

    def record(
        self,
        columns: Positions,
        before: Doubles,
        after: Doubles,
        gradients: Doubles,
        l1: Doubles,
        l2: Doubles,
        units: Floats,
    ) -> None:
        """Record the weights before and after a step, and the step's gradients."""
        if len(columns):
            found = rules.violations(before, gradients, l1, l2) * units
            self.violation = max(self.violation, float(found.max()))
            self.left[columns] = rules.stay_active(after, gradients, l1, self._threshold / units)
