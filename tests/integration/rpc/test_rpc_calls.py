"""Calls, references and gradients between workers that are threads of one process, over real sockets."""

from __future__ import annotations

import dataclasses
import gc
import logging
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from paceline.errors import (
    AuthenticationError,
    ConnectionLostError,
    DeadlineError,
    PacelineError,
    RankLostError,
    UsageError,
)
from paceline.rpc import Future, RemoteError, RRef, allow, async_execution, serving, wait_all
from paceline.rpc.agent import Agent
from paceline.rpc.allowed import qualified_name
from paceline.rpc.wire.codec import Encoding

from .agents import TOKEN, make_agents

S = timedelta(seconds=1)


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    made = make_agents(__name__, ["a", "b", "c"])
    yield made
    for agent in made:
        agent.close()


def call(
    agent: Agent, to: int, function: Callable[..., Any] | str, *args: Any, timeout: timedelta | None = None
) -> Any:
    return agent.call(to, qualified_name(function), args, None, timeout, is_blocking=True).wait()


def start(agent: Agent, to: int, function: Callable[..., Any], *args: Any, timeout: timedelta | None = None) -> Any:
    return agent.call(to, qualified_name(function), args, None, timeout)


def add(x: Any, y: Any) -> Any:
    return x + y


def fail(text: str) -> None:
    raise LookupError(text)


def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


gates: dict[str, threading.Event] = {}


def open_gate(name: str) -> None:
    gates.setdefault(name, threading.Event()).set()


def pass_gate(name: str) -> str:
    gates.setdefault(name, threading.Event()).wait(10)
    return name


later: dict[str, Future[Any]] = {}


@async_execution
def promised(name: str) -> Future[Any]:
    return later.setdefault(name, Future())


@async_execution
def not_a_future() -> int:
    return 1


def give(name: str, value: Any) -> None:
    later.setdefault(name, Future()).set_result(value)


class Counter:
    def __init__(self, value: int) -> None:
        self.value = value

    def add(self, by: int) -> int:
        self.value += by
        return self.value

    def itself(self) -> Counter:
        return self


freed: list[int] = []


class Tracked(Counter):
    def __del__(self) -> None:
        freed.append(self.value)


def read(rref: RRef[Any]) -> Any:
    return rref.to_here()


kept: list[Any] = []


def keep(rref: RRef[Any]) -> None:
    kept.append(rref)


def give_back_kept() -> Any:
    return kept.pop()


def value_of(rref: RRef[Any]) -> Any:
    return rref.local_value()


def unsendable() -> object:
    return object()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        gc.collect()
        time.sleep(0.005)


def test_calls_and_failures(agents: list[Agent]) -> None:
    a, b, _ = agents
    assert call(a, 1, add, 2, 3) == 5
    assert call(a, 0, add, 2, 3) == 5
    assert a.call(1, qualified_name(add), (1,), {"y": 2}).wait() == 3
    big = np.arange(1 << 18, dtype=np.float32)
    np.testing.assert_array_equal(call(a, 1, add, big, big), 2 * big)
    assert wait_all([start(a, 1, add, i, i) for i in range(200)]) == [2 * i for i in range(200)]
    with pytest.raises(LookupError, match="no such thing") as raised:
        call(a, 1, fail, "no such thing")
    assert isinstance(raised.value, RemoteError)
    assert "in fail" in raised.value.remote_traceback
    with pytest.raises(UsageError, match="is not allowed here"):
        call(a, 1, "os:system", "true")
    with pytest.raises(TypeError, match="missing 1 required"):
        call(a, 1, add, 1)
    with pytest.raises(UsageError, match=r"the result cannot be sent: it is of type builtins\.object"):
        call(a, 1, unsendable)
    with pytest.raises(UsageError, match=r"args\[0\] of the call cannot be sent"):
        call(a, 1, add, object(), 1)
    with pytest.raises(UsageError, match="worker 'x'"):
        a.directory.id_of("x")
    assert call(b, 0, add, 1, 1) == 2


