"""Compare the time of every kernel with its NumPy reference, on the cases of the tests.

    python -m benchmarks.kernels [--json] [--only WORD] [--rounds N]

Each line is one case. It shows the median time of the kernel and of its reference, and the kernel's time per item (a
key, an element, a stored pair). Kernels use one thread and warm memory. A call may change its arguments, which are not
restored before the next call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np
from tests.reference import filter_cases, rule_cases
from tests.reference.kernel_cases import ARRAY_CASES
from tests.reference.rule_cases import SPARSE_CASES, SparseCase

from paceline.tables.compile import compile_kernels, is_compiled

_BUDGET_S = 0.2  # limit of a measurement's time after the first round


@dataclass
class Result:
    case: str
    num_items: int
    kernel_s: float
    reference_s: float | None
    ns_per_item: float


def median_s(call: Callable[[], object], rounds: int) -> float:
    """Return the median time of a call, over at most `rounds` calls."""
    times: list[float] = []
    call()
    while len(times) < rounds and (sum(times) < _BUDGET_S or len(times) < 3):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def make_result(
    case: str, num_items: int, kernel: Callable[[], object], twin: Callable[[], object] | None, rounds: int
) -> Result:
    kernel_s = median_s(kernel, rounds)
    reference_s = None if twin is None else median_s(twin, 3)
    return Result(case, num_items, kernel_s, reference_s, 1e9 * kernel_s / num_items)


def array_results(only: str, rounds: int) -> Iterator[Result]:
    for case in (*ARRAY_CASES, *rule_cases.ARRAY_CASES, *filter_cases.ARRAY_CASES):
        if only in case.label:
            kernel_arguments, twin_arguments = case.arguments(), case.arguments()
            yield make_result(
                case.label,
                case.num_items,
                lambda case=case, kernel_arguments=kernel_arguments: case.kernel(*kernel_arguments),  # type: ignore[misc]
                lambda case=case, twin_arguments=twin_arguments: case.twin(*twin_arguments),  # type: ignore[misc]
                rounds,
            )


def sparse_results(only: str, rounds: int) -> Iterator[Result]:
    for case in SPARSE_CASES:
        if only in case.label:
            yield from table_results(case, rounds)


def table_results(case: SparseCase, rounds: int) -> Iterator[Result]:
    """Yield measurements of filling a table, of pulls and of pushes."""
    keys, batch, grads = case.batches()
    all_grads, out = np.resize(grads, len(keys) * case.dim), np.empty_like(grads)
    store, twin = case.store(), case.twin()
    start = time.perf_counter()
    store.push(keys, all_grads)
    insert_s = time.perf_counter() - start
    yield Result(f"{case.label}: insert all", len(keys), insert_s, None, 1e9 * insert_s / len(keys))
    pull: Callable[[], object] | None = None
    push: Callable[[], object] | None = None
    if case.num_rows <= 5000:  # with more rows, filling the dictionary takes minutes
        twin.push(keys, all_grads)
        pull, push = lambda: twin.gather(batch, out), lambda: twin.push(batch, grads)
    yield make_result(f"{case.label}: pull", len(batch), lambda: store.pull(batch, out), pull, rounds)
    yield make_result(f"{case.label}: push", len(batch), lambda: store.push(batch, grads), push, rounds)


def format_time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1e6 * seconds:.1f} µs" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--only", default="", metavar="WORD", help="only cases whose name contains WORD")
    parser.add_argument("--rounds", type=int, default=50, help="calls per kernel, at most (default 50)")
    arguments = parser.parse_args()
    if not is_compiled():
        print("compiling kernels, once", file=sys.stderr)
    compile_kernels()
    if not arguments.json:
        print(f"{'case':52} {'items':>8} {'kernel':>11} {'reference':>11} {'ratio':>7} {'ns/item':>9}")
    for results in (array_results, sparse_results):
        for result in results(arguments.only, arguments.rounds):
            if arguments.json:
                print(json.dumps(asdict(result)), flush=True)
                continue
            ratio = "-" if result.reference_s is None else f"{result.reference_s / result.kernel_s:.1f}"
            times = f"{format_time(result.kernel_s):>11} {format_time(result.reference_s):>11}"
            print(f"{result.case:52} {result.num_items:>8} {times} {ratio:>7} {result.ns_per_item:>9.2f}")


if __name__ == "__main__":
    main()
