"""A client belongs to one process. A forked child that uses it gets an error and does not affect the parent."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.ps import SGD

from .harness import Cluster, floats, keys_of

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no os.fork"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


def in_child(function: Callable[[], Any]) -> str:
    """Run a function in a forked process. Return its exception as text, or an empty text."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        text = ""
        try:
            function()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    return found


def test_every_use_of_a_client_in_a_child_is_an_error_and_the_parent_continues() -> None:
    with Cluster() as cluster:
        client = cluster.connect(rank=0)
        table = client.sparse_table("w", update=SGD(lr=1.0))
        ticket = table.push(keys_of(1), floats(1))
        client.servers.lock.acquire()  # type: ignore[union-attr]  # another thread's, as the child would see it
        uses: list[Callable[[], Any]] = [
            lambda: table.push(keys_of(1), floats(1)),
            lambda: table.pull(keys_of(1)),
            client.tick,
            client.flush,
            client.tables,
            lambda: client.sparse_table("w2", update=SGD(lr=1.0)),
            ticket.wait,
        ]
        found = [in_child(use) for use in uses]
        client.servers.lock.release()  # type: ignore[union-attr]
        assert [error.partition(" belongs to the parent")[0] for error in found] == ["UsageError: this client"] * 7
        assert in_child(client.close) == ""
        ticket.wait()
        assert table.pull(keys_of(1)) == -1
        assert len(client.tables()) == 1
        assert cluster.num_counted() == 1  # the child did not make the parent's member leave


def test_an_inherited_client_leaves_with_the_process() -> None:
    with Cluster() as cluster:
        client = cluster.connect(rank=0)
        assert in_child(lambda: client.__exit__(None, None, None)).startswith("UsageError")
        client.flush()
        client.close()
        with pytest.raises(UsageError, match="closed"):
            client.flush()
