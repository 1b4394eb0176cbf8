"""Run a function on Dask's workers: one task per node, whose ends and failures this module collects."""

from __future__ import annotations

import contextlib
import pickle
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final, TypeVar

from typing_extensions import override

from paceline.closing import Closing
from paceline.command_options import words_of
from paceline.environment import environment
from paceline.errors import PeerError, UsageError, first_line, name_ranks
from paceline.launch.engines.engine import Placement
from paceline.launch.run.blame import RankFailure, choose_culprit, follow_names, waiting_time
from paceline.launch.run.options import RunOptions
from paceline.launch.run.setup import plan_roles
from paceline.launch.supervisor import describe_status
from paceline.transport.security.authentication import check_or_make_token

try:
    import cloudpickle
    from distributed import Client, Future
    from distributed.comm import get_address_host
except ImportError as error:
    raise ImportError("paceline.dask needs Dask, which is not installed: pip install 'paceline[dask]'") from error

from paceline.dask.node import NodeRequest, run_node, running_nodes

_T = TypeVar("_T")

_POLL_S: Final = 0.05
_CHECK_S: Final = 0.5
"""Time between two requests for the list of living workers."""
_END_S: Final = 15.0
"""Time limit for the end of the other nodes after a failure."""


def run(
    client: Client,
    function: Callable[..., _T],
    *arguments: Any,
    num_nodes: int | None = None,
    workers: Sequence[str] | None = None,
    nproc_per_node: int = 1,
    strategy: str | None = None,
    servers: int | None = None,
    timeout: timedelta = timedelta(minutes=1),
) -> list[_T]:
    """Call ``function(*arguments)`` on every rank of a run; return the values of all ranks, by rank.

    Each of the Dask workers is a node with `nproc_per_node` ranks, which are new processes. In the function,
    ``paceline.torch.strategy()`` and ``paceline.collectives.init()`` work as under ``paceline run``.

    - `num_nodes`: number of workers; default: all.
    - `workers`: the addresses of the workers, default: all of the cluster. The first worker has the first ranks.
    - `strategy`, `servers`: the options of ``paceline run``.
    - `timeout`: time limit until these workers exist and each has started its part of the run.

    If a rank raises, the call raises the same exception. The cause of this exception is a PeerError with the rank, the
    worker and the traceback. Raises PeerError if a rank or a worker dies, and UsageError for wrong arguments. All
    processes of the run end with the call, with the client, or with their worker.
    """
    if not isinstance(client, Client) or client.asynchronous:
        raise UsageError(f"got the client {client!r}, expected a distributed.Client that is not asynchronous")
    try:
        program = cloudpickle.dumps((function, arguments))
    except Exception as error:
        raise UsageError(
            f"the function or an argument cannot be pickled: {first_line(error)}. Create this object in the function"
        ) from error
    deadline = time.monotonic() + timeout.total_seconds()
    nodes = _wait_workers(client, num_nodes, workers, deadline)
    options = RunOptions(strategy=strategy, nproc_per_node=nproc_per_node, servers=servers)
    plan_roles(replace(options, nnodes=len(nodes)))
    _check_versions(client, nodes)
    token = check_or_make_token(environment().token, "PACELINE_TOKEN")
    with _DaskRun(client, nodes, options, program, token) as started:
        return [pickle.loads(value) for value in started.wait_values(deadline)]


def _wait_workers(client: Client, num_nodes: int | None, workers: Sequence[str] | None, deadline: float) -> list[str]:
    """Return the addresses of the run's workers. Raises UsageError if workers are missing at the deadline."""
    if (num_nodes or 1) < 1 or (workers is not None and (isinstance(workers, str) or len({*workers}) < len(workers))):
        raise UsageError(f"got {num_nodes} nodes, workers {workers!r}: expected 1 or more, and a list of addresses")
    num_wanted = num_nodes or (1 if workers is None else len(workers))
    while True:
        living = _find_living(client)
        found = living if workers is None else [worker for worker in workers if worker in living]
        if len(found) >= num_wanted:
            return found[:num_nodes]
        if time.monotonic() >= deadline:
            missing = ", ".join(worker for worker in workers or () if worker not in living)
            raise UsageError(
                f"the Dask cluster has {len(found)} of {num_wanted} workers{missing and f', without {missing}'}. Start "
                "more workers, or pass another num_nodes or workers"
            )
        time.sleep(_POLL_S)


def _find_living(client: Client) -> list[str]:
    try:
        return sorted(client.nthreads())
    except OSError as error:
        raise PeerError(f"the Dask scheduler does not answer: {first_line(error)}. Start the run again") from error


def _check_versions(client: Client, nodes: Sequence[str]) -> None:
    """Raise UsageError if the scheduler or a worker has another version. The scheduler unpickles all tasks too."""
    found = client.get_versions(packages=["paceline"])
    places = {"the Dask scheduler": found["scheduler"]}
    places |= {f"the Dask worker {node}": found["workers"].get(node, found["client"]) for node in nodes}
    for place, versions in places.items():
        for name, num_parts in (("python", 2), ("paceline", 3)):
            own, other = (
                ".".join(str(place_versions["packages"][name]).split(".")[:num_parts])
                for place_versions in (found["client"], versions)
            )
            if own != other:
                raise UsageError(f"{place} has the version {other} of {name}, expected {own}. Install {own} there")