def test_timeouts_leave_the_connection_usable(agents: list[Agent]) -> None:
    a = agents[0]
    start_s = time.monotonic()
    with pytest.raises(DeadlineError, match=r"worker 'b' has not answered .*nap within 0\.05 s"):
        call(a, 1, nap, 4.0, timeout=timedelta(milliseconds=50))
    slow = start(a, 1, nap, 4.0, timeout=timedelta(milliseconds=50))
    until(slow.done)
    assert isinstance(slow.exception(), DeadlineError)
    assert time.monotonic() - start_s < 4.0
    assert call(a, 1, add, 1, 2) == 3


def test_calls_of_one_caller_run_concurrently(agents: list[Agent]) -> None:
    a = agents[0]
    gates.clear()
    waiting = [start(a, 1, pass_gate, f"g{i}") for i in range(4)]
    for i in range(4):
        call(a, 1, open_gate, f"g{i}")
    assert wait_all(waiting) == ["g0", "g1", "g2", "g3"]
    threads = [threading.Thread(target=call, args=(a, 1, pass_gate, "h")) for _ in range(3)]
    for thread in threads:
        thread.start()
    call(a, 1, open_gate, "h")
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_async_execution_replies_when_the_future_is_set(agents: list[Agent]) -> None:
    a = agents[0]
    later.clear()
    many = [start(a, 1, promised, "p") for _ in range(20)]  # more calls than threads
    call(a, 1, give, "p", 7)
    assert wait_all(many) == [7] * 20
    seen: list[int] = []
    following = start(a, 1, promised, "q").then(lambda done: seen.append(done.wait()))
    call(a, 1, give, "q", 8)
    following.wait(10 * S)
    assert seen == [8]
    with pytest.raises(UsageError, match="expected a Future"):
        call(a, 1, not_a_future)


def test_references_are_counted_by_the_owner(agents: list[Agent]) -> None:
    a, b, c = agents
    freed.clear()
    made = a.remote(1, qualified_name(Tracked), (5,), None)
    assert made.owner_name() == "b"
    assert made.rpc_sync().add(2) == 7
    assert made.rpc_async().add(1).wait() == 8
    with pytest.raises(UsageError, match=r"the method '__init__' .* not allowed"):
        a.call(1, (made, "__init__"), (1,), None).wait()
    with pytest.raises(UsageError, match="local_value"):
        made.local_value()
    assert call(a, 1, value_of_owner, made) == 8
    itself = made.remote().itself()
    assert itself.rpc_sync().add(0) == 8
    del itself
    # c also holds a reference, which keeps the object alive
    call(a, 2, keep, made)
    reference = made.reference
    del made
    until(lambda: b.table.holders(reference) == {2})
    assert freed == []
    back = call(a, 2, give_back_kept)
    assert back.rpc_sync().add(1) == 9
    del back
    until(lambda: freed == [9])
    assert b.table.num_owned == 0
    own = RRef.of_holding(c.own(3), c)
    assert own.local_value() == 3
    assert call(c, 0, read, own) == 3
    del own
    until(lambda: c.table.num_owned == 0)


def test_a_call_to_the_own_worker_times_out(agents: list[Agent]) -> None:
    a = agents[0]
    later.clear()
    with pytest.raises(DeadlineError, match=r"promised .* no result within 0\.02 s"):
        call(a, 0, promised, "never", timeout=timedelta(milliseconds=20))
    give("never", 1)  # a late reply has no effect
    with pytest.raises(DeadlineError, match=r"nap .* no result within 0 s"):
        start(a, 0, nap, 0.01, timeout=timedelta(0)).wait()
    with pytest.raises(DeadlineError, match=r"within 0\.01 s"):
        a.remote(0, qualified_name(promised), ("r",), None).to_here(timedelta(milliseconds=10))
    assert start(a, 0, add, 1, 2).wait() == 3
    reported_errors: list[BaseException | None] = []  # a callback sets the result, because no thread waits
    start(a, 0, promised, "nobody", timeout=timedelta(milliseconds=20)).add_done_callback(
        lambda done: reported_errors.append(done.exception())
    )
    until(lambda: bool(reported_errors))
    assert isinstance(reported_errors[0], DeadlineError)


chain: list[Agent] = []


