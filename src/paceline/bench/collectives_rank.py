"""Run one rank of ``bench collectives``: ``python -m paceline.bench.collectives_rank PLAN HOST:PORT FOLDER``.

The rank uses all libraries in turn. Rank 0 measures and reports on standard output, one JSON object per line:
``{"absent": …, "why": …}``, ``{"size": …}`` before the measurements of a message size, ``{"measured": [ … ]}`` after
them, and finally ``{"done": true}``. Any rank reports ``{"error": …}`` and then ends immediately.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from paceline.bench.buffers import Buffers
from paceline.bench.peers import MAKERS, TIMEOUT, Library, PacelineLibrary
from paceline.bench.plan import PACELINE, ROUNDS, BenchPlan, Measurement
from paceline.collectives import Group, init
from paceline.environment import environment
from paceline.errors import PacelineError, PeerError, UsageError, first_line
from paceline.launch.supervisor import watch_parent
from paceline.transport import register_type

_BUDGET_S = 0.7
"""Time for all rounds of one size and peer."""
_MOST_REPETITIONS = 2000
"""Limit for one round."""
_MOST_WARM_UPS = 50
_NUM_TRIED = 3


def main() -> int:
    """Run the plan (first argument) with the ranks at the address (second argument). Return the exit status.

    The third argument is the folder of temporary files. The driver removes it at the end, unless it is killed.
    """
    variables = environment()
    plan = msgspec.json.decode(sys.argv[1], type=register_type(BenchPlan))
    # mpirun passes its standard input to rank 0 only, and ends the other ranks after rank 0.
    if "mpi" not in plan.peers or variables.rank == 0:
        watch_parent(_end_orphaned)
    try:
        with init(address=sys.argv[2], timeout=TIMEOUT, algorithm=plan.algorithm) as group:
            _measure_all(plan, group)
    except Exception as error:  # a library may raise any error, which the command reports in one sentence
        text = str(error) if isinstance(error, PacelineError) else f"rank {variables.rank}: {first_line(error)}"
        _report({"error": text, "usage": isinstance(error, UsageError)})
        # Do not return, because the measured libraries' cleanup would wait for ranks that are in other calls.
        os._exit(1)
    return 0


def _end_orphaned() -> None:
    shutil.rmtree(sys.argv[3], ignore_errors=True)
    os._exit(1)


def _measure_all(plan: BenchPlan, group: Group) -> None:
    peers = _join_peers(plan, group)
    for size in plan.sizes:
        if group.rank == 0:
            _report({"size": size})
        measured = _measure(plan, size, peers, group)
        if group.rank == 0:
            _report({"measured": [dataclasses.asdict(result) for result in measured]})
    group.barrier()
    for peer in peers:
        peer.close()
    if group.rank == 0:
        _report({"done": True})
    group.barrier()


def _join_peers(plan: BenchPlan, group: Group) -> list[Library]:
    """Connect to all libraries. A library that fails on one rank is omitted on all ranks."""
    peers: list[Library] = [PacelineLibrary(group)]
    for name in plan.peers:
        if name == PACELINE:
            continue
        peer, why = None, "another rank could not join"
        try:
            peer = MAKERS[name](group)
        except Exception as error:  # report the error, and measure the other peers
            why = first_line(error)
        if group.all_reduce(np.array([peer is not None]), "min")[0]:
            assert peer is not None
            peers.append(peer)
        elif group.rank == 0:
            _report({"absent": name, "why": why})
    return peers


def _measure(plan: BenchPlan, size: int, peers: list[Library], group: Group) -> list[Measurement]:
    buffers = Buffers(plan.op, size, plan.dtype, group.rank, group.size)
    calls = [peer.prepare(plan.op, buffers) for peer in peers]
    for peer, call in zip(peers, calls, strict=True):
        _check(plan, size, peer, call, buffers, group)
    buffers.clear()
    repetitions = [_choose_repetitions(call, group) for call in calls]
    times: list[list[float]] = [[] for _ in peers]
    for number in range(ROUNDS):
        for turn in range(len(peers)):
            # Each round begins with another library, so that the order of the libraries varies.
            i = (turn + number) % len(peers)
            times[i] += _time_batch(calls[i], repetitions[i], group)
    algorithm = _algorithm(plan.op, size, group)
    return [
        _summarize(plan, size, peer.name, algorithm if peer.name == PACELINE else "", durations)
        for peer, durations in zip(peers, times, strict=True)
    ]


def _check(
    plan: BenchPlan, size: int, peer: Library, call: Callable[[], object], buffers: Buffers, group: Group
) -> None:
    """Run the operation on known values. Raises PeerError for a wrong result on this rank."""
    buffers.fill()
    group.barrier()
    call()
    if not buffers.is_right():
        raise PeerError(f"{peer.name} gave a wrong result for {plan.op} of {size} bytes on rank {group.rank}")
    group.barrier()


def _choose_repetitions(call: Callable[[], object], group: Group) -> int:
    """Return the number of calls per round, which rank 0 chooses."""
    tried = _time_batch(call, _NUM_TRIED, group)
    wanted = int(_BUDGET_S / ROUNDS / float(np.median(tried)))
    return int(group.broadcast(np.array([min(max(wanted, 1), _MOST_REPETITIONS)], np.int64))[0])


def _time_batch(call: Callable[[], object], repetitions: int, group: Group) -> list[float]:
    """Return the seconds of each call. The ranks start together, and do not measure the first few calls."""
    group.barrier()
    for _ in range(min(repetitions // 10 + 1, _MOST_WARM_UPS)):
        call()
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def _algorithm(op: str, size: int, group: Group) -> str:
    """Return the algorithm that the group chooses: the line with a star in the group's explanation."""
    if op == "barrier":
        return ""
    found = re.search(r"^\* (\S+)", group.explain(size, op), re.MULTILINE)
    return found.group(1) if found else ""


def _summarize(plan: BenchPlan, size: int, peer: str, algorithm: str, times: list[float]) -> Measurement:
    low, median, high = (round(float(value) * 1e6, 2) for value in np.percentile(times, (25, 50, 75)))
    return Measurement(
        op=plan.op,
        bytes=size,
        ranks=plan.ranks,
        peer=peer,
        algorithm=algorithm,
        median_us=median,
        low_us=low,
        high_us=high,
    )


def _report(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    sys.exit(main())
