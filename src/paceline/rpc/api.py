"""The public functions of rpc: join the workers, call other workers, and leave."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import msgspec

from paceline.environment import Environment, Timeout, environment
from paceline.errors import UsageError
from paceline.meeting.rendezvous import Meeting, rendezvous
from paceline.meeting.store import exchange
from paceline.meeting.world import World
from paceline.rpc.agent import Agent
from paceline.rpc.allowed import Allowed
from paceline.rpc.futures import Future, seconds_of
from paceline.rpc.options import check_backend, settings_of
from paceline.rpc.rref import RRef
from paceline.rpc.running import LocalWorker, current_agent, is_running, left_at, set_agent
from paceline.rpc.targets import Call, call_of
from paceline.rpc.workers import Directory, Introduction, Worker, WorkerInfo, check_name, decode_introduction
from paceline.transport import TLS

_Result = TypeVar("_Result")
DEFAULT_JOIN_TIMEOUT = timedelta(minutes=5)
_LINGER_S, _RETRY_S = 5.0, 0.05


def init_rpc(
    name: str,
    rank: int | None = None,
    world_size: int | None = None,
    *,
    address: str | None = None,
    token: str | None = None,
    allow: Iterable[str] = (),
    pickle: bool = False,
    timeout: Timeout | None = None,
    join_timeout: Timeout = DEFAULT_JOIN_TIMEOUT,
    num_threads: int | None = None,
    tls: TLS | None = None,
    backend: Any = None,
    rpc_backend_options: Any = None,
) -> None:
    """Join the workers of this program, under a unique name. Return when all workers have joined.

    By default, `rank`, `world_size`, `address` (``host:port`` of rank 0), `token` and `tls` come from environment
    variables, as in :func:`paceline.collectives.init`. `allow` lists the modules whose functions other workers may call
    in this process, and whose dataclasses may be arguments and results. An entry is ``my_module``, ``my_package.*``, or
    one function as ``my_module:function``.

    `pickle` enables pickled values between workers that both set it. Every process with the token can then run any code
    in this process. `timeout` is the default timeout of calls (60 s). At most `num_threads` threads (default: 64) run
    functions, and up to three more threads per worker read connections. `backend` and `rpc_backend_options` are for
    programs written for torch.distributed.rpc: see :mod:`paceline.rpc.options`.

    Raises UsageError if two workers have the same name or if rpc already runs, AuthenticationError if the tokens
    differ, and DeadlineError or RankLostError if workers did not join within `join_timeout`.
    """
    check_name(name)
    check_backend(backend)
    if rank is not None and type(rank) is not int:
        raise UsageError(f"rank is {rank!r}, expected a number; pass rank and world_size after the name")
    settings = settings_of(rpc_backend_options, address, timeout, num_threads)
    if is_running():
        raise UsageError(f"rpc runs in this process already, as {current_agent().name!r}; call shutdown() first")
    if isinstance(allow, str):
        raise UsageError(f"allow is {allow!r}, expected a list of names: allow=[{allow!r}]")
    allowed = Allowed(allow)
    variables = environment()
    tls = tls or TLS.of_environment(variables)
    join_s = seconds_of(join_timeout)
    meeting = _meet(
        None if rank == -1 else rank, world_size, settings.address, token, join_s, variables=variables, tls=tls
    )
    try:
        world = World(
            meeting.store,
            meeting.rank,
            meeting.world_size,
            token=meeting.token,
            host=meeting.host,
            tls=tls,
            name="rpc",
            timeout_s=join_s,
        )
    except BaseException:
        meeting.close()
        raise
    try:
        own = Introduction(name, pickle)
        agent = meet_by_name(world, meeting.token, own, allowed, settings.timeout, join_s, settings.num_threads)
    except BaseException:
        world.close()
        raise
    set_agent(agent)  # before the agent accepts calls, because the called functions may use it
    agent.start()


def _meet(
    rank: int | None,
    world_size: int | None,
    address: str | None,
    token: str | None,
    join_s: float,
    *,
    variables: Environment,
    tls: TLS | None,
) -> Meeting:
    """Connect to the other workers, and retry if rank 0 still serves the store of an earlier rpc session."""
    while True:
        try:
            return rendezvous(rank, world_size, address, token, join_s, variables=variables, tls=tls)
        except UsageError:
            if time.monotonic() > left_at() + _LINGER_S:
                raise
            time.sleep(_RETRY_S)


def meet_by_name(
    world: World,
    token: str,
    own: Introduction,
    allowed: Allowed,
    timeout: Timeout,
    join_s: float,
    num_threads: int,
) -> Agent:
    """Wait until all workers have joined. Return this process's agent, which does not accept calls yet."""
    deadline = time.monotonic() + join_s
    introductions = exchange(
        world.store,
        world.rank,
        world.size,
        msgspec.msgpack.encode(own),
        deadline,
        description="the names of the workers",
    )
    directory = Directory([decode_introduction(introduction) for introduction in introductions])
    return Agent(world, token, directory, allowed, pickle=own.pickle, timeout=timeout, num_threads=num_threads)


