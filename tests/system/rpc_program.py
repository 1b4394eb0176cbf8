"""The program of the ranks in `test_rpc_examples`: all examples, and then two ranks that fail."""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from datetime import timedelta
from pathlib import Path

from paceline import rpc
from paceline.errors import ConnectionLostError, RankLostError

EXAMPLES = Path(__file__).parents[2] / "examples"
RANK = int(os.environ["RANK"])
_HOLDING: list[object] = []


def run(name: str, *arguments: str) -> None:
    """Run an example as the main program."""
    sys.argv = [name, "--json", *arguments]
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def die() -> None:
    """End this process in the middle of a call."""
    os._exit(0)


def hold(value: object) -> None:
    """Keep the value alive."""
    _HOLDING.append(value)


def counts() -> int:
    """Return the number of objects that this process holds."""
    return rpc.running.current_agent().table.num_owned


def kill_worker() -> None:
    """End the process of a worker that holds one object and owns another object."""
    rpc.init_rpc(f"worker{RANK}", allow=[__name__], timeout=timedelta(seconds=60))
    report: dict[str, object] = {}
    if RANK == 0:
        remote_dict: rpc.RRef[dict[str, int]] = rpc.remote("worker2", "rpc_program:dict_of", ({"x": 1},))
        assert remote_dict.to_here() == {"x": 1}
        rpc.rpc_sync("worker2", hold, (rpc.RRef([1]),))
        held = counts()
        start = time.monotonic()
        try:
            rpc.rpc_sync("worker2", die)
        except ConnectionLostError as error:
            report["call"] = str(error)
        try:
            remote_dict.to_here()
        except ConnectionLostError as error:
            report["to_here"] = str(error)
        while counts() and time.monotonic() < start + 20:
            time.sleep(0.01)
        report["held"] = [held, counts()]
        report["quick"] = time.monotonic() - start < 20
    try:
        rpc.shutdown()
    except RankLostError as error:
        report["shutdown"] = str(error)
    print(json.dumps({"rank": RANK, **report}))


def dict_of(value: dict[str, int]) -> dict[str, int]:
    """Return the value."""
    return value


if __name__ == "__main__":
    sys.modules["rpc_program"] = sys.modules["__main__"]
    __name__ = "rpc_program"
    for function in (die, hold, dict_of):
        function.__module__ = "rpc_program"
    run("rpc_parameter_server.py", "--steps", "40")
    run("rpc_batch.py", "--steps", "15")
    run("rpc_pipeline.py", "--steps", "12")
    kill_worker()
