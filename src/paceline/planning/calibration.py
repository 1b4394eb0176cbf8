"""Measure the costs of this machine: collectives, sockets, and the strategies' own work. The results are stored.

Each strategy trains synthetic perceptrons, one of them with an embedding. The costs per step, per parameter, per byte
and per row are fitted, so that the predictions equal the measurements.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import numpy as np

from paceline.bench.collectives import BenchPlan, bench_collectives
from paceline.environment import num_cores
from paceline.observe.work import start_work
from paceline.output_files import USER_FOLDER, replacing
from paceline.planning.links import Curve, Machine, StrategyCost
from paceline.planning.predictions import FILTER, Scenario, StrategyCandidate, predict_step
from paceline.planning.scripts import MeasuredCommand, measured_step_s
from paceline.planning.steps import ClusterShape
from paceline.protocol.buckets import ALL
from paceline.strategies.profile import ModelProfile, find_impossible
from paceline.tables.dense_part import DensePart
from paceline.tables.initializers import Zeros
from paceline.tables.part import Selection
from paceline.tables.rules import Adam
from paceline.tables.settings import to_fields
from paceline.tables.spec import TableSpec
from paceline.transport import register_type
from paceline.version import __version__

_Kind = TypeVar("_Kind")
_MODULE: Final = "paceline.torch.calibration"
_SIZES: Final = (1 << 10, 1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 25)
_SOCKET_BYTES: Final = 1 << 22
_STEPS: Final = 60
_COSTS: Final = (("step_s", "few"), ("parameter_s", "many"), ("byte_s", "large"), ("row_s", "rows"))
"""Each cost, and the model from which it is computed."""
_CANDIDATES: Final = {
    "all-reduce": StrategyCandidate(strategy="all-reduce"),
    "parameter-server": StrategyCandidate(strategy="parameter-server", consistency="sequential", servers=1),
    "parameter-server:eventual": StrategyCandidate(strategy="parameter-server", consistency="eventual", servers=1),
    "sharded": StrategyCandidate(strategy="sharded"),
    "pipeline": StrategyCandidate(strategy="pipeline"),
}
_LAYERS: Final = 4
"""Each model has at least this number of layers, so pipelines have at most this number of stages."""
_SHARED: Final = ("all-reduce", "sharded")
"""The strategies under which one process trains all models."""
_HALVINGS: Final = 40
_REPEATS: Final = 9
_MOST_RESULTS: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMachine:
    """The file with a machine's costs."""

    version: str
    host: str
    machine: Machine


def folder() -> Path:
    """Return the folder of the stored measurements: ``~/.cache/paceline``.

    For a user without a home, no file can exist in it, so each command measures again.
    """
    try:
        return Path.home() / USER_FOLDER
    except RuntimeError:
        return Path(os.devnull) / USER_FOLDER


def load_machine(ranks_per_node: int) -> Machine | None:
    """Return the stored costs of this machine for this number of ranks; None if they are not measured yet.

    Print a warning for a file with impossible contents, and return None.
    """

    def is_same(stored: StoredMachine) -> bool:
        found = (stored.version, stored.host, stored.machine.num_cores)
        return found == (__version__, platform.node(), num_cores())

    def find_problem(stored: StoredMachine) -> str | None:
        machine = stored.machine
        sizes = [num_bytes for num_bytes, _ in machine.all_reduce.points]
        if not is_same(stored):
            return None
        if machine.ranks_per_node != ranks_per_node:
            return f"ranks_per_node is {machine.ranks_per_node}, but must be {ranks_per_node}"
        if not sizes or sizes[0] < 1 or sizes != sorted(set(sizes)):
            return "all_reduce.points must have increasing sizes, from 1 byte up"
        return find_impossible(machine)

    stored = _read(_machine_file(ranks_per_node), StoredMachine, find_problem, "This machine is measured again")
    return stored.machine if stored is not None and is_same(stored) else None


def measure_machine(ranks_per_node: int) -> Machine:
    """Measure this machine with two or more ranks, and store the result."""
    num_steps = 3 + len(_runs([*_CANDIDATES]))
    with start_work("starting", num_steps, in_background=False) as progress:
        machine = _measure_strategies(_measure_messages(ranks_per_node, progress.show), progress.show)
    stored = StoredMachine(version=__version__, host=platform.node(), machine=machine)
    _write(_machine_file(ranks_per_node), msgspec.json.encode(stored))
    return machine


def _measure_messages(ranks: int, show: Callable[[str], None]) -> Machine:
    show("measuring all-reduce in shared memory ...")
    curve = Curve(tuple(_all_reduce_times(BenchPlan(ranks=ranks, sizes=_SIZES, peers=("paceline",)))))
    show("measuring messages through sockets ...")
    plan = BenchPlan(ranks=2, sizes=(_SOCKET_BYTES,), peers=("paceline",), algorithm="ring")
    ((num_bytes, seconds),) = _all_reduce_times(plan)
    return Machine(
        num_cores=num_cores(),
        ranks_per_node=ranks,
        all_reduce=curve,
        socket_s_per_byte=seconds / (2 * num_bytes),
    )


def time_filter() -> float:
    """Return the seconds per byte that the filter of the predictions needs to encode and decode large arrays."""
    values = np.random.default_rng(0).standard_normal(1 << 20, np.float32)
    data, decoded = np.empty(FILTER.num_bytes(len(values)), np.uint8), np.empty_like(values)

    def run() -> None:
        FILTER.encode(values, None, data)
        FILTER.decode(data, decoded)

    return _median_s(run) / values.nbytes


