"""``python -m paceline.simulation --product``: many seeds, and how to replay what failed."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Final

from paceline.launch import prepare_kernels
from paceline.simulation.product.cluster import Cluster, Outcome
from paceline.simulation.product.faults import KINDS

_CHUNK: Final = 10


def run_product(seeds: Sequence[int], faults: tuple[str, ...], options: argparse.Namespace) -> int:
    """Run; return the exit status: 0, or 1 if a guarantee did not hold."""
    prepare_kernels()
    began_s = time.perf_counter()
    fired: Counter[str] = Counter()
    num_failed = num_pushes = num_reads = num_compared = 0
    for outcome in _outcomes(seeds, faults, options):
        fired += outcome.fired
        num_pushes += outcome.num_pushes
        num_reads += outcome.num_reads
        num_compared += outcome.num_compared
        if outcome.violation is not None:
            num_failed += 1
            print(f"seed {outcome.seed}: {outcome.violation}\n  {_replay(outcome.seed, faults, options)}", flush=True)
    took_s = time.perf_counter() - began_s
    print(f"{'fault':16} {'fired':>9}")
    for kind in faults:
        print(f"{kind:16} {fired[kind]:9}")
    print(f"{len(seeds)} seeds, {num_pushes} pushes, {num_reads} reads and {num_compared} buckets checked")
    print(f"{took_s:.1f} s: {took_s / len(seeds):.2f} s per run")
    print(f"{num_failed} violations")
    return 1 if num_failed else 0


def _replay(seed: int, faults: tuple[str, ...], options: argparse.Namespace) -> str:
    words = ["python -m paceline.simulation --product --trace --seeds", str(seed)]
    if faults != KINDS:
        words.append(f"--faults {','.join(faults)}" if faults else "--faults=")
    if options.num_faults is not None:
        words.append(f"--num-faults {options.num_faults}")
    return " ".join(words)


def _outcomes(seeds: Sequence[int], faults: tuple[str, ...], options: argparse.Namespace) -> Iterator[Outcome]:
    number = options.num_faults
    if options.jobs == 1 or options.trace:
        for seed in seeds:
            yield Cluster(seed, faults=faults, num_faults=number, trace=print if options.trace else None).run()
        return
    chunks = [(seeds[at : at + _CHUNK], faults, number) for at in range(0, len(seeds), _CHUNK)]
    with ProcessPoolExecutor(options.jobs) as pool:
        for outcomes in pool.map(_run, *zip(*chunks, strict=True)):
            yield from outcomes


def _run(seeds: Sequence[int], faults: tuple[str, ...], num_faults: int | None) -> list[Outcome]:
    sys.setswitchinterval(1.0)  # whoever has the baton runs until it hands it on
    return [Cluster(seed, faults=faults, num_faults=num_faults).run() for seed in seeds]
