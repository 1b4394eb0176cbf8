"""Run a function on Dask's workers, with one task per node, and collect the results and failures of the tasks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

from typing_extensions import override

from paceline.closing import Closing
from paceline.environment import Timeout, timedelta_of
from paceline.errors import PeerError, UsageError, first_line

try:
    from distributed import Client, Future
    from distributed.comm import get_address_host
except ImportError as error:
    raise ImportError("paceline.dask needs Dask, which is not installed: pip install 'paceline[dask]'") from error

from paceline.dask.node import run_dask_task, running_tasks
from paceline.launch.engines.placement import Placement
from paceline.launch.functions.call import END_S, RankResults, make_call
from paceline.launch.functions.node import FunctionCall

_T = TypeVar("_T")

_POLL_S: Final = 0.05
_CHECK_S: Final = 0.5
"""Time between two requests for the list of living workers."""


def run(
    client: Client,
    function: Callable[..., _T],
    *arguments: Any,
    num_nodes: int | None = None,
    workers: Sequence[str] | None = None,
    nproc_per_node: int = 1,
    strategy: str | None = None,
    servers: int | None = None,
    timeout: Timeout = timedelta(minutes=1),
) -> list[_T]:
    """Call ``function(*arguments)`` on every rank of a run; return the values of all ranks, by rank.

    Each Dask worker is a node with `nproc_per_node` ranks, which are new processes. In the function,
    ``paceline.torch.strategy()`` and ``paceline.collectives.init()`` work as under ``paceline run``.

    - `num_nodes`: number of workers; default: all.
    - `workers`: the addresses of the workers, default: all of the cluster. The first worker has the first ranks.
    - `strategy`, `servers`: the options of ``paceline run``.
    - `timeout`: time limit (a timedelta, or seconds) until these workers exist and each has started its part.

    If a rank raises, the call raises the same exception. The cause of this exception is a PeerError with the rank, the
    worker and the traceback. Raises PeerError if a rank or a worker dies, and UsageError for wrong arguments. All
    processes of the run end with the call, with the client, or with their worker.
    """
    if not isinstance(client, Client) or client.asynchronous:
        raise UsageError(f"got the client {client!r}, expected a distributed.Client that is not asynchronous")
    deadline = time.monotonic() + timedelta_of(timeout).total_seconds()
    nodes = _wait_workers(client, num_nodes, workers, deadline)
    call = make_call(
        function,
        arguments,
        num_nodes=len(nodes),
        nproc_per_node=nproc_per_node,
        strategy=strategy,
        servers=servers,
    )
    _check_versions(client, nodes)
    with _DaskRun(client, nodes, call) as started:
        return started.wait_values(deadline)


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

    def __init__(self, client: Client, nodes: Sequence[str], call: FunctionCall) -> None:
        self._client, self._nodes = client, nodes
        self._results = RankResults([f"Dask worker {node}" for node in nodes], call.num_ranks)
        self._pending: dict[int, Future] = {}
        self._checks_at = 0.0
        addresses = [get_address_host(node) for node in nodes]
        for number, node in enumerate(nodes):
            placement, key = Placement.on_nodes(addresses, number, call.job), f"paceline-{call.job}-{number}"
            self._pending[number] = client.submit(
                run_dask_task, call, placement, key=key, workers=[node], allow_other_workers=False, retries=0
            )

    def wait_values(self, deadline: float) -> list[Any]:
        """Return the values of all ranks.

        Raises the error of the rank that failed first, and UsageError if a task has not started at the deadline.
        """
        waiting = {*self._pending}
        while self._pending:
            self._take_ended()
            if not self._results.raise_cause() and waiting:
                running = self._find_running()
                waiting = {number for number in waiting & {*self._pending} if self._pending[number].key not in running}
                if waiting and time.monotonic() >= deadline:
                    nodes = ", ".join(self._nodes[number] for number in sorted(waiting))
                    raise UsageError(
                        f"Dask workers have not started their part of the run: {nodes}. They run other tasks, or have "
                        "ended. Pass a longer timeout or other workers"
                    )
            time.sleep(_POLL_S)
        return self._results.load_values()

    @override
    def close(self) -> None:
        if self._pending:
            keys = {future.key for future in self._pending.values()}
            self._client.cancel([*self._pending.values()], force=True)
            self._pending = {}
            deadline = time.monotonic() + END_S
            while keys & self._find_running() and time.monotonic() < deadline:
                time.sleep(_POLL_S)

    def _find_running(self) -> set[str]:
        """Return the keys of the tasks that run on the workers."""
        living = [node for node in _find_living(self._client) if node in self._nodes]
        found = self._client.run(running_tasks, workers=living, on_error="ignore") if living else {}
        return {key for keys in found.values() for key in keys}

    def _take_ended(self) -> None:
        """Record nodes that have finished, and nodes whose task or Dask worker has failed."""
        living = None
        if time.monotonic() >= self._checks_at:
            living, self._checks_at = _find_living(self._client), time.monotonic() + _CHECK_S
        for number, future in [*self._pending.items()]:
            is_done = future.done()
            if is_done and future.status == "finished":
                self._results.add_end(number, *future.result())
            elif is_done or (living is not None and self._nodes[number] not in living):
                reason = first_line(future.exception()) if future.status == "error" else "it has ended"
                self._results.add_loss(number, reason)
            if is_done:
                del self._pending[number]
