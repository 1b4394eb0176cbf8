"""Many seeds, in this process or in several, and how to play one of them again."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import TypeAlias, TypeVar

_Outcome = TypeVar("_Outcome")
Play: TypeAlias = Callable[[range, tuple[str, ...], argparse.Namespace], list[_Outcome]]
"""Plays seeds, with the kinds of faults that may happen and the options of the command line."""


def outcomes(
    play: Play[_Outcome],
    seeds: range,
    faults: tuple[str, ...],
    options: argparse.Namespace,
    *,
    chunk: int,
    initializer: Callable[[], None] | None = None,
) -> Iterator[_Outcome]:
    """Yield the outcomes of seeds in order, `chunk` at a time where there are several `jobs`.

    Each of those processes begins with the `initializer`.
    """
    if options.jobs == 1 or options.trace:
        for seed in seeds:
            yield from play(range(seed, seed + 1), faults, options)
        return
    chunks = [(seeds[at : at + chunk], faults, options) for at in range(0, len(seeds), chunk)]
    with ProcessPoolExecutor(options.jobs, initializer=initializer) as pool:
        for found in pool.map(play, *zip(*chunks, strict=True)):
            yield from found


def replay(seed: int, faults: tuple[str, ...], kinds: tuple[str, ...], options: argparse.Namespace) -> str:
    """Return the command that runs one seed again, with everything that happens; `kinds` are all kinds of faults."""
    words = ["python -m simulator"]
    if options.product:
        words.append("--product")
    words.append(f"--trace --seeds {seed}")
    if faults != kinds:
        words.append(f"--faults {','.join(faults)}" if faults else "--faults=")
    if options.num_faults is not None:
        words.append(f"--num-faults {options.num_faults}")
    if options.may_lose:
        words.append("--may-lose")
    return " ".join(words)
