"""A real Ray cluster on this machine. The first node has no CPUs, so it runs no ranks."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

MARKS = [
    pytest.mark.ray,
    pytest.mark.thorough,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra paceline[ray]"),
]
NODE = {"num_cpus": 2, "num_gpus": 2, "object_store_memory": 80 << 20}


@contextlib.contextmanager
def started(*, num_nodes: int, **variables: str) -> Iterator[Any]:
    """Run a cluster, and connect this process to it. Its processes have these additional environment variables."""
    import ray
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # a short path, because the paths of sockets begin with it
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled", **variables}.items():
            patch.setenv(name, value)
        cluster = Cluster(True, head_node_args=NODE | {"num_cpus": 0, "num_gpus": 0, "include_dashboard": False})
        for _ in range(num_nodes):
            cluster.add_node(**NODE)
        ray.init(cluster.address)
        yield cluster
        ray.shutdown()
        cluster.shutdown()
    shutil.rmtree(folder)
