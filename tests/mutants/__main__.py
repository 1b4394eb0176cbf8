"""``python -m tests.mutants``: plants each defect in a copy of the product, and reports who finds it.

Each is looked for by the unit tests that it names, and by one of the simulations, which play seeds until one fails: of
the protocol (after the first few in storms of faults), or of the product. If neither finds it, by the integration tests
that it names. The exit status is 1 if one is found by nobody.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.mutants import DEFECTS, Defect, Simulation

_ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 900
_CHUNKS = {Simulation.PROTOCOL: 25, Simulation.PRODUCT: 10}
_STORM = ("--num-faults", "24")


@dataclass(frozen=True)
class Limits:
    """How many seeds are played at most."""

    seeds: int = 500
    """Of the protocol."""
    runs: int = 50
    """Of the product."""

    def of(self, simulation: Simulation) -> int:
        """How many of one kind."""
        return {Simulation.PROTOCOL: self.seeds, Simulation.PRODUCT: self.runs, Simulation.NONE: 0}[simulation]


@dataclass(frozen=True)
class Finding:
    """Who has found a defect: in how many seeds a simulation, and whether the tests; None: not asked."""

    defect: Defect
    seeds: int | None
    """None also if no seed has shown it."""
    unit: bool | None
    integration: bool | None

    @property
    def is_found(self) -> bool:
        return self.seeds is not None or bool(self.unit) or bool(self.integration)

    @property
    def row(self) -> str:
        words = {True: "yes", False: "no", None: ""}
        counts = dict.fromkeys(Simulation, "")
        counts[self.defect.simulation] = "no" if self.seeds is None else str(self.seeds)
        cells = (
            f"`{self.defect.name}`",
            self.defect.what,
            words[self.unit],
            counts[Simulation.PROTOCOL],
            counts[Simulation.PRODUCT],
            words[self.integration],
        )
        return f"| {' | '.join(cells)} |"


@contextmanager
def planted(defect: Defect) -> Iterator[Path]:
    """A folder with a copy of the product that has the defect."""
    with tempfile.TemporaryDirectory(prefix="paceline-mutant-") as folder:
        source = Path(folder, "src")
        shutil.copytree(_ROOT / "src", source, copy_function=shutil.copy2)  # with the times that Numba's cache goes by
        path = source / "paceline" / defect.module
        path.write_text(defect.apply(path.read_text()))
        yield source


def seeds_until_found(source: Path, simulation: Simulation, limit: int) -> int | None:
    """Play seeds of a simulation, up to `limit`; return how many it took until one failed."""
    chunk = _CHUNKS.get(simulation, 1)
    for first in range(0, limit, chunk):
        arguments = ["--seeds", f"{first}:{min(first + chunk, limit)}"]
        if simulation is Simulation.PRODUCT:
            arguments.append("--product")
        elif first:
            arguments += _STORM
        try:
            ran = _run(source, "-m", "paceline.simulation", *arguments)
        except subprocess.TimeoutExpired:  # a cluster that never comes to an end is a failure too
            return first + 1
        if ran.returncode:
            found = re.search(r"^seed (\d+):", ran.stdout, re.MULTILINE)
            return 1 + (int(found[1]) if found else first)
    return None


def tests_fail(source: Path, paths: Sequence[str], *, compiles: bool) -> bool | None:
    """Whether any of these tests fails; None if there are none. `compiles`: whether kernels are compiled."""
    if not paths:
        return None
    # A random test has to find it as it is run in CI, and remembers nothing of other runs.
    options = ("-q", "-x", "-n0", "-p", "no:cacheprovider", "-p", "no:rerunfailures")
    try:
        status = _run(source, "-m", "pytest", *options, *paths, compiles=compiles).returncode
    except subprocess.TimeoutExpired:
        return True
    return status == 1 or status < 0  # a test fails, or the process is ended by a signal


def _run(source: Path, *arguments: str, compiles: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(source), "HYPOTHESIS_STORAGE_DIRECTORY": str(source / "hypothesis")}
    if not compiles:
        environment["NUMBA_DISABLE_JIT"] = "1"
    return subprocess.run(
        [sys.executable, *arguments], cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S
    )


def look_for(defect: Defect, limits: Limits) -> Finding:
    """Return who finds a defect."""
    with planted(defect) as source:
        unit = tests_fail(source, defect.unit, compiles=not defect.alters_kernels)
        seeds = seeds_until_found(source, defect.simulation, limits.of(defect.simulation))
        integration = None if unit or seeds is not None else tests_fail(source, defect.integration, compiles=True)
    return Finding(defect, seeds, unit, integration)


def main(arguments: list[str] | None = None) -> int:
    """Run; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="defects (default: all)")
    parser.add_argument("--seeds", type=int, default=500, help="of the protocol, at most (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=50, help="of the product, at most (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="defects at once (default: %(default)s)")
    options = parser.parse_args(arguments)
    known = {each.name: each for each in DEFECTS}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"there is no defect {unknown[0]!r}: expected some of {', '.join(known)}")
    chosen = [known[name] for name in options.names] or list(DEFECTS)
    limits = Limits(options.seeds, options.runs)
    began_s = time.monotonic()
    print("| defect | what goes wrong | unit tests | seeds of the protocol | runs of the product | integration tests |")
    print("|---|---|---|---:|---:|---|", flush=True)
    missed = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for finding in pool.map(lambda defect: look_for(defect, limits), chosen):
            print(finding.row, flush=True)
            if not finding.is_found:
                missed.append(finding.defect.name)
    print(f"\n{len(chosen) - len(missed)} of {len(chosen)} found, in {time.monotonic() - began_s:.0f} s")
    if missed:
        print(f"nobody finds {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
