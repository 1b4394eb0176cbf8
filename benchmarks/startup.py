"""Measure short commands, which mostly start processes: the median wall time, and processor time with child processes.

``python benchmarks/startup.py [--runs 7] [--only train] [--json] [old=PATH new=PATH]`` measures ``paceline --help``, a
training on 500 generated rows, predictions with its model, a local cluster with one client, and a script under
``paceline run --strategy one-device``. If source trees (folders that contain ``src``) are given, it runs each command
in all trees in turns. Before that, it compiles the kernels and modules, as an installation with pip does.
Wall times are meaningful only on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.data import ClickLogSpec, write_click_log

_ROWS = 500
_PREPARE = "from paceline.launch import prepare_kernels; prepare_kernels()"
_CLUSTER = """
import paceline
with paceline.local_cluster(servers=1) as cluster, cluster.connect():
    pass
"""
_SCRIPT = "print('done')\n"


def commands(folder: Path) -> dict[str, list[str]]:
    """Return the commands by name. Their order matters, because later commands read files of earlier ones."""
    data, model, script = str(folder / "clicks.tsv"), str(folder / "model"), folder / "script.py"
    write_click_log(data, ClickLogSpec(rows=_ROWS))
    script.write_text(_SCRIPT)
    paceline = [sys.executable, "-m", "paceline"]
    return {
        "import": [sys.executable, "-c", "import paceline"],
        "help": [*paceline, "--help"],
        "train": [*paceline, "train", data, "--format", "criteo", "--quiet", "--save", model],
        "predict": [*paceline, "predict", model, data, "--output", str(folder / "predictions.txt")],
        "cluster": [sys.executable, "-c", _CLUSTER],
        "run": [*paceline, "run", "--strategy", "one-device", str(script)],
    }


def measure(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> tuple[float, float]:
    """Run a command. Return its wall time and its processes' processor time, in seconds."""
    before, begin_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    wall_s, after = time.perf_counter() - begin_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed with {done.returncode}: {done.stderr}")
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", metavar="NAME=PATH", help="source trees; default: the installed package")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--only", help="only this command; `predict` also runs `train`")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    trees: dict[str, dict[str, str]] = {"installed": dict(os.environ)}
    if options.trees:
        named = (tree.partition("=") for tree in options.trees)
        trees = {name: {**os.environ, "PYTHONPATH": str(Path(path).resolve() / "src")} for name, _, path in named}
    found: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="paceline-startup-") as scratch:
        folder = Path(scratch)
        for environment in trees.values():
            environment.pop("PYTHONDONTWRITEBYTECODE", None)
            environment["PYTHONPYCACHEPREFIX"] = str(folder / "byte-code")
            measure([sys.executable, "-c", _PREPARE], environment, folder)
        for name, command in commands(folder).items():
            if options.only not in (None, name) and not (options.only == "predict" and name == "train"):
                continue
            for environment in trees.values():
                measure(command, environment, folder)  # to load files into the page cache
            took: dict[str, list[tuple[float, float]]] = {tree: [] for tree in trees}
            for _ in range(options.runs):
                for tree, environment in trees.items():
                    took[tree].append(measure(command, environment, folder))
            for tree, times in took.items():
                wall_s, cpu_s = (statistics.median(column) for column in zip(*times, strict=True))
                found.append({"command": name, "tree": tree, "wall_s": round(wall_s, 3), "cpu_s": round(cpu_s, 3)})
                if not options.json:
                    print(f"{name:8} {tree:10} {wall_s:7.3f} s wall {cpu_s:7.3f} s of the processor", flush=True)
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