def bounce(left: int) -> int:
    """Call the other agent, which calls this agent, and so on."""
    return 0 if not left else 1 + call(chain[left % 2], 1 - left % 2, bounce, left - 1)


def test_a_chain_of_calls_may_be_longer_than_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    chain[:] = made = make_agents(__name__, ["a", "b"], num_threads=1)
    try:
        assert call(made[0], 1, bounce, 40) == 40
        monkeypatch.setattr(serving, "MAX_WAITING", 10)
        with pytest.raises(UsageError, match=r"10 functions of this process wait .* nested too deep"):
            call(made[0], 1, bounce, 40)
        assert call(made[0], 1, bounce, 3) == 3
    finally:
        for agent in made:
            agent.close()


def leave_program() -> None:
    sys.exit(3)


def test_an_exiting_function_sends_a_reply(agents: list[Agent], caplog: pytest.LogCaptureFixture) -> None:
    a = agents[0]
    with pytest.raises(RemoteError, match="SystemExit: 3"):
        call(a, 1, leave_program)
    with pytest.raises(SystemExit):
        start(a, 0, leave_program).wait(5 * S)
    with pytest.raises(RemoteError, match="SystemExit: 3"):
        a.remote(1, qualified_name(leave_program), (), None).to_here()
    assert call(a, 1, add, 1, 2) == 3


def test_invalid_arguments_of_calls(agents: list[Agent]) -> None:
    a = agents[0]
    name = qualified_name(add)
    bad: Any
    for begin in (a.call, a.remote):
        for bad in (5, "abc", b"ab"):
            with pytest.raises(UsageError, match=r"args is .*, expected a tuple of arguments"):
                begin(1, name, bad, None)
        for bad in ([1], {1: 2}):
            with pytest.raises(UsageError, match="kwargs is"):
                begin(1, name, (1,), bad)
        for bad in (-5.0, "5", True, float("nan")):
            with pytest.raises(UsageError, match=r"timeout=.*: expected seconds"):
                begin(1, name, (1, 2), None, bad)
    assert call(a, 1, add, 1, 2, timeout=timedelta.max) == 3
    assert start(a, 1, add, 1, 2, timeout=timedelta.max).wait(timedelta.max) == 3
    assert a.remote(0, name, (1, 2), None).to_here(timedelta.max) == 3


def test_unreadable_arguments_are_reported_as_the_reason(agents: list[Agent]) -> None:
    made = agents[0].remote(1, qualified_name(kind_of), (Stranger(1),), None)
    for _ in range(2):
        for use in (made.to_here, made.rpc_sync().value, made.rpc_async().value().wait, made.remote().value().to_here):
            with pytest.raises(UsageError, match=r"Stranger' is not allowed here"):
                use()


def test_a_reference_from_before_a_shutdown_refers_to_no_new_object(agents: list[Agent]) -> None:
    left = agents[0].remote(1, qualified_name(Counter), (5,), None)
    first, second = make_agents(__name__, ["a", "b"])
    try:
        new = first.remote(1, qualified_name(Counter), (7,), None)
        assert new.reference == left.reference
        with pytest.raises(UsageError, match=r"args\[0\] .* RRef .* shut down"):
            call(first, 1, value_of_owner, left)
        with pytest.raises(UsageError, match=r"RRef.* shut down"):
            first.call(1, (left, "add"), (1,), None)
        assert call(first, 1, value_of_owner, new) == 7
    finally:
        first.close()
        second.close()


def value_of_owner(rref: RRef[Counter]) -> int:
    return rref.local_value().value


def test_failures_of_remote_calls_are_raised_with_the_value(agents: list[Agent]) -> None:
    a = agents[0]
    with pytest.raises(LookupError, match="later"):
        a.remote(1, qualified_name(fail), ("later",), None).to_here()
    failed = a.remote(1, qualified_name(fail), ("later",), None)
    for use in (failed.rpc_sync().value, failed.rpc_async().value().wait, failed.remote().value().to_here):
        with pytest.raises(LookupError, match="later") as raised:
            use()
        assert "in fail" in raised.value.remote_traceback  # type: ignore[attr-defined]
    left = a.remote(1, qualified_name(leave_program), (), None)
    with pytest.raises(RemoteError, match="SystemExit: 3"):
        left.rpc_sync().value()
    with pytest.raises(UsageError, match="is not allowed here"):
        a.remote(1, "os:getcwd", (), None).to_here()
    slow = a.remote(1, qualified_name(nap), (0.3,), None)
    with pytest.raises(DeadlineError, match="to_here"):
        slow.to_here(timedelta(milliseconds=20))
    assert slow.to_here() == 0.3


