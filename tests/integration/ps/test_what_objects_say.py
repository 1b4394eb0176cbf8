"""The representations of clients, tables, tickets and clusters, and errors after the cluster is closed."""

from __future__ import annotations

import numpy as np
import pytest

import paceline
from paceline.errors import ConnectionLostError

pytestmark = pytest.mark.usefixtures("warm_clusters")


@pytest.mark.parametrize("replicas", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_representations_are_available_during_and_after_the_cluster(replicas: int) -> None:
    keys = np.array([1, 2**63], np.uint64)
    with paceline.local_cluster(servers=2, replicas=replicas) as cluster:
        client = cluster.connect()
        table = client.sparse_table("w", dim=2, update=paceline.SGD(lr=0.1))
        net = client.dense_table("net", size=5000, update=paceline.Adagrad(lr=0.1))
        ticket = table.push(keys, np.ones((2, 2), np.float32))
        assert repr(ticket).startswith(("<Ticket of a push: waits for", "<Ticket of a push: done>"))
        ticket.wait()
        assert repr(ticket) == "<Ticket of a push: done>"
        address = cluster.scheduler
        assert repr(client) == f"<Client: worker 0 of {address}, 2 servers, eventual, tables w, net>"
        assert repr(table).startswith("<SparseTable 'w': dim 2, SGD(lr=0.1, ")
        assert repr(table).endswith(", on 2 servers>")
        assert repr(net).startswith("<DenseTable 'net': 5,000 elements, Adagrad(lr=0.1, ")
        assert repr(cluster) == f"<LocalCluster at {address}: 2 servers, eventual>"
    assert repr(cluster) == f"<LocalCluster at {address}: ended, eventual>"
    for use in (lambda: table.pull(keys), lambda: net.pull(), client.statistics):
        with pytest.raises(ConnectionLostError, match="the cluster has ended"):
            use()
    client.close()
    assert "closed" in repr(client)
    assert repr(table).endswith(", its client is closed>")
