"""Checks of the operations of ``paceline.horovod`` against their expected results."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.waiting import in_threads

import paceline.horovod as hvd

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)


def start(rank: int, size: int) -> None:
    with raises(ValueError, "Horovod has not been initialized; use hvd.init()."):
        hvd.size()
    with raises(ValueError, "Horovod has not been initialized; use hvd.init()."):
        hvd.DistributedOptimizer(torch.optim.SGD([torch.ones(1)]))
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "30"
    in_threads(*[hvd.init] * 3)


@contextlib.contextmanager
def raises(kind: type[BaseException], *words: str) -> Iterator[None]:
    """Check that the block raises an error with all words."""
    text = None
    try:
        yield
    except kind as error:
        text = str(error)
    assert text is not None, f"no {kind.__name__} was raised"
    assert [word for word in words if word not in text] == [], text


def check_ranks(rank: int, size: int) -> None:
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (rank, size, rank, size)
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous(), hvd.is_initialized()) == (0, 1, True, True)
    assert (hvd.gloo_enabled(), hvd.mpi_enabled(), hvd.nccl_built(), hvd.ccl_built()) == (True, False, 0, False)
    hvd.init()  # does nothing


def check_all_reduce(rank: int, size: int) -> None:
    for dtype in DTYPES:
        tensor = torch.arange(17 * 3).view(17, 3).to(dtype)
        total = hvd.allreduce(tensor, op=hvd.Sum)
        assert total.dtype == dtype
        assert torch.equal(total, (tensor * size).to(dtype))
        torch.testing.assert_close(hvd.allreduce(tensor), tensor)
        assert torch.equal(tensor, torch.arange(17 * 3).view(17, 3).to(dtype))
        own = torch.full((5,), rank + 1).to(dtype)
        for op, expected in ((hvd.Min, 1), (hvd.Max, size), (hvd.Product, 6)):
            assert hvd.allreduce(own, op=op).tolist() == [expected] * 5
        assert hvd.allreduce_(own, op=hvd.Sum) is own
        assert own.tolist() == [6] * 5
    assert hvd.allreduce(torch.tensor(float(rank))).item() == 1.0
    assert hvd.allreduce(torch.tensor([-5, 5]) if rank == 0 else torch.zeros(2, dtype=torch.int64)).tolist() == [-1, 1]
    assert hvd.allreduce(torch.zeros(0, 4)).shape == (0, 4)
    average = hvd.allreduce(torch.tensor(71.0 * (rank > 0)))
    assert average.equal(torch.tensor(142.0) / 3)  # which 142.0 * (1 / 3) does not equal
    strided = torch.full((4, 3), float(rank)).t()
    hvd.allreduce_(strided, op=hvd.Sum)
    assert strided.tolist() == [[3.0] * 4] * 3


def check_scales_and_compression(rank: int, size: int) -> None:
    ones = torch.full((4,), 3.0)
    assert hvd.allreduce(ones, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0).tolist() == [18.0] * 4
    assert ones.tolist() == [3.0] * 4
    numbers = torch.tensor([3, 5])
    assert hvd.allreduce(numbers, op=hvd.Sum, prescale_factor=0.5).tolist() == [3, 6]
    hvd.allreduce_(ones, op=hvd.Sum, prescale_factor=2.0)
    assert ones.tolist() == [18.0] * 4
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        result = hvd.allreduce(torch.tensor([1.0 + 2**-20]), compression=compression)
        assert (result.item(), result.dtype) == (1.0, torch.float32)
    assert hvd.allreduce(torch.tensor([2]), compression=hvd.Compression.fp16).dtype == torch.int64


def check_any_order_and_fusion(rank: int, size: int) -> None:
    """Each rank requests the tensors in another order, for several steps: the cache and the fusion are used."""
    generator = np.random.default_rng(rank)
    for step in range(4):
        handles = {}
        for number in generator.permutation(60):
            dtype = (torch.float32, torch.float16, torch.int64)[number % 3]
            tensor = torch.full((int(number) + 1,), rank + int(number) % 5 + step).to(dtype)
            handles[number] = hvd.allreduce_async(tensor, op=hvd.Sum, name=f"tensor {number}")
        for number in generator.permutation(60):
            expected = 3 + 3 * (int(number) % 5 + step)
            assert hvd.synchronize(handles[number]).tolist() == [expected] * (int(number) + 1)
        assert hvd.synchronize(handles[0]) is None
        assert hvd.poll(handles[0])


def check_groups(rank: int, size: int) -> None:
    tensors = [torch.full((number + 1,), float(rank)) for number in range(5)]
    for _ in range(2):
        results = hvd.grouped_allreduce(tensors, op=hvd.Sum, name="group")
        assert [result.tolist() for result in results] == [[3.0] * (number + 1) for number in range(5)]
    hvd.grouped_allreduce_(tensors)
    assert [tensor.mean().item() for tensor in tensors] == [1.0] * 5
    gathered = hvd.grouped_allgather([torch.full((1,), rank), torch.full((rank,), 1.0)])
    assert [result.tolist() for result in gathered] == [[0, 1, 2], [1.0] * 3]
    (row,) = hvd.grouped_reducescatter([np.ones(size, np.float32)], compression=hvd.Compression.fp16, op=hvd.Sum)
    assert isinstance(row, np.ndarray)
    assert row.tolist() == [size]
    scattered = hvd.grouped_reducescatter([torch.ones(size), torch.ones(2 * size)], op=hvd.Sum)
    assert [result.tolist() for result in scattered] == [[3.0], [3.0, 3.0]]
    assert hvd.grouped_allreduce([]) == []


def check_inference_mode(rank: int, size: int) -> None:
    """The results can be used and changed outside of the mode too, and the engine's own tensors stay usable."""
    tensors = [torch.full((number + 1,), float(rank)) for number in range(3)]
    with torch.inference_mode():
        results = hvd.grouped_allreduce(tensors, op=hvd.Sum, name="inference")
        scaled = hvd.allreduce(tensors[2], op=hvd.Sum, postscale_factor=2.0, name="scaled")
        hvd.grouped_allreduce_(tensors, op=hvd.Sum, name="in place")
        gathered = hvd.allgather(tensors[0])
        averages = [hvd.allreduce(torch.tensor([rank]).to(dtype)) for dtype in (torch.float32, torch.int64)]
    assert [average.item() for average in averages] == [1.0, 1]
    assert [result.tolist() for result in results] == [tensor.tolist() for tensor in tensors]
    assert [result[0].item() for result in results] == [3.0] * 3
    assert scaled.tolist() == [6.0] * 3
    assert gathered.requires_grad_().sum().item() == 9.0
    hvd.grouped_allreduce_(tensors, op=hvd.Sum, name="in place")
    assert tensors[1].tolist() == [9.0] * 2


