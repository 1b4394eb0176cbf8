"""Direct a training by blocks of columns: the workers read the data once, then solve for the weights.

If a worker dies, its rows are lost, so the remaining workers read all data again and restart the passes. The solver's
weights are in a separate table. At the end, they are written to the table of the logistic regression.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from paceline.data import Dataset
from paceline.errors import LostRowsError, PacelineError, UsageError
from paceline.models.base import BIAS_KEY, open_tables
from paceline.models.proximal.rules import ProximalBlocks
from paceline.models.proximal.solver import BlockPass, SolveTask
from paceline.protocol import Role, Sequential
from paceline.ps import Client, read_records, write_records
from paceline.tables.rules.proximal import ProximalNewton
from paceline.tables.types import Floats, Keys
from paceline.training.job_running import FinishedJob, JobRunner
from paceline.training.plan import TrainingPlan
from paceline.training.worker import jobs

_MOST_ATTEMPTS = 4
_ENDS = {
    "passes": "the objective still changes by {0.change:.1e} per pass. Pass a larger --epochs to continue",
    "separable": "a plane separates the labels. Without --l1 or --l2 the weights have no optimum and would grow "
    "forever. The current weights are kept",
}


class BlockTraining:
    """A training by blocks on a cluster. `on_news` receives a line about each pass."""

    def __init__(
        self,
        client: Client,
        runner: JobRunner,
        plan: TrainingPlan,
        blocks: ProximalBlocks,
        *,
        on_news: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        consistency = client.consistency
        if not isinstance(consistency, Sequential) or consistency.aggregate != "sum":
            raise UsageError(
                f"--solver proximal-blocks needs sums over all workers, but the consistency of this cluster is "
                f"{consistency}. Start the cluster with --consistency sequential"
            )
        self._client = client
        self._runner = runner
        self._plan = plan
        self._blocks = blocks
        self._on_news = on_news
        self._warn = warn

    def run(self, reading: jobs.WorkerTask, dataset: Dataset, share: float) -> FinishedJob:
        """Read the columns, solve for the weights and write them to the model. An interruption also writes them.

        `share` is this job's fraction of the whole work. The returned reports contain one for each pass.
        """
        attempt = 0
        while True:
            attempt += 1
            read = self._runner.run(reading, dataset, span=(0.0, share / 2))
            table = f"blocks {attempt}"
            self._empty_table(table)
            try:
                solved = self._solve(reading, read, table, dataset, share)
                break
            except LostRowsError as error:
                if attempt == _MOST_ATTEMPTS:
                    raise
                self._move_weights(table, is_wanted=False)
                self._warn(f"{error}: workers read all data again, and the passes start from the beginning")
            except (KeyboardInterrupt, PacelineError):
                with contextlib.suppress(PacelineError):
                    self._move_weights(table)
                raise
        self._move_weights(table)
        passes = block_passes(solved)
        last = passes[-1]
        if last.ended in _ENDS:
            self._warn(_ENDS[last.ended].format(last))
        progress = {**read.state.progress, "loss": last.loss, "bytes": solved.state.progress.get("bytes", 0.0)}
        seconds = read.state.seconds + solved.state.seconds
        state = dataclasses.replace(read.state, progress=progress, seconds=seconds)
        return FinishedJob(state, read.reports + solved.reports, read.account)

    def _solve(
        self, reading: jobs.WorkerTask, read: FinishedJob, table: str, dataset: Dataset, share: float
    ) -> FinishedJob:
        progress = read.state.progress
        examples, positives = int(progress.get("held", 0)), int(progress.get("positives", 0))
        if not 0 < positives < examples:
            reason = f"all {examples:,} labels are {int(positives > 0)}" if examples else "there is no example"
            self._warn(f"{reason}, so no intercept is best. The intercept keeps its value")
        view, settings = self._client.link.view, self._client.settings
        ranks = [] if view is None else [member.rank for member in view.of_role(Role.WORKER)]
        num_places = max(settings.num_workers, *(rank + 1 for rank in ranks), 1)
        task = SolveTask(
            table=table,
            blocks=self._blocks,
            examples=examples,
            num_places=num_places,
            offset=float(self._plan.model.describe()["offset"]),
        )
        job = msgspec.structs.replace(reading, task="solve-blocks", solve=task)
        return self._runner.run(
            job, dataset, span=(share / 2, share), num_shards=num_places, on_report=self._report_pass
        )

    def _report_pass(self, fields: dict[str, Any]) -> None:
        if fields["kind"] == "pass":
            self._on_news(describe_pass(_read_pass(fields)))

    def _empty_table(self, name: str) -> None:
        self._move_weights(name, is_wanted=False)
        for spec in self._client.tables():
            if spec.name == name:
                self._client.open_table(spec).set_update(ProximalNewton(l1=self._blocks.l1, l2=self._blocks.l2))

    def _move_weights(self, name: str, *, is_wanted: bool = True) -> None:
        """Empty the solver's table. If `is_wanted`, first write its nonzero weights to the model's table."""
        spec = next((spec for spec in self._client.tables() if spec.name == name), None)
        if spec is None:
            return
        solved, model = self._client.open_table(spec), open_tables(self._client, self._plan.model, self._plan.update)
        for keys, records in read_records(self._client, spec):
            if is_wanted:
                chosen = _is_weight(keys, records)
                rows = _model_records(records[chosen, 0], model[0].spec.record_words, self._plan.update)
                write_records(self._client, model[0].spec, keys[chosen], rows)
            solved.erase(keys)  # type: ignore[union-attr]


def block_passes(finished: FinishedJob) -> list[BlockPass]:
    return [_read_pass(fields) for fields, _ in finished.reports if fields["kind"] == "pass"]


def describe_pass(block_pass: BlockPass) -> str:
    return (
        f"pass {block_pass.number}: objective {block_pass.objective:.8g}, relative change {block_pass.change:.1e}, "
        f"{block_pass.nonzero:,} of {block_pass.features:,} weights other than 0, "
        f"{block_pass.active:.1%} of the columns active"
    )


def _read_pass(fields: dict[str, Any]) -> BlockPass:
    return msgspec.convert({name: value for name, value in fields.items() if name != "kind"}, BlockPass)


def _is_weight(keys: Keys, records: Floats) -> Any:
    """Return a mask, bool [n], of the rows to write: the intercept and the columns with a nonzero weight."""
    return (records[:, 2] > 0) & ((records[:, 0] != 0) | (keys == BIAS_KEY))


def _model_records(weights: Floats, num_words: int, update: Any) -> Floats:
    records = np.zeros((len(weights), num_words), np.float32)
    records[:, 0] = weights
    if update.initialize_reference is not None:
        update.initialize_reference(records[:, 0], list(records[:, 1:].T), np.array(update.hyper))
    return records
