"""Serve the requests of other workers: run functions, keep their results, and count the references to them."""

from __future__ import annotations

import functools
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from typing_extensions import override

from paceline.errors import ConnectionLostError, DeadlineError, PacelineError, ProtocolError, UsageError
from paceline.meeting.node import ConnectionReceiver
from paceline.rpc.calling import unreadable
from paceline.rpc.counting import ReferenceId
from paceline.rpc.functions import is_async, promise_of
from paceline.rpc.futures import Future
from paceline.rpc.running import LocalWorker, in_context
from paceline.rpc.serving import CalleeEnd, RequestServer
from paceline.rpc.wire.codec import Decoding, Encoding
from paceline.rpc.wire.framed_socket import FramedSocket, Received
from paceline.rpc.wire.messages import RemoteError, RpcKind, failure_meta
from paceline.transport import Buffer, Header, reader

_logger = logging.getLogger("paceline.rpc")
_HANDSHAKE_S = 10.0
_NONE = msgspec.msgpack.encode(None)
_CALL, _REMOTE, _RESULT, _FAILED = map(int, (RpcKind.CALL, RpcKind.REMOTE, RpcKind.RESULT, RpcKind.FAILED))

_Reference = tuple[int, int, int]
_decode_fetch = reader(_Reference, "a request for an object")
_decode_share = reader(tuple[list[_Reference], int], "the registration of an RRef's new holder")
_decode_release = reader(tuple[_Reference, int], "the release of an RRef")


def run_local(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], result: Future[Any], context: int
) -> None:
    """Run a function in this thread, and set its result or exception in `result`.

    `context` is the number of the autograd context in which the function runs; 0 without a context.
    """
    try:
        value = _run(function, args, kwargs, context)
        promise = promise_of(value) if is_async(function) else None
    except BaseException as error:  # also SystemExit, because a thread waits for the result
        result.resolve(None, error)
        return
    if promise is None:
        result.resolve(value, None)
    else:
        promise.add_done_callback(functools.partial(_copy, result))


def _run(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], context: int) -> Any:
    if not context:
        return function(*args, **kwargs)
    with in_context(context):
        return function(*args, **kwargs)


def _copy(result: Future[Any], done: Future[Any]) -> None:
    error = done.exception()
    result.resolve(done.value() if error is None else None, error)


