"""``Sharded`` with real processes: four ranks, which serve all checks one after the other."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.warm.processes import WarmProcess

torch = pytest.importorskip("torch")

_HERE = Path(__file__).parent
_MODULE = "sharded_checks"
_SIZE = 4
_PATIENCE_S = 380.0
_CHECKS = [
    line[4 : line.index("(")]
    for line in (_HERE / f"{_MODULE}.py").read_text().splitlines()
    if line.startswith(("def check_", "def last_"))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def said(folder: Path) -> dict[str, list[str]]:
    """By check, what each rank says: nothing if all is well."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    surroundings = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")},
        "WORLD_SIZE": str(_SIZE),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "sharded",
        "SHARDED_CHECKPOINT": str(folder / "checkpoint"),
    }
    ranks = [
        WarmProcess(
            [_HERE / "strategy_ranks.py", _MODULE, folder],
            kind="torch",
            env={**surroundings, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(_SIZE)
    ]
    try:
        errors = [rank.communicate(timeout=_PATIENCE_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.end()
    assert [rank.returncode for rank in ranks] == [0] * _SIZE, "\n".join(errors)
    found: dict[str, list[str]] = {}
    for number in range(_SIZE):
        for line in (folder / f"rank {number}").read_text().splitlines():
            name, text = json.loads(line)
            found.setdefault(name, []).append(text)
    return found


@pytest.mark.timeout(420)
@pytest.mark.xdist_group("sharded")
@pytest.mark.parametrize("check", _CHECKS)
def test_check(check: str, said: dict[str, list[str]]) -> None:
    assert said[check] == [""] * _SIZE, "\n".join(said[check])


@pytest.mark.timeout(420)
@pytest.mark.xdist_group("sharded")
def test_a_checkpoint_loads_on_one_device(said: dict[str, list[str]], folder: Path) -> None:
    from tests.integration.strategies import sharded_checks as checks

    from paceline.torch.strategies import strategy

    batches = checks.batches_of(6)
    expected = checks.plain_loop(*checks.model_and_optimizer("adam"), batches, None)
    with strategy("one-device", device="cpu") as one:
        model, optimizer = one.prepare(*checks.model_and_optimizer("adam"))
        assert one.load(folder / "checkpoint" / "by sharded") == {"epoch": 3}
        assert checks.plain_loop(model, optimizer, batches[3:], None) == pytest.approx(expected[3:], abs=1e-5)
