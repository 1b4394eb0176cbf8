"""Run one scheduler or server in this process until the cluster ends, a signal arrives or the parent ends."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec
from typing_extensions import override

from paceline.closing import Closing
from paceline.environment import environment
from paceline.errors import PacelineError, PeerError
from paceline.observe.spans.window import StepWindow
from paceline.observe.work import SilentWork, start_work
from paceline.protocol import Role
from paceline.ps import Scheduler, SchedulerLink, Server, make_node_name, messages
from paceline.ps.fail_stop import Fail, end_process, watch_loop, watch_threads
from paceline.ps.loop_watchdog import LoopWatchdog
from paceline.ps.recorded_frames import RecordedFrames
from paceline.ps.scheduler.link import LinkHooks
from paceline.tables.memory.limit import MemoryLimit
from paceline.transport import TLS, Endpoint, Handler, Hello, SocketTransport, new_event_loop
from paceline.transport.backoff import reach

from .supervisor import watch_parent

if TYPE_CHECKING:
    from paceline.observe.progress import WorkProgress
    from paceline.protocol.chains import ChainGroup

_LINGER_S = 5.0
_SOON_S = 1.0
_PATIENCE = 4.0  # heartbeat intervals after which an event loop that has not run counts as hung
_RECONNECT_S = 60.0
_CONNECT_S = 5.0
_Reached = TypeVar("_Reached")


@dataclass(frozen=True, kw_only=True)
class Joining:
    """The data for joining a cluster: the scheduler's address, the token, and optional TLS settings."""

    scheduler: str
    token: str
    tls: TLS | None = None

    def transport(self) -> SocketTransport:
        return SocketTransport(self.token, tls=self.tls)

    def wait_scheduler(self, patience_s: float, on_wait: Callable[[], None]) -> None:
        """Wait until a scheduler answers; call `on_wait` once if the wait is not short.

        Raises DeadlineError if no scheduler answers within `patience_s`. A wrong token, certificate or version raises
        immediately, because another attempt would not help.
        """
        transport, hello = self.transport(), Hello(role="observer", to="scheduler")
        reach(
            lambda: transport.connect(self.scheduler, hello, timeout_s=_CONNECT_S), patience_s, on_wait=on_wait
        ).close()


def run_scheduler(
    settings: messages.ClusterSettings,
    *,
    token: str,
    address: str = "127.0.0.1:0",
    tls: TLS | None = None,
    on_ready: Callable[[Endpoint], None],
    on_note: Callable[[str], None] = lambda text: None,
    on_loss: Callable[[str], None] = lambda text: None,
    with_parent: bool = False,
    replaces: bool = False,
    accepts_minority: bool = False,
) -> None:
    """Run the scheduler until the cluster ends; call `on_ready` with its addresses.

    If it has the address, token and settings of a dead scheduler, it takes over the dead scheduler's cluster. With
    `replaces` it waits for the members of that cluster. With `accepts_minority` it declares members dead that do not
    arrive. `on_note` receives notes for the operator, `on_loss` reports of lost data. Raises PeerError if another
    scheduler takes over.
    """
    settings.check()
    fail = partial(end_process, "scheduler")

    async def serve(stop: asyncio.Event) -> None:
        scheduler = Scheduler(
            settings,
            fail=fail,
            replaces=replaces,
            accepts_minority=accepts_minority,
            on_note=on_note,
            on_loss=on_loss,
            reports_ends=not with_parent,
        )
        transport = SocketTransport(token, tls=tls)
        hello = Hello(role="scheduler", name="scheduler")
        listener = await transport.serve(_recorded(scheduler), hello, address=address)
        try:
            on_ready(listener.endpoint)
            ended = asyncio.ensure_future(scheduler.ended.wait())
            stopped = asyncio.ensure_future(stop.wait())
            await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
            scheduler.end("the scheduler was ended")
            if not with_parent or ended.done():  # wait until all members have received the message of the end and left
                deadline = asyncio.get_running_loop().time() + _LINGER_S
                while scheduler.core.cluster.membership.members and asyncio.get_running_loop().time() < deadline:
                    await asyncio.sleep(0.01)
            for task in (ended, stopped):
                task.cancel()
            if scheduler.failure is not None:
                raise scheduler.failure
        finally:
            scheduler.close()
            await listener.close()

    _run(serve, with_parent, fail)


