"""Run scripts to measure their steps: in independent processes, and under strategies."""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from paceline.environment import num_cores
from paceline.errors import PeerError, UsageError, printable
from paceline.launch import RunOptions
from paceline.launch.fork_server import module_command
from paceline.launch.run.plan import command_of
from paceline.launch.run.run import check_script
from paceline.launch.supervisor import ChildProcess, Supervisor, describe_status, spawn
from paceline.planning.options import ScriptOptions
from paceline.planning.predictions import StrategyCandidate
from paceline.planning.waiting import spread_of, without_drift
from paceline.strategies.profile import (
    COPIES,
    FEWEST_STEPS,
    LEAST_STEPS,
    STARTED,
    TARGET,
    LayerProfile,
    ModelProfile,
    StepRecord,
    read_record,
    warm_up_steps,
    without_outliers,
)
from paceline.temporary import TemporaryFolder

_Record = TypeVar("_Record")
ONLY: Final = ""
"""The name of the model of a script that trains a single model."""
_PATIENCE_S: Final = 300.0
"""A script must reach its training loop, and end a few dozen steps, in this time."""
_OPTIONAL_S: Final = 30.0
"""A process may take this much longer after it has written its profile, to add the time of microbatches."""
_POLL_S: Final = 0.1
_SLOWER: Final = 10
"""Steps may take this many times as long as predicted."""
_END_S: Final = 5.0
_DEVICES: Final = "CUDA_VISIBLE_DEVICES"
_FOREIGN: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PACELINE_SCHEDULER", "PACELINE_COORDINATOR")
_TUTORIAL: Final = (
    "A script must train on a loader from paceline.torch.strategy().prepare(model, optimizer, loader), for at least {} "
    "steps"
)


@dataclass(frozen=True, slots=True)
class MeasuredCommand:
    """A script or a module with its arguments."""

    script: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def name(self) -> str:
        """The script's path and arguments, which identify it. Bytes that are not UTF-8 are escaped."""
        name = " ".join([self.script if self.is_module else str(Path(self.script).resolve()), *self.arguments])
        return os.fsencode(name).decode(errors="backslashreplace")

    def profiles(self, copies: int, threads: int, models: Sequence[str] = (ONLY,)) -> dict[str, ModelProfile]:
        """Run `copies` independent processes at the same time. Return the mean profile of each model.

        The script trains the models one after another. The process with the folder ``X/0`` writes the measurements of a
        model to ``X/MODEL/0``. Raises UsageError for a script without a training loop that can be measured, and
        PeerError for a failing script.
        """
        command = command_of(sys.executable, self.script, self.arguments, is_module=self.is_module)
        with TemporaryFolder.make("profile") as folder:
            for model, number in itertools.product(models, range(copies)):
                place = folder.path / model / str(number)
                place.mkdir(parents=True)
                (place / COPIES).touch()
            variables = {"PACELINE_STRATEGY": "one-device", "OMP_NUM_THREADS": str(threads)}
            devices = [{} if device is None else {_DEVICES: device} for device in devices_of(copies)]
            added = [
                {**variables, **device, "PACELINE_PROFILE": str(folder.path / str(number))}
                for number, device in enumerate(devices)
            ]
            files = [[folder.path / model / f"{n}/profile.json" for model in models] for n in range(copies)]
            self._run([command] * copies, added, _PATIENCE_S * len(models), LEAST_STEPS, files)
            found = [[self._read(file, ModelProfile, LEAST_STEPS) for file in of_copy] for of_copy in files]
            return {model: mean_profile(same) for model, *same in zip(models, *found, strict=True)}

    def records(
        self,
        candidate: StrategyCandidate,
        ranks: int,
        steps: int,
        models: Sequence[str] = (ONLY,),
        *,
        step_s: float = 0.0,
        target_loss: float | None = None,
    ) -> dict[str, list[StepRecord]]:
        """Run the script under a strategy for `steps` steps of each model. Return the record of each rank, by model.

        `step_s` is the predicted time of a step. A longer prediction allows more time. With `target_loss`, the ranks
        end soon after one of them has reached this loss. Raises UsageError and PeerError like :meth:`profiles`.
        """
        ranks = 1 if candidate.strategy == "one-device" else ranks
        words = [*candidate.words(), "--nproc-per-node", str(ranks), *(["-m"] if self.is_module else [])]
        if candidate.strategy == "pipeline":
            words += ["--stages", str(ranks)]
        command = module_command("paceline", "run", *words, self.script, *self.arguments)
        with TemporaryFolder.make("record") as folder:
            place = folder.path / "ranks"
            if target_loss is not None:
                place.mkdir()
                (place / TARGET).write_text(str(target_loss))
            added = {"PACELINE_PROFILE": str(place), "PACELINE_PROFILE_STEPS": str(steps)}
            limit_s, least = _PATIENCE_S * len(models) + _SLOWER * steps * step_s, warm_up_steps(steps) + FEWEST_STEPS
            self._run([command], [added], limit_s, least, under=f" under {candidate.label}")
            return {
                model: [
                    self._read(folder.path / model / f"ranks/rank{n}.json", StepRecord, least) for n in range(ranks)
                ]
                for model in models
            }

    def _read(self, file: Path, kind: type[_Record], least: int) -> _Record:
        if not file.exists():
            raise UsageError(f"{self.script} ended before its steps could be measured. {_TUTORIAL.format(least)}")
        return read_record(file, kind)

    def _run(
        self,
        commands: Sequence[Sequence[str]],
        variables: Sequence[dict[str, str]],
        limit_s: float,
        least: int,
        files: Sequence[Sequence[Path]] = ((),),
        *,
        under: str = "",
    ) -> None:
        """Run commands at the same time until they end. Raises PeerError if one fails, UsageError after `limit_s`.

        A command that has written its `files` may fail, or hang. The errors have the needed number of steps `least`,
        and the words `under`, such as `` under all-reduce``.
        """
        inherited = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
        supervisor, deadline = Supervisor(), time.monotonic() + limit_s
        with tempfile.TemporaryFile() as output:
            try:
                for number, (command, added) in enumerate(zip(commands, variables, strict=True)):
                    launch = partial(
                        spawn,
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        env={**inherited, **added},
                    )
                    supervisor.start(f"process {number}", launch, is_foreign=True)
                for child, written in zip(supervisor.children, files, strict=True):
                    status = _wait(child.process, deadline, written)
                    if status is None:
                        folders = [Path(added["PACELINE_PROFILE"]) for added in variables]
                        raise UsageError(self._describe_timeout(folders, limit_s, least))
                    if status:
                        output.seek(0)
                        lines = output.read().decode(errors="replace").split("\n")
                        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
                        end = f"failed{under} with status {status}" if status > 0 else describe_status(status) + under
                        raise PeerError(f"{self.script} {end}: {printable(last, 300)}")
            finally:
                supervisor.close(_END_S, signal.SIGTERM)

    def _describe_timeout(self, folders: Sequence[Path], limit_s: float, least: int) -> str:
        if any((folder / STARTED).exists() for folder in folders):
            return (
                f"{self.script} did not end its measured steps within {limit_s:.0f} s. Use a smaller batch, fewer "
                "--steps, or an idle machine"
            )
        return f"{self.script} ran for {limit_s:.0f} s and did not reach its training loop. {_TUTORIAL.format(least)}"


