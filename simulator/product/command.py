"""``python -m simulator --product``: many seeds, and how to replay what failed."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from typing import Final

from paceline.launch import prepare_kernels
from simulator.product.cluster import ProductCluster, ProductOutcome
from simulator.product.faults import KINDS
from simulator.seeds import outcomes, replay

_CHUNK: Final = 10


def run_product(seeds: range, faults: tuple[str, ...], options: argparse.Namespace) -> int:
    """Run; return the exit status: 0, or 1 if a guarantee did not hold."""
    prepare_kernels()
    began_s = time.perf_counter()
    fired: Counter[str] = Counter()
    num_failed = num_pushes = num_reads = num_compared = 0
    for outcome in outcomes(_play, seeds, faults, options, chunk=_CHUNK, initializer=_keep_the_baton):
        fired += outcome.fired
        num_pushes += outcome.num_pushes
        num_reads += outcome.num_reads
        num_compared += outcome.num_compared
        if outcome.violation is not None:
            num_failed += 1
            print(
                f"seed {outcome.seed}: {outcome.violation}\n  {replay(outcome.seed, faults, KINDS, options)}",
                flush=True,
            )
    took_s = time.perf_counter() - began_s
    print(f"{'fault':16} {'fired':>9}")
    for kind in faults:
        print(f"{kind:16} {fired[kind]:9}")
    print(f"{len(seeds)} seeds, {num_pushes} pushes, {num_reads} reads and {num_compared} buckets checked")
    print(f"{took_s:.1f} s: {took_s / len(seeds):.2f} s per run")
    print(f"{num_failed} violations")
    return 1 if num_failed else 0


def _play(seeds: range, faults: tuple[str, ...], options: argparse.Namespace) -> list[ProductOutcome]:
    number, trace = options.num_faults, print if options.trace else None
    return [ProductCluster(seed, faults=faults, num_faults=number, trace=trace).run() for seed in seeds]


def _keep_the_baton() -> None:
    sys.setswitchinterval(1.0)  # whoever has it runs until it hands it on
