"""Send invalid frames and files to every listener: ``python -m tests.fuzz --frames 10000000``.

An episode is the lifetime of one listener, with honest clients and clients that send arbitrary bytes. The seed and the
episode's number determine the frames, except for the order of threads. After a defect the process prints the command
that repeats the episode, and ends with status 1. After a crash or a hang it prints the episode's name first.
"""

from __future__ import annotations

import argparse
import faulthandler
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.launch import prepare_kernels

from .collectives import CoordinatorEpisode, HeadsEpisode, OwnLaunchersEpisode, PointToPointEpisode, StoreEpisode
from .files import FilesEpisode
from .handshakes import HandshakeEpisode
from .listening import Episode, FoundError, play
from .scheduler import Recovering, SchedulerEpisode
from .server import BoundedServer, EventualServer, SequentialServer

LISTENERS: tuple[type[Episode], ...] = (
    EventualServer, BoundedServer, SequentialServer, SchedulerEpisode, Recovering, StoreEpisode, HeadsEpisode,
    CoordinatorEpisode, OwnLaunchersEpisode, PointToPointEpisode, HandshakeEpisode, FilesEpisode,
)  # fmt: skip
EPISODE_FRAMES = 1000
HANG_S = 100
MEMORY_BYTES = 3 << 30
"""Limit of the growth of requested memory. A frame that announces more is a defect."""
RESIDENT_BYTES = 300 << 20
"""Limit of the growth of memory in use."""


def episodes(num_frames: int, only: str) -> Iterator[tuple[type[Episode], int, int]]:
    """Yield each listener with the number of its episode and the number of its frames."""
    kinds = [kind for kind in LISTENERS if only in ("", kind.name)]
    weights = sum(kind.weight for kind in kinds)
    left = {kind: max(num_frames * kind.weight // weights, 1) for kind in kinds}
    number = 0
    while left:
        for kind in list(left):
            yield kind, number, min(left[kind], EPISODE_FRAMES)
            left[kind] -= EPISODE_FRAMES
            if left[kind] <= 0:
                del left[kind]
        number += 1


def fuzz(num_frames: int, seed: str, only: str = "", episode: int | None = None) -> int:
    """Play episodes; return the number of frames. Raises FoundError."""
    prepare_kernels()
    _bound_memory()
    resident = _resident_bytes()
    done = 0
    for kind, number, frames in episodes(num_frames, only):
        if episode is not None and number != episode:
            continue
        again = f"python -m tests.fuzz --frames {num_frames} --seed {seed} --only {kind.name} --episode {number}"
        print(f"\r{done:>10} {again}", end="", file=sys.stderr, flush=True)
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        with tempfile.TemporaryDirectory(prefix="paceline-fuzz-") as folder:
            try:
                done += play(kind, f"{seed}/{kind.name}/{number}", frames, Path(folder))
            except FoundError as error:
                raise FoundError(f"{error}\nagain: {again}") from error
            grown = _resident_bytes() - resident
            if grown > RESIDENT_BYTES:
                raise FoundError(f"{kind.name}: {grown >> 20} MB more are in use\nagain: {again}")
    faulthandler.cancel_dump_traceback_later()
    return done


def _bound_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, most))


def _resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def main() -> int:
    """Run the episodes that the arguments select."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--frames", type=int, default=100_000, help="how many, of all listeners together")
    parser.add_argument("--seed", default="0", help="any text")
    parser.add_argument("--only", default="", choices=["", *(kind.name for kind in LISTENERS)], help="one listener")
    parser.add_argument("--episode", type=int, help="run only this episode")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with its share of the frames")
    parsed = parser.parse_args()
    if parsed.jobs > 1:
        share = ["--frames", str(parsed.frames // parsed.jobs), "--only", parsed.only]
        command = [sys.executable, "-m", "tests.fuzz", *share]
        jobs = [subprocess.Popen([*command, "--seed", f"{parsed.seed}.{job}"]) for job in range(parsed.jobs)]
        return max(abs(job.wait()) for job in jobs)
    start = time.monotonic()
    try:
        done = fuzz(parsed.frames, parsed.seed, parsed.only, parsed.episode)
    except FoundError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    print(f"\n{done} frames in {time.monotonic() - start:.0f} s: nothing found", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
