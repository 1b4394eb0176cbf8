"""Unusual calls of the backend, on a group of one rank."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch._C._distributed_c10d import HashStore  # noqa: E402

import paceline.torch  # noqa: F401, E402
from paceline.collectives import CollectiveTicket  # noqa: E402
from paceline.errors import MismatchError, UsageError  # noqa: E402
from paceline.torch.backend.errors import Terms  # noqa: E402
from paceline.torch.backend.work import TicketWork  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def _alone() -> Iterator[None]:
    dist.init_process_group("paceline", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _world() -> Any:
    return dist.group.WORLD


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64])
def test_a_product_of_unsupported_dtypes_is_refused(dtype: Any) -> None:
    with pytest.raises(UsageError, match="for a tensor of dtype torch"):
        dist.reduce_scatter_single(torch.zeros(2).to(dtype), torch.ones(2).to(dtype), dist.ReduceOp.PRODUCT)


def test_complex_sums_are_scattered() -> None:
    output = torch.zeros(2, dtype=torch.complex64)
    dist.reduce_scatter_single(output, torch.full((2,), 1 + 2j))
    assert output.tolist() == [1 + 2j] * 2


def test_results_of_asynchronous_calls_reach_tensors_of_inference_mode() -> None:
    with torch.inference_mode():
        outputs = [torch.zeros(3, 2).t()]
        work = dist.all_gather(outputs, torch.ones(2, 3), async_op=True)
        assert work is not None
        work.wait()
        assert outputs[0].tolist() == [[1.0] * 3] * 2


def _conjugated() -> tuple[Any, Any]:
    """Return a complex tensor with the conjugate bit, and a contiguous tensor with the negative bit."""
    number = torch.tensor([1 + 2j])
    return number.conj(), number[0].conj().imag


def test_lazily_conjugated_and_negated_tensors_are_sent_correctly() -> None:
    conjugated, negated = _conjugated()
    assert negated.is_neg()
    assert negated.is_contiguous()
    output = torch.zeros(1)
    dist.all_gather([output], negated.view(1))
    assert output.tolist() == [-2]
    dist.reduce_scatter_single(output, negated.view(1))
    assert output.tolist() == [-2]
    gathered = torch.zeros(1, dtype=torch.complex64)
    _world().allgather([[gathered]], [conjugated]).wait()
    assert gathered.tolist() == [1 - 2j]
    _world().broadcast([conjugated]).wait()
    assert _world().group.all_reduce(negated).tolist() == -2


def test_invalid_results_are_rejected() -> None:
    conjugated, negated = _conjugated()
    group, ones = _world().group, torch.ones(2, 3)
    expanded = torch.zeros(3).expand(2, 3)
    calls: tuple[Any, ...] = (
        lambda: _world().allreduce([conjugated]),
        lambda: dist.all_reduce(negated),
        lambda: dist.all_reduce(expanded),
        lambda: _world().reduce([conjugated]),
        lambda: dist.reduce(expanded, 0),
        lambda: dist.all_gather([expanded], ones),
        lambda: dist.all_gather_single(torch.zeros(5).as_strided((2, 3), (1, 1)), ones),
        lambda: dist.scatter(expanded, [ones]),
        lambda: dist.reduce_scatter_single(expanded, ones),
        lambda: dist.all_to_all_single(expanded, ones),
        lambda: _world().alltoall([conjugated], [torch.ones(1, dtype=torch.complex64)]),
        lambda: _world().recv([conjugated], 0),
        lambda: group.all_reduce(ones, out=expanded),
        lambda: group.all_reduce(torch.ones(()), out=negated),
    )
    for call in calls:
        with pytest.raises(UsageError, match=r"share memory|negative bit"):
            call()
    group.barrier()


def test_targets_of_inference_mode_with_gaps_are_filled_in_any_thread() -> None:
    with torch.inference_mode():
        target = torch.zeros(3, 2).t()
    group = _world().group
    group.all_reduce(torch.full((2, 3), 2.0), out=target)
    assert target.tolist() == [[2.0] * 3] * 2
    group.all_reduce_async(torch.full((2, 3), 3.0), out=target).wait()
    assert target.tolist() == [[3.0] * 3] * 2


def test_calls_without_tensors_complete_immediately() -> None:
    for work in (
        _world().allreduce_coalesced([]),
        _world().all_gather_single_coalesced([], []),
        _world().allgather_coalesced([[]], []),
    ):
        assert work.wait()
        assert work.is_completed()
        assert work.get_future().done()


def test_all_to_all_between_shapes_of_equal_size() -> None:
    for splits in (None, [2]):
        output = torch.zeros(6)
        dist.all_to_all_single(output, torch.arange(6.0).view(2, 3), None if splits is None else [6], splits)
        assert output.tolist() == list(range(6))


def test_wrong_sizes_of_an_all_to_all_are_refused_before_it_begins() -> None:
    for rows, outputs, inputs in ((3, None, None), (2, [1], [2]), (2, [2], [3]), (2, [1, 1], [2]), (2, [2], [-2])):
        with pytest.raises(UsageError, match="splits"):
            dist.all_to_all_single(torch.zeros(rows), torch.zeros(2), outputs, inputs)
    dist.barrier()


def test_a_failing_message_ends_the_future() -> None:
    sending = dist.isend(torch.ones(2), 0)
    receiving = dist.irecv(torch.zeros(3), 0)
    assert sending is not None
    assert receiving is not None
    with pytest.raises(MismatchError, match="float32"):
        receiving.get_future().wait()


def test_a_future_completes_after_the_copy_of_the_result() -> None:
    """The ticket of a call completes before its result is copied to the target."""
    ticket, copying, copied = CollectiveTicket(), threading.Event(), threading.Event()

    def copy() -> None:
        copying.set()
        assert copied.wait(10)

    work = TicketWork([ticket], [torch.ones(1)], Terms(timedelta(seconds=10)), after=copy)
    group = threading.Thread(target=ticket._finish, args=(None,))
    group.start()
    assert copying.wait(10)
    threading.Timer(0.05, copied.set).start()
    future = work.get_future()
    assert copied.is_set()
    assert future.done()
    group.join()
