"""The engine on socket pairs, without a group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from paceline.collectives.calls import CollectiveCall
from paceline.collectives.engine import Area, Order, Reduction
from paceline.collectives.network.engine import NetworkEngine
from paceline.collectives.network.executor import ScheduleExecutor
from paceline.collectives.network.mesh import Mesh
from paceline.collectives.schedules import ALGORITHMS
from paceline.kernels import combine

from .meshes import in_ranks, open_meshes


def order(algorithm: str) -> Order:
    call = CollectiveCall("all_reduce", "float16", (1,))
    return Order(call, call.signature, 1, 10.0, algorithm)


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("algorithm", ALGORITHMS["all_reduce"])
def test_every_schedule_reduces_and_scales(algorithm: str, size: int) -> None:
    sources = [np.full(1001, rank, np.float16) for rank in range(size)]
    targets = [np.zeros(1001, np.float16) for _ in range(size)]

    def reduce(meshes: Sequence[Mesh], rank: int) -> None:
        executor = ScheduleExecutor(meshes[rank], group="g")
        network = NetworkEngine(meshes[rank], executor, [0] * size, lambda collective, num_bytes: "ring")
        reduction = Reduction(combine.combiner("float16"), combine.SUM, 1.0 / size, 2)
        given, taken = (Area(arrays[rank].ctypes.data, arrays[rank].nbytes) for arrays in (sources, targets))
        network.all_reduce(order(algorithm), given, taken, reduction)

    with open_meshes(size) as meshes:
        assert in_ranks(lambda rank: reduce(meshes, rank), range(size)) == dict.fromkeys(range(size))
    for rank in range(size):
        assert (sources[rank] == rank).all()
        assert np.allclose(targets[rank], (size - 1) / 2, rtol=1e-3)
        assert targets[rank].tobytes() == targets[0].tobytes()
