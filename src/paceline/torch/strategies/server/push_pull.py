"""The thread that carries gradients to the servers while backward runs, and values back while forward does."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from paceline.errors import PacelineError, UsageError
from paceline.ps import Client, Ticket
from paceline.torch.strategies.server.dense_tables import Bucket
from paceline.torch.strategies.server.staging import Staging

_PULLS_AT_ONCE = 3  # enough that a server always has the next one; more only make it take memory for the answers


class PushPull:
    """Pushes and pulls buckets in the order asked for, in a thread of its own; :meth:`close` ends it.

    What fails there is raised by every later call, with the rank named.
    """

    def __init__(self, client: Client, staging: Staging, rank: int) -> None:
        self._client = client
        self._staging = staging
        self._rank = rank
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._num_awaited = 0  # iterations that are not acknowledged
        self._num_stale = 0  # buckets that are not current
        self._pushes: list[Ticket] = []
        self._thread = threading.Thread(target=self._run, name="paceline-push-pull", daemon=True)
        self._thread.start()

    def push(self, bucket: Bucket) -> None:
        """Push a bucket's gradients, which must stay as they are until :meth:`end_iteration` returns."""
        bucket.was_pushed = True
        self._staging.collect(bucket)
        self._jobs.put(lambda: self._push(bucket))

    def end_iteration(self, buckets: Sequence[Bucket]) -> None:
        """Tick, and ask for all values, those of `buckets` in this order; return when the pushes are acknowledged."""
        self._staging.prepare_values()
        self._mark_stale(buckets)
        self._num_awaited += 1
        self._jobs.put(lambda: self._tick_and_pull(buckets))
        with self._changed:
            self._changed.wait_for(lambda: not self._num_awaited or self._failure is not None)
        self.raise_failure()

    def pull(self, buckets: Sequence[Bucket]) -> None:
        """Ask for the current values of `buckets`; :meth:`wait` waits for them."""
        self._staging.prepare_values()
        self._mark_stale(buckets)
        self._jobs.put(lambda: self._pull(buckets))

    @property
    def is_current(self) -> bool:
        """Whether all values are there."""
        return not self._num_stale

    def wait(self, bucket: Bucket) -> None:
        """Return when a bucket's values are in the parameters."""
        if not bucket.is_current:
            with self._changed:
                self._changed.wait_for(lambda: bucket.is_current or self._failure is not None)
            if not bucket.is_current:
                self.raise_failure()
        self._staging.wait(bucket)

    def raise_failure(self) -> None:
        """Raise what has failed in the thread, if anything has."""
        error = self._failure
        if error is None:
            return
        if isinstance(error, PacelineError) and len(error.args) == 1:
            raise type(error)(f"rank {self._rank}: {error}") from error
        raise error

    def close(self, *, at_once: bool) -> None:
        """End the thread: `at_once`, or when what is under way is done. Idempotent."""
        self._jobs.put(None)
        if at_once:
            self._fail(UsageError("the strategy was closed while parameters were on their way"))
            self._client.abort()
        try:
            self._thread.join()
        except BaseException:  # Ctrl-C
            self._client.abort()
            self._thread.join(5.0)
            raise

    # In the thread.

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            if self._failure is None:
                try:
                    with torch._C.DisableTorchFunctionSubclass():  # parameters wait for what is done here
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
                self._num_awaited -= 1
                self._changed.notify_all()

        self._pull(buckets, acknowledged)

    def _pull(self, buckets: Sequence[Bucket], when_asked: Callable[[], None] | None = None) -> None:
        under_way: deque[tuple[Bucket, Ticket]] = deque()
        for bucket in buckets:
            if len(under_way) == _PULLS_AT_ONCE:
                if when_asked is not None:
                    when_asked()
                    when_asked = None
                self._land(*under_way.popleft())
            ticket = bucket.table.pull_async(self._staging.target(bucket), start=bucket.start, stop=bucket.stop)
            under_way.append((bucket, ticket))
        if when_asked is not None:
            when_asked()
        while under_way:
            self._land(*under_way.popleft())

    def _land(self, bucket: Bucket, ticket: Ticket) -> None:
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
