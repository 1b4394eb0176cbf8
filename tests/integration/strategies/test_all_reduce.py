"""``AllReduce`` with real processes.

Importing torch takes seconds, so one run of a few ranks (see ``strategy_ranks.py``) serves all checks.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.warm.processes import WarmProcess

torch = pytest.importorskip("torch")

_HERE = Path(__file__).parent
_MODULE = "all_reduce_checks"
_SIZE = 3
"""No power of two. Two ranks agree with one device in ``test_equal_results.py``."""
_PATIENCE_S = 180.0
_CHECKS = [
    line[4 : line.index("(")]
    for line in (_HERE / f"{_MODULE}.py").read_text().splitlines()
    if line.startswith(("def check_", "def last_"))
]


class Run:
    """All ranks, started at once, and carried to their end by :meth:`finish`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        surroundings = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")},
            "WORLD_SIZE": str(_SIZE),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "all-reduce",
        }
        self._ranks = [
            WarmProcess(
                [_HERE / "strategy_ranks.py", _MODULE, folder],
                kind="torch",
                env={**surroundings, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(_SIZE)
        ]
        self.codes: list[int | None] = []
        self.errors: list[str] = []
        self.said: dict[str, list[str]] = {}
        """By check, what each rank says: nothing if all is well."""

    def finish(self) -> None:
        """Wait for the ranks, and read what they say."""
        try:
            for rank in self._ranks:
                rank.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            pass  # what is missing is missed
        finally:
            for rank in self._ranks:
                rank.kill()
            self.errors = [rank.communicate()[1] for rank in self._ranks]
        self.codes = [rank.returncode for rank in self._ranks]
        for report in sorted(self._folder.glob("rank *")):
            for line in report.read_text().splitlines():
                name, said = json.loads(line)
                self.said.setdefault(name, []).append(said)


@pytest.mark.timeout(240)
def test_all_reduce(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.finish()
    wrong = [
        f"{check}: {said}"
        for check in _CHECKS
        for said in [run.said.get(check, [])]
        if said != [""] * (_SIZE - 1 if check == "last_killed" else _SIZE)
    ]
    assert not wrong, "\n".join([*wrong, *run.errors]).replace("\\n", "\n")
    assert run.codes == [7 if rank == 1 else 0 for rank in range(_SIZE)], run.errors
    assert "Traceback" not in "".join(run.errors)


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("cpu", None),
        ("cpu", "gloo"),
        pytest.param("cuda", None, marks=pytest.mark.gpu),
        pytest.param("cuda", "nccl", marks=pytest.mark.gpu),
        pytest.param("cuda", "paceline", marks=pytest.mark.gpu),
    ],
)
def test_a_single_rank_does_as_one_device(device: str, backend: str | None) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    from paceline.torch.strategies import AllReduce, OneDevice, Strategy

    def train(strategy: Strategy) -> list[float]:
        torch.manual_seed(1)
        layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        model, optimizer, batches = strategy.prepare(
            layers, torch.optim.Adam(layers.parameters()), torch.utils.data.DataLoader(data, 4, shuffle=True)
        )
        losses = []
        for batch in batches:
            assert batch.device.type == device
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(strategy.reduce(loss.item()))
        return losses

    data = torch.randn(20, 4, generator=torch.Generator().manual_seed(2))
    with OneDevice(device=device) as alone:
        expected = train(alone)
    with AllReduce(device=device, backend=backend) as strategy:
        assert train(strategy) == pytest.approx(expected, abs=1e-5)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "smoke"}, ["'smoke'", "paceline, gloo, nccl"]),
        ({"backend": "nccl", "device": "cpu"}, ["nccl", "cpu", "leave backend out"]),
        ({"compression": "zip"}, ["'zip'", "powersgd"]),
        ({"filters": "key-caching"}, ["key-caching:64 is not for gradients"]),
        ({"filters": "quantize:8", "compression": "fp16"}, ["take one of them"]),
        ({"compression": "powersgd:0"}, ["powersgd:0"]),
        ({"join": True, "sync_batch_norm": True}, ["join=True", "sync_batch_norm=True"]),
        ({"bucket_mb": 0}, ["bucket_mb=0"]),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], words: list[str]) -> None:
    from paceline.errors import UsageError
    from paceline.torch.strategies import AllReduce

    with pytest.raises(UsageError) as caught:
        AllReduce(**options)
    for word in words:
        assert word in str(caught.value)
    assert not torch.distributed.is_initialized()
