"""Collectives through copies in host memory. Ranks that share a CUDA device use them."""

from __future__ import annotations

import functools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._C._distributed_c10d import AllgatherOptions, HashStore  # noqa: E402

import paceline.torch  # noqa: E402, F401
from paceline.torch.backend.work import HostWork, through_host  # noqa: E402

dist = torch.distributed


@pytest.mark.parametrize("is_async", [False, True])
def test_results_are_copied_back(is_async: bool) -> None:
    dist.init_process_group("paceline", store=HashStore(), rank=0, world_size=1)
    try:
        group: Any = dist.group.WORLD
        options = AllgatherOptions()
        options.asyncOp = is_async
        given, outputs = torch.arange(3.0), [torch.zeros(3)]
        work = through_host(functools.partial(group.allgather), [[outputs], [given], options])
        assert isinstance(work, HostWork)
        assert work.get_future().wait()[0] is outputs[0]
        assert work.wait()
        assert outputs[0].tolist() == [0.0, 1.0, 2.0]
    finally:
        dist.destroy_process_group()


def test_a_barrier_of_the_cuda_group_names_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

    class CudaGroup:
        def barrier(self, options: Any) -> Any:
            found.append(options.device)
            return self

        def wait(self) -> None: ...

        def shutdown(self) -> None: ...

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    dist.init_process_group("paceline", store=HashStore(), rank=0, world_size=1)
    try:
        world: Any = dist.group.WORLD
        vars(vars(world)["_devices"])["_group"] = CudaGroup()
        dist.barrier()
    finally:
        dist.destroy_process_group()
    assert found == [torch.device("cuda", 0)]
