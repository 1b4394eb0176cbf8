"""``Hybrid`` with two processes and a server; embeddings on servers without one."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.warm.processes import WarmProcess

torch = pytest.importorskip("torch")

import paceline  # noqa: E402
from paceline.errors import UsageError  # noqa: E402
from paceline.launch.local import LocalCluster  # noqa: E402
from paceline.protocol import BoundedDelay, Eventual, Sequential  # noqa: E402
from paceline.torch.embeddings import ClusterTables, Embedder, Embedding, find_embeddings  # noqa: E402
from paceline.torch.strategies.hybrid import Hybrid  # noqa: E402

_HERE = Path(__file__).parent
_SIZE = 2
_PATIENCE_S = 180.0
_CHECKS = [
    line[4 : line.index("(")]
    for line in (_HERE / "hybrid_checks.py").read_text().splitlines()
    if line.startswith("def check_")
]


def start(cluster: LocalCluster, port: int, folder: Path) -> list[WarmProcess]:
    surroundings = {
        **os.environ,
        "WORLD_SIZE": str(_SIZE),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "hybrid",
        "PACELINE_SCHEDULER": cluster.scheduler,
        "PACELINE_TOKEN": cluster.token,
    }
    return [
        WarmProcess(
            [_HERE / "strategy_ranks.py", "hybrid_checks", folder],
            kind="torch",
            env={**surroundings, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(_SIZE)
    ]


def test_hybrid(tmp_path: Path) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with paceline.local_cluster(servers=1, workers=_SIZE, consistency=Sequential(aggregate="mean")) as cluster:
        ranks = start(cluster, store.port, tmp_path)
        try:
            for rank in ranks:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.wait(_PATIENCE_S)
        finally:
            for rank in ranks:
                rank.kill()
            errors = "\n".join(rank.communicate()[1] for rank in ranks)
    said: dict[str, list[str]] = {}
    for report in sorted(tmp_path.glob("rank *")):
        for line in report.read_text().splitlines():
            name, text = json.loads(line)
            said.setdefault(name, []).append(text)
    wrong = [f"{check}: {said.get(check)}" for check in _CHECKS if said.get(check) != [""] * _SIZE]
    assert not wrong, "\n".join([*wrong, errors]).replace("\\n", "\n")
    assert [rank.returncode for rank in ranks] == [0] * _SIZE, errors


def test_without_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_SCHEDULER", raising=False)
    with pytest.raises(UsageError, match=r"rank 0: strategy hybrid.*paceline run --strategy hybrid --servers 1"):
        Hybrid()
    assert not torch.distributed.is_initialized()


def test_a_program_may_say_what_servers_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    with paceline.local_cluster(servers=2, replicas=1, consistency=BoundedDelay(tau=4)) as cluster:
        monkeypatch.setenv("PACELINE_SCHEDULER", cluster.scheduler)
        monkeypatch.setenv("PACELINE_TOKEN", cluster.token)
        with Hybrid(consistency=BoundedDelay(tau=4), replicas=1):
            pass
        options = "--servers 3 --replicas 2 --consistency bounded:4 SCRIPT`"
        with pytest.raises(UsageError, match=f"strategy hybrid was made with replicas=2, and .* {options}"):
            Hybrid(replicas=2)
        with pytest.raises(UsageError, match="--servers 2 --replicas 1 --consistency eventual SCRIPT`"):
            Hybrid(consistency=Eventual())  # what was right stays as it is
        with pytest.raises(UsageError, match="was made with replicas=-1: expected 0 or more"):
            Hybrid(replicas=-1)
        assert not torch.distributed.is_initialized()


def test_rows_are_asked_for_an_iteration_ahead() -> None:
    """Under bounded delay they lack this worker's own last update; a request of its own has it."""
    with (
        paceline.local_cluster(servers=2, consistency=BoundedDelay(tau=2)) as cluster,
        cluster.connect(rank=0) as client,
    ):
        embedding = Embedding(1, initializer=paceline.Zeros(), filters=[paceline.KeyCaching()], pull_filters=[])
        optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
        embedder = Embedder(ClusterTables(client))
        embedder.serve(find_embeddings(embedding), [optimizer])
        embedder.step_with([optimizer], tick=client.tick)
        batches = [torch.tensor([7, 8, 20 + number]) for number in range(5)]
        seen = []
        for number, batch in enumerate(batches):
            embedder.begin(batch)
            embedder.prefetch(batches[number + 1] if number + 1 < len(batches) else None)
            optimizer.zero_grad()
            rows = embedding(batch)
            seen.append(rows[0].item())
            rows.sum().backward()
            optimizer.step()
        assert client.clock == 5
        # Where keys are was learned from the first batch, too late for the second.
        assert seen == [0, -1, -1, -2, -3]
        assert embedding(torch.tensor([7])).item() == -5
        table = embedder.tables["embedding"]
        declared = client.sparse_table("embedding", update=paceline.SGD(lr=1.0), filters=[paceline.KeyCaching()])
        assert len(declared) == len(table)  # other filters would be refused
        assert (len(table), table.is_shared) == (7, True)
        kept = [(keys.copy(), records.copy()) for keys, records in table.items()]
        table.clear()
        assert len(table) == 0
        for keys, records in kept:
            table.write(keys, records)
        assert embedding(torch.tensor([7, 8, 10])).flatten().tolist() == [-5, -5, 0]
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.zero_grad()
        embedding(torch.tensor([10])).sum().backward()
        optimizer.step()
        assert embedding(torch.tensor([10])).item() == -0.5
