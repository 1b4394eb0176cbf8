"""Compare the time of a call of `paceline.rpc` with `torch.distributed.rpc` (TensorPipe), in turns on one machine.

    python benchmarks/rpc.py [--rounds 15] [--calls 200] [--json]

Each library has two processes: one makes calls, and the other replies. In each round, both libraries make the same
calls, one library after the other. The table has the median of the rounds' medians, and the median of the rounds'
ratios. Other programs on the machine hardly change the ratios. The tensors are float32 on the CPU. Needs torch.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

KINDS = ("paceline", "torch")
CASES = {
    "empty call": ("nothing", 0, 1),
    "1 KB tensor": ("take", 1 << 8, 1),
    "1 MB tensor": ("take", 1 << 18, 1),
    "1 MB there and back": ("give_back", 1 << 18, 1),
    "100 empty calls at once": ("nothing", 0, 100),
}
GOALS = {"empty call": 0.35, "1 MB tensor": 0.6}


def nothing() -> None:
    """Do nothing."""


def take(tensor: Any) -> None:
    """Accept a tensor."""


def give_back(tensor: Any) -> Any:
    """Return a tensor."""
    return tensor


def run_worker(kind: str, rank: int, port: int) -> None:
    """Run one process of a library. Rank 0 runs the cases from standard input, one per line."""
    import torch

    torch.set_num_threads(1)
    if kind == "paceline":
        from paceline import rpc

        rpc.init_rpc(f"worker{rank}", rank, 2, address=f"127.0.0.1:{port}", allow=["__main__"])
    else:
        warnings.simplefilter("ignore")
        from torch.distributed import rpc  # type: ignore[no-redef]

        options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        serve_cases(rpc)
    rpc.shutdown()


def serve_cases(rpc: Any) -> None:
    """Run the cases from standard input, and print the median seconds of each."""
    import torch

    functions: dict[str, Callable[..., Any]] = {"nothing": nothing, "take": take, "give_back": give_back}
    print("ready", flush=True)
    for line in sys.stdin:
        case, calls = json.loads(line)
        name, elements, at_once = CASES[case]
        args = (torch.ones(elements),) if elements else ()
        taken = []
        for _ in range(max(calls // at_once, 3)):
            start = time.perf_counter()
            if at_once == 1:
                rpc.rpc_sync("worker1", functions[name], args=args)
            else:
                for future in [rpc.rpc_async("worker1", functions[name], args=args) for _ in range(at_once)]:
                    future.wait()
            taken.append(time.perf_counter() - start)
        print(json.dumps(statistics.median(taken)), flush=True)


class Processes:
    """The two processes of one library."""

    def __init__(self, kind: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        self._all = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", kind, str(rank), str(port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if kind == "paceline" else subprocess.DEVNULL,
                env=environment,
                text=True,
            )
            for rank in range(2)
        ]
        self._caller = self._all[0]

    def wait_ready(self) -> None:
        """Wait until both processes are connected."""
        assert self._caller.stdout is not None
        if self._caller.stdout.readline() != "ready\n":
            sys.exit("rpc.py: the processes did not start; see their output above")

    def measure(self, case: str, calls: int) -> float:
        """Return the median seconds of a call, or of a group of concurrent calls."""
        assert self._caller.stdin is not None
        assert self._caller.stdout is not None
        self._caller.stdin.write(json.dumps([case, calls]) + "\n")
        self._caller.stdin.flush()
        return float(self._caller.stdout.readline())

    def close(self) -> None:
        """End both processes."""
        for process in self._all:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._all:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=200, help="calls of each case in a round")
    parser.add_argument("--json", action="store_true", help="one JSON object per case")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        run_worker(options.worker[0], int(options.worker[1]), int(options.worker[2]))
        return
    if options.rounds < 1 or options.calls < 1:
        parser.error("expected at least 1 round and 1 call")
    processes = {kind: Processes(kind) for kind in KINDS}
    try:
        for pair in processes.values():
            pair.wait_ready()
        if not options.json:
            print(f"{'':<24}{'paceline µs':>12}{'torch µs':>12}{'ratio':>8}{'goal':>8}   {options.rounds} rounds")
        for case in CASES:
            rounds = []
            for _ in range(options.rounds + 1):
                rounds.append({kind: processes[kind].measure(case, options.calls) for kind in KINDS})
            show(case, rounds[1:], is_json=options.json)
    finally:
        for pair in processes.values():
            pair.close()


def show(case: str, rounds: list[dict[str, float]], *, is_json: bool) -> None:
    """Print one case."""
    paceline_us, torch_us = (statistics.median(times[kind] for times in rounds) * 1e6 for kind in KINDS)
    ratio = statistics.median(times["paceline"] / times["torch"] for times in rounds)
    if is_json:
        print(json.dumps({"case": case, "paceline_us": paceline_us, "torch_us": torch_us, "ratio": ratio}), flush=True)
    else:
        goal = f"{GOALS[case]:>8}" if case in GOALS else ""
        print(f"{case:<24}{paceline_us:>12.1f}{torch_us:>12.1f}{ratio:>8.3f}{goal}", flush=True)


if __name__ == "__main__":
    main()
