"""One rank of the program in `test_collectives_processes`: run a scenario, and print the result as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import numpy as np

from paceline import collectives
from paceline.collectives import Group
from paceline.errors import GroupClosedError, MismatchError, PacelineError


def report(event: str, **more: Any) -> None:
    print(json.dumps({"event": event, "at": time.monotonic(), **more}), flush=True)


def wait_for_the_end() -> None:
    sys.stdin.read()


def loop(group: Group) -> None:
    array = np.ones(int(os.environ.get("ITEMS", "5000000")), np.float32)
    for turn in range(1_000_000):
        group.all_reduce(array, "max", out=array)
        if turn == 1:
            report("loops")


def leaves_early(group: Group) -> None:
    for turn in range(100):
        if turn == 10 and group.rank == 1:
            return
        group.all_reduce(np.ones(1000))


def exits_early(group: Group) -> None:
    leaves_early(group)
    report("exits")
    sys.stdout.flush()
    sys.exit(0)


def never_calls(group: Group) -> None:
    group.barrier()
    if group.rank == 1:
        wait_for_the_end()
    else:
        group.all_reduce(np.ones(1000))


def calls_another(group: Group) -> None:
    group.barrier()
    if group.rank == 1:
        group.broadcast(np.ones((3, 4), np.int32), root=2)
    else:
        group.all_reduce(np.ones(1000))


def works(group: Group) -> None:
    for items in (4096, 1 << 20):
        for turn in range(int(os.environ["TURNS"])):
            array = np.full(items, turn + group.rank, np.float32)
            group.all_reduce(array, out=array)
            assert (array == group.size * turn + group.size * (group.size - 1) // 2).all()
    assert group.all_gather_objects(group.rank) == list(range(group.size))
    ticket = group.send_async(np.array([group.rank]), (group.rank + 1) % group.size)
    got = np.zeros(1, np.int64)
    group.recv(got)
    ticket.wait()
    assert got[0] == (group.rank - 1) % group.size


def main(scenario: str) -> None:
    start = time.monotonic()
    try:
        group = collectives.init(timeout=timedelta(seconds=float(os.environ.get("TIMEOUT", "30"))))
    except PacelineError as error:
        report("not joined", kind=type(error).__name__, text=str(error))
        return
    report("joined", took=time.monotonic() - start)
    try:
        globals()[scenario](group)
    except (PacelineError, KeyboardInterrupt) as error:
        report("raised", kind=type(error).__name__, text=str(error), ranks=getattr(error, "ranks", None))
        try:
            with contextlib.suppress(MismatchError):  # an interrupt between two calls does not close the group
                group.barrier()
            group.barrier()
        except GroupClosedError:
            report("refuses")
        if os.environ.get("STAY"):
            wait_for_the_end()
    group.close()
    other_threads = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    for thread in other_threads:  # a rank may still wait a second or two for the reply of a stopped rank
        thread.join(5.0)
    report("closed", threads=[thread.name for thread in other_threads if thread.is_alive()])


if __name__ == "__main__":
    main(sys.argv[1])
