"""The text of an explanation, and the options of ``paceline run --strategy auto``."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline.errors import PeerError, UsageError
from paceline.launch import RunOptions
from paceline.planning import explaining, scripts
from paceline.planning.calibration import key_of
from paceline.planning.explaining import choose_options, explain_choice, show_explanation
from paceline.planning.links import Curve, Machine, NodeLink, StrategyCost
from paceline.planning.predictions import Scenario, StepPrediction, StrategyCandidate, choose, predict_all
from paceline.planning.scripts import ONLY, MeasuredCommand, mean_profile
from paceline.planning.steps import ClusterShape
from paceline.strategies.profile import LayerProfile, ModelProfile, write_record
from paceline.strategies.registry import StrategyFlags

MACHINE = Machine(num_cores=4, ranks_per_node=4, all_reduce=Curve(((1, 0.0), (1 << 20, 1e-3))), socket_s_per_byte=0.0)
COSTLY = replace(
    MACHINE,
    num_cores=2,
    ranks_per_node=2,
    costs={
        "all-reduce": StrategyCost(step_s=0.1),
        "parameter-server": StrategyCost(step_s=1.0),
        "sharded": StrategyCost(step_s=1.0),
    },
)
"""A machine on which servers are slow, and all-reduce is the fastest way to use two ranks."""
LAYER = LayerProfile(name="0", forward_s=0.1, backward_s=0.1, num_parameters=2, parameter_bytes=125_000_000)


def profile_of(layers: Sequence[LayerProfile], spread: float = 1.0) -> ModelProfile:
    return ModelProfile(
        layers=tuple(layers), steps_s=(0.2,) * 5, program_s=0.0, update_s=0.0, batch_size=32, spread=spread
    )


def explain(layers: Sequence[LayerProfile], spread: float = 1.0, servers: int = 2) -> list[str]:
    profile = profile_of(layers)
    link = NodeLink(bytes_per_s=1.25e8, latency_s=0.0)
    scenario = Scenario(
        profile=profile,
        alone=replace(profile, spread=spread),
        machine=MACHINE,
        shape=ClusterShape(nodes=2, ranks_per_node=4, link=link),
        servers=servers,
    )
    output = io.StringIO()
    show_explanation(Console(file=output, width=200), scenario, predict_all(scenario), {})
    return output.getvalue().splitlines()


def test_lower_bound_of_nodes_that_reduce_inside_first() -> None:
    """Two servers for two nodes: each link carries the gradients once, whatever the number of ranks per node."""
    line = next(line for line in explain([LAYER]) if line.startswith("lower bound"))
    assert line.endswith(": 1,000.00 ms")


def test_a_noisy_single_process_makes_the_choice_uncertain() -> None:
    """The line replaces the confident one, and no sentence describes changes of the order."""
    for spread, absent, present in ((1.9, "uncertain", "fastest strategy"), (2.1, "fastest strategy", "uncertain")):
        lines = explain([LAYER], spread)
        assert not any(line.startswith(absent) for line in lines)
        assert any(line.startswith(present) for line in lines)
        assert any(line.startswith("With ") for line in lines) == (spread < 2)


@pytest.mark.parametrize(("advantage", "chosen"), [(1.5, "all-reduce"), (3.5, "one-device")])
def test_a_noisy_measurement_replaces_the_default_only_with_a_large_advantage(advantage: float, chosen: str) -> None:
    slow, fast = (
        StepPrediction(
            candidate=StrategyCandidate(strategy=name), step_s=1.0, examples_per_s=speed, memory_bytes=0.0, parts={}
        )
        for name, speed in (("all-reduce", 100.0), ("one-device", 100.0 * advantage))
    )
    assert choose([fast, slow]) is fast
    assert choose([fast, slow], 3.0).candidate.strategy == chosen
    assert f"Chosen: {chosen}, " in explain_choice([fast, slow], 3.0)
    assert choose([fast], 3.0) is fast  # a single rank has no other candidate


class FakeMeasurements:
    """Replaces the measurements of a script. The spreads of its steps are `spreads`, in their order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, spreads: Sequence[float]) -> None:
        self.spreads, self.copies = [*spreads], list[int]()
        monkeypatch.setattr(MeasuredCommand, "profiles", lambda command, copies, threads: self._profiles(copies))
        monkeypatch.setattr(scripts, "num_cores", lambda: 2)
        monkeypatch.setattr(explaining, "find_machine", lambda *_, **__: COSTLY)

    def _profiles(self, copies: int) -> dict[str, ModelProfile]:
        """Two processes are twice as slow as one, so that the ranks together are a little slower than one device."""
        self.copies.append(copies)
        profile = profile_of([replace(LAYER, parameter_bytes=4)], self.spreads.pop(0))
        return {ONLY: replace(profile.scaled(copies), steps_s=(0.2 * copies,) * 5)}