def check_all_gather(rank: int, size: int) -> None:
    for step in range(3):  # the number of rows changes, so the cached request has another shape
        gathered = hvd.allgather(torch.full((rank + step, 2), rank), name="rows")
        assert gathered[:, 0].tolist() == [number for number in range(size) for _ in range(number + step)]
        assert gathered.shape[1:] == (2,)


def check_broadcast(rank: int, size: int) -> None:
    root: Any
    for root in np.arange(size):
        given = torch.full((3, 2), float(rank))
        assert hvd.broadcast(given, root).tolist() == [[float(root)] * 2] * 3
        assert given.mean().item() == rank
        assert hvd.broadcast_(given, root_rank=root) is given
        assert given.mean().item() == root
    with raises(ValueError, "root_rank=3"):
        hvd.broadcast(torch.ones(1), 3)


def check_all_to_all(rank: int, size: int) -> None:
    assert hvd.alltoall(torch.arange(size) + 10 * rank).tolist() == [rank, 10 + rank, 20 + rank]
    rows = torch.arange(6)[:, None] + 10 * rank
    for splits in (torch.tensor([1, 2, 3]), [1, 2, 3]):
        received, counts = hvd.alltoall(rows, splits=splits)
        assert counts.tolist() == [rank + 1] * size
        begin = (0, 1, 3)[rank]
        expected = [begin + row + 10 * source for source in range(size) for row in range(rank + 1)]
        assert received[:, 0].tolist() == expected
    for invalid in ([1, 2], [1, 2, 4], torch.tensor([1.0, 2.0, 3.0]), [[1], [2], [3]], "abc", 6):
        with raises(ValueError, "splits"):
            hvd.alltoall(rows, splits=invalid)
    with raises(ValueError, "7 rows"):
        hvd.alltoall(torch.ones(7))


