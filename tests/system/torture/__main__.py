"""Execute each run in its own process, one after the other, and print a table of faults and findings."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

import msgspec
import numpy as np
from tests.warm import processes

from paceline.launch import prepare_kernels

from .cluster import Settings, describe
from .scenario import Outcome, Run

_MODES = ("eventual", "bounded", "sequential", "lockstep")
_ENCLOSED = ["unshare", "--pid", "--fork", "--kill-child", "--net", "--mount", "--mount-proc"]
_LONGEST_S = 600.0  # the longest duration of a run


def choose(seed: int, options: argparse.Namespace, folder: Path, *, is_network: bool) -> Settings:
    """Return the settings of a seed, with the given options."""
    chance = random.Random(seed)
    replicas, is_apart, is_storm = chance.choice([0, 1, 1, 1, 2, 2]), chance.random() < 0.5, chance.random() < 0.25
    replicas = replicas if options.replicas is None else options.replicas
    storm = options.faults if options.faults is not None else 24 if is_storm and not options.pause else 0
    return Settings(
        seed=seed,
        mode=options.mode or _MODES[seed % len(_MODES)],
        duration_s=options.duration,
        folder=str(folder),
        num_faults=storm,
        pause_s=options.pause,
        servers=max(3, replicas + 2),
        replicas=replicas,
        is_network=is_network,
        is_apart=is_network and is_apart,
        kinds=tuple(options.kind),
    )


def may_enclose() -> bool:
    """Whether a run may create namespaces and a network."""
    if sys.platform != "linux" or not all(map(shutil.which, ("unshare", "ip"))):
        return False
    check = "mount -t tmpfs none /run && ip netns add some && test -w /dev/net/tun"
    return subprocess.run([*_ENCLOSED, "sh", "-c", check], capture_output=True, check=False).returncode == 0


def carry_out(settings: Settings) -> Outcome:
    """Execute a run in a separate process. The end of this process also ends all processes that it has started."""
    path = Path(settings.folder) / "settings.json"
    path.write_bytes(msgspec.json.encode(settings))
    words = [sys.executable, "-m", "system.torture", "--run", str(path)]
    if settings.is_network:
        words = [*_ENCLOSED, "sh", "-c", 'mount -t tmpfs none /run && exec "$0" "$@"', *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    running = subprocess.Popen(words, stdin=subprocess.PIPE, env=environment, start_new_session=True)
    try:
        running.wait(_LONGEST_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        try:
            os.killpg(running.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        running.wait()
    result = Path(settings.folder) / "outcome.json"
    if not result.exists():
        return Outcome(violations=["the run did not end"], operations=0, faults=[], seconds=_LONGEST_S)
    return msgspec.json.decode(result.read_bytes(), type=Outcome)


def be_run(path: Path) -> int:
    """Run the process of one run."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    settings = msgspec.json.decode(path.read_bytes(), type=Settings)
    began = time.monotonic()
    with processes.zygotes(), open(path.with_name("story"), "w", buffering=1) as story:
        outcome = Run(settings, lambda text: print(f"{time.monotonic() - began:7.2f} {text}", file=story)).carry_out()
    path.with_name("outcome.json").write_bytes(msgspec.json.encode(outcome))
    return 0


def report(outcomes: list[Outcome]) -> None:
    """Print the table."""
    pauses: dict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        for kind, pause in outcome.faults:
            pauses[kind].append(pause)
    rows = sorted(pauses.items())
    pauses_without_workers = [pause for kind, found in rows for pause in found if not kind.startswith("worker")]
    print(f"\n{'fault':48} {'number':>7}   longest operation, s: {'p50':>6} {'p99':>6} {'max':>6}")
    for kind, found in [*rows, ("all except worker faults", pauses_without_workers)]:
        if found:
            p50, p99 = np.percentile(found, [50, 99])
            print(f"{kind:48} {len(found):7} {'':22} {p50:6.2f} {p99:6.2f} {max(found):6.2f}")
    operations = sum(outcome.operations for outcome in outcomes)
    minutes = sum(outcome.seconds for outcome in outcomes) / 60
    failed = sum(bool(outcome.violations) for outcome in outcomes)
    print(f"\n{len(outcomes)} runs in {minutes:.1f} minutes, {operations} operations, {failed} with a violation")


def main() -> int:
    """Execute the runs; return the exit status."""
    parser = argparse.ArgumentParser(prog="system.torture", description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1, help="of the first run; the others count on")
    parser.add_argument("--duration", type=float, default=12.0, help="of the faults of a run, in seconds")
    parser.add_argument("--mode", choices=_MODES, help="instead of all in turn")
    parser.add_argument("--replicas", type=int, help="replicas; default: chosen by the seed")
    parser.add_argument("--faults", type=int, help="faults without a pause; default: chosen by the seed")
    parser.add_argument("--pause", type=float, default=0.0, help="between faults, in seconds, on average; no storms")
    parser.add_argument("--kind", action="append", default=[], help="only faults of this kind (as the table names it)")
    parser.add_argument("--no-network", action="store_true", help="all hosts on the loopback device: nothing is cut")
    parser.add_argument("--logs", type=Path, help="directory for the files of all runs; default: keep violations only")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        return be_run(options.run)
    prepare_kernels(lambda text: print(text, flush=True))
    is_network = not options.no_network and may_enclose()
    if not is_network and not options.no_network:
        print("no network namespaces here (Linux, root, ip and unshare): faults of the network are left out")
    base = options.logs or Path(tempfile.mkdtemp(prefix="paceline-torture-"))
    outcomes = []
    try:
        for seed in range(options.seed, options.seed + options.runs):
            folder = base / f"run-{seed}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            settings = choose(seed, options, folder, is_network=is_network)
            outcome = carry_out(settings)
            outcomes.append(outcome)
            storm = f", a storm of {settings.num_faults}" if settings.num_faults else ""
            print(
                f"seed {seed:4}  {outcome.seconds:5.1f} s  {outcome.operations:6} operations  {len(outcome.faults):3} "
                f"faults  {describe(settings)}{storm}",
                flush=True,
            )
            for violation in outcome.violations:
                print(f"  VIOLATION: {violation}\n  its logs: {folder}", flush=True)
            if not outcome.violations and not options.logs:
                shutil.rmtree(folder)
    except KeyboardInterrupt:
        print("interrupted")
    finally:
        if outcomes:
            report(outcomes)
        if not any(base.iterdir()):
            base.rmdir()
    return 1 if any(outcome.violations for outcome in outcomes) or len(outcomes) < options.runs else 0


if __name__ == "__main__":
    sys.exit(main())