@pytest.mark.parametrize(
    ("spreads", "copies", "strategy", "reason"),
    [
        ([1.5, 1.5], [2, 1], "one-device", "fastest strategy"),
        ([2.5, 1.5, 1.5], [2, 2, 1], "one-device", "fastest strategy"),
        (
            [1.5, 2.5, 2.4],
            [2, 1, 1],
            "all-reduce",
            "uncertain: the measurements are noisy (factor 2.4)",
        ),
    ],
)
def test_automatic_choice_repeats_noisy_measurements(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spreads: list[float],
    copies: list[int],
    strategy: str,
    reason: str,
) -> None:
    """A quiet second measurement decides. After two noisy ones, the default is chosen, and the reason says so."""
    measurements = FakeMeasurements(monkeypatch, spreads)
    (tmp_path / "train.py").touch()
    options = RunOptions(script=str(tmp_path / "train.py"), strategy="auto", nproc_per_node=2)
    chosen, text = choose_options(options, lambda title: None)
    assert measurements.copies == copies
    assert (chosen.strategy, text.startswith(reason)) == (strategy, True)


def test_slow_changes_and_differences_between_processes_are_noise() -> None:
    """Slow changes are removed from the steps, but the measurement is uncertain."""
    slow = replace(profile_of([LAYER]), steps_s=(0.1,) * 20 + (0.25,) * 20)
    found = mean_profile([slow, slow])
    assert max(found.steps_s) < 1.3 * min(found.steps_s)
    assert found.spread == pytest.approx(2.5)
    quiet = profile_of([LAYER])
    assert mean_profile([quiet, quiet]).spread == 1.0
    assert mean_profile([quiet, replace(quiet, steps_s=(0.5,) * 5)]).spread == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"replicas": 1}, "options of one strategy do not apply. Leave --replicas 1 out"),
        ({"filters": "quantize:4"}, "options of one strategy do not apply. Leave --filters quantize:4 out"),
        ({"stages": 2}, "options of one strategy do not apply. Leave --stages 2 out"),
        ({"shard": "rows"}, "options of one strategy do not apply. Leave --shard rows out"),
        ({"balance": True}, "options of one strategy do not apply. Leave --balance out"),
        ({"nnodes": 2}, "chooses a strategy for the ranks of this machine. Leave --nnodes 2 out"),
    ],
)
def test_options_of_one_strategy_are_rejected_before_measuring(changes: dict[str, Any], words: str) -> None:
    flags = StrategyFlags()
    for name, value in changes.items():
        for part in ("pipeline", "sharding", "elastic"):
            if hasattr(getattr(flags, part), name):
                flags = replace(flags, **{part: replace(getattr(flags, part), **{name: value})})
    others = {name: value for name, value in changes.items() if not flags.given()}
    options = replace(RunOptions(script="train.py", strategy="auto", flags=flags), **others)
    with pytest.raises(UsageError) as raised:
        choose_options(options, lambda text: pytest.fail(text))
    assert str(raised.value).startswith(f"--strategy auto: {words}, or choose")


def test_results_are_stored_for_each_number_of_servers() -> None:
    candidate = StrategyCandidate(strategy="parameter-server", consistency="eventual", servers=1)
    keys = {key_of(MeasuredCommand("train.py"), 2, replace(candidate, servers=servers)) for servers in (1, 2)}
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("marked", "message"),
    [(True, "did not end its measured steps within"), (False, "did not reach its training loop. A script must train")],
)
def test_slow_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marked: bool, message: str) -> None:
    """The launcher of the script is the script itself here. It sleeps before or in its loop."""
    monkeypatch.setattr("paceline.planning.scripts._PATIENCE_S", 1.0)
    mark = "pathlib.Path(os.environ['PACELINE_PROFILE'], 'started').touch()" if marked else "pass"
    script = tmp_path / "train.py"
    script.write_text(f"import os, pathlib, time\n{mark}\ntime.sleep(60)\n")
    with pytest.raises(UsageError, match=message):
        MeasuredCommand(str(script)).profiles(1, 1)


@pytest.mark.parametrize("end", ["time.sleep(60)", "os._exit(3)"])
def test_a_script_that_fails_or_hangs_after_its_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Only the time of microbatches is missing then. The launcher of the script is the script itself here."""
    monkeypatch.setattr("paceline.planning.scripts._OPTIONAL_S", 0.5)
    write_record(tmp_path / "given.json", profile_of([LAYER]))
    script = tmp_path / "train.py"
    script.write_text(
        "import os, pathlib, shutil, time\n"
        f"shutil.copy('{tmp_path}/given.json', pathlib.Path(os.environ['PACELINE_PROFILE'], 'profile.json'))\n{end}\n"
    )
    began_s = time.monotonic()
    found = MeasuredCommand(str(script)).profiles(2, 1)[ONLY]
    assert (found.layers, found.microbatch_s) == ((LAYER,), 0.0)
    assert time.monotonic() - began_s < 30


def test_a_killed_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, signal\nprint('reading data', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n")
    with pytest.raises(PeerError, match=r"train\.py was killed by SIGKILL: reading data"):
        MeasuredCommand(str(script)).profiles(1, 1)
