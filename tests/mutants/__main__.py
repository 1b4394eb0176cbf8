"""``python -m tests.mutants``: plants each defect in a copy of the product, and reports which tests find it.

Each defect is looked for by the unit tests of its module and by the simulation, which plays seeds until one fails; if
neither finds it, by integration tests. The exit status is 1 if one is found by nobody.
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

from tests.mutants.defects import DEFECTS, Defect

_ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 900
_CHUNK = 25


@dataclass(frozen=True)
class Finding:
    """Who has found a defect: in how many seeds the simulation, and whether the others; None: not asked."""

    defect: Defect
    seeds: int | None
    unit: bool
    integration: bool | None

    @property
    def is_found(self) -> bool:
        return self.seeds is not None or self.unit or bool(self.integration)

    @property
    def row(self) -> str:
        words = {True: "yes", False: "no", None: ""}
        seeds = "no" if self.seeds is None else str(self.seeds)
        cells = (f"`{self.defect.name}`", self.defect.what, words[self.unit], seeds, words[self.integration])
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


def seeds_until_found(source: Path, limit: int) -> int | None:
    """Play seeds of the simulation, up to `limit`; return how many it took until one failed."""
    for first in range(0, limit, _CHUNK):
        seeds = f"{first}:{min(first + _CHUNK, limit)}"
        try:
            ran = _run(source, "-m", "paceline.simulation", "--seeds", seeds)
        except subprocess.TimeoutExpired:  # a cluster that never comes to an end is a failure too
            return first + 1
        if ran.returncode:
            found = re.search(r"^seed (\d+):", ran.stdout, re.MULTILINE)
            return 1 + (int(found[1]) if found else first)
    return None


def tests_fail(source: Path, paths: Sequence[str]) -> bool:
    """Whether any of these tests fails."""
    # A random test has to find it as it is run in CI, and remembers nothing of other runs.
    options = ("-q", "-x", "-n0", "-p", "no:cacheprovider", "-p", "no:rerunfailures")
    try:
        return _run(source, "-m", "pytest", *options, *paths).returncode == 1
    except subprocess.TimeoutExpired:
        return True


def _run(source: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(source), "HYPOTHESIS_STORAGE_DIRECTORY": str(source / "hypothesis")}
    return subprocess.run(
        [sys.executable, *arguments], cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S
    )


def look_for(defect: Defect, limit: int) -> Finding:
    """Return who finds a defect."""
    with planted(defect) as source:
        seeds = seeds_until_found(source, limit)
        unit = tests_fail(source, defect.unit)
        integration = None if unit or seeds is not None else tests_fail(source, defect.integration)
    return Finding(defect, seeds, unit, integration)


def main(arguments: list[str] | None = None) -> int:
    """Run; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="defects (default: all)")
    parser.add_argument("--seeds", type=int, default=500, help="of the simulation, at most (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="defects at once (default: %(default)s)")
    options = parser.parse_args(arguments)
    known = {each.name: each for each in DEFECTS}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"there is no defect {unknown[0]!r}: expected some of {', '.join(known)}")
    chosen = [known[name] for name in options.names] or list(DEFECTS)
    began_s = time.monotonic()
    print("| defect | what goes wrong | unit tests | simulation, seeds | integration tests |", flush=True)
    print("|---|---|---|---:|---|", flush=True)
    missed = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for finding in pool.map(lambda defect: look_for(defect, options.seeds), chosen):
            print(finding.row, flush=True)
            if not finding.is_found:
                missed.append(finding.defect.name)
    print(f"\n{len(chosen) - len(missed)} of {len(chosen)} found, in {time.monotonic() - began_s:.0f} s")
    if missed:
        print(f"nobody finds {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
