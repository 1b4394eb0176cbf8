"""The agent: the object that represents this process as an rpc worker."""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from typing_extensions import override

from paceline.environment import Timeout
from paceline.errors import DeadlineError, PacelineError, UsageError
from paceline.meeting.store import exchange
from paceline.meeting.world import World
from paceline.rpc.allowed import Allowed
from paceline.rpc.callee_ends import CalleeEnds, run_local
from paceline.rpc.caller_ends import GROUP, CallerEnds
from paceline.rpc.calling import PendingReply
from paceline.rpc.counting import ReferenceId
from paceline.rpc.futures import Future, TimedFuture
from paceline.rpc.references import ObjectTable
from paceline.rpc.rref import RRef
from paceline.rpc.running import LocalWorker, Target, current_context
from paceline.rpc.serving import SpareThreads, Standby
from paceline.rpc.targets import Call, creation_of, description_of
from paceline.rpc.wire.codec import Encoding
from paceline.rpc.wire.messages import RpcKind
from paceline.rpc.workers import Directory
from paceline.transport import read_meta

_logger = logging.getLogger("paceline.rpc")
_POLL_S = 0.002
_MAX_SAME = 20


class Agent(LocalWorker):
    """The rpc worker of this process. It calls other workers, holds references to remote objects, and shuts down.

    The agent is thread-safe.
    """

    def __init__(
        self,
        world: World,
        token: str,
        directory: Directory,
        allowed: Allowed,
        *,
        pickle: bool,
        timeout: Timeout,
        num_threads: int,
    ) -> None:
        self.rank, self.directory, self.timeout = world.rank, directory, timeout
        self.allowed, self.pickle = allowed, pickle
        self.table = ObjectTable(world.rank)
        self.threads = SpareThreads(num_threads + 3 * world.size)
        self.standby = Standby(self.threads)
        self.callee_ends = CalleeEnds(self, token)
        self.ends = CallerEnds(self, world, token)
        self.world = world
        self._is_closed = False

    def start(self) -> None:
        self.standby.start()
        threading.Thread(target=self._release_dropped, name="paceline-rpc-references", daemon=True).start()
        self.world.node.take(GROUP, "rpc", self.callee_ends)

    @override
    def call(
        self,
        to: int,
        target: Target,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        timeout: Timeout | None = None,
        *,
        is_blocking: bool = False,
    ) -> Future[Any]:
        timeout_s = self._check(Call(target, args, kwargs), timeout)
        if to == self.rank:
            result: TimedFuture[Any] = TimedFuture(description_of(target), timeout_s)
            self._call_local(target, args, kwargs or {}, result, is_blocking=is_blocking)
            if not result.done():
                self.standby.watch_timed(result)
            return result
        encoding, context = self._encoding(to)
        meta = encoding.encode_call((), target, args, kwargs or {})
        return self._send(
            *(to, RpcKind.CALL, meta, encoding, context, description_of(target), timeout_s),
            is_blocking=is_blocking,
            creation=creation_of(target),
        )

    @override
    def remote(
        self,
        to: int,
        target: Target,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        timeout: Timeout | None = None,
    ) -> RRef[Any]:
        timeout_s = self._check(Call(target, args, kwargs), timeout)
        reference = self.table.new_id(to)
        if to == self.rank:
            result: Future[Any] = Future()
            self._call_local(target, args, kwargs or {}, result, is_blocking=False)
            self.table.own(reference, self.rank, result)
            return RRef.of_holding(self.table.hold(reference), self)
        encoding, context = self._encoding(to)
        meta = encoding.encode_call((list(reference),), target, args, kwargs or {})
        creation = self._send(
            to, RpcKind.REMOTE, meta, encoding, context, description_of(target), timeout_s, creation=creation_of(target)
        )
        creation.add_done_callback(functools.partial(_log_failure, description_of(target)))
        holding = self.table.hold(reference)
        holding.creation = creation
        return RRef.of_holding(holding, self)

    @override
    def fetch(self, rref: RRef[Any], timeout: Timeout | None = None) -> Future[Any]:
        timeout_s, reference = self.seconds_of(timeout), rref.reference
        if reference.owner == self.rank:
            return self.table.value(reference)
        encoding, context = self._encoding(reference.owner)
        meta = msgspec.msgpack.encode(list(reference))
        owner = reference.owner
        return self._send(
            *(owner, RpcKind.FETCH, meta, encoding, context, "to_here()", timeout_s),
            is_blocking=True,
            creation=rref.creation,
        )

    def _check(self, call: Call, timeout: Timeout | None) -> float:
        call.check()
        owner = None if isinstance(call.target, str) else call.target[0]
        if isinstance(owner, RRef) and owner.agent is not self:
            raise UsageError(f"{owner!r} belongs to an rpc session that was shut down; create it again")
        return self.seconds_of(timeout)

    def _encoding(self, to: int) -> tuple[Encoding, int]:
        context = current_context()
        pickle = self.pickle and self.directory.reads_pickle(to)
        return Encoding(pickle=pickle, records=bool(context), agent=self), context

    def _send(
        self,
        to: int,
        kind: RpcKind,
        meta: bytes,
        encoding: Encoding,
        context: int,
        description: str,
        timeout_s: float,
        *,
        is_blocking: bool = False,
        creation: Future[Any] | None = None,
    ) -> PendingReply:
        if encoding.references:
            self.share(encoding.references, to)
        message = 0
        if context:
            from paceline.rpc.autograd import contexts

            message = contexts.part(context).record_sent(to, encoding.tensors)
        reply = self.ends.end_to(to).start(
            kind,
            meta,
            encoding.parts,
            description=description,
            timeout_s=timeout_s,
            context=context,
            message=message,
            creation=creation,
        )
        if not is_blocking:
            self.standby.touch()
        return reply

    def _call_local(
        self, target: Target, args: Sequence[Any], kwargs: dict[str, Any], result: Future[Any], *, is_blocking: bool
    ) -> None:
        function = self.function_of(target)
        if is_blocking:
            run_local(function, args, kwargs, result, current_context())
        else:
            self.threads.run(run_local, function, args, kwargs, result, current_context())

    @override
    def function_of(self, target: Any) -> Callable[..., Any]:
        if type(target) is str:
            found: Callable[..., Any] = self.allowed.resolve(target)
            return found
        if not isinstance(target, (list, tuple)) or len(target) != 2 or not isinstance(target[1], str):
            raise UsageError("got a call without a function name")
        value = target[0]
        if isinstance(value, RRef):
            value = self.table.value(value.reference).wait(self.seconds_of(None))
        method: Callable[..., Any] = self.allowed.check_method(value, target[1])
        return method

    @override
    def share(self, rrefs: Sequence[RRef[Any]], to: int, *, is_answer: bool = False) -> None:
        by_owner: dict[int, list[ReferenceId]] = {}
        for rref in rrefs:
            by_owner.setdefault(rref.reference.owner, []).append(rref.reference)
        for owner, references in by_owner.items():
            if owner == self.rank:
                self.watch(to)
                self.table.share(references, to)
            elif owner != to or is_answer:
                meta = msgspec.msgpack.encode((references, to))
                description = "the registration of an RRef's new holder"
                self.ends.end_to(owner).start(
                    RpcKind.SHARE, meta, (), description=description, timeout_s=self.seconds_of(None)
                ).wait()

    @override
    def watch(self, holder: int) -> None:
        if holder == self.rank or self.callee_ends.has_caller(holder):
            return
        reply = self.ends.end_to(holder).watch(RpcKind.WATCH)
        if reply is not None:
            reply.add_done_callback(lambda _: self.table.remove_holder(holder))
            self.standby.touch()

    def _release_dropped(self) -> None:
        while True:
            dropped = self.table.dropped.get()
            if dropped is None:
                return
            reference, times = dropped
            try:
                if reference.owner == self.rank:
                    self.table.release(reference, self.rank, times)
                else:
                    meta = msgspec.msgpack.encode((reference, times))
                    self.ends.end_to(reference.owner).notify(RpcKind.RELEASE, meta, self.seconds_of(None))
            except PacelineError as error:
                _logger.debug("an RRef could not be released at its owner: %s", error)
            except Exception:
                _logger.exception("the object of an RRef could not be freed")

    def wait_for_all(self, timeout_s: float = math.inf) -> None:
        """Wait until every worker has called this method and no call is pending in any process.

        Raises RankLostError if a worker died or did not call this method within `timeout_s`, and DeadlineError if this
        process still has pending calls after `timeout_s`.

        The workers repeatedly exchange their numbers of sent and served requests. The wait ends when all sent requests
        were served and no number has changed since the previous exchange (four-counter method, Mattern, Algorithms for
        distributed termination detection, 1987).
        """
        deadline = time.monotonic() + timeout_s
        last: list[tuple[int, int]] = []
        num_same = 0
        for number in range(1 << 30):
            while not self.ends.is_idle() or not self.callee_ends.is_idle():
                if time.monotonic() >= deadline:
                    raise DeadlineError(
                        f"calls are still pending {timeout_s:g} s after shutdown(); wait for their results first"
                    )
                time.sleep(_POLL_S)
            own = msgspec.msgpack.encode((self.ends.num_sent(), self.callee_ends.num_served))
            description = f"the shutdown of rpc ({number})"
            world = self.world
            with world.in_ranks(description):
                values = exchange(
                    world.store, self.rank, world.size, own, deadline, description=description, check=world.check_alive
                )
            counts = [read_meta(value, tuple[int, int], "a worker's counts") for value in values]
            sent, served = (sum(counts) for counts in zip(*counts, strict=True))
            num_same = num_same + 1 if counts == last else 0
            if num_same and (sent == served or num_same > _MAX_SAME):
                return
            last = counts
            time.sleep(_POLL_S)

    @override
    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.table.dropped.put(None)
        self.world.node.forget(GROUP)
        self.standby.close()
        self.ends.close()
        self.callee_ends.close()
        self.world.close()


def _log_failure(description: str, future: Future[Any]) -> None:
    if future.exception() is not None:
        _logger.debug("remote call of %s: %s", description, future.exception())
