"""Clusters, clients, tables and strategies as tables in notebooks."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from operator import methodcaller

import paceline
from paceline.observe.notebooks import NotebookTable
from paceline.torch import OneDevice

show: Callable[[NotebookTable], str] = methodcaller("_repr_html_")
"""The method that IPython calls."""


def rows_of(shown: NotebookTable) -> dict[str, str]:
    """Return the rows of the table that a notebook shows. The HTML must be well-formed."""
    table = ElementTree.fromstring(show(shown))
    assert table.findtext("caption") == type(shown).__name__
    return {row.findtext("th", ""): row.findtext("td", "") for row in table.iter("tr")}


def test_a_cluster_and_its_tables() -> None:
    with paceline.local_cluster(servers=2) as cluster:
        running = rows_of(cluster)
        assert running == {"scheduler": cluster.scheduler, "processes": "2 servers", "consistency": "eventual"}
        assert all(text in repr(cluster) for text in running.values())
        with cluster.connect() as client:
            table = client.sparse_table("<b>&'w'</b>", dim=16, update=paceline.Adagrad(lr=0.1))
            found = rows_of(table)
            assert (found["name"], found["shape"], found["place"]) == ("<b>&'w'</b>", "dim 16", "on 2 servers")
            assert "<b>" not in show(table)
            assert found["update"] == repr(paceline.Adagrad(lr=0.1))
            assert rows_of(client)["tables"] == "<b>&'w'</b>"
            assert repr(client).endswith(", 2 servers, eventual, tables <b>&'w'</b>>")
        assert rows_of(client)["servers"] == "closed"
    assert rows_of(cluster)["processes"] == "ended"


def test_a_strategy() -> None:
    with OneDevice(device="cpu") as strategy:
        assert rows_of(strategy) == {"rank": "0", "world_size": "1", "device": "cpu"}
        assert repr(strategy) == "OneDevice(rank=0, world_size=1, device='cpu')"