def check_reduce_scatter(rank: int, size: int) -> None:
    rows = torch.arange(7.0)[:, None]
    expected = [[0.0, 1.0, 2.0], [3.0, 4.0], [5.0, 6.0]][rank]
    assert hvd.reducescatter(rows)[:, 0].tolist() == expected
    result = hvd.reducescatter(rows, op=hvd.Sum, prescale_factor=2.0, compression=hvd.Compression.bf16)
    assert result[:, 0].tolist() == [6 * value for value in expected]
    with raises(hvd.HorovodInternalError, "Adasum"):
        hvd.reducescatter(rows, op=hvd.Adasum)
    with raises(hvd.HorovodInternalError, "0 dimensions"):
        hvd.reducescatter(torch.tensor(1.0))


def check_gradients(rank: int, size: int) -> None:
    tensor = torch.full((2,), float(rank), requires_grad=True)
    (hvd.allreduce(tensor, op=hvd.Sum) * (rank + 1)).sum().backward()
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [6.0, 6.0]
    tensor = torch.ones((rank + 1, 2), requires_grad=True)
    gathered = hvd.allgather(tensor)
    gathered.backward(torch.cat([torch.full((number + 1, 2), float(number)) for number in range(size)]))
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [[float(rank)] * 2] * (rank + 1)
    tensor = torch.ones(2, requires_grad=True)
    hvd.broadcast(tensor, 1).backward(torch.full((2,), float(rank)))
    assert tensor.grad is not None
    assert tensor.grad.tolist() == ([1.0, 1.0] if rank == 1 else [0.0, 0.0])
    tensor = torch.ones(6, requires_grad=True)
    received, _ = hvd.alltoall(tensor, splits=[1, 2, 3])
    received.backward(torch.full((received.shape[0],), float(rank)))
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    for op, expected in ((hvd.Sum, 3.0), (hvd.Average, 1.0)):
        tensor = torch.ones(3, requires_grad=True)
        hvd.reducescatter(tensor, op=op).backward(torch.ones(1))
        assert tensor.grad is not None
        assert tensor.grad.tolist() == [expected] * 3
    tensors = [torch.ones(2, requires_grad=True) for _ in range(2)]
    sum(result.sum() for result in hvd.grouped_allreduce(tensors, op=hvd.Sum)).backward()
    assert [tensor.grad.tolist() for tensor in tensors if tensor.grad is not None] == [[3.0, 3.0]] * 2


def check_arrays(rank: int, size: int) -> None:
    array = np.full((2, 3), rank, np.float64)
    result = hvd.allreduce(array, op=hvd.Sum)
    assert isinstance(result, np.ndarray)
    assert result.tolist() == [[3.0] * 3] * 2
    hvd.allreduce_(array[:, ::2])
    assert array.tolist() == [[1.0, float(rank), 1.0]] * 2
    assert hvd.allgather(np.array([rank])).tolist() == [0, 1, 2]
    assert hvd.broadcast(np.array([rank]), 2).tolist() == [2]
    assert hvd.synchronize(hvd.alltoall_async(np.arange(3)))[0].tolist() == [rank] * 3
    assert hvd.reducescatter(np.ones(3), op=hvd.Sum).tolist() == [3.0]
    fixed = np.ones(2)
    fixed.flags.writeable = False
    assert hvd.allreduce(fixed).tolist() == [1.0, 1.0]
    with raises(ValueError, "read-only"):
        hvd.allreduce_(fixed)
    with raises(ValueError, "share memory"):
        hvd.allreduce_(torch.ones(1).expand(3))
    assert hvd.allreduce(torch.ones(1).expand(3)).tolist() == [1.0] * 3
    assert hvd.allreduce_(np.zeros((0, 4))).shape == (0, 4)  # NumPy's strides of an empty array may be 0
    for invalid in (torch.zeros(2, dtype=torch.complex64), torch.zeros(2).to_sparse(), [1.0]):
        with raises(ValueError):
            hvd.allreduce(invalid)