class _DaskRun(Closing):
    """The tasks of a run. :meth:`close` ends them."""

    def __init__(self, client: Client, nodes: Sequence[str], options: RunOptions, program: bytes, token: str) -> None:
        self._client, self._nodes, self._options = client, nodes, options
        self._pending: dict[int, Future] = {}
        self._values: dict[int, bytes] = {}
        self._failures: list[RankFailure] = []
        self._errors: dict[int, Exception] = {}
        """The error to raise for a failed rank."""
        self._failed_at = self._checks_at = 0.0
        job, hosts = secrets.token_hex(8), [get_address_host(node) for node in nodes]
        for number, (node, host) in enumerate(zip(nodes, hosts, strict=True)):
            placement = Placement(
                launcher=number,
                num_launchers=len(nodes),
                local_launcher=hosts[:number].count(host),
                num_local_launchers=hosts.count(host),
                address=hosts[0],
                job=job,
            )
            words, num_ranks = tuple(words_of(options)), len(self._ranks_of(number))
            request = NodeRequest(placement=placement, num_ranks=num_ranks, words=words, program=program, token=token)
            self._pending[number] = client.submit(
                run_node, request, key=f"paceline-{job}-{number}", workers=[node], allow_other_workers=False, retries=0
            )

    def wait_values(self, deadline: float) -> list[bytes]:
        """Return the pickled values of all ranks.

        Raises the error of the rank that failed first, and UsageError if a task has not started at the deadline.
        """
        waiting = {*self._pending}
        while self._pending:
            self._take_ended()
            if self._failures:
                self._raise_cause()
            elif waiting:
                running = self._find_running()
                waiting = {number for number in waiting & {*self._pending} if self._pending[number].key not in running}
                if waiting and time.monotonic() >= deadline:
                    nodes = ", ".join(self._nodes[number] for number in sorted(waiting))
                    raise UsageError(
                        f"Dask workers have not started their part of the run: {nodes}. They run other tasks, or have "
                        "ended. Pass a longer timeout or other workers"
                    )
            time.sleep(_POLL_S)
        return [self._values[rank] for rank in sorted(self._values)]

    @override
    def close(self) -> None:
        if self._pending:
            keys = {future.key for future in self._pending.values()}
            self._client.cancel([*self._pending.values()], force=True)
            self._pending = {}
            deadline = time.monotonic() + _END_S
            while keys & self._find_running() and time.monotonic() < deadline:
                time.sleep(_POLL_S)

    def _ranks_of(self, number: int) -> range:
        num_ranks = self._options.nproc_per_node or 1
        return range(number * num_ranks, (number + 1) * num_ranks)

    def _find_running(self) -> set[str]:
        """Return the keys of the tasks that run on the workers."""
        living = [node for node in _find_living(self._client) if node in self._nodes]
        found = self._client.run(running_nodes, workers=living, on_error="ignore") if living else {}
        return {key for keys in found.values() for key in keys}

    def _take_ended(self) -> None:
        """Record the values and failures of nodes that have ended, and the loss of workers."""
        living = None
        if time.monotonic() >= self._checks_at:
            living, self._checks_at = _find_living(self._client), time.monotonic() + _CHECK_S
        for number, future in [*self._pending.items()]:
            node, is_done = self._nodes[number], future.done()
            if is_done and future.status == "finished":
                self._record(number, *future.result())
            elif is_done or (living is not None and node not in living):
                reason = first_line(future.exception()) if future.status == "error" else "it has ended"
                error = PeerError(f"the Dask worker {node} has failed: {reason}")
                self._add(RankFailure(self._ranks_of(number)[0], -1, ()), error)
            if is_done:
                del self._pending[number]

    def _record(self, number: int, status: int, reports: dict[int, bytes]) -> None:
        """Record the end of a node: its exit status, and the reports of its ranks."""
        node = self._nodes[number]
        for rank, report in reports.items():
            value, error, text = pickle.loads(report)
            if value is not None:
                self._values[rank] = value
                continue
            cause: Exception = PeerError(f"rank {rank} failed on the Dask worker {node}:\n\n{text}")
            with contextlib.suppress(Exception):  # the class of the exception decides what may go wrong
                error = pickle.loads(error)
                error.__cause__ = cause
                cause = error
            self._add(RankFailure(rank, 1, tuple(text.encode().splitlines())), cause)
        silent = [rank for rank in self._ranks_of(number) if rank not in reports]
        if silent and (status != 1 or not self._failures):  # 1: the status of a rank that has raised
            text = f"{name_ranks(silent)} on the Dask worker {node} {describe_status(status)}, and returned no value"
            self._add(RankFailure(silent[0], status, ()), PeerError(f"{text}. See the worker's output"))

    def _add(self, failure: RankFailure, error: Exception) -> None:
        self._failed_at = self._failed_at or time.monotonic()
        self._failures.append(failure)
        self._errors.setdefault(failure.rank, error)

    def _raise_cause(self) -> None:
        """Raise the error of the rank that failed first, unless a later failure of another rank may be the cause."""
        culprit = choose_culprit(self._failures)
        living = [rank for number in self._pending for rank in self._ranks_of(number)]
        waits_until = self._failed_at + waiting_time(self._failures, living)
        if culprit is None and (not living or time.monotonic() >= waits_until):
            culprit = follow_names(self._failures)[0]
        if culprit is not None:
            raise self._errors[culprit.rank]
