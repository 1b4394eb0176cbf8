"""``python -m simulator``: simulate many seeds, print a table of the faults and the commands that repeat failures."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Final

from simulator.cluster import Cluster, Outcome
from simulator.protocol import FOLLOWING, KINDS, ProtocolCluster

_CHUNK: Final = 10


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return the exit status: 0 for success, 1 if a guarantee did not hold, 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m simulator", description=__doc__)
    parser.add_argument("--seeds", default="0:1000", help="FIRST:END, or one seed (default: %(default)s)")
    parser.add_argument("--faults", help="kinds that may happen, by commas (default: all)")
    parser.add_argument("--product", action="store_true", help="run the product's processes instead of the cores")
    parser.add_argument("--num-faults", type=int, help="number in each phase (default: 0 to 8, drawn for each seed)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--trace", action="store_true", help="print every event")
    parser.add_argument("--allow-loss", action="store_true", help="let more servers fail than chains can bear")
    options = parser.parse_args(arguments)
    kinds = _kinds(options)
    first, _, end = options.seeds.partition(":")
    faults = kinds if options.faults is None else tuple(kind for kind in options.faults.split(",") if kind)
    if not first.isdecimal() or (end and not end.isdecimal()):
        parser.error(f"--seeds {options.seeds}: expected FIRST:END, such as 0:1000, or one number")
    if unknown := [kind for kind in faults if kind not in kinds]:
        parser.error(f"--faults: {unknown[0]!r} is not a kind of fault: expected {', '.join(kinds)}")
    if options.product and options.allow_loss:
        parser.error("--allow-loss is for the cores: leave --product out")
    return _run(range(int(first), int(end) if end else int(first) + 1), faults, options)


def _run(seeds: range, faults: tuple[str, ...], options: argparse.Namespace) -> int:
    began_s = time.perf_counter()
    fired: Counter[str] = Counter()
    num_failed = num_events = num_pushes = num_reads = num_compared = num_lost = 0
    for outcome in _outcomes(seeds, faults, options):
        fired += outcome.fired
        num_events += outcome.num_events
        num_pushes += outcome.num_pushes
        num_reads += outcome.num_reads
        num_compared += outcome.num_compared
        num_lost += bool(outcome.lost)
        if outcome.violation is not None:
            num_failed += 1
            print(f"seed {outcome.seed}: {outcome.violation}\n  {_replay(outcome.seed, faults, options)}", flush=True)
    took_s = time.perf_counter() - began_s
    print(f"{'fault':16} {'fired':>9}")
    for kind in (*faults, *(() if options.product else FOLLOWING)):
        print(f"{kind:16} {fired[kind]:9}")
    print(f"{len(seeds)} seeds, {num_events} events")
    print(f"{num_pushes} pushes, {num_reads} reads and {num_compared} comparisons of buckets checked")
    print(f"{took_s:.1f} s: {len(seeds) / took_s * 60:.0f} seeds per minute")
    if options.allow_loss:
        print(f"{num_lost} clusters lost buckets, as they must")
    print(f"{num_failed} violations")
    return 1 if num_failed else 0


def _kinds(options: argparse.Namespace) -> tuple[str, ...]:
    if not options.product:
        return KINDS
    from simulator.product import KINDS as PRODUCT_KINDS  # imports the product

    return PRODUCT_KINDS


def _cluster_type(options: argparse.Namespace) -> Callable[..., Cluster]:
    if not options.product:
        return partial(ProtocolCluster, allow_loss=options.allow_loss)
    from simulator.product import ProductCluster

    return ProductCluster


def _play(seeds: range, faults: tuple[str, ...], options: argparse.Namespace) -> list[Outcome]:
    make, trace = _cluster_type(options), print if options.trace else None
    return [make(seed, faults=faults, num_faults=options.num_faults, trace=trace).run() for seed in seeds]


def _outcomes(seeds: range, faults: tuple[str, ...], options: argparse.Namespace) -> Iterator[Outcome]:
    """Yield the outcomes of the seeds, in the order of the seeds."""
    if options.product:
        from paceline.launch import prepare_kernels

        prepare_kernels()
    if options.jobs == 1 or options.trace:
        for seed in seeds:
            yield from _play(range(seed, seed + 1), faults, options)
        return
    chunks = [(seeds[at : at + _CHUNK], faults, options) for at in range(0, len(seeds), _CHUNK)]
    # Python need not switch threads often: a thread runs until it passes the baton (:mod:`simulator.world`).
    with ProcessPoolExecutor(options.jobs, initializer=sys.setswitchinterval, initargs=(1.0,)) as pool:
        for found in pool.map(_play, *zip(*chunks, strict=True)):
            yield from found


def _replay(seed: int, faults: tuple[str, ...], options: argparse.Namespace) -> str:
    """Return the command that runs one seed again and prints its trace."""
    words = ["python -m simulator"]
    if options.product:
        words.append("--product")
    words.append(f"--trace --seeds {seed}")
    if faults != _kinds(options):
        words.append(f"--faults {','.join(faults)}" if faults else "--faults=")
    if options.num_faults is not None:
        words.append(f"--num-faults {options.num_faults}")
    if options.allow_loss:
        words.append("--allow-loss")
    return " ".join(words)


if __name__ == "__main__":
    sys.exit(main())
