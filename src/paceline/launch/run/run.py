"""``paceline run``: start a script as the ranks of a strategy, with its servers, and wait until it ends.

This module does not import torch; ``paceline.torch.strategy()`` reads the ranks' environments.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.environment import environment
from paceline.errors import DeadlineError, UsageError
from paceline.launch.engines.engine import LOST_NODE_STATUS, report
from paceline.launch.run.blame import Tracebacks
from paceline.launch.run.elastic import ElasticRun, RankGrowth
from paceline.launch.run.loop import RunLoop, Signals
from paceline.launch.run.options import RunOptions
from paceline.launch.run.plan import (
    Layout,
    RankPlan,
    command_of,
    plan_ranks,
)
from paceline.launch.run.processes import Rank, RankProcesses, RunJob
from paceline.launch.run.setup import (
    PATIENCE_S,
    Setup,
    coordinator_address,
    find_placement,
    plan_cluster,
    plan_node,
)
from paceline.launch.run.streams import check_log_dir
from paceline.launch.screen import Screen
from paceline.protocol import Accept, parse_stale_policy
from paceline.strategies import ElasticOptions, StrategyChoice, StrategySpec
from paceline.tables.memory.limit import MemoryLimit
from paceline.transport import SocketTransport

if TYPE_CHECKING:  # other modules of servers and filters need Numba, so they are imported at their first use
    from paceline.launch.run.servers import RunServers
    from paceline.ps import messages

_OPTIONS_OF_RUN = {"--nproc-per-node", "--nproc_per_node", "--nnodes"}  # scripts rarely have options with these names
_DATA_SUFFIXES = {".csv", ".gz", ".jsonl", ".npy", ".npz", ".parquet", ".svm", ".tsv", ".txt", ".vw", ".zst"}
_MOST_SCRIPT_BYTES = 16 << 20
_HEARTBEAT_TIMEOUT_S = 30.0
"""The scheduler declares a process dead after this time without a heartbeat, as node 0 does with a launcher.

