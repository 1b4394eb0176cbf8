"""Run a server's event loop in a thread of the test's process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from paceline.transport import Address, Endpoint, Handler, Hello, Listener, Transport

_T = TypeVar("_T")
_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Served:
    """A server that runs in a thread."""

    endpoint: Endpoint
    listener: Listener
    loop: asyncio.AbstractEventLoop

    def call(self, function: Callable[[], _T]) -> _T:
        """Run ``function`` in the loop's thread, like the handler's methods; return its result."""

        async def run() -> _T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(_PATIENCE_S)


@contextmanager
def serve_in_thread(
    handler: Handler,
    transport: Transport,
    *,
    hello: Hello | None = None,
    address: Address | str | None = None,
    unix: bool = True,
) -> Iterator[Served]:
    """Serve ``handler`` during the context; then close everything and join the thread.

    Raises the errors of ``transport.serve`` in the caller's thread.
    """
    ready: Future[Served] = Future()
    stop = asyncio.Event()

    async def serve() -> None:
        listener = await transport.serve(handler, hello or Hello(role="server"), address=address, unix=unix)
        try:
            ready.set_result(Served(listener.endpoint, listener, asyncio.get_running_loop()))
            await stop.wait()
        finally:
            await listener.close()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    thread = threading.Thread(target=run, name="paceline-test-server", daemon=True)  # may not end
    thread.start()
    try:
        served = ready.result(_PATIENCE_S)
    except BaseException:
        thread.join(_PATIENCE_S)
        raise
    try:
        yield served
    finally:
        served.loop.call_soon_threadsafe(stop.set)
        thread.join(_PATIENCE_S)
        assert not thread.is_alive(), f"the server's thread did not end within {_PATIENCE_S:g} s"