def check_sparse(rank: int, size: int) -> None:
    tensor = torch.sparse_coo_tensor(torch.tensor([[rank, 3]]), torch.tensor([1.0, 2.0]), (5,), check_invariants=True)
    for op, expected in ((hvd.Sum, [1.0, 1.0, 1.0, 6.0, 0.0]), (hvd.Average, [1 / 3, 1 / 3, 1 / 3, 2.0, 0.0])):
        wait = hvd.sparse_allreduce_async(tensor, name="sparse", op=op)
        torch.testing.assert_close(wait().to_dense(), torch.tensor(expected))


def check_objects(rank: int, size: int) -> None:
    value = {"text": "a", 0: [1, 2.5, None, {True}], "tensor": torch.arange(3), "array": np.ones((2, 2), np.float16)}
    received = hvd.broadcast_object(value if rank == 1 else None, root_rank=1)
    assert received["tensor"].tolist() == [0, 1, 2]
    assert received["array"].dtype == np.float16
    assert received[0] == [1, 2.5, None, {True}]
    assert hvd.allgather_object(["x" * rank, torch.full((rank,), 2.0).sum()], name="o")[2][1].item() == 4.0
    with raises(ValueError, "object"):
        hvd.broadcast_object(threading.Lock() if rank == 0 else None)
    with raises(ValueError, "object"):
        hvd.allgather_object(threading.Lock() if rank == 2 else None)


def check_mismatches(rank: int, size: int) -> None:
    """Every rank gets the error, which names the ranks and their values. The next operation succeeds."""
    wrong = rank == 1
    cases: list[tuple[list[str], Any]] = [
        (["Mismatched ALLREDUCE tensor shapes", "[4]", "[3]", "rank 1"], lambda: torch.ones(4 if wrong else 3)),
        (["Mismatched data types", "int32", "float32"], lambda: torch.ones(3, dtype=torch.int32 if wrong else None)),
    ]
    for words, make in cases:
        with raises(hvd.HorovodInternalError, *words):
            hvd.allreduce(make())
        assert hvd.allreduce(torch.ones(1)).item() == 1.0
    with raises(hvd.HorovodInternalError, "Mismatched reduction operation", "max", "rank 1"):
        hvd.allreduce(torch.ones(1), op=hvd.Max if wrong else hvd.Min, name="op")
    with raises(hvd.HorovodInternalError, "Mismatched prescale and/or postscale factors"):
        hvd.allreduce(torch.ones(1), prescale_factor=1.0 + wrong)
    with raises(hvd.HorovodInternalError, "Mismatched BROADCAST root ranks"):
        hvd.broadcast(torch.ones(1), root_rank=int(wrong))
    with raises(hvd.HorovodInternalError, "Mismatched operations"):
        (hvd.allgather if wrong else hvd.allreduce)(torch.ones(1))
    with raises(hvd.HorovodInternalError, "Mismatched ALLGATHER tensor shapes"):
        hvd.allgather(torch.ones(2, 3 + wrong))
    assert hvd.allreduce(torch.ones(1)).item() == 1.0