def time_update() -> float:
    """Return the seconds per byte of parameters that a server needs to update a large dense table with Adam."""
    size = _SOCKET_BYTES
    spec = TableSpec(
        name="values", kind="dense", size=size, update=to_fields(Adam(lr=0.001)), initializer=to_fields(Zeros())
    )
    part, grads = DensePart(spec, ALL), np.ones(size, np.float32)
    return _median_s(lambda: part.push(Selection(None, 0, size, ALL), grads)) / grads.nbytes


def _median_s(run: Callable[[], object]) -> float:
    times = []
    for _ in range(_REPEATS):
        began_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


def _all_reduce_times(plan: BenchPlan) -> list[tuple[int, float]]:
    return [(measured.bytes, measured.median_us / 1e6) for (measured, *_) in bench_collectives(plan)]


def _command(models: Sequence[str]) -> MeasuredCommand:
    return MeasuredCommand(_MODULE, tuple(models), is_module=True)


def _runs(names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the strategy and the models of each run. A pipeline cannot have embeddings of ``paceline.torch``."""
    runs: list[tuple[str, list[str]]] = []
    for name in names:
        models = [model for part, model in _COSTS if name != "pipeline" or part != "row_s"]
        runs += [(name, models)] if name in _SHARED else [(name, [each]) for each in models]
    return runs


def _measure_strategies(machine: Machine, show: Callable[[str], None]) -> Machine:
    ranks, models = machine.ranks_per_node, [model for _, model in _COSTS]
    show("measuring synthetic models without communication ...")
    profiles = _command(models).profiles(ranks, max(machine.num_cores // ranks, 1), models)
    steps_s: dict[tuple[str, str], float] = {}
    measured = [name for name in _CANDIDATES if name != "pipeline" or ranks <= _LAYERS]
    for name, chosen in _runs(measured):
        show(f"measuring {' and '.join(chosen)} parameters under {name} ...")
        for model, records in _command(chosen).records(_CANDIDATES[name], ranks, _STEPS, chosen).items():
            steps_s[name, model] = measured_step_s(records)
    large = profiles["large"]
    machine = replace(machine, server_update_share=time_update() * large.parameter_bytes / large.update_s)
    for name in measured:
        of_strategy = {model: step_s for (each, model), step_s in steps_s.items() if each == name}
        machine = fit_cost(machine, name, profiles, of_strategy)
    return machine


def fit_cost(machine: Machine, name: str, profiles: dict[str, ModelProfile], steps_s: dict[str, float]) -> Machine:
    """Return the machine with the fitted costs of a strategy, for which predictions equal the measured steps.

    The keys of `profiles` and `steps_s` are the models ``few``, ``many``, ``large`` and ``rows``. A cost is 0 if its
    model was not measured, or if the prediction is too long even without this cost. Pure.
    """
    candidate, shape = _CANDIDATES[name], ClusterShape(ranks_per_node=machine.ranks_per_node)

    def predicted_s(cost: StrategyCost, model: str) -> float:
        changed = replace(machine, costs={**machine.costs, name: cost})
        profile = profiles[model]
        scenario = Scenario(profile=profile, alone=profile, machine=changed, shape=shape)
        return predict_step(scenario, candidate).step_s

    cost = StrategyCost()
    for _ in range(2):  # twice, because each cost changes the prediction of the other models a little
        for part, model in _COSTS:
            if model not in steps_s:
                continue
            low, high = 0.0, steps_s[model]
            for _ in range(_HALVINGS):
                middle = (low + high) / 2
                is_short = predicted_s(replace(cost, **{part: middle}), model) < steps_s[model]
                low, high = (middle, high) if is_short else (low, middle)
            cost = replace(cost, **{part: low})
    return replace(machine, costs={**machine.costs, name: cost})


def _machine_file(ranks: int) -> Path:
    return folder() / f"machine-{num_cores()}-cores-{ranks}-ranks.json"


def load_results() -> dict[str, float]:
    """Return the measured steps of ``paceline compare``, in seconds, by the key of :func:`key_of`."""
    remedy = "Measure the script again with paceline compare"
    return _read(_results_file(), dict[str, float], find_impossible, remedy) or {}


def store_result(key: str, step_s: float) -> None:
    """Store the mean seconds of a step. The newest results are kept."""
    results = {name: value for name, value in load_results().items() if name != key}
    newest = [*results.items(), (key, step_s)][-_MOST_RESULTS:]
    _write(_results_file(), msgspec.json.encode(dict(newest)))


def _results_file() -> Path:
    return folder() / "compared.json"


def key_of(command: MeasuredCommand, ranks: int, candidate: StrategyCandidate) -> str:
    """Return the key of a result: everything that the measured step depends on."""
    machine = f"{__version__} | {platform.node()} | {num_cores()} cores"
    return f"{machine} | {command.name} | {ranks} ranks | {candidate.label} | servers: {candidate.servers}"


def _read(path: Path, kind: type[_Kind], find_problem: Callable[[_Kind], str | None], remedy: str) -> _Kind | None:
    """Return the contents of a file; None without the file. Print a warning for other contents, and return None."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=register_type(kind))
        problem = find_problem(found)
    except OSError:
        return None
    except (ValueError, RuntimeError) as error:  # no JSON, no UTF-8, or too many levels
        problem = str(error)
    if problem is None:
        return found
    print(f"paceline: {path} is not used: {problem}. {remedy}", file=sys.stderr, flush=True)
    return None


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path) as part:
            part.write_bytes(content)
    except OSError:
        pass  # the next command measures again
