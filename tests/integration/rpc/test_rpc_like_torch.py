"""Calls in the style of torch.distributed.rpc. The workers are threads of one process."""

from __future__ import annotations

import concurrent.futures
import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from paceline import rpc
from paceline.errors import DeadlineError, RankLostError, UsageError
from paceline.rpc.agent import Agent
from paceline.rpc.running import set_agent

from .agents import make_agents

HIDDEN = "_hidden"


@pytest.fixture
def owner() -> Iterator[Agent]:
    """Run rpc in this process as worker ``a``; the caller starts the other worker, ``b``."""
    a, b = make_agents([__name__, "torch"], ["a", "b"])
    set_agent(a)
    yield b
    set_agent(None)
    for agent in (a, b):
        agent.close()


@dataclass
class Scale:
    by: float

    def of(self, x: float) -> float:
        self.by += 1
        return self.by * x

    def __call__(self, x: float) -> float:
        return self.by * x


class Table:
    def __init__(self) -> None:
        self.values = [1.0, 2.0]

    def total(self, more: float = 0) -> float:
        return sum(self.values) + more

    def _hidden(self) -> int:
        return 1

    @staticmethod
    @rpc.functions.async_execution
    def below(x: int) -> rpc.Future[int]:
        return promised(x)

    @rpc.functions.async_execution
    @classmethod
    def above(cls, x: int) -> Any:
        source_future: concurrent.futures.Future[int] = concurrent.futures.Future()
        promised(x).then(lambda done: source_future.set_result(done.wait()))
        return source_future


class ScaleError(Exception):
    pass


def fail() -> None:
    raise ScaleError("too large")


def promised(x: int) -> rpc.Future[int]:
    return rpc.rpc_async(1, functools.partial(plus, x), (1,))


def plus(x: int, y: int) -> int:
    return x + y


@rpc.allow
def _call_method(method: Callable[..., Any], rref: rpc.RRef[Any], *args: Any, **kwargs: Any) -> Any:
    return method(rref.local_value(), *args, **kwargs)


def both(first: rpc.RRef[float], second: rpc.RRef[float] | None = None) -> float:
    assert second is not None
    return first.to_here() + second.to_here()


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def test_workers_by_name_number_and_info(owner: Agent) -> None:
    for to in ("b", 1, rpc.get_worker_info("b"), rpc.get_worker_info(1)):
        assert rpc.rpc_sync(to, plus, args=[1, 2]) == 3
        assert rpc.rpc_async(to=to, func=plus, args=(1,), kwargs={"y": 2}, timeout=-1.0).wait() == 3
        assert rpc.remote(to, plus, (1, 2), None, 5).to_here(timeout=5.0) == 3


def test_times_in_seconds(owner: Agent) -> None:
    assert rpc.get_rpc_timeout() == 10
    with pytest.raises(DeadlineError, match=r"within 0\.02 s"):
        rpc.rpc_sync("b", sleep, (0.5,), timeout=0.02)
    assert rpc.rpc_sync("b", sleep, (0.01,), timeout=0) is None
    table = rpc.remote("b", Table)
    assert table.rpc_sync(timeout=5).total() == table.rpc_async(timeout=0).total().wait() == 3
    with pytest.raises(RankLostError, match=r"rank 1 of 2 did not come to the shutdown of rpc .* within 0\.0"):
        rpc.shutdown(timeout=timedelta(milliseconds=20))


def test_methods_given_as_functions(owner: Agent) -> None:
    table = rpc.remote("b", Table)
    assert rpc.rpc_sync(table.owner(), _call_method, args=[Table.total, table], kwargs={"more": 2}) == 5
    assert rpc.rpc_sync(table.owner(), table.rpc_sync().total, args=(1,)) == 4
    assert rpc.rpc_async(table.owner(), table.rpc_async().total, kwargs={"more": 3}).wait() == 6
    with pytest.raises(UsageError, match=r"'a'.*'b'.*rref\.rpc_async\(\)\.method"):
        rpc.rpc_sync("a", table.rpc_sync().total)
    with pytest.raises(UsageError, match=r"'_hidden' of .*Table is not allowed here: its name begins with _"):
        getattr(table.rpc_sync(), HIDDEN)()