def test_the_death_of_a_holder_releases_its_references(agents: list[Agent]) -> None:
    a, b, c = agents
    freed.clear()
    kept.clear()
    made = a.remote(1, qualified_name(Tracked), (1,), None)
    call(a, 2, keep, made)  # c has no connection to b
    reference = made.reference
    del made
    until(lambda: b.table.holders(reference) == {2})
    assert freed == []
    c.close()
    until(lambda: freed == [1])
    kept.clear()
    second = c_less = a.remote(1, qualified_name(Tracked), (2,), None)
    assert second.rpc_sync().add(0) == 2
    a.close()
    until(lambda: freed == [1, 2])
    del second, c_less
    assert b.table.num_owned == 0


def test_a_dying_callee_ends_pending_calls(agents: list[Agent], caplog: pytest.LogCaptureFixture) -> None:
    a, b, _ = agents
    caplog.set_level(logging.CRITICAL)
    gates.clear()
    made = a.remote(1, qualified_name(Counter), (1,), None)
    assert made.rpc_sync().add(1) == 2
    waiting = start(a, 1, pass_gate, "never")
    blocked: list[BaseException] = []

    def wait() -> None:
        try:
            call(a, 1, pass_gate, "never")
        except BaseException as error:
            blocked.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    b.close()
    thread.join(10)
    assert isinstance(blocked[0], ConnectionLostError)
    with pytest.raises(ConnectionLostError, match=r"worker 'b' died or left before it answered .*pass_gate"):
        waiting.wait(10 * S)
    for attempt in (made.to_here, lambda: call(a, 1, add, 1, 1)):
        with pytest.raises(ConnectionLostError, match=r"worker 'b' .*died or left"):
            attempt()
    open_gate("never")


def test_all_workers_leave_together(agents: list[Agent]) -> None:
    a, b, c = agents
    done: list[str] = []
    waiting = start(a, 1, nap, 0.1)

    def leave(agent: Agent) -> None:
        agent.wait_for_all()
        done.append(agent.name)

    threads = [threading.Thread(target=leave, args=(agent,)) for agent in (b, c)]
    for thread in threads:
        thread.start()
    time.sleep(0.02)
    assert call(a, 1, add, 1, 1) == 2
    assert done == []
    leave(a)
    assert waiting.done()
    for thread in threads:
        thread.join(10)
    assert sorted(done) == ["a", "b", "c"]


def test_leaving_names_dead_workers(agents: list[Agent]) -> None:
    agents[2].close()
    with pytest.raises(RankLostError, match="rank 2"):
        agents[0].wait_for_all()


def test_workers_with_another_token_are_rejected() -> None:
    a, b = make_agents(__name__, ["a", "b"], tokens=[TOKEN, "another token for tests"])
    try:
        with pytest.raises(AuthenticationError, match="worker 'b' cannot be called"):
            call(a, 1, add, 1, 1)
    finally:
        a.close()
        b.close()


def test_names_of_workers_must_differ() -> None:
    with pytest.raises(UsageError, match=r"two workers are called 'x': ranks 0 and 1"):
        make_agents(__name__, ["x", "x"])


@dataclasses.dataclass
class Stranger:
    x: int


Stranger.__module__ = "nobody_allows_this"


class Plain:
    pass


def kind_of(value: Any) -> str:
    return type(value).__name__


def test_pickle_is_used_if_both_ends_permit_it() -> None:
    a, b = make_agents(__name__, ["a", "b"], pickle=True)
    try:
        assert call(a, 1, kind_of, Plain()) == "Plain"
        with pytest.raises(UsageError, match="not allowed here"):
            call(a, 1, "os:getcwd")
    finally:
        a.close()
        b.close()


