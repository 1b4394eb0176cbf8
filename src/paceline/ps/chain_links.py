"""A server's connections to the servers behind it in chains, kept as long as they are wanted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from paceline.errors import PacelineError
from paceline.transport import Endpoint, Handler, Header, Hello, Peer, Transport

_CONNECT_S = 2.0
_PAUSE_S = 0.05

FrameHandler = Callable[[int, Header, memoryview, memoryview], None]


class ChainLinks:
    """One connection to each wanted server, by incarnation; made again when it breaks.

    `on_up` and `on_down` are called with the server's incarnation, `on_frame` with what it sends, all in the loop.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        on_up: Callable[[int], None],
        on_down: Callable[[int], None],
        on_frame: FrameHandler,
    ) -> None:
        self._transport = transport
        self._on_up = on_up
        self._on_down = on_down
        self._on_frame = on_frame
        self._links: dict[int, _Link] = {}

    def want(self, targets: Mapping[int, Endpoint], hello: Hello) -> None:
        """Have a connection to each of these, and to no other; `hello` is who we are."""
        for gone in self._links.keys() - targets.keys():
            self._links.pop(gone).stop()
        for target, endpoint in targets.items():
            if target not in self._links:
                self._links[target] = _Link(target, endpoint, hello, self)

    def peer(self, target: int) -> Peer | None:
        """Return the connection to a server; None while there is none."""
        link = self._links.get(target)
        return None if link is None else link.peer

    def close(self) -> None:
        """Close all connections."""
        for link in self._links.values():
            link.stop()
        self._links = {}


class _Link(Handler):
    def __init__(self, target: int, endpoint: Endpoint, hello: Hello, owner: ChainLinks) -> None:
        self.peer: Peer | None = None
        self._target = target
        self._endpoint = endpoint
        self._hello = hello
        self._owner = owner
        self._broken = asyncio.Event()
        self._is_stopped = False
        self._task = asyncio.get_running_loop().create_task(self._keep())

    async def _keep(self) -> None:
        owner = self._owner
        while True:
            self._broken.clear()
            try:
                peer = await owner._transport.open(self, self._endpoint, self._hello, timeout_s=_CONNECT_S)
            except PacelineError:
                await asyncio.sleep(_PAUSE_S)
                continue
            if self._is_stopped:
                peer.abort()
                return
            self.peer = peer
            owner._on_up(self._target)
            await self._broken.wait()
            self.peer = None
            owner._on_down(self._target)
            await asyncio.sleep(_PAUSE_S)

    def stop(self) -> None:
        self._is_stopped = True
        peer, self.peer = self.peer, None
        if peer is not None:
            peer.abort()  # what has not gone out is of an old map
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._task.cancel()

    def frame_received(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        if peer is self.peer:
            self._owner._on_frame(self._target, header, meta, body)

    def disconnected(self, peer: Peer, reason: Exception | None) -> None:
        self._broken.set()