def test_methods_of_sendable_objects_run_on_a_copy(owner: Agent) -> None:
    scale = Scale(2)
    assert rpc.rpc_sync("b", scale.of, (10,)) == 30
    assert rpc.rpc_sync("b", scale, (10,)) == 20
    assert rpc.remote("b", functools.partial(scale.of, 10)).to_here() == 30
    assert scale.by == 2
    with pytest.raises(UsageError, match=r"total\(\) is a method of an object .* cannot be sent"):
        rpc.rpc_sync("b", Table().total)
    for hidden in ("__init__", "__class__"):
        with pytest.raises(UsageError, match="not allowed here: its name begins with _"):
            rpc.running.current_agent().call(1, (scale, hidden), (1,), None).wait()
    with pytest.raises(UsageError, match=r"'append' of builtins\.list is not allowed here"):
        rpc.running.current_agent().call(1, ([1], "append"), (1,), None).wait()


def test_late_replies(owner: Agent) -> None:
    for function in (Table.below, Table.above):
        assert rpc.rpc_sync("b", function, (1,)) == 2
    table = rpc.remote("b", Table)
    assert table.rpc_sync().below(2) == table.rpc_async().above(2).wait() == table.remote().below(2).to_here() == 3


def test_representations_of_references(owner: Agent) -> None:
    own, other = rpc.RRef(1.5, type_hint=float), rpc.remote("b", plus, (1, 2))
    assert own.confirmed_by_owner()
    assert other.to_here() == 3
    assert other.confirmed_by_owner()
    assert (own.is_owner(), other.is_owner(), other.owner_name()) == (True, False, "b")
    assert rpc.rpc_sync("b", both, (own,), {"second": other}) == 4.5
    failed: rpc.RRef[Any] = rpc.remote("b", "m:f")
    with pytest.raises(UsageError):
        failed.to_here()
    assert not failed.confirmed_by_owner()


def test_exceptions_of_the_program_keep_the_class(owner: Agent) -> None:
    with pytest.raises(ScaleError, match="too large"):
        rpc.rpc_sync("b", fail)


def test_functions_of_tensors_are_called_by_name(owner: Agent) -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(2)
    assert rpc.rpc_sync("b", torch.add, args=(x, 3)).tolist() == [4, 4]
    assert rpc.rpc_sync("b", torch.zeros, (2,), {"dtype": torch.float64}).dtype is torch.float64
    assert rpc.rpc_sync("b", x.add, (x,)).tolist() == rpc.rpc_sync("b", torch.Tensor.add, (x, x)).tolist() == [2, 2]
    total = rpc.remote("b", torch.add, args=(x, 1))
    assert total.rpc_sync().sum() == 4
    with pytest.raises(UsageError, match="that compute with tensors"):
        rpc.rpc_sync("b", torch.from_file, ("/nowhere",))


def test_an_optimizer_accepts_frozen_parameters(owner: Agent) -> None:
    torch = pytest.importorskip("torch")
    frozen, learned = torch.ones(2), torch.ones(2, requires_grad=True)
    rrefs = [rpc.RRef(frozen), rpc.RRef(learned)]
    optimizer = rpc.optimizer.DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.5)
    with rpc.autograd.context() as context:
        rpc.autograd.backward(context, [(frozen * learned).sum()])
        optimizer.step(context)
    assert frozen.tolist() == [1, 1]
    assert learned.tolist() == [0.5, 0.5]
    with pytest.raises(UsageError, match="RRef refers to Tensor, expected a parameter"):
        rpc.optimizer.DistributedOptimizer(torch.optim.SGD, [rpc.RRef(learned * 2)], lr=0.5)


def test_calls_are_executed_only_when_functions_can_use_rpc(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    start = Agent.start

    def started(agent: Agent) -> None:
        seen.append(rpc.get_worker_info().name)
        start(agent)

    monkeypatch.setattr(Agent, "start", started)
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=0)
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options, allow=[__name__])
    try:
        assert seen == ["alone"]
        assert rpc.get_rpc_timeout() == math.inf
        assert rpc.rpc_sync("alone", plus, (1, 2)) == 3
    finally:
        rpc.shutdown()


def test_a_backward_pass_from_a_reference(owner: Agent) -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(2, requires_grad=True)
    with rpc.autograd.context() as context:
        total = rpc.remote("b", torch.sum, (x,))
        with pytest.raises(UsageError, match="RRef to float, expected a tensor"):
            rpc.RRef(1.0).backward(context)
        total.backward(context)
        assert rpc.autograd.get_gradients(context)[x].tolist() == [1, 1]
    own = rpc.RRef((x * 3).sum())
    own.backward()
    assert x.grad.tolist() == [3, 3]