The time is long, because a rank may be busy. A killed process is detected earlier by its broken connection.
"""


def run_script(options: RunOptions, num_wanted: Callable[[], int] | None = None) -> int:
    """Run a script; return its status. Raises UsageError before processes start, PeerError if a server fails.

    With `num_wanted`, an elastic run on one machine changes its number of ranks to the result of this function, which
    is called often.
    """
    memory_limit = options.memory.parse()
    check_script(options)
    options.engine.check_only(None)
    placement = find_placement(options)
    setup = plan_node(options, placement) if options.cluster is None else plan_cluster(options)
    stale = str(Accept() if options.stale is None else parse_stale_policy(options.stale))
    choice = setup.choice
    if isinstance(choice.options, ElasticOptions):
        _check_elastic(options)
    if options.snapshot_dir is not None:
        choice.spec.check_snapshots(options.snapshot_dir, options.snapshot_every)
    elif options.snapshot_every is not None:
        raise UsageError(f"--snapshot-every {options.snapshot_every}: needs a directory. Pass --snapshot-dir DIR too")
    filters, pull_filters = _find_filters(options, choice.spec)
    settings: messages.ClusterSettings | None = None
    if choice.consistency is not None:
        settings = options.pushes.make_settings(
            num_servers=choice.servers,
            num_workers=choice.options.min_ranks if isinstance(choice.options, ElasticOptions) else setup.num_ranks,
            consistency=str(choice.consistency),
            stale=stale,
            replicas=choice.server_replicas,
            heartbeat_timeout_s=options.heartbeat_timeout or _HEARTBEAT_TIMEOUT_S,
        )
    else:
        _check_no_servers(options, memory_limit, choice)
    if memory_limit is not None and memory_limit.warning is not None:
        print(f"paceline run: {memory_limit.warning}", file=sys.stderr)
    if options.log_dir is not None:
        check_log_dir(options.log_dir)
    with contextlib.ExitStack() as stack:
        collector = stack.enter_context(options.observe.open("paceline run"))
        job = stack.enter_context(RunJob.start(options, setup.layout))
        starting = stack.enter_context(contextlib.ExitStack())
        if placement is not None:
            starting.enter_context(_ignore_sigterm())
        servers: RunServers | None = None
        scheduler: str | None = None
        if settings is not None:
            if setup.share is not None and not setup.share.runs_scheduler and not setup.share.servers:
                from paceline.launch.local import wait_cluster

                scheduler = f"tcp://{setup.share.scheduler}"
                wait_cluster(SocketTransport(setup.token, tls=setup.tls), scheduler, PATIENCE_S)
            else:
                from paceline.launch.run.servers import RunServers

                servers = stack.enter_context(
                    RunServers.start(
                        settings,
                        memory_limit=memory_limit,
                        token=setup.token,
                        tls=setup.tls,
                        share=setup.share,
                        filter_modules=options.filter_modules.names(options.filters, options.pull_filters),
                    )
                )
                scheduler = servers.scheduler
        if setup.layout is None:
            assert servers is not None
            assert setup.share is not None
            served = ", ".join(map(str, setup.share.servers))
            print(f"paceline run: server {served} is ready at {setup.share.scheduler}", file=sys.stderr)
            servers.serve()
            return 0
        starting.close()
        # The launcher of rank 0 collects the metrics of all servers, because sums must count each server once.
        if collector is not None and scheduler is not None and 0 in setup.layout.ranks:
            from paceline.launch.cluster_metrics import ClusterMetrics

            stack.enter_context(ClusterMetrics.start(SocketTransport(setup.token, tls=setup.tls), scheduler, collector))
        job.start_agent(stack, setup, setup.layout, scheduler, collector)
        status = _run_ranks(options, setup, setup.layout, job, filters, pull_filters, scheduler, servers, num_wanted)
        job.finish(has_failed=status != 0)
        if status == 0 and servers is not None:
            servers.wait_workers()
        return status


@contextlib.contextmanager
def _ignore_sigterm() -> Iterator[None]:
    """Ignore SIGTERM during the block, and in the child processes that start in it.

    Slurm sends the signal to all processes of a job. The servers must ignore it and end after the ranks, because the
    ranks need the servers to save a checkpoint.
    """
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _find_filters(options: RunOptions, strategy: StrategySpec) -> tuple[str | None, str | None]:
    """Return the filters and the pull filters for the ranks, as texts with the modules to import. Raises UsageError."""
    pushed, pulled = options.filters or "", options.pull_filters
    if not pushed and pulled is None and not options.filter_modules.filter_module:
        return None, None
    from paceline.filters import parse_filters
    from paceline.filters.gradients import gradient_filters
    from paceline.filters.modules import with_modules
    from paceline.ps.client.filtered import filters_of_dense_tables

    options.filter_modules.load(options.filters, options.pull_filters)
    chain = parse_filters(pushed)
    if pulled is not None:
        parse_filters(pulled)
        if not strategy.has_servers:
            raise UsageError(
                f"--pull-filters {pulled}: {strategy.name} has no embeddings on servers. Leave the option out"
            )
    if chain and strategy.filters == ("tables",):
        filters_of_dense_tables(pushed)
    elif chain and strategy.filters == ("gradients",):
        gradient_filters(pushed)
    elif chain and not strategy.filters:
        reason = "runs in one process" if strategy.is_one_process else "exchanges no gradients that filters apply to"
        raise UsageError(f"--filters {pushed}: strategy {strategy.name} {reason}. Leave it out")
    return with_modules(pushed) if chain else None, None if pulled is None else with_modules(pulled)


def _run_ranks(
    options: RunOptions,
    setup: Setup,
    layout: Layout,
    job: RunJob,
    filters: str | None,
    pull_filters: str | None,
    scheduler: str | None,
    servers: RunServers | None,
    num_wanted: Callable[[], int] | None,
) -> int:
    assert options.script is not None
    plan = partial(
        plan_ranks,
        choice=setup.choice,
        inherited={**os.environ, **options.snapshot_variables(), **job.variables()},
        token=setup.token,
        tls=setup.tls,
        scheduler=scheduler,
        filters=filters,
        pull_filters=pull_filters,
        threads=options.threads,
        cores=setup.num_cores,
    )
    plans = plan(layout)
    elastic_options = setup.choice.options if isinstance(setup.choice.options, ElasticOptions) else None
    if options.no_python:
        command = [options.script, *(options.arguments or ())]
    else:
        command = command_of(sys.executable, options.script, options.arguments or (), is_module=options.module)
    is_alone = layout.world_size == 1 and num_wanted is None
    screen, tracebacks = Screen(None if is_alone else "rank {}".format), Tracebacks()
    with contextlib.ExitStack() as stack:
        processes = RankProcesses()
        stack.callback(processes.close)
        # A single rank inherits the standard streams, which may be a terminal.
        captured = not is_alone or options.log_dir is not None or elastic_options is not None

        def start(*plans: RankPlan) -> Rank:
            processes.start(command, plans, screen, tracebacks, captured=captured, log_dir=options.log_dir)
            job.add(processes.ranks[-len(plans) :])
            return processes.ranks[-1]

        elastic: ElasticRun | None = None
        if elastic_options is not None:  # before signals are forwarded, because this may wait for node 0
            try:
                elastic = ElasticRun(
                    elastic_options,
                    plans,
                    start,
                    growth=None if num_wanted is None else RankGrowth(num_wanted, layout, plan),
                    node=layout.node,
                    max_ranks=layout.world_size if num_wanted is None else sys.maxsize,
                    address=coordinator_address(layout),
                    token=setup.token,
                    tls=setup.tls,
                    timeout_s=options.heartbeat_timeout or _HEARTBEAT_TIMEOUT_S,
                )
            except DeadlineError as error:
                report(str(error))
                return LOST_NODE_STATUS
            stack.callback(elastic.close)
        with Signals(processes) as signals:
            if elastic is None:
                start(*plans)
            else:
                elastic.start_all()
            if signals.first is not None:  # the signal arrived before all ranks were started
                processes.signal(signals.first, groups=True)
            loop = RunLoop(
                processes,
                screen,
                tracebacks,
                world_size=layout.world_size,
                log_dir=options.log_dir,
                find_lost_server=lambda: next(
                    filter(None, (part.failure() for part in (servers, elastic) if part)), None
                ),
                elastic=elastic,
            )
            status = loop.run(signals)
            failure = loop.failure()
            if failure is not None:
                job.add_event(failure)
            return LOST_NODE_STATUS if status == 1 and elastic is not None and layout.node else status


# Checks before the start of any process.


def check_script(options: RunOptions, *, is_here: bool = True) -> None:
    """Raise UsageError for a missing or wrong script. With `is_here`, the script must be on this machine."""
    if options.threads is not None and options.threads < 1:
        raise UsageError(f"--threads {options.threads}: expected 1 or more")
    script = options.script
    if script is None:
        if options.job == "server":
            return
        raise UsageError("no script. Pass its path, as in paceline run [options] SCRIPT [arguments of the script]")
    if options.job == "server":
        raise UsageError(f"--job server runs no script. Leave {script} out")
    if not is_here:
        pass
    elif options.no_python:
        if shutil.which(script) is None:
            remedy = "a program in PATH, or the path of an executable file"
            remedy = f"python {script}" if script.endswith(".py") else remedy
            raise UsageError(f"no program {script}. Pass {remedy}")
    elif options.module:
        _check_module(script)
    elif not Path(script).exists():
        raise UsageError(f"no script {script}. Pass options of 'paceline run' before the script and its own after it")
    elif Path(script).is_dir() and not (Path(script) / "__main__.py").exists():
        raise UsageError(f"{script} is a folder without a __main__.py. Pass a script")
    elif not _is_python(Path(script)):
        raise UsageError(f"{script} is not a Python script: pass a script, or use 'paceline train' for data")
    for name in _OPTIONS_OF_RUN.intersection(options.arguments or ()):
        print(
            f"paceline run: {name} after {script} is an argument of the script. Pass options of 'paceline run' before "
            "the script",
            file=sys.stderr,
        )


def _is_python(script: Path) -> bool:
    """Return False for data files (by the suffix), and for files with invalid syntax unless the suffix is ``.py``."""
    if script.suffix.startswith(".py") or script.is_dir() or zipfile.is_zipfile(script):
        return script.suffix not in _DATA_SUFFIXES
    if script.suffix in _DATA_SUFFIXES or script.stat().st_size > _MOST_SCRIPT_BYTES:
        return False
    try:
        compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def _check_elastic(options: RunOptions) -> None:
    coordinator = environment().coordinator
    if coordinator is not None:
        raise UsageError(
            f"PACELINE_COORDINATOR={coordinator}: with --min-ranks, node 0 has the coordinator. Unset the variable, or "
            "start the script without paceline run"
        )
    for name, value in (("--cluster", options.cluster), ("--filters", options.filters)):
        if value is not None and value != "none":
            raise UsageError(f"{name} {value}: not supported with --min-ranks. Leave it out")


def _check_no_servers(options: RunOptions, memory_limit: MemoryLimit | None, choice: StrategyChoice) -> None:
    given = {
        "--stale": options.stale,
        "--min-replicas": options.pushes.min_replicas,
        "--non-finite": options.pushes.non_finite,
        "--memory-limit": None if memory_limit is None else memory_limit.num_bytes,
        "--heartbeat-timeout": None if isinstance(choice.options, ElasticOptions) else options.heartbeat_timeout,
    }
    for name, value in given.items():
        if value is not None:
            shown = f"{value:g}" if isinstance(value, float) else value
            raise UsageError(f"strategy {choice.name} has no servers. Leave {name} {shown} out")


def _check_module(name: str) -> None:
    """Find a module like ``python -m``, but without running the packages that contain it. Raises UsageError."""
    places: list[str] | None = None
    if all(part.isidentifier() for part in name.split(".")):
        before, sys.path[:] = list(sys.path), [os.getcwd(), *sys.path]
        try:
            found = None
            for depth in range(1, name.count(".") + 2):
                part = ".".join(name.split(".")[:depth])
                specs = (finder.find_spec(part, places) for finder in sys.meta_path if hasattr(finder, "find_spec"))
                found = next((spec for spec in specs if spec is not None), None)
                if found is None:
                    break
                places = None if found.submodule_search_locations is None else list(found.submodule_search_locations)
                if places is None and depth <= name.count("."):
                    found = None
                    break
            if found is not None:
                return
        finally:
            sys.path[:] = before
    raise UsageError(f"no module {name}. Pass a module that Python can import from this folder, such as package.module")
