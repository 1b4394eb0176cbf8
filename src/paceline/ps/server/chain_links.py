"""A server's connections to its successors, with reconnection and probes.

A cut cable gives no error; bytes just stay unacknowledged. So the server probes its successors periodically, and their
event loops answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from paceline.errors import PacelineError
from paceline.protocol import Silence
from paceline.ps.fail_stop import Fail, watch_task
from paceline.ps.messages import PING, PONG
from paceline.transport import Endpoint, Handler, Header, Hello, Peer, Transport, frame_parts
from paceline.transport.backoff import Backoff

_CONNECT_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.1

FrameHandler = Callable[[int, Header, memoryview, memoryview], None]


class ChainLinks:
    """One connection to each wanted server, by incarnation; reconnects when it breaks.

    `on_up` and `on_down` are called with the server's incarnation, `on_frame` with its frames, all in the event loop;
    `fail` is called with an exception that ends a link's task.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        on_up: Callable[[int], None],
        on_down: Callable[[int], None],
        on_frame: FrameHandler,
        fail: Fail,
    ) -> None:
        self._transport = transport
        self._on_up = on_up
        self._on_down = on_down
        self._on_frame = on_frame
        self.fail = fail
        self._links: dict[int, _Link] = {}
        self._silence = Silence()
        self._timer: asyncio.TimerHandle | None = None
        self.unreachable: tuple[int, ...] = ()
        """The wanted servers without a message for five consecutive polls; may be read in any thread."""

    def watch(self, period_s: float) -> None:
        """Probe all servers and update :attr:`unreachable`, now and every `period_s`."""
        self._timer = asyncio.get_running_loop().call_later(period_s, self.watch, period_s)
        for target, link in self._links.items():
            if link.probe():
                self._silence.received(target)
        self.unreachable = self._silence.poll(self._links)

    def frame_received(self, target: int, header: Header, meta: memoryview, body: memoryview) -> None:
        """Receive a frame of a server."""
        self._silence.received(target)
        if header.kind != PONG:
            self._on_frame(target, header, meta, body)

    def want(self, targets: Mapping[int, Endpoint], hello: Hello) -> None:
        """Keep connections to exactly these servers; `hello` identifies this server."""
        for removed in self._links.keys() - targets.keys():
            self._links.pop(removed).stop()
        for target, endpoint in targets.items():
            if target not in self._links:
                self._links[target] = _Link(target, endpoint, hello, self)

    def peer(self, target: int) -> Peer | None:
        """Return the connection to a server; None while disconnected."""
        link = self._links.get(target)
        return None if link is None else link.peer

    def renew(self, target: int) -> None:
        """Close the connection to a server: after the reconnection everything that it may lack is sent."""
        peer = self.peer(target)
        if peer is not None:
            peer.abort()

    def close(self) -> None:
        """Close all connections."""
        if self._timer is not None:
            self._timer.cancel()
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
        self._taken = -1  # bytes that the system had accepted at the last probe, if more were waiting; else -1
        self._task = asyncio.get_running_loop().create_task(self._keep())
        watch_task(self._task, owner.fail)

    async def _keep(self) -> None:
        owner, backoff = self._owner, Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            self._broken.clear()
            try:
                peer = await owner._transport.open(self, self._endpoint, self._hello, timeout_s=_CONNECT_S)
            except (PacelineError, OSError):
                await asyncio.sleep(backoff.next_s())
                continue
            if self._is_stopped:
                peer.abort()
                return
            self.peer, self._taken = peer, -1
            owner._on_up(self._target)
            await self._broken.wait()
            self.peer = None
            owner._on_down(self._target)
            backoff.reset()
            await asyncio.sleep(backoff.next_s())

    def probe(self) -> bool:
        """Send a probe; return whether the server is known to be reachable without it.

        With a large backlog an answer would take long. But then the system accepts more bytes, because the other end
        acknowledges earlier ones.
        """
        peer = self.peer
        if peer is None:
            return False
        waiting = peer.write_backlog_bytes
        taken = peer.statistics().bytes_sent - waiting
        takes = 0 <= self._taken < taken
        self._taken = taken if waiting else -1
        if not waiting:
            peer.send(*frame_parts(PING))
        return takes

    def stop(self) -> None:
        self._is_stopped = True
        peer, self.peer = self.peer, None
        if peer is not None:
            peer.abort()  # unsent frames are of an old view
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._task.cancel()

    def frame_received(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        if peer is self.peer:
            self._owner.frame_received(self._target, header, meta, body)

    def disconnected(self, peer: Peer, reason: Exception | None) -> None:
        self._broken.set()
