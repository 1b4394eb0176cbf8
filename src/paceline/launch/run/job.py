"""The files of a run's processes, for ``paceline stacks`` and for the flight recorder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from typing_extensions import override

from paceline.closing import Closing
from paceline.launch.engines.engine import report
from paceline.launch.run.processes import Rank
from paceline.observe.stuck.jobs import LaunchedJob, start_job
from paceline.observe.stuck.torch_files import check_directory, write_torch_files


class RunJob(Closing):
    """The job of this launcher. If its folder cannot be created, the run works without the files."""

    def __init__(self, job: LaunchedJob | None, directory: Path | None) -> None:
        """Use a job; :meth:`start` creates it."""
        self._job, self._directory = job, directory

    @classmethod
    def start(cls, directory: Path | None) -> RunJob:
        """Start a job that writes the flight recorder to `directory`. Raises UsageError if this cannot be created."""
        if directory is not None:
            check_directory(directory)
        return cls(start_job(), directory)

    def variables(self) -> dict[str, str]:
        """Return the variables of the ranks."""
        return {"PACELINE_JOB_DIR": "" if self._job is None else str(self._job.folder)}

    def add(self, ranks: Sequence[Rank]) -> None:
        """Add ranks that have been started."""
        if self._job is not None:
            for rank in ranks:
                self._job.add(f"rank {rank.rank}", rank.child.process.pid)

    def write_flight_recorder(self) -> None:
        """Write the last collectives of the ranks after a failure, if the user has requested this."""
        if self._job is None or self._directory is None:
            return
        try:
            written = write_torch_files([self._job.folder], self._directory)
        except OSError as error:
            report(f"cannot write the last collectives to {self._directory}: {error.strerror}")
        else:
            report(
                f"the last collectives of {len(written)} ranks are in {self._directory}. Analyse them with python -m "
                f"torch.distributed.flight_recorder.fr_trace {self._directory}"
            )

    @override
    def close(self) -> None:
        """Remove the files."""
        if self._job is not None:
            self._job.close()
