"""Open connections to other workers at the first call, and decode replies."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
from typing_extensions import override

from paceline.errors import AuthenticationError, ConnectionLostError, PacelineError, PeerError, UsageError, printable
from paceline.meeting.world import World
from paceline.rpc.calling import CallerEnd, PendingReply, ReplyReader
from paceline.rpc.futures import Future
from paceline.rpc.running import LocalWorker
from paceline.rpc.wire.codec import Decoding
from paceline.rpc.wire.framed_socket import FramedSocket, Received
from paceline.rpc.wire.messages import RpcKind, failure_of

GROUP = "rpc"
_CONNECT_S = 30.0
_RESULT, _NONE = int(RpcKind.RESULT), msgspec.msgpack.encode(None)


class CallerEnds(ReplyReader):
    """The caller's ends of the connections to other workers, by rank. Thread-safe."""

    def __init__(self, agent: LocalWorker, world: World, token: str) -> None:
        self._agent, self._world, self._token = agent, world, token
        self._ends: dict[int, CallerEnd] = {}
        self._num_sent_before = 0
        self._lock = threading.Lock()
        self._is_closed = False

    def end_to(self, to: int) -> CallerEnd:
        end = self._ends.get(to)
        if end is not None and end.failure is None:
            return end
        with self._lock:
            end = self._ends.get(to)
            if end is None or end.failure is not None:
                if self._is_closed:
                    raise UsageError("rpc was shut down in this process")
                if end is not None:
                    self._num_sent_before += end.num_sent
                    self._agent.standby.forget(end)
                end = self._ends[to] = self._connect(to)
                self._agent.standby.watch_caller(end)
            return end

    def _connect(self, to: int) -> CallerEnd:
        peer = f"worker {self._agent.directory.workers[to].name!r}"
        deadline = time.monotonic() + min(self._agent.seconds_of(None), _CONNECT_S)
        try:
            connected = self._world.node.connect(self._world.infos[to], GROUP, self._agent.rank, "rpc", deadline)
            framed = FramedSocket(connected, peer)
            framed.agree_on_seals(self._token, connecting=True, deadline=deadline)
        except AuthenticationError as error:
            raise AuthenticationError(f"{peer} cannot be called: {error}") from None
        except (PacelineError, OSError) as error:
            raise ConnectionLostError(f"{peer} cannot be reached: it died or left ({error})") from None
        if self._world.infos[to].memory_domain == self._world.infos[self._agent.rank].memory_domain:
            framed.share_bodies()
        return CallerEnd(framed, to, self)

    def num_sent(self) -> int:
        return self._num_sent_before + sum(end.num_sent for end in list(self._ends.values()))

    def is_idle(self) -> bool:
        return not any(end.num_pending for end in list(self._ends.values()) if end.failure is None)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            ends = list(self._ends.values())
        for end in ends:
            end.fail(ConnectionLostError("this process has left rpc"))

    @override
    def read_reply(self, end: CallerEnd, reply: PendingReply, received: Received) -> tuple[Any, BaseException | None]:
        header, meta, body = received
        if header.kind == _RESULT and meta == _NONE:
            return None, None
        agent = self._agent
        try:
            if header.kind == RpcKind.FAILED:
                return None, reply.cause_of(
                    failure_of(meta, agent.directory.workers[end.rank].name, reply.description, agent.allowed)
                )
            decoding = Decoding(body, agent.allowed, pickle=agent.pickle, agent=agent)
            result = decoding.decode(meta)
            if header.epoch:
                from paceline.rpc.autograd import contexts

                contexts.part(header.sequence).record_received(end.rank, header.epoch, decoding.tensors)
        except PacelineError as error:
            return None, type(error)(f"the reply of {end.name} to {reply.description} cannot be read: {error}")
        except Exception as error:
            text = printable(f"{type(error).__name__}: {error}", 500)
            return None, PeerError(f"the reply of {end.name} to {reply.description} cannot be read: {text}")
        return result, None

    @override
    def run_callbacks_of(self, future: Future[Any]) -> None:
        self._agent.threads.run(future.run_callbacks)
