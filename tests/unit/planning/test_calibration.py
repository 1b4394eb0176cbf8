"""The stored measurements of a machine: files that are old, damaged or impossible are measured again."""

from __future__ import annotations

import contextlib
import io
import json
import math
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.environment import num_cores
from paceline.planning.calibration import StoredMachine, folder, load_machine, load_results, store_result
from paceline.planning.links import Curve, Machine, StrategyCost
from paceline.planning.predictions import Scenario, predict_all
from paceline.planning.steps import ClusterShape
from paceline.strategies.profile import LayerProfile, ModelProfile
from paceline.version import __version__

MACHINE = Machine(
    num_cores=num_cores(),
    ranks_per_node=2,
    all_reduce=Curve(((1024, 1e-4), (1 << 20, 1e-3))),
    socket_s_per_byte=1e-9,
    costs={name: StrategyCost(step_s=1e-3, byte_s=1e-9) for name in ("all-reduce", "parameter-server", "sharded")},
)
LAYERS = tuple(
    LayerProfile(name=str(number), forward_s=1e-3, backward_s=2e-3, num_parameters=2, parameter_bytes=1 << 20)
    for number in range(3)
)
PROFILE = ModelProfile(layers=LAYERS, steps_s=(1e-2,), program_s=0.0, update_s=1e-3, batch_size=8)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder().mkdir(parents=True)
    return folder()


def content_of(machine: Machine, version: str = __version__) -> bytes:
    return msgspec.json.encode(StoredMachine(version=version, host=platform.node(), machine=machine))


def load(content: bytes) -> tuple[Machine | None, str]:
    """Return the machine in a file with this content, and the printed warning."""
    (folder() / f"machine-{num_cores()}-cores-2-ranks.json").write_bytes(content)
    with contextlib.redirect_stderr(io.StringIO()) as output:
        return load_machine(2), output.getvalue()


def test_a_valid_file_and_a_file_of_another_version() -> None:
    assert load(content_of(MACHINE)) == (MACHINE, "")
    assert load(content_of(MACHINE, "0.0.1")) == (None, "")
    assert load_machine(3) is None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"all_reduce": Curve(())}, "all_reduce.points must have increasing sizes"),
        ({"all_reduce": Curve(((2048, 1e-4), (1024, 1e-3)))}, "all_reduce.points must have increasing sizes"),
        ({"all_reduce": Curve(((1024, -1e-4),))}, "all_reduce.points[0][1] is -0.0001, but must be from 0 to"),
        ({"ranks_per_node": 3}, "ranks_per_node is 3, but must be 2"),
        ({"socket_s_per_byte": -1.0}, "socket_s_per_byte is -1, but must be from 0 to"),
        (
            {"costs": {"sharded": StrategyCost(step_s=1e300)}},
            "costs['sharded'].step_s is 1e+300, but must be from 0 to",
        ),
    ],
)
def test_impossible_values_are_reported_and_not_used(changes: dict[str, Any], problem: str) -> None:
    found, warning = load(content_of(replace(MACHINE, **changes)))
    assert found is None
    assert f"ranks.json is not used: {problem}" in warning
    assert warning.endswith("This machine is measured again\n")
    assert warning.count("\n") == 1


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """Return all lists and dictionaries in a value, each with all its keys or indices."""
    if not isinstance(value, (dict, list)):
        return []
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    return [(value, key) for key in keys] + [place for key in keys for place in places_in(value[key])]


VALUES: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([None, True, "", "2", [], {}, [[]], [[1, 2.0]], 0, -1, 10**400, 1e308, -1e-9, math.inf, math.nan]),
    st.floats(),
    st.integers(),
)


@given(st.data())
def test_changed_files_are_rejected_or_give_predictions(data: st.DataObject) -> None:
    """A file with changed values or bytes never causes an exception, neither here nor in a prediction."""
    stored = json.loads(content_of(MACHINE))
    for _ in range(data.draw(st.integers(0, 3))):
        parent, key = data.draw(st.sampled_from(places_in(stored["machine"]) or [(stored, "machine")]))
        if data.draw(st.booleans()):
            parent[key] = data.draw(VALUES)
        else:
            del parent[key]
            stored.setdefault("machine", {})
    content = bytearray(json.dumps(stored).encode())
    for _ in range(data.draw(st.integers(0, 2))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    machine, warning = load(bytes(content[: data.draw(st.sampled_from([None, 10]))]))
    if machine is None:
        assert warning.count("\n") <= 1
        return
    scenario = Scenario(profile=PROFILE, alone=PROFILE, machine=machine, shape=ClusterShape(ranks_per_node=2))
    for prediction in predict_all(scenario):
        assert 0 < prediction.step_s < math.inf
        assert prediction.examples_per_s > 0


@pytest.mark.parametrize("content", [b'{"key": -1.0}', b'{"key": "text"}', b'{"\xff": 1.0}', b"[]", b"["])
def test_impossible_results_are_not_used(content: bytes, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "compared.json").write_bytes(b'{"key": 1.5}')
    assert load_results() == {"key": 1.5}
    (home / "compared.json").write_bytes(content)
    assert load_results() == {}
    assert "compared.json is not used: " in capsys.readouterr().err


def test_a_user_without_a_home_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", find_no_home)
    store_result("a result", 1.0)
    assert load_results() == {}
    assert load_machine(2) is None
