"""Checks of the functions of torch.distributed against their expected results."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

from paceline.torch import PacelineProcessGroup


def own_tensor(rank: int, dtype: torch.dtype = torch.float32, count: int = 5) -> Tensor:
    return (torch.arange(count) + 10 * rank).to(dtype)


def _all(size: int, dtype: torch.dtype = torch.float32, count: int = 5) -> Tensor:
    return torch.stack([own_tensor(rank, dtype, count) for rank in range(size)])


def check_all_reduce(rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.uint8):
        everything = _all(size, dtype)
        for op, expected in (
            (dist.ReduceOp.SUM, everything.sum(0).to(dtype)),
            (dist.ReduceOp.MIN, everything.min(0).values),
            (dist.ReduceOp.MAX, everything.max(0).values),
        ):
            tensor = own_tensor(rank, dtype)
            dist.all_reduce(tensor, op)
            torch.testing.assert_close(tensor, expected)
    tensor = torch.full((3,), float(rank + 1))
    dist.all_reduce(tensor, dist.ReduceOp.PRODUCT)
    assert tensor.tolist() == [6.0] * 3
    tensor = torch.full((2, 2), float(rank))
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    assert tensor.tolist() == [[1.0, 1.0]] * 2
    premultiplied = torch.ones(2)
    dist.all_reduce(premultiplied, dist.ReduceOp.PREMUL_SUM(0.5))
    assert premultiplied.tolist() == [1.5, 1.5]
    whole = torch.tensor([1 << rank, 7 - rank])
    for op, expected_list in (
        (dist.ReduceOp.BAND, [0, 7 & 6 & 5]),
        (dist.ReduceOp.BOR, [7, 7]),
        (dist.ReduceOp.BXOR, [7, 7 ^ 6 ^ 5]),
    ):
        tensor = whole.clone()
        dist.all_reduce(tensor, op)
        assert tensor.tolist() == expected_list
    flags = torch.tensor([rank == 0, False])
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    assert flags.tolist() == [True, False]


def check_strided_empty_and_complex_tensors(rank: int, size: int) -> None:
    base = torch.zeros(4, 6)
    base[:, ::2] = rank + 1.0
    dist.all_reduce(base[:, ::2])
    assert base[0].tolist() == [6.0, 0.0] * 3
    nothing = torch.zeros(0, 3)
    dist.all_reduce(nothing)
    dist.broadcast(nothing, 1)
    dist.all_gather([torch.zeros(0, 3) for _ in range(size)], nothing)
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    assert scalar.item() == 3.0
    wave = torch.full((2,), complex(rank, 1))
    dist.all_reduce(wave)
    assert wave.tolist() == [3 + 3j] * 2
    turned = torch.full((3, 2), float(rank)).t()
    dist.broadcast(turned, 2)
    assert turned.tolist() == [[2.0] * 3] * 2
    for dtype in (torch.complex64, torch.float8_e4m3fn):
        moved = torch.full((3,), float(rank)).to(dtype)
        dist.broadcast(moved, 1)
        assert moved.to(torch.float32 if dtype == torch.float8_e4m3fn else dtype).tolist() == [1.0] * 3


def check_sparse_all_reduce(rank: int, size: int) -> None:
    tensor = torch.sparse_coo_tensor(
        torch.tensor([[rank, 3]]), torch.tensor([[1.0, 2.0], [4.0, 8.0]]), (5, 2), check_invariants=True
    )
    dist.all_reduce(tensor)
    expected = torch.zeros(5, 2)
    expected[:3] = torch.tensor([1.0, 2.0])
    expected[3] = torch.tensor([12.0, 24.0])
    assert torch.equal(tensor.to_dense(), expected)
    empty = torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0), (4,))
    if rank == 1:
        empty = torch.sparse_coo_tensor(torch.tensor([[2]]), torch.tensor([5.0]), (4,))
    dist.all_reduce(empty)
    assert empty.to_dense().tolist() == [0.0, 0.0, 5.0, 0.0]


def check_broadcast_reduce_gather_scatter(rank: int, size: int) -> None:
    tensor = own_tensor(rank)
    dist.broadcast(tensor, 1)
    assert torch.equal(tensor, own_tensor(1))
    tensor = own_tensor(rank)
    dist.reduce(tensor, 2, dist.ReduceOp.SUM)
    assert torch.equal(tensor, _all(size).sum(0) if rank == 2 else own_tensor(rank))
    outputs = [torch.zeros(5) for _ in range(size)] if rank == 1 else None
    dist.gather(own_tensor(rank), outputs, 1)
    assert outputs is None or torch.equal(torch.stack(outputs), _all(size))
    output = torch.zeros(2, 5).t()[:, 0]
    dist.scatter(output, list(_all(size)) if rank == 0 else None, 0)
    assert torch.equal(output, own_tensor(rank))


def check_all_gather(rank: int, size: int) -> None:
    outputs = [torch.zeros(5) for _ in range(size)]
    dist.all_gather(outputs, own_tensor(rank))
    assert torch.equal(torch.stack(outputs), _all(size))
    whole = torch.zeros(size, 5)
    dist.all_gather(list(whole.unbind()), own_tensor(rank))
    assert torch.equal(whole, _all(size))
    uneven = [torch.zeros(number + 1) for number in range(size)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
    assert [tensor.tolist() for tensor in uneven] == [[0.0], [1.0, 1.0], [2.0, 2.0, 2.0]]
    for shape in ((size * 5,), (size, 5)):
        single = torch.zeros(shape)
        dist.all_gather_single(single, own_tensor(rank))
        assert torch.equal(single.view(size, 5), _all(size))
    with c10d._coalescing_manager(async_ops=True) as pending:
        singles = [torch.zeros(size * 5), torch.zeros(size * 2)]
        dist.all_gather_single(singles[0], own_tensor(rank))
        dist.all_gather_single(singles[1], own_tensor(rank, count=2))
    pending.wait()
    assert torch.equal(singles[0].view(size, 5), _all(size))
    assert torch.equal(singles[1].view(size, 2), _all(size, count=2))


def check_reduce_scatter(rank: int, size: int) -> None:
    expected = _all(size, count=6).sum(0).view(size, 2)[rank]
    output = torch.zeros(2)
    dist.reduce_scatter(output, list(own_tensor(rank, count=6).view(size, 2).unbind()))
    assert torch.equal(output, expected)
    dist.reduce_scatter(output, [part.clone() for part in own_tensor(rank, count=6).view(size, 2)], dist.ReduceOp.AVG)
    torch.testing.assert_close(output, expected / size)
    source = own_tensor(rank, count=6)
    dist.reduce_scatter_single(output, source)
    assert torch.equal(output, expected)
    assert torch.equal(source, own_tensor(rank, count=6))
    with c10d._coalescing_manager():
        outputs = [torch.zeros(2), torch.zeros(1)]
        dist.reduce_scatter_single(outputs[0], source)
        dist.reduce_scatter_single(outputs[1], torch.ones(size))
    assert torch.equal(outputs[0], expected)
    assert outputs[1].item() == size


def check_all_to_all(rank: int, size: int) -> None:
    output = torch.zeros(size)
    dist.all_to_all_single(output, torch.arange(float(size)) + 10 * rank)
    assert output.tolist() == [rank, 10.0 + rank, 20.0 + rank]
    # Rank s sends d + 1 rows to rank d.
    source = torch.full((6, 2), float(rank))
    uneven = torch.zeros(size * (rank + 1), 2)
    dist.all_to_all_single(uneven, source, [rank + 1] * size, [1, 2, 3])
    assert uneven[:, 1].tolist() == [float(other) for other in range(size) for _ in range(rank + 1)]
    outputs = [torch.zeros(rank + 1) for _ in range(size)]
    dist.all_to_all(outputs, [torch.full((to + 1,), float(rank)) for to in range(size)])
    assert [tensor.tolist() for tensor in outputs] == [[float(other)] * (rank + 1) for other in range(size)]


def check_messages(rank: int, size: int) -> None:
    if rank == 0:
        tensors = [torch.zeros(2), torch.zeros(2)]
        second = dist.irecv(tensors[1], 1, tag=2)
        first = dist.irecv(tensors[0], 1, tag=1)
        assert first is not None
        assert second is not None
        assert first.wait()
        second.wait(timedelta(seconds=10))
        assert [tensor.tolist() for tensor in tensors] == [[1.0, 1.0], [2.0, 2.0]]
        anybody = torch.zeros(1)
        sources = {dist.recv(anybody, tag=7) for _ in range(2)}
        assert sources == {1, 2}
    else:
        if rank == 1:
            dist.send(torch.full((2,), 2.0), 0, tag=2)
            dist.send(torch.ones(2), 0, tag=1)
        dist.send(torch.ones(1), 0, tag=7)
    received = torch.zeros(3)
    ring = [
        dist.P2POp(dist.isend, torch.full((3,), float(rank)), (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    assert received.tolist() == [float((rank - 1) % size)] * 3
    works = [dist.isend(torch.full((1,), float(rank)), rank), dist.irecv(received[:1], rank)]
    futures = [work.get_future() for work in works if work is not None]
    assert [value.item() for value in futures[1].wait()] == [rank]


def check_asynchronous_calls(rank: int, size: int) -> None:
    tensors = [torch.full((1000,), float(rank + number)) for number in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    last = torch.tensor([rank])
    dist.all_reduce(last)  # this call waits for its turn
    assert last.item() == 3
    for number, (tensor, work) in enumerate(zip(tensors, works, strict=True)):
        assert work is not None
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.result()[0] is tensor
        assert tensor[0].item() == 3 + 3 * number
    outputs = [torch.zeros(2) for _ in range(size)]
    work = dist.all_gather(outputs, torch.full((2,), float(rank)), async_op=True)
    assert work is not None
    doubled = work.get_future().then(lambda done: [2 * tensor for tensor in done.value()])
    assert [tensor.tolist() for tensor in doubled.wait()] == [[0.0, 0.0], [2.0, 2.0], [4.0, 4.0]]


def check_objects(rank: int, size: int) -> None:
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * 100 * rank})
    assert [entry["rank"] for entry in gathered] == [0, 1, 2]
    values: list[Any] = [("a", 1), {2}] if rank == 1 else [None, None]
    dist.broadcast_object_list(values, 1)
    assert values == [("a", 1), {2}]
    own: list[Any] = [None]
    dist.scatter_object_list(own, ["a", "b", "c"] if rank == 0 else None, 0)
    assert own == ["abc"[rank]]


def check_groups(rank: int, size: int) -> None:
    apart = dist.new_group([0, 2])
    both = [dist.new_group([0, 1]), dist.new_group([1, 2], timeout=timedelta(seconds=5))]
    if rank in (0, 2):
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=apart)
        dist.broadcast(tensor, 2, group=apart)
        assert tensor.item() == 2.0
        assert isinstance(apart, PacelineProcessGroup)
        assert apart.group.ranks == (0, 1)
        if rank == 0:
            dist.send(tensor, 2, group=apart)
        else:
            assert dist.recv(tensor, group=apart) == 0
    for group, members in zip(both, ([0, 1], [1, 2]), strict=True):
        if rank in members:
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == 2.0
    dist.barrier()
    if rank in (0, 2):
        dist.destroy_process_group(apart)
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("outer", "inner"))
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=mesh.get_group("outer"))
    assert tensor.item() == size
    dist.all_reduce(tensor, group=mesh.get_group("inner"))
    assert tensor.item() == size


def check_functional_collectives(rank: int, size: int) -> None:
    world: Any = dist.group.WORLD
    tensor = torch.full((4,), float(rank))
    assert (functional.all_reduce(tensor, "sum", world) + 0).tolist() == [3.0] * 4
    assert (functional.all_reduce(tensor.to(torch.complex64), "sum", world) + 0).tolist() == [3.0 + 0j] * 4
    averaged = functional.all_reduce_coalesced([tensor, tensor[:2]], "avg", world)
    assert [(tensor + 0).tolist() for tensor in averaged] == [[1.0] * 4, [1.0] * 2]
    assert (functional.broadcast(tensor, 1, world) + 0).tolist() == [1.0] * 4
    gathered = functional.all_gather_single(tensor, 0, world)
    assert (gathered + 0).view(size, 4)[:, 0].tolist() == [0.0, 1.0, 2.0]
    both = functional.all_gather_single_coalesced([tensor, tensor[:1]], world)
    assert [(tensor + 0)[-1].item() for tensor in both] == [2.0, 2.0]
    scattered = functional.reduce_scatter_single(torch.ones(size * 2) * rank, "sum", 0, world)
    assert (scattered + 0).tolist() == [3.0] * 2
    parts = functional.reduce_scatter_single_coalesced([torch.ones(size)], "sum", [0], world)
    assert (parts[0] + 0).tolist() == [3.0]
    exchanged = functional.all_to_all_single(torch.full((6,), float(rank)), [rank + 1] * size, [1, 2, 3], world)
    assert (exchanged + 0).tolist() == [float(other) for other in range(size) for _ in range(rank + 1)]


def check_mistakes_of_callers(rank: int, size: int) -> None:
    compressed: Any = torch.zeros(2, 2).to_sparse_csr()
    mistakes: list[Callable[[], object]] = [
        lambda: dist.all_gather([torch.zeros(1)], torch.zeros(1)),
        lambda: dist.all_reduce(torch.zeros(1, dtype=torch.int64), dist.ReduceOp.AVG),
        lambda: dist.all_reduce(torch.zeros(1), dist.ReduceOp.BAND),
        lambda: dist.all_reduce(torch.zeros(1, device="meta")),
        lambda: dist.all_reduce(compressed),
    ]
    for wrong in mistakes:
        with contextlib.suppress(ValueError):
            wrong()
            raise AssertionError("no error")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)  # no rank is in a call, so the group continues
    assert tensor.item() == size


def check_monitored_barrier(rank: int, size: int) -> None:
    group = dist.new_group()
    assert isinstance(group, PacelineProcessGroup)
    group.monitored_barrier(timedelta(seconds=20))
    if rank == 2:
        dist.barrier()
        return
    try:
        group.monitored_barrier(timedelta(seconds=0.3), wait_all_ranks=True)
    except RuntimeError as error:
        message = str(error)
    else:
        message = "no error"
    assert ("Rank 2 failed to pass monitoredBarrier" if rank == 0 else "Rank 1 successfully reached") in message, (
        message
    )
    dist.barrier()


def last_destroyed_groups_leave_no_resources_and_can_be_created_again(rank: int, size: int) -> None:
    store = c10d._get_default_store()
    num_open: list[int] = []
    for _ in range(4):
        dist.destroy_process_group()
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("paceline")]
        assert not threads, threads
        num_open.append(len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0)
        dist.init_process_group("paceline", store=store, rank=rank, world_size=size)
        tensor = torch.ones(1)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
        assert tensor.item() == size
    assert num_open[1:] == num_open[1:2] * 3, num_open