class CalleeEnds(RequestServer, ConnectionReceiver):
    """Takes over connections from other workers, and serves the requests on them."""

    def __init__(self, agent: LocalWorker, token: str) -> None:
        self.num_served = 0
        self._agent, self._token = agent, token
        self._callers: dict[CalleeEnd, int] = {}
        self._lock = threading.Lock()
        self._num_running = 0
        self._is_closed = False

    def has_caller(self, rank: int) -> bool:
        return rank in list(self._callers.values())

    def is_idle(self) -> bool:
        return not self._num_running

    def close(self) -> None:
        self._is_closed = True
        for end in list(self._callers):
            end.framed.close()

    # The methods of ConnectionReceiver. The listener (meeting.node.Node) calls them for each connection of a worker.

    @override
    def coming(self, rank: int) -> None:
        pass

    @override
    def arrived(self, rank: int, connected: socket.socket | None) -> None:
        if connected is not None:
            self._agent.threads.run(self._welcome, rank, connected)

    def _welcome(self, rank: int, connected: socket.socket) -> None:
        if self._is_closed or not 0 <= rank < len(self._agent.directory.workers):
            connected.close()
            return
        framed = FramedSocket(connected, f"worker {self._agent.directory.workers[rank].name!r}")
        try:
            framed.agree_on_seals(self._token, connecting=False, deadline=time.monotonic() + _HANDSHAKE_S)
        except PacelineError as error:
            _logger.warning("a connection of %s failed: %s", framed.name, error)
            framed.release()
            return
        end = CalleeEnd(framed, rank, self)
        self._callers[end] = rank
        self._agent.standby.watch_callee(end)
        end.read_on(object())

    @override
    def caller_lost(self, end: CalleeEnd) -> None:
        self._callers.pop(end, None)
        self._agent.standby.forget(end)
        if not self._is_closed:
            self._agent.table.remove_holder(end.rank)
            autograd = sys.modules.get("paceline.rpc.autograd")
            if autograd is not None:
                autograd.contexts.remove_worker(end.rank)

    @override
    def serve_request(self, end: CalleeEnd, received: Received) -> None:
        header = received.header
        with self._lock:
            self._num_running += 1
        try:
            self._handle(end, received)
        except Exception as error:
            failure = unreadable(end.framed.name, error)
            if header.kind == RpcKind.RELEASE:  # the session has ended, and its objects are freed already
                _logger.debug("%s: %s", end.framed.name, failure)
            else:
                self._reply_failure(end, header, failure, with_trace=False)
                if isinstance(failure, ProtocolError):
                    _logger.warning("the connection of %s is closed: %s", end.framed.name, failure)
                    end.framed.close()
        finally:
            with self._lock:
                self._num_running -= 1
                self.num_served += 1

    def _handle(self, end: CalleeEnd, received: Received) -> None:
        header, meta, body = received
        agent = self._agent
        if header.kind == _CALL or header.kind == _REMOTE:
            self._call(end, header, meta, body)
        elif header.kind == RpcKind.FETCH:
            value = agent.table.value(ReferenceId(*_decode_fetch(meta)))
            self._agent.standby.touch()
            end.begin()
            self._reply_later(end, header, value)
        elif header.kind == RpcKind.SHARE:
            references, holder = _decode_share(meta)
            if not 0 <= holder < len(agent.directory.workers):
                raise ProtocolError(f"got a holder with the unknown rank {holder}")
            agent.table.share([ReferenceId(*reference) for reference in references], holder)
            agent.standby.touch()
            end.begin()
            agent.watch(holder)
            end.framed.send(_RESULT, _NONE, deadline=_send_deadline(), request=header.request)
        elif header.kind == RpcKind.RELEASE:
            reference, times = _decode_release(meta)
            agent.table.release(ReferenceId(*reference), end.rank, times)
        elif header.kind != RpcKind.WATCH:
            raise ProtocolError(f"got a request of kind {header.kind}, which this version does not support")

    def _call(self, end: CalleeEnd, header: Header, meta: bytes | memoryview, body: memoryview) -> None:
        agent = self._agent
        decoding = Decoding(body, agent.allowed, pickle=agent.pickle, agent=agent)
        parts = decoding.decode(meta)
        result: Future[Any] | None = None
        if header.kind == _REMOTE:
            reference, parts, result = self._new_reference(end, parts), parts[1:], Future()
            agent.table.own(reference, end.rank, result)
        try:
            if not isinstance(parts, list) or len(parts) != 3:
                raise ProtocolError("got a call that cannot be read")
            target, args, kwargs = parts
            if not isinstance(args, list) or not isinstance(kwargs, dict):
                raise ProtocolError("got a call whose arguments cannot be read")
            if header.epoch:
                from paceline.rpc.autograd import contexts

                contexts.part(header.sequence).record_received(end.rank, header.epoch, decoding.tensors)
        except Exception as error:
            if result is not None:
                result.set_exception(error)
            raise
        agent.standby.touch()
        end.begin()
        del decoding
        try:
            function = agent.function_of(target)
        except BaseException as error:  # the function is not allowed, or its object could not be created
            if result is not None:
                result.set_exception(error)
            self._reply_failure(end, header, error, with_trace=_has_trace(error))
            return
        if result is None:
            self._run_and_answer(end, header, function, args, kwargs)
        else:
            end.framed.send(_RESULT, _NONE, deadline=_send_deadline(), request=header.request)
            run_local(function, args, kwargs, result, header.sequence)

    def _new_reference(self, end: CalleeEnd, parts: Any) -> ReferenceId:
        identity = parts[0] if isinstance(parts, list) and len(parts) == 4 else None
        if not isinstance(identity, list) or len(identity) != 3 or identity[:2] != [self._agent.rank, end.rank]:
            raise ProtocolError("got a remote call whose reference cannot be read")
        return ReferenceId(*identity)

    def _run_and_answer(
        self, end: CalleeEnd, header: Header, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        try:
            value = _run(function, args, kwargs, header.sequence)
        except BaseException as error:  # also SystemExit, because the caller waits for a reply
            own = error.__traceback__ and error.__traceback__.tb_next
            error.__traceback__ = own and own.tb_next
            self._reply_failure(end, header, error, with_trace=True)
            return
        if is_async(function):
            self._reply_later(end, header, promise_of(value))
        else:
            self._reply(end, header, value)

    def _reply_later(self, end: CalleeEnd, header: Header, value: Future[Any]) -> None:
        with self._lock:
            self._num_running += 1

        def reply(done: Future[Any]) -> None:
            try:
                error = done.exception()
                if error is None:
                    self._reply(end, header, done.value())
                else:
                    self._reply_failure(end, header, error, with_trace=_has_trace(error))
            finally:
                with self._lock:
                    self._num_running -= 1

        value.add_done_callback(reply)

    def _reply(self, end: CalleeEnd, header: Header, value: Any) -> None:
        agent = self._agent
        try:
            message = 0
            parts: Sequence[Buffer] = ()
            if value is None:
                meta = _NONE
            else:
                pickle = agent.pickle and agent.directory.reads_pickle(end.rank)
                encoding = Encoding(pickle=pickle, records=bool(header.sequence), agent=agent)
                meta, parts = encoding.encode(value, "the result"), encoding.parts
                if encoding.references:
                    agent.share(encoding.references, end.rank, is_answer=True)
                if encoding.tensors:
                    from paceline.rpc.autograd import contexts

                    message = contexts.part(header.sequence).record_sent(end.rank, encoding.tensors)
        except PacelineError as error:
            self._reply_failure(end, header, error, with_trace=False)
            return
        try:
            end.framed.send(
                _RESULT,
                meta,
                parts,
                deadline=_send_deadline(),
                request=header.request,
                context=header.sequence,
                message=message,
            )
        except UsageError as error:  # the reply is too long for a frame
            self._reply_failure(end, header, error, with_trace=False)
        except (ConnectionLostError, DeadlineError) as error:
            _logger.debug("an answer could not be sent: %s", error)

    def _reply_failure(self, end: CalleeEnd, header: Header, error: BaseException, *, with_trace: bool) -> None:
        meta = failure_meta(error, with_trace=with_trace)
        try:
            end.framed.send(_FAILED, meta, deadline=_send_deadline(), request=header.request)
        except PacelineError as lost:
            _logger.debug("a failure could not be reported: %s", lost)


def _has_trace(error: BaseException) -> bool:
    return not isinstance(error, PacelineError) or isinstance(error, RemoteError)


def _send_deadline() -> float:
    return time.monotonic() + 60.0
