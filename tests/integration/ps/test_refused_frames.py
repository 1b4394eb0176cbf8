"""If the successor rejects a frame, the push is resent and acknowledged later, without an endless wait."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from paceline.ps import SGD

from .harness import Cluster, key_of


def test_refused_pushes_are_resent_with_the_tables(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise the error would only be logged, and the push would never be acknowledged."""
    with Cluster(servers=2, replicas=1) as cluster:
        client = cluster.connect()
        table = client.sparse_table("w", update=SGD(lr=1.0))
        owner = client.servers.routes.owners[0]
        other_node = cluster.nodes[1 - owner]
        key = key_of(client, owner)
        with caplog.at_level(logging.ERROR, "paceline.ps"):
            other_node.call(lambda: other_node.server.tables.by_number.pop(table.number))
            table.push(key, np.ones((1, 1), np.float32)).wait()
        assert "rejected a frame" in caplog.text
        assert table.pull(key) == -1
        cluster.compare_replicas()
