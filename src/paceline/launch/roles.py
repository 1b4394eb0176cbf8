"""One process in one role: scheduler or server, until the cluster ends, a signal comes or the parent is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from paceline.errors import PacelineError, PeerError, UsageError
from paceline.protocol import (
    Accept,
    Consistency,
    Eventual,
    Sequential,
    StalePolicy,
    parse_consistency,
    parse_stale_policy,
)
from paceline.ps import Scheduler, SchedulerLink, Server, make_node_name, messages
from paceline.transport import TLS, Endpoint, Hello, SocketTransport, new_event_loop

_LINGER_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Joining:
    """How a process finds its cluster: the scheduler's address, the token, TLS if it is used."""

    scheduler: str
    token: str
    tls: TLS | None = None

    def transport(self) -> SocketTransport:
        """Return the transport that speaks to this cluster."""
        return SocketTransport(self.token, tls=self.tls)


def check_stale_policy(consistency: Consistency, stale: StalePolicy) -> None:
    """Raise UsageError for a policy that has nothing to do under this consistency."""
    if isinstance(consistency, Sequential) and not isinstance(stale, Accept):
        raise UsageError(
            f"stale-gradient policy {stale} has nothing to do under sequential consistency, where no gradient is "
            "stale: leave it out, or choose bounded or eventual"
        )


def run_scheduler(
    *,
    token: str,
    address: str = "127.0.0.1:0",
    tls: TLS | None = None,
    num_servers: int,
    num_workers: int,
    consistency: Consistency | None = None,
    stale: StalePolicy | None = None,
    heartbeat_timeout_s: float = 10.0,
    on_ready: Callable[[Endpoint], None],
    with_parent: bool = False,
) -> None:
    """Be the scheduler until the cluster is told to end; `on_ready` is called with its addresses."""

    async def serve(stop: asyncio.Event) -> None:
        scheduler = Scheduler(
            num_servers=num_servers,
            num_workers=num_workers,
            consistency=Eventual() if consistency is None else consistency,
            stale=Accept() if stale is None else stale,
            heartbeat_timeout_s=heartbeat_timeout_s,
        )
        transport = SocketTransport(token, tls=tls)
        listener = await transport.serve(scheduler, Hello(role="scheduler", name="scheduler"), address=address)
        try:
            on_ready(listener.endpoint)
            ended = asyncio.ensure_future(scheduler.ended.wait())
            stopped = asyncio.ensure_future(stop.wait())
            await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
            scheduler.end("the scheduler was told to end")
            if not with_parent or ended.done():  # until everybody has heard it and left
                deadline = asyncio.get_running_loop().time() + _LINGER_S
                while scheduler.num_members and asyncio.get_running_loop().time() < deadline:
                    await asyncio.sleep(0.01)
            for task in (ended, stopped):
                task.cancel()
        finally:
            scheduler.close()
            await listener.close()

    _run(serve, with_parent)


def run_server(
    joining: Joining, *, address: str = "127.0.0.1:0", rank: int | None = None, with_parent: bool = False,
    on_ready: Callable[[int, Endpoint], None] | None = None,
) -> None:  # fmt: skip
    """Be a parameter server until the cluster ends. Raises PeerError if the scheduler is lost or expels us."""

    async def serve(stop: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        failure: list[PacelineError] = []
        server: Server | None = None

        def end(error: PacelineError | None) -> None:
            if error is not None:
                failure.append(error)
            stop.set()

        def heard(notice: msgspec.Struct) -> None:
            if isinstance(notice, messages.ClusterMap):
                if server is not None:
                    loop.call_soon_threadsafe(server.members_changed, notice)
            elif isinstance(notice, messages.Ended):
                loop.call_soon_threadsafe(end, None)
            elif isinstance(notice, messages.Expelled):
                loop.call_soon_threadsafe(end, PeerError(f"this server was declared dead: {notice.reason}"))

        def lost(error: PacelineError) -> None:
            loop.call_soon_threadsafe(end, error)

        transport, node = joining.transport(), make_node_name("server")
        link = await asyncio.to_thread(
            lambda: SchedulerLink(
                transport, joining.scheduler, Hello(role="server", name=node), on_notice=heard, on_lost=lost
            )
        )
        try:
            settings = await asyncio.to_thread(link.call, messages.GetSettings(), messages.Settings)
            server = Server(
                consistency=parse_consistency(settings.consistency),
                stale=parse_stale_policy(settings.stale),
                expected_workers=settings.num_workers,
            )
            hello = Hello(role="server", rank=rank or 0, name=node)
            listener = await transport.serve(server, hello, address=address)
            try:
                register = messages.Register(node=node, role="server", endpoint=listener.endpoint, rank=rank)
                welcome = await asyncio.to_thread(link.register, register)
                server.rank = welcome.rank
                server.members_changed(welcome.cluster)
                if on_ready is not None:
                    on_ready(welcome.rank, listener.endpoint)
                await stop.wait()
            finally:
                server.close()
                await listener.close()
        finally:
            await asyncio.to_thread(link.close)
        if failure:
            raise failure[0]

    _run(serve, with_parent)


def watch_parent(on_gone: Callable[[], None]) -> None:
    """Call `on_gone` in a thread when standard input ends: the parent holds its other end, and is gone."""

    def watch() -> None:
        try:
            while os.read(sys.stdin.fileno(), 4096):
                pass
        except (OSError, ValueError):
            pass
        on_gone()

    threading.Thread(target=watch, name="paceline-parent-watch", daemon=True).start()


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        pass  # the loop is closed: what was to be told is known


def _run(serve: Callable[[asyncio.Event], Awaitable[None]], with_parent: bool) -> None:
    """Run a role's coroutine on the transport's event loop until it ends or SIGTERM or SIGINT asks for it."""
    loop = new_event_loop()

    async def main() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                loop.add_signal_handler(number, stop.set)
            except (NotImplementedError, RuntimeError, ValueError):
                pass  # not the main thread, or no Unix
        if with_parent:
            watch_parent(lambda: _call_soon(loop, stop.set))
        await serve(stop)

    try:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(main())
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        asyncio.set_event_loop(None)
        loop.close()