def run_server(
    joining: Joining, *, address: str = "127.0.0.1:0", rank: int | None = None, extra: bool = False,
    with_parent: bool = False, on_ready: Callable[[int, Endpoint], None] | None = None,
    on_leaving: Callable[[], None] = lambda: None, node: str | None = None, memory_limit: MemoryLimit | None = None,
) -> None:  # fmt: skip
    """Run a parameter server until the cluster ends, under the unique name `node` (None: a new name).

    Rows beyond the `memory_limit` are stored in files. An `extra` server joins a cluster that has all its servers.
    After SIGTERM the server first moves its buckets to the other servers, without a time limit, and then ends. It calls
    `on_leaving` if the move is not short. A second SIGTERM ends the server immediately. Raises PeerError if the
    scheduler is lost or expels this server.
    """

    node = make_node_name("server") if node is None else node
    name = "server" if rank is None else f"server {rank}"

    def fail(error: BaseException) -> None:
        end_process(name, error)

    async def serve(stop: asyncio.Event) -> None:
        nonlocal name
        loop = asyncio.get_running_loop()
        failure: list[PacelineError] = []
        server: Server | None = None
        resources = contextlib.ExitStack()

        moves: BucketMoves | None = None
        ended = False

        def end(error: PacelineError | None) -> None:
            nonlocal ended
            if error is not None and not ended:
                failure.append(error)
            ended = True
            stop.set()

        def raise_failure() -> None:
            if failure:
                raise failure[0]

        def handle_notice(notice: msgspec.Struct) -> None:
            if isinstance(notice, messages.View):
                if moves is not None:
                    moves.take(notice.groups)
                if server is not None:
                    loop.call_soon_threadsafe(server.view_changed, notice)
            elif isinstance(notice, messages.Ended):
                loop.call_soon_threadsafe(end, None)
            elif isinstance(notice, messages.Expelled):
                loop.call_soon_threadsafe(end, PeerError(f"this server was declared dead: {notice.reason}"))

        def handle_loss(error: PacelineError) -> None:
            loop.call_soon_threadsafe(end, error)

        def tables() -> list[messages.KnownTable]:
            return [] if server is None else server.known_tables()

        def unreachable() -> tuple[int, ...]:
            return () if server is None else server.unreachable()

        def report_filled(filled: messages.Filled) -> None:
            with contextlib.suppress(PacelineError):  # the callback `on_lost` reports the loss of the scheduler
                link.notify(filled)

        watchdog = LoopWatchdog(loop, lambda text: print(f"paceline {name}: {text}", file=sys.stderr, flush=True))
        transport = joining.transport()
        link = await asyncio.to_thread(
            lambda: SchedulerLink(
                transport,
                joining.scheduler,
                Hello(role="server", name=node),
                hooks=LinkHooks(handle_notice, handle_loss, tables, unreachable, watchdog.is_running),
                # Wait for the scheduler without a limit, because only this server has its rows.
                reconnect_s=_RECONNECT_S if with_parent else math.inf,
            )
        )
        try:
            request_settings = partial(link.call, messages.GetSettings(), messages.ClusterSettings)
            settings: messages.ClusterSettings | None = await unless_stopped(link, stop, request_settings)
            if settings is None:
                raise_failure()
                return
            server = Server(
                settings, memory_limit=memory_limit, transport=transport, on_filled=report_filled, fail=fail
            )
            hello = Hello(role="server", rank=rank or 0, name=node)
            listener = await transport.serve(_recorded(server), hello, address=address)
            try:
                register = messages.Register(
                    node=node, role=Role.SERVER, address=listener.endpoint, rank=rank, is_extra=extra
                )
                # Wait until this server is a member and the cluster has all its servers.
                welcome = await unless_stopped(link, stop, partial(link.register, register, timeout_s=math.inf))
                if welcome is None:
                    raise_failure()
                    return
                check_settings(settings, welcome.settings, joining.scheduler)
                name = f"server {welcome.rank}"
                joined = Hello(
                    role="server",
                    rank=welcome.rank,
                    incarnation=welcome.incarnation,
                    name=node,
                    cluster=welcome.settings.cluster,
                )
                listener.set_hello(joined)
                watchdog.patience_s = _PATIENCE * welcome.heartbeat_s
                server.joined(joined, welcome.heartbeat_s)
                server.view_changed(welcome.view)
                moves = resources.enter_context(BucketMoves(welcome.incarnation))
                moves.take(welcome.view.groups)
                if on_ready is not None:
                    on_ready(welcome.rank, listener.endpoint)
                await stop.wait()
                if not (ended or failure or with_parent):
                    moves.is_leaving = True
                    await _drain(link, stop, on_leaving)
            finally:
                resources.close()
                server.close()
                await listener.close()
        finally:
            await asyncio.to_thread(link.close)
        raise_failure()

    _run(serve, with_parent, fail)


