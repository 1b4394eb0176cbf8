"""Fork failing ranks for `test_collective_failures`: read cases as JSON lines, print the errors of the ranks."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import numpy as np

from paceline.collectives import Group, join
from paceline.errors import GroupClosedError, PacelineError
from paceline.meeting.rendezvous import rendezvous
from paceline.testing.ranks import StoreOfOneHost

TIMEOUT_S = 3.0
_SMALL, _LARGE = 8, 1 << 18


def _chain(group: Group) -> None:
    """Receive from the next rank in a ring, so that all ranks wait for the victim through other ranks.

    If the victim is rank 0, receive from the previous rank.
    """
    before = group.rank + 1 if VICTIM else group.rank - 1
    group.recv(np.zeros(1), before % group.size, tag=7)


def _ping_pong(group: Group) -> None:
    for _ in range(3):
        group.send(np.zeros(1), VICTIM, tag=group.rank)
        group.recv(np.zeros(1), VICTIM, tag=group.rank)


OPERATIONS: dict[str, Callable[[Group], Any]] = {
    "barrier": lambda group: group.barrier(),
    "all_reduce": lambda group: group.all_reduce(np.ones(_SMALL)),
    "all_reduce, large": lambda group: group.all_reduce(np.ones(_LARGE)),
    "all_reduce, async": lambda group: group.all_reduce_async(np.ones(_SMALL)).result(),
    "reduce": lambda group: group.reduce(np.ones(_LARGE), root=1),
    "reduce_scatter": lambda group: group.reduce_scatter(np.ones(12 * _SMALL)),
    "broadcast": lambda group: group.broadcast(np.ones(_LARGE), root=1),
    "all_gather": lambda group: group.all_gather(np.ones(_SMALL)),
    "gather": lambda group: group.gather(np.ones(_SMALL), root=1),
    "scatter": lambda group: group.scatter(
        np.ones(12 * _SMALL) if group.rank == 1 else None, np.ones(12 // group.size * _SMALL), root=1
    ),
    "all_to_all": lambda group: group.all_to_all(np.ones(12 * _SMALL)),
    "all_gather_objects": lambda group: group.all_gather_objects({"rank": group.rank}),
    "send": lambda group: group.send(np.zeros(10 << 20), VICTIM),
    "recv": lambda group: group.recv(np.zeros(1), VICTIM),
    "recv from any": lambda group: group.recv(np.zeros(1)),
    "recv in a chain": _chain,
    "send and recv": _ping_pong,
    "split": lambda group: group.split(0),
    "subgroup": lambda group: group.subgroup(range(group.size)),
}
VICTIM = 0


def _fail(failure: str, operation: str, group: Group) -> None:
    if failure == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif failure == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif failure == "raises":
        raise ZeroDivisionError
    elif failure == "calls another":
        (group.barrier if operation != "barrier" else lambda: group.all_reduce(np.ones(3)))()
    signal.pause()  # this rank does not make the call


def _rank(case: dict[str, Any], rank: int, port: int) -> dict[str, Any]:
    global VICTIM
    VICTIM = case["victim"]
    size, hosts = case["size"], case["hosts"]
    meeting = rendezvous(rank, size, f"127.0.0.1:{port}", "a token for tests", 30.0)
    vars(meeting.store)["_answer_s"] = TIMEOUT_S
    store = meeting.store if hosts is None else StoreOfOneHost(meeting.store, rank, hosts)
    timeout = timedelta(seconds=TIMEOUT_S)
    with join(store, rank, size, token=meeting.token, timeout=timeout, algorithm=case["algorithm"]) as group:
        for _ in range(2):
            group.all_reduce(np.ones(_SMALL))
        if rank == VICTIM:
            _fail(case["failure"], case["operation"], group)
        start = time.monotonic()
        try:
            for _ in range(2):  # twice, because a rank that only sends may complete the first call
                OPERATIONS[case["operation"]](group)
            group.barrier()
        except PacelineError as error:
            answer = {
                "rank": rank,
                "kind": type(error).__name__,
                "text": str(error),
                "ranks": list(getattr(error, "ranks", ())),
                "after_s": time.monotonic() - start,
                "refuses": [_refusal(group.barrier), _refusal(lambda: group.send(np.zeros(1), VICTIM))],
            }
        else:
            answer = {"rank": rank, "kind": "", "text": "received no error"}
        time.sleep(0.7)  # the timeout must detect the death, not the closed connection
        return answer


def _refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except GroupClosedError as error:
        return str(error)
    except PacelineError as error:
        return f"not refused, but {type(error).__name__}: {error}"
    return "not refused"


def _child(case: dict[str, Any], rank: int, port: int, pipe: int) -> NoReturn:
    try:
        os.write(pipe, json.dumps(_rank(case, rank, port)).encode() + b"\n")
    except ZeroDivisionError:
        pass
    except BaseException as error:
        os.write(pipe, json.dumps({"rank": rank, "kind": "", "text": repr(error)}).encode() + b"\n")
    finally:
        os._exit(0)


def _run(cases: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Run all of these cases concurrently."""
    started = []
    for case in cases:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        reading, writing = os.pipe()
        children = []
        for rank in range(case["size"]):
            child = os.fork()
            if not child:
                _child(case, rank, port, writing)
            children.append(child)
        os.close(writing)
        started.append((children, case, reading))
    results = []
    for children, case, reading in started:
        deadline = time.monotonic() + 60.0
        with os.fdopen(reading) as lines:
            expected = case["size"] - 1
            answers: list[dict[str, Any]] = []
            killer = threading.Timer(deadline - time.monotonic(), _kill, [children])
            killer.start()
            for line in lines:
                answers.append(json.loads(line))
                if len([answer for answer in answers if answer["rank"] != case["victim"]]) == expected:
                    break
            killer.cancel()
            killer.join()
        _kill(children)
        for child in children:
            os.waitpid(child, 0)
        results.append([answer for answer in answers if answer["rank"] != case["victim"]])
    return results


def _kill(children: list[int]) -> None:
    for child in children:
        os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    from paceline.testing import run_ranks

    # the children inherit the kernels that are compiled here
    run_ranks(2, lambda group: group.all_reduce(np.ones(_LARGE)))
    gc.freeze()  # the garbage collector of a child must not visit shared objects, because this would copy them
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)
