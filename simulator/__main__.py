"""``python -m simulator``: many seeds, a table of the faults that fired, and how to replay what failed."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from simulator.cluster import Cluster, Outcome
from simulator.faults import FOLLOWING, KINDS
from simulator.seeds import outcomes, replay

_CHUNK = 50


def main(arguments: list[str] | None = None) -> int:
    """Run; return the exit status: 0, 1 if a guarantee did not hold, 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m simulator", description=__doc__)
    parser.add_argument("--seeds", default="0:1000", help="FIRST:END, or one seed (default: %(default)s)")
    parser.add_argument("--faults", help="kinds that may happen, by commas (default: all)")
    parser.add_argument(
        "--product",
        action="store_true",
        help="the product's own servers, scheduler and clients instead of the protocol",
    )
    parser.add_argument("--num-faults", type=int, help="how many are drawn for each seed (default: 0 to 8)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--trace", action="store_true", help="print every frame that arrives")
    parser.add_argument(
        "--may-lose", action="store_true", help="let more servers fail than chains can bear; cuts no cable"
    )
    options = parser.parse_args(arguments)
    kinds = _kinds(options.product)
    first, _, end = options.seeds.partition(":")
    faults = kinds if options.faults is None else tuple(kind for kind in options.faults.split(",") if kind)
    if not first.isdecimal() or (end and not end.isdecimal()):
        parser.error(f"--seeds {options.seeds}: expected FIRST:END, such as 0:1000, or one number")
    if unknown := [kind for kind in faults if kind not in kinds]:
        parser.error(f"--faults: {unknown[0]!r} is no kind of fault: expected some of {', '.join(kinds)}")
    if options.product and options.may_lose:
        parser.error("--may-lose is for the cores: leave --product out")
    seeds = range(int(first), int(end) if end else int(first) + 1)
    if options.product:
        from simulator.product.command import run_product

        return run_product(seeds, faults, options)
    began_s = time.perf_counter()
    fired: Counter[str] = Counter()
    failed: list[Outcome] = []
    num_events = num_reads = num_pushes = num_lost = 0
    for outcome in outcomes(_play, seeds, faults, options, chunk=_CHUNK):
        fired += outcome.fired
        num_events += outcome.num_events
        num_reads += outcome.num_reads
        num_pushes += outcome.num_pushes
        num_lost += bool(outcome.lost)
        if outcome.violation is not None:
            failed.append(outcome)
            print(
                f"seed {outcome.seed}: {outcome.violation}\n  {replay(outcome.seed, faults, KINDS, options)}",
                flush=True,
            )
    took_s = time.perf_counter() - began_s
    print(f"{'fault':16} {'fired':>9}")
    for kind in (*faults, *FOLLOWING):
        print(f"{kind:16} {fired[kind]:9}")
    print(f"{len(seeds)} seeds, {num_events} events, {num_pushes} pushes and {num_reads} reads checked")
    print(f"{took_s:.1f} s: {len(seeds) / took_s * 60:.0f} seeds per minute")
    if options.may_lose:
        print(f"{num_lost} clusters lost buckets, as they must")
    print(f"{len(failed)} violations")
    return 1 if failed else 0


def _kinds(of_product: bool) -> tuple[str, ...]:
    if not of_product:
        return KINDS
    from simulator.product import PRODUCT_KINDS

    return PRODUCT_KINDS


def _play(seeds: range, faults: tuple[str, ...], options: argparse.Namespace) -> list[Outcome]:
    trace = print if options.trace else None
    number, may_lose = options.num_faults, options.may_lose
    return [Cluster(seed, faults=faults, num_faults=number, may_lose=may_lose, trace=trace).run() for seed in seeds]


if __name__ == "__main__":
    sys.exit(main())
