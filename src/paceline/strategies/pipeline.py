"""Declare the strategy ``pipeline`` and its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final

from typing_extensions import override

from paceline.command_options import option
from paceline.errors import UsageError
from paceline.strategies.spec import StrategyOptions, StrategySpec

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class ScheduleKind:
    """A schedule of ``torch.distributed.pipelining``."""

    torch_name: str
    parts_per_rank: int
    """Number of stages per process."""
    meaning: str


SCHEDULES: dict[str, ScheduleKind] = {
    "gpipe": ScheduleKind("GPipe", 1, "all microbatches forward, then all backward"),
    "1f1b": ScheduleKind("1F1B", 1, "one forward, one backward: fewer activations in memory"),
    "interleaved": ScheduleKind("Interleaved1F1B", 2, "1f1b with two stages per process, assigned round robin"),
    "looped-bfs": ScheduleKind("LoopedBFS", 2, "gpipe with two stages per process"),
    "interleaved-zero-bubble": ScheduleKind("InterleavedZeroBubble", 2, "interleaved, weights' gradients in the gaps"),
    "zbv": ScheduleKind("ZBVZeroBubble", 2, "zero bubble: stages in a V, weights' gradients in the gaps"),
    "dualpipev": ScheduleKind("DualPipeV", 2, "DualPipe cut in half: stages in a V"),
}
"""Every schedule, by its name for ``--schedule``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFlags:
    """The options as the user gave them, unchecked. Missing options are None."""

    panel: ClassVar = "Pipeline and sharded"

    stages: int | None = option("pipeline: number of processes for the model's layers, with one or two stages each.")
    data_parallel: int | None = option(
        "pipeline, sharded: number of parallel pipelines, or of parallel groups that shard the model, each with its "
        "part of the data; default 1."
    )
    schedule: str | None = option(
        "pipeline: gpipe, 1f1b, interleaved, looped-bfs, interleaved-zero-bubble, zbv, dualpipev or auto (default: the "
        "fastest by prediction)."
    )
    microbatches: str | None = option("pipeline: number of parts of each batch, or auto (default).")
    split: str | None = option("pipeline: modules that begin a stage, such as layers.4,layers.8; default: measured.")
    stage_memory: str | None = option(
        "pipeline: memory limit of a process for parameters, optimizer and activations, such as 4G."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions(StrategyOptions):
    """A pipeline's valid options, created by :func:`choose_pipeline`."""

    strategy: ClassVar[str] = "pipeline"

    stages: int
    """Number of processes of one pipeline."""
    data_parallel: int
    """Number of parallel pipelines, each with its own part of the data."""
    schedule: str
    """A key of :data:`SCHEDULES`, or ``auto``."""
    microbatches: int | None
    """Number of parts of a batch; None: the number with the shortest predicted step."""
    split: tuple[str, ...]
    """Names of modules that begin a stage; empty: ``pipe_split()`` or predicted times determine the cuts."""
    stage_memory: int | None
    """Limit in bytes for a process's parameters, optimizer state and activations; None: no limit."""

    @property
    @override
    def num_processes(self) -> int:
        return self.stages * self.data_parallel


def choose_pipeline(flags: PipelineFlags, processes: int | None) -> PipelineOptions:
    """Check the options for a pipeline on `processes` (None: any number), and set the defaults. Raises UsageError."""
    data_parallel = 1 if flags.data_parallel is None else flags.data_parallel
    if data_parallel < 1:
        raise UsageError(f"--data-parallel {data_parallel}: expected 1 or more pipelines")
    stages = flags.stages
    if stages is None:
        if processes is None:
            raise UsageError("strategy pipeline: pass --stages S, the number of processes for the model")
        stages, remainder = divmod(processes, data_parallel)
        if remainder:
            raise UsageError(
                f"--data-parallel {data_parallel} does not divide {processes} processes. Pass a divisor, or --stages"
            )
    if stages < 1:
        raise UsageError(f"--stages {stages}: expected 1 or more")
    if processes is not None and processes != stages * data_parallel:
        raise UsageError(
            f"--stages {stages} x --data-parallel {data_parallel} is {stages * data_parallel} processes, but there are "
            f"{processes}. Leave --nproc-per-node out, or make the numbers equal"
        )
    schedule = flags.schedule or AUTO
    if schedule != AUTO and schedule not in SCHEDULES:
        raise UsageError(f"--schedule {schedule}: expected one of {', '.join(SCHEDULES)} or {AUTO}")
    split = tuple(name.strip() for name in flags.split.split(",")) if flags.split else ()
    options = PipelineOptions(
        stages=stages,
        data_parallel=data_parallel,
        schedule=schedule,
        microbatches=_count(flags.microbatches),
        split=split,
        stage_memory=_size(flags.stage_memory),
    )
    _check_split(options)
    return options


def default_microbatches(stages: int, batch_size: int) -> list[int]:
    """Return the numbers of microbatches from which the one with the shortest predicted step is chosen."""
    return [stages * factor for factor in (1, 2, 4, 8) if stages * factor <= batch_size] or [batch_size]


def _count(text: str | None) -> int | None:
    if text is None or text == AUTO:
        return None
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise UsageError(f"--microbatches {text}: expected a whole number from 1 up, or {AUTO}")
    return int(text)


def _size(text: str | None) -> int | None:
    if text is None:
        return None
    from paceline.tables.memory.limit import parse_size

    num_bytes = parse_size(text)
    if num_bytes is None:
        raise UsageError(f"--stage-memory {text}: expected a number of bytes such as 500M or 4G")
    return num_bytes


def _check_split(options: PipelineOptions) -> None:
    split = options.split
    if not split:
        return
    if "" in split or len(set(split)) < len(split):
        raise UsageError(f"--split {','.join(split)}: expected different module names with commas between them")
    kinds = [options.schedule] if options.schedule != AUTO else ["gpipe", "interleaved"]
    counts = sorted({options.stages * SCHEDULES[kind].parts_per_rank for kind in kinds})
    if len(split) + 1 not in counts:
        expected = " or ".join(f"{count - 1} for {count}" for count in counts)
        raise UsageError(
            f"--split {','.join(split)} makes {len(split) + 1} stages, but --stages {options.stages} with --schedule "
            f"{options.schedule} needs one name fewer than stages: {expected} stages"
        )


def _choose(given: Mapping[str, Any], processes: int | None) -> StrategyOptions:
    return choose_pipeline(PipelineFlags(**given), processes)


PIPELINE: Final = StrategySpec(
    name=PipelineOptions.strategy,
    meaning="the model's layers on several processes, batches split into microbatches",
    implementation="paceline.torch.strategies.pipeline.strategy:Pipeline",
    only_copies="a stage of the model",
    flags=tuple(flag.name for flag in fields(PipelineFlags)),
    without_flags="has no pipeline stages",
    choose_options=_choose,
    flags_set_processes=True,
    neutral_settings=("data_parallel", "timeout"),
)
