"""``Hybrid`` with two processes and a server, and ``Hybrid`` without servers."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.integration.strategies.rank_checks import run_checks  # noqa: E402

import paceline  # noqa: E402
from paceline.errors import UsageError  # noqa: E402
from paceline.protocol import BoundedDelay, Eventual, Sequential  # noqa: E402
from paceline.torch.embeddings import ClusterTables, Embedder, Embedding, find_embeddings  # noqa: E402
from paceline.torch.strategies.hybrid import Hybrid  # noqa: E402

_SIZE = 2


def test_hybrid(tmp_path: Path) -> None:
    with paceline.local_cluster(servers=1, workers=_SIZE, consistency=Sequential(aggregate="mean")) as cluster:
        environment = {"PACELINE_SCHEDULER": cluster.scheduler, "PACELINE_TOKEN": cluster.token}
        result = run_checks("hybrid_checks", _SIZE, tmp_path, environment=environment)
    assert not result.failures()
    assert result.codes == [0] * _SIZE, result.errors


def test_without_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_SCHEDULER", raising=False)
    with pytest.raises(UsageError, match=r"rank 0: strategy hybrid.*paceline run --strategy hybrid --servers 1"):
        Hybrid()
    assert not torch.distributed.is_initialized()


def test_a_program_may_name_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    with paceline.local_cluster(servers=2, replicas=1, consistency=BoundedDelay(tau=4)) as cluster:
        monkeypatch.setenv("PACELINE_SCHEDULER", cluster.scheduler)
        monkeypatch.setenv("PACELINE_TOKEN", cluster.token)
        with Hybrid(consistency=BoundedDelay(tau=4), replicas=1):
            pass
        options = "--servers 3 --replicas 2 --consistency bounded:4 SCRIPT`"
        with pytest.raises(UsageError, match=f"strategy hybrid was created with replicas=2, .* {options}"):
            Hybrid(replicas=2)
        with pytest.raises(UsageError, match="--servers 2 --replicas 1 --consistency eventual SCRIPT`"):
            Hybrid(consistency=Eventual())  # the valid setting is unchanged
        with pytest.raises(UsageError, match="was created with replicas=-1: expected 0 or more"):
            Hybrid(replicas=-1)
        assert not torch.distributed.is_initialized()


def test_rows_are_requested_one_iteration_in_advance() -> None:
    """With bounded delay, prefetched rows lack this worker's last update. A separate request has it."""
    with (
        paceline.local_cluster(servers=2, consistency=BoundedDelay(tau=2)) as cluster,
        cluster.connect(rank=0) as client,
    ):
        embedding = Embedding(1, initializer=paceline.Zeros(), filters=[paceline.KeyCaching()], pull_filters=[])
        optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
        embedder = Embedder(ClusterTables(client))
        embedder.serve(find_embeddings(embedding), [optimizer])
        embedder.step_with([optimizer], lambda stepped: embedder.step(stepped, client.tick))
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
        # The first batch shows the positions of keys. Then it is too late to prefetch the second batch.
        assert seen == [0, -1, -1, -2, -3]
        assert embedding(torch.tensor([7])).item() == -5
        table = embedder.tables["embedding"]
        declared = client.sparse_table("embedding", update=paceline.SGD(lr=1.0), filters=[paceline.KeyCaching()])
        assert len(declared) == len(table)  # other filters would be rejected
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