def _wait(process: ChildProcess, deadline_s: float, files: Sequence[Path]) -> int | None:
    """Return the status of a process when it ends; None after the deadline.

    Return 0 for a process that has written all its files, also if it fails or hangs then.
    """
    status, has_written = None, False
    while True:
        with suppress(subprocess.TimeoutExpired):
            status = process.wait(_POLL_S)
        if files and not has_written and all(file.exists() for file in files):
            has_written, deadline_s = True, min(deadline_s, time.monotonic() + _OPTIONAL_S)
        if status is not None or time.monotonic() >= deadline_s:
            return 0 if has_written else status


def devices_of(copies: int) -> list[str | None]:
    """Return the CUDA device of each copy, if there are enough; the copies would otherwise all use the first one."""
    given = os.environ.get(_DEVICES)
    if given is None:
        names = sorted(path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))
    else:
        names = given.split(",")
    return [*names[:copies]] if len(names) >= copies > 1 else [None] * copies


def check_options(options: ScriptOptions) -> tuple[MeasuredCommand, int]:
    """Return the script and the number of ranks per node. Raises UsageError for a missing script or too many ranks."""
    cores = num_cores()
    if options.script is None:
        raise UsageError("no script. Pass its path after the options, and its arguments after the path")
    check_script(RunOptions(script=options.script, arguments=options.arguments))
    ranks = min(2, cores) if options.nproc_per_node is None else options.nproc_per_node
    if ranks > cores:
        raise UsageError(
            f"--nproc-per-node {ranks}: a node is measured on this machine, which has {cores} cores. Pass "
            f"{cores} or less"
        )
    return MeasuredCommand(options.script, tuple(options.arguments or ())), ranks


def mean_profile(profiles: Sequence[ModelProfile]) -> ModelProfile:
    """Return a profile with the mean times of equal processes, and all their steps without outliers and drift."""
    first = profiles[0]
    layers: list[LayerProfile] = []
    for same in zip(*(profile.layers for profile in profiles), strict=True):
        forward_s, backward_s = (
            statistics.fmean(getattr(layer, name) for layer in same) for name in ("forward_s", "backward_s")
        )
        layers.append(replace(same[0], forward_s=forward_s, backward_s=backward_s))
    steps_s = [without_drift(without_outliers(profile.steps_s)) for profile in profiles]
    return replace(
        first,
        layers=tuple(layers),
        steps_s=tuple(itertools.chain.from_iterable(steps_s)),
        spread=spread_of([step_s for profile in profiles for step_s in profile.steps_s]),
        stretch=statistics.fmean(profile.stretch for profile in profiles),
        microbatch_s=statistics.fmean(profile.microbatch_s for profile in profiles),
        program_s=statistics.fmean(profile.program_s for profile in profiles),
        update_s=statistics.fmean(profile.update_s for profile in profiles),
    )


def measured_step_s(records: Sequence[StepRecord]) -> float:
    """Return the mean seconds of a step over all ranks, without outliers."""
    return statistics.fmean(statistics.fmean(without_outliers(record.steps_s)) for record in records)
