"""Negotiate with the other ranks, and run the agreed operations.

The module :mod:`~paceline.protocol.negotiation.schedule` decides which thread runs the rounds of the negotiation: a
thread that waits for an operation, or the background thread.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Final

import msgspec
import numpy as np

from paceline.collectives import Group
from paceline.collectives.clocks import clock_offsets
from paceline.errors import CollectiveError, first_line
from paceline.horovod.entries import EntryTable, TensorEntry
from paceline.horovod.errors import HorovodInternalError
from paceline.horovod.execution import TensorExecutor
from paceline.horovod.stalls import StallInspector
from paceline.horovod.traces import PhaseRecorder, RankTraces
from paceline.horovod.wakeups import Wakeups
from paceline.observe.stuck.report import script_calls
from paceline.observe.stuck.stacks import StackFrame
from paceline.protocol.negotiation.negotiator import Negotiator
from paceline.protocol.negotiation.requests import (
    ADD_PROCESS_SET,
    CHANGE_SETS,
    GLOBAL_SET,
    NO_TIMELINE,
    TIMELINE,
    TIMELINE_OF_ROUNDS,
    EndJoin,
    FailRequest,
    Key,
    NegotiationDecision,
    NegotiationInstruction,
    NegotiationReport,
    RunOperation,
    TensorRequest,
)
from paceline.protocol.negotiation.schedule import GRACE_S, RoundSchedule
from paceline.transport import read_meta

_log = logging.getLogger(__name__)
_CHECK_S: Final = 1.0
"""Rank 0 writes the events of the timeline after this time."""
_SHUT_DOWN: Final = (
    "Horovod has been shut down: a rank has called shutdown() or has ended, while other ranks still request "
    "collective operations; call shutdown() on all ranks after the last operation"
)


class HorovodEngine:
    """Runs the requests of one rank. All methods are thread-safe."""

    def __init__(self, group: Group, negotiator: Negotiator, stalls: StallInspector | None) -> None:
        """Without `stalls`, operations wait for missing ranks forever, and without a warning."""
        self._group, self._negotiator = group, negotiator
        self._executor = TensorExecutor(group)
        self._wakeups = Wakeups(group)
        self._stalls = stalls
        self._schedule = RoundSchedule()
        self._rounds = threading.Lock()
        """Held by the thread that runs a round. A thread that needs `_lock` too must acquire this lock first."""
        self._lock = threading.Lock()
        """Protects the negotiator, the schedule and the entries."""
        self._changed = threading.Condition(threading.Lock())
        """Notified after entries are done, a join or timeline starts or ends, and after each round."""
        self._entries = EntryTable()
        self._running_set = GLOBAL_SET
        """The process set whose group runs an operation."""
        self._last_joined = -1
        """The rank that joined last; -1 until all ranks have joined."""
        self._failure = ""
        self._stacks: list[list[StackFrame]] = []
        """On rank 0, the calls of each rank's script. Empty in rounds without reports."""
        self._stall = ""
        """On rank 0, the error that the next decision sends to all ranks."""
        self._recorder: PhaseRecorder | None = None
        self._timeline = NO_TIMELINE
        """On rank 0, the state of the timeline that the next decision sends to all ranks."""
        self._traces: RankTraces | None = None
        self._traced_s = 0.0
        """The time at which this rank last sent its events to rank 0."""
        self._thread = threading.Thread(target=self._serve, name="paceline-horovod", daemon=True)

    @property
    def is_closed(self) -> bool:
        """Whether all further operations fail, after an error or after a rank has left."""
        return bool(self._failure)

    def start(self) -> None:
        self._thread.start()

    def submit(self, requests: Mapping[Key, TensorRequest], entries: Sequence[TensorEntry]) -> None:
        """Request operations, all in the same round. Raises UsageError if the name of a request is in use."""
        with self._lock:
            if self._failure:
                raise HorovodInternalError(self._failure)
            self._schedule.request(None if self._negotiator.needs_round else time.monotonic())
            self._negotiator.request(requests)
            self._entries.add(requests, entries)
            if self._recorder is not None:
                requested_ns = time.monotonic_ns()
                for entry in entries:
                    entry.requested_ns = requested_ns
            if self._schedule.is_asleep:
                self._wake_thread()

    def wait(self, entry: TensorEntry) -> None:
        """Wait until an operation is done. Raises HorovodInternalError if it failed."""
        self._wait_until(lambda: entry.is_done)
        if entry.error:
            raise HorovodInternalError(entry.error)

    def join(self) -> int:
        """Take part in the operations of the other ranks until all have joined. Return the rank that joined last."""
        with self._lock:
            self._check_alive()
            self._last_joined = -1
            self._negotiator.join()
            self._wake_thread()
        self._wait_until(lambda: self._last_joined >= 0 or bool(self._failure))
        if self._last_joined < 0:
            raise HorovodInternalError(self._failure)
        return self._last_joined

    def change_process_sets(self, operation: str, ranks: Sequence[int]) -> None:
        """Add or remove a process set. All ranks of the program must call this method."""
        request = TensorRequest(operation, operation, shape=tuple(ranks))
        entry = TensorEntry(request)
        self.submit({request.key: request}, [entry])
        self.wait(entry)

    def set_timeline(self, traces: RankTraces | None, *, has_rounds: bool = False) -> None:
        """Start or end the timeline of all ranks, and wait until all ranks have done so. Only rank 0 may call it."""
        with self._lock:
            self._check_alive()
            self._timeline = NO_TIMELINE if traces is None else TIMELINE_OF_ROUNDS if has_rounds else TIMELINE
            if traces is not None:
                self._traces = traces
            elif self._traces is None:
                return
            self._negotiator.request_reports()
            self._wake_thread()
        self._wait_until(lambda: (self._recorder is None) == (traces is None) or bool(self._failure))

    def find_process_set(self, ranks: Sequence[int]) -> int | None:
        with self._lock:
            return self._negotiator.find_process_set(ranks)

    def close(self) -> None:
        """End the threads of all ranks, after the operations that are ready. Idempotent."""
        with self._lock:
            if not self._failure:
                self._negotiator.leave()
                self._wake_thread()
        self._thread.join()
        for group in self._executor.groups.values():
            group.close()

    def _check_alive(self) -> None:
        if self._failure:
            raise HorovodInternalError(self._failure)

    def _wake_thread(self) -> None:
        """The caller must hold `_lock`."""
        if self._schedule.is_asleep:
            self._schedule.is_asleep = False
            with contextlib.suppress(CollectiveError):  # the thread gets the error too, and fails all entries
                self._wakeups.wake_own_thread()

    def _wait_until(self, is_over: Callable[[], bool]) -> None:
        """Wait until a condition is true. Run the necessary rounds, unless another thread runs them."""
        while not is_over():
            if self._can_run_round() and self._rounds.acquire(blocking=False):
                self._run_round_and_release()
            else:
                with self._changed:
                    self._changed.wait_for(lambda: is_over() or self._can_run_round())

    def _can_run_round(self) -> bool:
        return self._negotiator.needs_round and not self._failure and not self._rounds.locked()

    def _serve(self) -> None:
        try:
            while not self._failure:
                self._wait_for_round()
                if self._rounds.acquire(timeout=GRACE_S):
                    self._run_round_and_release(is_background=True)
        except BaseException as error:
            self._abort(error)
            with self._rounds:
                self._end(error)

    def _wait_for_round(self) -> None:
        """Wait until this rank should take part in a round."""
        while not self._failure:
            with self._lock:
                action = self._schedule.next_action(
                    time.monotonic(),
                    needs_round=self._negotiator.needs_round,
                    has_pending=self._negotiator.has_pending or self._recorder is not None,
                )
                number = self._schedule.number
            if action.wakes_ranks:
                self._wakeups.wake_other_ranks(number)
            if action.runs_round:
                return
            number = self._wakeups.wait(timedelta(seconds=action.timeout_s))
            with self._lock:
                if self._schedule.woken(number):
                    self._negotiator.uncache_pending()

    def _run_round_and_release(self, *, is_background: bool = False) -> None:
        """Run a round if this rank needs it or if another rank has started it. The caller must hold `_rounds`."""
        try:
            if self._failure or not (self._negotiator.needs_round or self._schedule.is_started):
                return
            self._run_round(is_background=is_background)
            if self._negotiator.is_over:
                self._set_recorder(NO_TIMELINE)
                self._end(None)
        except BaseException as error:
            self._abort(error)
            self._end(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._rounds.release()
            with self._lock:
                if self._negotiator.needs_round:
                    self._wake_thread()
            with self._changed:
                self._changed.notify_all()

    def _abort(self, error: BaseException) -> None:
        """End the groups, so that the other ranks get errors too."""
        if not isinstance(error, HorovodInternalError):
            for number, group in self._executor.groups.items():
                if number != self._running_set or not isinstance(error, CollectiveError):
                    group.abort()  # the group of the failed operation has notified its ranks already

    def _end(self, error: BaseException | None) -> None:
        """Fail all operations of this rank, because of an error or because a rank has left. Idempotent."""
        failure = _SHUT_DOWN if error is None else str(error)
        if error is not None and not isinstance(error, HorovodInternalError):
            failure = f"a collective operation failed, and Horovod ends on this rank: {first_line(error)}"
        if self._traces is not None:
            self._traces.close()
        with self._lock:
            self._failure = self._failure or failure
            entries = self._entries.take_all()
            self._wake_thread()
        self._finish((), entries, self._failure)

    def _run_round(self, *, is_background: bool) -> None:
        with self._lock:
            vote, num_bits, number = self._negotiator.vote(), self._negotiator.num_bits, self._schedule.number
            has_idle_ranks = self._negotiator.has_idle_ranks
            wakes_ranks = self._schedule.begin_round(
                time.monotonic(), is_background=is_background, has_idle_ranks=has_idle_ranks
            )
        if wakes_ranks:
            self._wakeups.wake_other_ranks(number)
        if self._recorder is not None:
            self._recorder.add_round()
        bits = np.frombuffer(bytearray(vote.to_bytes(num_bits + 7 >> 3, "little")), np.uint8)
        self._group.all_reduce(bits, "bitwise_and", out=bits)
        with self._lock:
            self._schedule.end_vote()
            instructions = self._negotiator.agreed(int.from_bytes(bits.tobytes(), "little"))
        self._carry_out(instructions)
        if self._negotiator.needs_reports:
            decision = self._decide()
            if decision.failure:
                raise HorovodInternalError(decision.failure)
            self._set_recorder(decision.timeline)
            with self._lock:
                instructions = self._negotiator.decided(decision)
            self._carry_out(instructions)
            self._send_events()
        if self._group.rank == 0:
            if self._stalls is not None:
                self._inspect_stalls(self._stalls)
            if self._recorder is not None and time.monotonic() - self._traced_s >= _CHECK_S:
                self._request_reports()
            self._stacks.clear()

    def _decide(self) -> NegotiationDecision:
        """Send this rank's report to rank 0, and return the decision of rank 0."""
        with self._lock:
            report = self._negotiator.report()
        report = msgspec.structs.replace(report, calls=script_calls())
        reports = self._group.gather_objects(msgspec.msgpack.encode(report))
        data = b""
        if reports is not None:
            decoded = [read_meta(text, NegotiationReport, "a report of the negotiation") for text in reports]
            self._stacks = [[StackFrame(*call) for call in report.calls] for report in decoded]
            decision = self._negotiator.decide(decoded)
            decision = msgspec.structs.replace(decision, timeline=self._timeline, failure=self._stall)
            data = msgspec.msgpack.encode(decision)
        data = self._group.broadcast_object(data)
        decided: NegotiationDecision = read_meta(data, NegotiationDecision, "a decision of the negotiation")
        return decided

    def _request_reports(self) -> None:
        with self._lock:
            self._negotiator.request_reports()

    def _inspect_stalls(self, stalls: StallInspector) -> None:
        with self._lock:
            missing = self._negotiator.missing()
        time_s = time.monotonic()
        if not any(stalls.find_late(missing, time_s)):
            return
        if self._stacks:
            warning, self._stall = stalls.describe(missing, time_s, self._stacks)
            if warning:
                _log.warning("%s", warning)
        if self._stall or not self._stacks:
            self._request_reports()

    def _set_recorder(self, timeline: int) -> None:
        """Start or end the timeline of this rank. All ranks call this method in the same round."""
        if (self._recorder is None) == (timeline == NO_TIMELINE):
            return
        if timeline == NO_TIMELINE:
            self._send_events()
            if self._traces is not None:
                self._traces.close()
            self._traces = recorder = None
        else:
            offsets_ns = clock_offsets(self._group)
            if self._traces is not None:
                self._traces.offsets_ns = offsets_ns
            recorder = PhaseRecorder(has_rounds=timeline == TIMELINE_OF_ROUNDS)
        with self._changed:
            self._recorder = recorder
            self._changed.notify_all()

    def _send_events(self) -> None:
        """Send the events of the timeline to rank 0, which writes them."""
        if self._recorder is None:
            return
        events = self._group.gather_objects(self._recorder.take())
        self._traced_s = time.monotonic()
        if self._traces is not None and events is not None:
            self._traces.write(events)

    def _carry_out(self, instructions: Sequence[NegotiationInstruction]) -> None:
        agreed_ns = 0 if self._recorder is None else time.monotonic_ns()
        for instruction in instructions:
            match instruction:
                case RunOperation(requests, keys, names):
                    _log.debug("%s of %s", requests[0].operation, keys)
                    with self._lock:
                        entries = self._entries.take(keys)
                    if requests[0].operation in CHANGE_SETS:
                        self._change_groups(requests[0])
                    else:
                        self._running_set = requests[0].process_set
                        phases = self._executor.run(requests, entries)
                        self._running_set = GLOBAL_SET
                        if self._recorder is not None:
                            self._recorder.add(entries, agreed_ns, phases)
                    self._finish(names, entries)
                case FailRequest(key, error):
                    with self._lock:
                        entries = self._entries.take([key])
                    self._finish([key], entries, error)
                case EndJoin(last):
                    with self._changed:
                        self._last_joined = last
                        self._changed.notify_all()

    def _finish(self, keys: Iterable[Key], entries: Iterable[TensorEntry | None], error: str = "") -> None:
        """Mark this rank's entries as done, and free their names."""
        with self._lock:
            self._entries.operation_ended()
            self._negotiator.finished(keys)
        with self._changed:
            for entry in entries:
                if entry is not None:
                    if error:
                        entry.error = error
                    entry.is_done = True
            self._changed.notify_all()

    def _change_groups(self, request: TensorRequest) -> None:
        if request.operation == ADD_PROCESS_SET:
            number = self._negotiator.find_process_set(request.shape)
            if number is not None and number not in self._executor.groups:
                group = self._group.subgroup(request.shape)
                if group is not None:
                    self._executor.groups[number] = group
            return
        for number in [number for number in self._executor.groups if number not in self._negotiator.process_sets]:
            self._executor.groups.pop(number).close()