class BucketMoves(Closing):
    """Shows how many buckets a server has copied from other servers, or has moved to them before it leaves."""

    def __init__(self, server: int) -> None:
        """`server` is the server's incarnation."""
        self._server = server
        self._total = 0
        self._work: WorkProgress | SilentWork | None = None
        self.is_leaving = False

    def take(self, groups: Sequence[ChainGroup]) -> None:
        """Show the progress in the groups of a new view."""
        held = sum(group.buckets.bit_count() for group in groups if self._server in group.members)
        copied = sum(group.buckets.bit_count() for group in groups if self._server == group.filling)
        if self._work is None and (copied or self.is_leaving):
            self._total = held + copied
            title = "moving buckets to other servers" if self.is_leaving else "copying buckets from other servers"
            self._work = start_work(title, self._total, "buckets").__enter__()
        if self._work is not None:
            self._work.update(self._total - held if self.is_leaving else held)
        if not copied and not self.is_leaving:
            self.close()

    @override
    def close(self) -> None:
        """End the display."""
        if self._work is not None:
            self._work.close()
            self._work = None


def _recorded(handler: Handler) -> Handler:
    """Record the frames of a server or scheduler for the timeline, if the launcher writes one."""
    settings = environment()
    if settings.timeline_steps is not None and settings.job_dir is not None:
        with contextlib.suppress(OSError):  # the cluster works without a timeline
            return RecordedFrames(handler, StepWindow(settings.job_dir))
    return handler


def check_settings(requested: messages.ClusterSettings, joined: messages.ClusterSettings, scheduler: str) -> None:
    """Raise PeerError unless the cluster has the requested settings, because the scheduler may have been restarted."""
    may_differ = {name: getattr(requested, name) for name in ("cluster", "num_servers", "heartbeat_timeout_s")}
    if msgspec.structs.replace(joined, **may_differ) != requested:
        raise PeerError(
            f"the scheduler at {scheduler} was restarted with other settings while this server joined. Restart the "
            "server too"
        )


async def unless_stopped(link: SchedulerLink, stop: asyncio.Event, call: Callable[[], _Reached]) -> _Reached | None:
    """Return the scheduler's reply to a call on the link; None if this server stops first."""
    calling = asyncio.ensure_future(asyncio.to_thread(call))
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait({calling, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not calling.done():
        await asyncio.to_thread(link.close)
        await asyncio.wait({calling})
        calling.exception()
        return None
    return calling.result()


async def _drain(link: SchedulerLink, stop: asyncio.Event, on_leaving: Callable[[], None]) -> None:
    """Wait until this server's buckets are on other servers, or a second signal arrives."""
    stop.clear()
    try:
        await asyncio.to_thread(link.notify, messages.Drain())
    except PacelineError:
        return  # the scheduler is lost, so the server ends without moving its buckets
    try:
        await asyncio.wait_for(stop.wait(), _SOON_S)
    except asyncio.TimeoutError:
        on_leaving()
        await stop.wait()


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        pass  # the loop is closed, because the role has ended


def _run(serve: Callable[[asyncio.Event], Awaitable[None]], with_parent: bool, fail: Fail) -> None:
    """Run a role's coroutine on the transport's event loop until it ends, or until SIGTERM, SIGINT or SIGHUP.

    With a parent, signals keep their default effect, because the parent ends this process in another way and counts a
    process killed by a signal as dead. An uncaught exception in the loop or a thread goes to `fail`, which ends the
    process.
    """
    loop = new_event_loop()
    watch_loop(loop, fail)
    watch_threads(fail)

    async def main() -> None:
        stop = asyncio.Event()
        for number in () if with_parent else (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_IGN:  # an ignored signal (SIGHUP under nohup) stays ignored
                continue
            try:
                loop.add_signal_handler(number, stop.set)
            except (NotImplementedError, RuntimeError, ValueError):
                pass  # not in the main thread, or not on Unix, where signals cannot be handled
        if with_parent:
            watch_parent(lambda: _call_soon(loop, stop.set))
        await serve(stop)

    try:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(main())
    finally:
        if left := asyncio.all_tasks(loop):
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        asyncio.set_event_loop(None)
        loop.close()
