"""CUDA tensors in the operations of ``paceline.horovod``, on two ranks that share a device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.free_ports import free_port


def main() -> None:
    """Compute on a side stream, so that the operations must wait for the kernels that compute their tensors."""
    import torch

    import paceline.horovod as hvd

    hvd.init()
    rank = hvd.rank()
    with torch.cuda.stream(torch.cuda.Stream()):
        for step in range(20):
            large = torch.full((1 << 22,), float(rank), device="cuda")
            for _ in range(20):
                large = large + 1.0
            handles = [hvd.allreduce_async_(large, op=hvd.Sum), hvd.allreduce_async(large[:3].clone(), op=hvd.Max)]
            total, most = (hvd.synchronize(handle) for handle in handles)
            assert total is large
            assert (total == 41.0).all().item(), step
            assert most.tolist() == [21.0] * 3
            gathered = hvd.allgather(torch.full((rank + 1,), rank, device="cuda"))
            assert (gathered.is_cuda, gathered.tolist()) == (True, [0, 1, 1])
            assert hvd.broadcast(large[:1] + rank, 1).tolist() == [42.0]
            assert hvd.alltoall(torch.arange(2, device="cuda")).tolist() == [rank, rank]
            assert hvd.reducescatter(torch.ones(2, device="cuda"), op=hvd.Sum).tolist() == [2.0]
    hvd.shutdown()


@pytest.mark.gpu
def test_cuda_tensors() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    addresses = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    root = str(Path(__file__).parents[3])
    path = os.pathsep.join([os.environ.get("PYTHONPATH", root), root])
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__], env={**os.environ, **addresses, "PYTHONPATH": path, "RANK": str(rank)}
        )
        for rank in range(2)
    ]
    assert [process.wait(120) for process in ranks] == [0, 0]


if __name__ == "__main__":
    main()
