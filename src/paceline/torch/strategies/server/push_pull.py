"""Run a thread that sends gradients to the servers during backward, and receives values during forward."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from paceline.errors import PacelineError, UsageError
from paceline.observe import recording
from paceline.ps import Client, Ticket
from paceline.torch.strategies.server.dense_tables import Bucket
from paceline.torch.strategies.server.staging import Staging

_PULLS_AT_ONCE = 3  # pulls in flight: enough to keep servers busy; more would only need more memory


class PushPull:
    """Pushes and pulls buckets in order, in a thread. If the thread fails, every later call raises its error."""

    def __init__(self, client: Client, staging: Staging, rank: int) -> None:
        self._client = client
        self._staging = staging
        self._rank = rank
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._num_unacknowledged = 0  # number of iterations with unacknowledged pushes
        self._num_stale = 0  # number of buckets whose current values have not arrived
        self._pushes: list[Ticket] = []
        self._thread = threading.Thread(target=self._run, name="paceline-push-pull", daemon=True)
        self._thread.start()

    def push(self, bucket: Bucket) -> None:
        """Push a bucket's gradients, which must not change until :meth:`end_iteration` returns."""
        bucket.was_pushed = True
        self._staging.collect(bucket)
        self._jobs.put(lambda: self._push(bucket))

    def end_iteration(self, buckets: Sequence[Bucket]) -> None:
        """End the iteration, and request the values of `buckets` in order. Return when the pushes are acknowledged."""
        self._staging.prepare_copies()
        self._mark_stale(buckets)
        self._num_unacknowledged += 1
        self._jobs.put(lambda: self._tick_and_pull(buckets))
        with recording.waiting(), self._changed:
            self._changed.wait_for(lambda: not self._num_unacknowledged or self._failure is not None)
        self.raise_failure()

    def pull(self, buckets: Sequence[Bucket]) -> None:
        """Request the current values of `buckets`; :meth:`wait` waits for them."""
        self._staging.prepare_copies()
        self._mark_stale(buckets)
        self._jobs.put(lambda: self._pull(buckets))

    @property
    def is_current(self) -> bool:
        return not self._num_stale

    def wait(self, bucket: Bucket) -> None:
        if not bucket.is_current:
            with recording.waiting(), self._changed:
                self._changed.wait_for(lambda: bucket.is_current or self._failure is not None)
            if not bucket.is_current:
                self.raise_failure()
        self._staging.wait(bucket)

    def raise_failure(self) -> None:
        error = self._failure
        if error is None:
            return
        if isinstance(error, PacelineError) and len(error.args) == 1:
            raise type(error)(f"rank {self._rank}: {error}") from error
        raise error

    def close(self, *, at_once: bool) -> None:
        """End the thread: with `at_once` immediately, otherwise after its pending work. Idempotent."""
        self._jobs.put(None)
        if at_once:
            self._fail(UsageError("the strategy was closed while parameters were in flight"))
            self._client.abort()
        try:
            self._thread.join()
        except BaseException:  # for example KeyboardInterrupt
            self._client.abort()
            self._thread.join(5.0)
            raise

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            if self._failure is None:
                try:
                    # without this context, an access to a parameter would wait for this thread itself
                    with torch._C.DisableTorchFunctionSubclass():
                        job()
                except BaseException as error:
                    self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._changed.notify_all()

    def _push(self, bucket: Bucket) -> None:
        for start, gradients in self._staging.gradients(bucket):
            self._pushes.append(bucket.table.push(gradients, start=start))

    def _tick_and_pull(self, buckets: Sequence[Bucket]) -> None:
        self._client.tick()
        pushes, self._pushes = self._pushes, []

        def acknowledged() -> None:
            for ticket in pushes:
                ticket.wait()
            with self._changed:
                self._num_unacknowledged -= 1
                self._changed.notify_all()

        self._pull(buckets, acknowledged)

    def _pull(self, buckets: Sequence[Bucket], when_requested: Callable[[], None] | None = None) -> None:
        in_flight: deque[tuple[Bucket, Ticket]] = deque()
        for bucket in buckets:
            if len(in_flight) == _PULLS_AT_ONCE:
                if when_requested is not None:
                    when_requested()
                    when_requested = None
                self._receive(*in_flight.popleft())
            ticket = bucket.table.pull_async(self._staging.target(bucket), start=bucket.start, stop=bucket.stop)
            in_flight.append((bucket, ticket))
        if when_requested is not None:
            when_requested()
        while in_flight:
            self._receive(*in_flight.popleft())

    def _receive(self, bucket: Bucket, ticket: Ticket) -> None:
        ticket.wait()
        self._staging.arrived(bucket)
        with self._changed:
            bucket.is_current = True
            self._num_stale -= 1
            self._changed.notify_all()

    def _mark_stale(self, buckets: Sequence[Bucket]) -> None:
        with self._changed:
            for bucket in buckets:
                self._num_stale += bucket.is_current
                bucket.is_current = False