def rpc_sync(
    to: Worker,
    func: Callable[..., _Result] | str,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: Timeout | None = None,
) -> _Result:
    """Call a function in another process and return its result.

    `to` is a worker's name, rank or WorkerInfo. `func` is a function of a module, or its name as ``module:function``.
    The called process must allow the function. `func` can also be a method of an object. The object is then sent, and
    the method runs on the received copy. `timeout` is a timedelta or a number of seconds; 0 means no limit, and None
    and -1 mean the default.

    Arguments and results can be numbers, text, bytes, None, lists, tuples, sets, dictionaries, NumPy arrays, CPU
    tensors, RRefs, dataclasses, msgspec structs, enumerations, and named functions. Received arrays and tensors are
    views of the received message. A call to this process itself passes the arguments without copies.

    Raises the function's exception (see :class:`RemoteError`), DeadlineError after `timeout`, ConnectionLostError if
    the other worker died or left, and UsageError if the worker is unknown, does not allow the function, or if an
    argument cannot be sent.
    """
    agent = current_agent()
    number, call = _called(agent, to, func, args, kwargs)
    result: _Result = agent.call(number, *call, timeout, is_blocking=True).wait()
    return result


def rpc_async(
    to: Worker,
    func: Callable[..., _Result] | str,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: Timeout | None = None,
) -> Future[_Result]:
    """Call a function like :func:`rpc_sync`, but return the future of its result."""
    agent = current_agent()
    number, call = _called(agent, to, func, args, kwargs)
    return agent.call(number, *call, timeout)


def remote(
    to: Worker,
    func: Callable[..., _Result] | str,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: Timeout | None = None,
) -> RRef[_Result]:
    """Call a function or class in another process, which keeps the result. Return a reference to the result.

    The call returns before the function has run. If the function raises an exception, ``to_here()`` of the reference
    raises it. The arguments are those of :func:`rpc_sync`.
    """
    agent = current_agent()
    number, call = _called(agent, to, func, args, kwargs)
    rref: RRef[_Result] = agent.remote(number, *call, timeout)
    return rref


def _called(
    agent: LocalWorker,
    to: Worker,
    func: Callable[..., Any] | str,
    args: Sequence[Any] | None,
    kwargs: dict[str, Any] | None,
) -> tuple[int, Call]:
    number, call = agent.directory.id_of(to), call_of(func, args, kwargs)
    owner = None if isinstance(call.target, str) else call.target[0]
    if isinstance(owner, RRef) and owner.reference.owner != number:
        raise UsageError(
            f"a method was called on {agent.directory.workers[number].name!r}, but its object lives on "
            f"{owner.owner_name()!r}; call it there with rref.rpc_async().method(...)"
        )
    return number, call


def get_worker_info(worker_name: Worker | None = None) -> WorkerInfo:
    """Return a worker, given its name or rank; by default this worker. Raises UsageError for an unknown worker."""
    agent = current_agent()
    return agent.directory.workers[agent.rank if worker_name is None else agent.directory.id_of(worker_name)]


def get_rpc_timeout() -> float:
    """Return the default timeout of calls in seconds. It is infinite if calls have no limit."""
    return current_agent().seconds_of(None)


def is_available() -> bool:
    """Return True. The function exists in ``torch.distributed.rpc``; this package is always available."""
    return True


def shutdown(graceful: bool = True, timeout: Timeout = 0) -> None:
    """Leave rpc: wait for all workers and pending calls, then close the connections.

    During the wait, this worker still serves the calls of other workers. Without `graceful`, this worker leaves
    immediately, and calls of other workers that it has not answered fail. Raises RankLostError if a worker has died or
    has not called shutdown() within `timeout` (0 means no limit), and DeadlineError if calls of this worker are still
    pending. This worker has left even if an error is raised. The function does nothing if rpc is not running.
    """
    if not is_running():
        return
    agent = current_agent()
    timeout_s = seconds_of(timeout)
    try:
        if graceful:
            agent.wait_for_all(timeout_s)
    finally:
        agent.close()
        set_agent(None)