def check_names_in_use(rank: int, size: int) -> None:
    if rank == 0:
        handle = hvd.allreduce_async(torch.ones(1), name="twice")
        with raises(ValueError, "same name as another tensor that is currently being processed", "twice"):
            hvd.allreduce_async(torch.ones(1), name="twice")
    hvd.barrier()
    if rank != 0:
        handle = hvd.allreduce_async(torch.ones(1), name="twice")
    assert hvd.synchronize(handle).item() == 1.0
    assert hvd.synchronize(handle) is None
    assert hvd.synchronize(1 << 40) is None
    wrong: Any
    for wrong in (5, "\ud800"):  # the other ranks could not read such a request
        with raises(ValueError, f"name={wrong!r}"):
            hvd.allreduce(torch.ones(1), name=wrong)
    for wrong in (None, 0):
        with raises(ValueError, f"process_set={wrong}"):
            hvd.alltoall(torch.ones(3), process_set=wrong)
        with raises(ValueError, f"process_set={wrong}"):
            hvd.barrier(process_set=wrong)
    with raises(ValueError, "device meta"):
        hvd.allreduce(torch.ones(1, device="meta"))
    assert hvd.allreduce(torch.ones(1), name="", op=hvd.Sum).item() == size
    with raises(ValueError, "supersedes average"):
        hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)
    with raises(ValueError, "op=17"):
        hvd.allreduce(torch.ones(1), op=17)
    with raises(ValueError, "booleans have no average"):
        hvd.allreduce(torch.tensor(True))


def check_join(rank: int, size: int) -> None:
    """Rank r has r steps. Joined ranks take part in every operation."""
    for step in range(rank):
        active = list(range(step + 1, size))
        for _ in range(2):
            assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="sum").tolist() == [len(active)] * 2
        assert hvd.allreduce(torch.ones(2)).tolist() == [torch.tensor(len(active) / size).item()] * 2
        assert hvd.allreduce(torch.full((2,), 5), op=hvd.Min).tolist() == [5, 5]
        product = hvd.allreduce(torch.full((2,), 3.0), op=hvd.Product, prescale_factor=2.0)
        assert product.tolist() == [6.0 ** len(active)] * 2
        scaled = hvd.grouped_allreduce([torch.tensor(5), torch.tensor(6)], op=hvd.Min, prescale_factor=-1.0)
        assert [value.item() for value in scaled] == [-5, -6]
        assert hvd.allgather(torch.full((2,), rank)).tolist() == [number for number in active for _ in range(2)]
        assert hvd.broadcast(torch.tensor([rank]), size - 1).tolist() == [size - 1]
        assert hvd.alltoall(torch.full((size,), rank)).tolist() == active
        assert hvd.reducescatter(torch.ones(size), op=hvd.Sum).tolist() == [len(active)]
        hvd.barrier()
        if rank == 2 and step == 1:
            with raises(hvd.HorovodInternalError, "rank 0, has joined"):
                hvd.broadcast(torch.ones(1), 0)
    assert hvd.join() == 2
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


def check_process_sets(rank: int, size: int) -> None:
    outer = hvd.add_process_set([0, 2])
    middle = hvd.add_process_set(hvd.ProcessSet([1]))
    with raises(ValueError, "exists already"):
        hvd.add_process_set([2, 0])
    with raises(ValueError, "from 0 to 2"):
        hvd.add_process_set([0, 3])
    own = middle if rank == 1 else outer
    assert (own.size(), own.included(), own.rank()) == (len(own.ranks), True, own.ranks.index(rank))
    for step in range(3):
        expected = float(sum(own.ranks)) + step * len(own.ranks)
        assert hvd.allreduce(torch.tensor(float(rank + step)), op=hvd.Sum, process_set=own).item() == expected
        assert hvd.allgather(torch.tensor([rank]), process_set=own).tolist() == own.ranks
        assert hvd.broadcast(torch.tensor([rank]), own.ranks[-1], process_set=own).tolist() == own.ranks[-1:]
    hvd.barrier(process_set=own)
    other = outer if rank == 1 else middle
    with raises(ValueError, f"rank {rank} is not in"):
        hvd.allreduce(torch.ones(1), process_set=other)
    handle = hvd.allreduce_async(torch.ones(1), name="set", process_set=outer if rank == 0 else hvd.global_process_set)
    with raises(hvd.HorovodInternalError, "Mismatched process sets", "'set'"):
        hvd.synchronize(handle)
    assert hvd.remove_process_set(outer)
    assert hvd.remove_process_set(middle)
    assert not hvd.remove_process_set(middle)
    assert not hvd.remove_process_set(hvd.global_process_set)
    with raises(ValueError, "was not added"):
        hvd.allreduce(torch.ones(1), process_set=own)