def test_invalid_frames_receive_an_error(agents: list[Agent], caplog: pytest.LogCaptureFixture) -> None:
    a = agents[0]
    for kind, meta in (
        (40, b""),
        (16, b"\xc1"),
        (16, b"\x93\x01\x02\x03"),
        (16, b"\x05"),
        (17, b"\x91\x01"),
        (18, b"\x01"),
        (19, b""),
    ):
        with pytest.raises(PacelineError, match=r"cannot be read|does not support|names no") as raised:
            a.ends.end_to(1).start(kind, meta, (), description="nonsense", timeout_s=10).wait()
        assert "nonsense" in str(raised.value)
        with pytest.raises(ConnectionLostError):  # the connection is closed and opened again
            call(a, 1, add, 1, 1)
    assert call(a, 1, add, 1, 1) == 2


def test_altered_frames_raise_an_error(agents: list[Agent], caplog: pytest.LogCaptureFixture) -> None:
    a, rng, answers = agents[0], random.Random(3), 0
    whole = Encoding(agent=a)
    call_meta = whole.encode_call((), qualified_name(add), (np.ones(3), {1: (2, "x")}), {"y": 1 << 70})
    made_meta = whole.encode_call(([1, 0, 999],), qualified_name(Counter), (1,), {})
    kinds = {16: call_meta, 17: made_meta, 18: b"\x93\x01\x00\x05", 19: b"\x92\x91\x93\x01\x00\x05\x00", 22: call_meta}
    for _ in range(150):
        kind = rng.choice(list(kinds))
        meta = bytearray(kinds[kind])
        for _ in range(rng.randint(1, 3)):
            meta[rng.randrange(len(meta))] = rng.randrange(256)
        body = [np.zeros(rng.choice([0, 3, 4]))]
        end = a.ends.end_to(1)
        try:
            end.start(kind, bytes(meta), body, description="fuzz", timeout_s=5).wait()
        except DeadlineError:
            raise
        except (PacelineError, TypeError):
            answers += 1
        end.fail(ConnectionLostError("it may be closed"))
    assert answers > 50
    assert call(a, 1, add, 1, 1) == 2
    assert [record for record in caplog.records if record.exc_info] == []


def test_a_process_without_the_token_is_rejected(agents: list[Agent]) -> None:
    a = agents[0]
    address = a.world.infos[1].endpoint.tcp
    with socket.create_connection((address.host, address.port)) as stranger:
        stranger.settimeout(10)
        stranger.sendall(b"\0" * 200)
        while stranger.recv(4096):
            pass
    assert call(a, 1, add, 1, 1) == 2


@allow
def linear_part(weights: RRef[Any], x: Any) -> Any:
    return weights.local_value() * x


def test_gradients_flow_back_along_the_calls(agents: list[Agent]) -> None:
    torch = pytest.importorskip("torch")
    from paceline.rpc import autograd
    from paceline.rpc.running import in_context, set_agent

    a, b, _ = agents
    w = torch.tensor([2.0, 3.0], requires_grad=True)
    x = torch.tensor([5.0, 7.0], requires_grad=True)
    held = call(b, 0, store_reference, RRef.of_holding(b.own(w), b))
    assert held is None
    rref = kept.pop()
    with pytest.raises(UsageError, match="autograd context 123 "):
        autograd.backward(123, [x.sum()])
    # Threads of one process share the contexts, so the sends of a and the receives of b are in one context.
    number = autograd.contexts.new(a.rank)
    with in_context(number):
        y = call(a, 1, linear_part, rref, x)
        assert y.requires_grad
        unused = call(a, 1, linear_part, rref, x)
        assert unused.requires_grad
        with pytest.raises(UsageError, match="one element"):
            autograd.backward(number, [y])
        set_agent(a)
        try:
            autograd.backward(number, [y.sum()])
        finally:
            set_agent(None)
    gradients = autograd.contexts.gradients(number)
    assert set(gradients) == {w, x}
    assert torch.equal(gradients[x], w.detach())
    assert torch.equal(gradients[w], x.detach())
    assert not call(a, 1, linear_part, rref, x).requires_grad
    autograd.contexts.pop(number)


def store_reference(rref: RRef[Any]) -> None:
    kept.append(rref)
