"""The text of an explanation, and the options of ``paceline run --strategy auto``."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline.errors import PeerError, UsageError
from paceline.launch import RunOptions
from paceline.planning.calibration import key_of
from paceline.planning.explaining import choose_options, show_explanation
from paceline.planning.links import Curve, Machine, NodeLink
from paceline.planning.predictions import Scenario, StrategyCandidate, predict_all
from paceline.planning.scripts import MeasuredCommand
from paceline.planning.steps import ClusterShape
from paceline.strategies.profile import LayerProfile, ModelProfile
from paceline.strategies.registry import StrategyFlags

MACHINE = Machine(num_cores=4, ranks_per_node=4, all_reduce=Curve(((1, 0.0), (1 << 20, 1e-3))), socket_s_per_byte=0.0)
LAYER = LayerProfile(name="0", forward_s=0.1, backward_s=0.1, num_parameters=2, parameter_bytes=125_000_000)


def explain(layers: Sequence[LayerProfile], steps_s: tuple[float, ...] = (0.2,) * 5, servers: int = 2) -> list[str]:
    profile = ModelProfile(layers=tuple(layers), steps_s=(0.2,) * 5, program_s=0.0, update_s=0.0, batch_size=32)
    link = NodeLink(bytes_per_s=1.25e8, latency_s=0.0)
    scenario = Scenario(
        profile=profile,
        alone=replace(profile, steps_s=steps_s),
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


def test_noise_of_the_single_process_is_reported() -> None:
    assert not any(line.startswith("uncertain") for line in explain([LAYER]))
    assert any(line.startswith("uncertain") for line in explain([LAYER], (0.1, 0.1, 0.5, 0.5)))


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


def test_a_killed_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, signal\nprint('reading data', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n")
    with pytest.raises(PeerError, match=r"train\.py was killed by SIGKILL: reading data"):
        MeasuredCommand(str(script)).profiles(1, 1)