def check_an_idle_process_uses_no_cpu(rank: int, size: int) -> None:
    hvd.barrier()
    used = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(1.0)
    after = resource.getrusage(resource.RUSAGE_SELF)
    hvd.barrier()
    assert after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime < 0.02


def check_timeline(rank: int, size: int) -> None:
    path = Path(tempfile.gettempdir(), f"timeline {os.getppid()}.json")
    if rank == 0:
        with raises(OSError, "no folder"):
            hvd.start_timeline("/no folder/file")
        hvd.start_timeline(path, mark_cycles=True)
    hvd.barrier()
    for _ in range(3):
        hvd.grouped_allreduce_([torch.ones(1), torch.ones(2)], name="fused")
    time.sleep(1.5)
    hvd.allgather(torch.ones(1), name="rows")
    if rank == 0:
        assert "QUEUE" in {event["name"] for event in json.loads(path.read_text())}  # before the end
        hvd.stop_timeline()
    hvd.allreduce(torch.ones(1), name="after")
    if rank:
        return
    events = json.loads(path.read_text())
    path.unlink()
    tracks = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["ph"] == "M"}
    found: dict[tuple[int, str, str], list[Any]] = {}
    for event in events:
        if event["ph"] != "M":
            found.setdefault((event["pid"], tracks.get((event["pid"], event["tid"]), ""), event["name"]), []).append(
                event
            )
    for other in range(size):
        assert len(found[other, "cycles", "CYCLE_START"]) >= 4
        for phase in ("ALLREDUCE", "QUEUE", "MEMCPY_IN_FUSION_BUFFER", "PACELINE_ALLREDUCE", "NEGOTIATE_ALLREDUCE"):
            assert len(found[other, "allreduce.fused.2of2", phase]) == 3
        assert len(found[other, "allgather.rows", "PACELINE_ALLGATHER"]) == 1
        assert (other, "allreduce.after", "ALLREDUCE") not in found
    for calls in zip(*(found[other, "allreduce.fused.2of2", "ALLREDUCE"] for other in range(size)), strict=True):
        assert max(call["ts"] for call in calls) < min(call["ts"] + call["dur"] for call in calls)


def check_many_threads(rank: int, size: int) -> None:
    def call(number: int) -> Any:
        return hvd.allreduce(torch.tensor(float(number)), name=f"thread {number}").item()

    numbers = [*range(8)] if rank else [*reversed(range(8))]
    assert in_threads(*(partial(call, number) for number in numbers)) == numbers


def last_shutdown_and_init(rank: int, size: int) -> None:
    pending = hvd.allreduce_async(torch.ones(1), name="never") if rank == 0 else -1
    hvd.barrier()
    hvd.shutdown()
    assert not hvd.is_initialized()
    with raises(ValueError, "hvd.init()"):
        hvd.rank()
    if rank == 0:
        with raises(hvd.HorovodInternalError, "shut down"):
            hvd.synchronize(pending)
    assert "paceline-horovod" not in [thread.name for thread in threading.enumerate()]
    hvd.init()
    if rank == 1:
        hvd.shutdown()
    else:
        with raises(hvd.HorovodInternalError, "shut down"):
            hvd.allreduce(torch.ones(1))
    hvd.init()  # starts again on all ranks
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    hvd.shutdown()
    hvd.init(process_sets=[hvd.ProcessSet([0, 1])])
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    hvd.shutdown()
    if rank < 2:
        hvd.init(comm=[0, 1])
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
    else:
        with raises(ValueError, "rank 2"):
            hvd.init(comm=[0, 1])
