"""Simulate time, processes and threads. A seed determines the order of all events.

Processes of protocol runs have no threads: the world calls their functions. The product's code waits for locks, data
and events. Each of these waits calls :meth:`VirtualWorld.block`, which passes the *baton* (the right to run) to the
thread with the next turn, and sets the time to the time of this turn. The threads are real, so that the product's code
runs unchanged, but only one thread runs at a time.
"""

from __future__ import annotations

import heapq
import threading
import zlib
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, Final

_JITTER_S: Final = 2e-4
"""The maximum time until a woken thread gets a processor."""
_MAX_TURNS: Final = 400_000


class Killed(SystemExit):
    """Ends a thread of a process that was killed. It is a SystemExit, because asyncio re-raises every SystemExit."""


class Deadlock(Exception):  # noqa: N818 - reported like a Violation
    """The simulation has not ended after the maximum number of turns."""


class VirtualProcess:
    """A process of the simulation: its calls and threads are paused and killed together."""

    def __init__(self, world: VirtualWorld, name: str, host: str) -> None:
        self.world = world
        self.name = name
        self.host = host
        self.number = len(world.processes)
        self.is_dead = False
        self.is_paused = False
        self.is_silent = False
        """Whether the process dies with its host, so that its connections do not end."""
        self.role: Any = None
        """The product's server or scheduler that runs in this process."""
        self.loop: Any = None
        """The event loop of the server or scheduler."""
        self.threads: list[Thread] = []
        self.at_death: list[Callable[[], None]] = []
        """Functions to call when the process is killed or its main thread has ended."""
        self.failure: BaseException | None = None
        """The error for which the process has ended itself, if any."""
        self.hook: Callable[[Any], None] | None = None
        """The ``threading.excepthook`` of this process."""
        self.signals: dict[int, Callable[[], None]] = {}
        self.is_leaving = False
        """Whether the process has received a request to leave."""
        self.clock_offset_s = 0.0
        """The difference of the process's clock from the virtual time."""
        self.is_disturbed = False
        """Whether other processes may declare it dead, so that it may end itself."""
        self._deferred: list[tuple[Thread, int]] = []
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()  # to call when it resumes
        world.processes.append(self)

    def later(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call a function after a delay. A paused process runs it later, a dead process does not."""
        self.world.after(delay_s, self.run, call, *arguments)

    def run(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call a function now, or when the process resumes."""
        if self.is_paused:
            self._calls.append((call, arguments))
        elif not self.is_dead:
            call(*arguments)

    def start(self, main: Callable[[], None]) -> Thread:
        """Start the main thread. The process ends with this thread."""

        def run() -> None:
            try:
                main()
            finally:
                self.kill()

        thread = Thread(self, run, f"{self.name}/main")
        thread.start()
        return thread

    def pause(self) -> None:
        """Stop all threads of the process, as SIGSTOP does."""
        self.is_paused = True

    def resume(self) -> None:
        """Let the threads of the process run again."""
        self.is_paused = False
        deferred, self._deferred = self._deferred, []
        for thread, generation in deferred:
            self.world.resume_at(self.world.time_s, thread, generation)
        calls, self._calls = self._calls, deque()
        for call, arguments in calls:
            self.run(call, *arguments)

    def defer(self, thread: Thread, generation: int) -> None:
        """Give a thread its turn when the process resumes."""
        self._deferred.append((thread, generation))

    def kill(self) -> None:
        """End the process now: its threads stop, and its connections end. Idempotent."""
        if self.is_dead:
            return
        self.is_dead = True
        self.is_paused = False
        self._calls.clear()
        for call in self.at_death:
            call()
        for thread in self.threads:
            self.world.resume_at(self.world.time_s, thread, None)


class Thread:
    """A thread of a process. A thread runs only while it has the baton."""

    def __init__(self, process: VirtualProcess, target: Callable[[], None], name: str) -> None:
        self.process = process
        self.name = name
        self.generation = 0
        self.is_woken = False
        self.is_over = False
        self.ended: list[Thread] = []  # threads that wait for the end of this thread
        self.at_end: list[Callable[[], None]] = []
        self.number = process.world.next_number()
        self._baton = threading.Lock()
        self._baton.acquire()
        self._target = target

    def start(self) -> None:
        """Start the thread; it runs at its turn."""
        process = self.process
        process.threads.append(self)
        threading.Thread(target=self._run, name=self.name, daemon=True).start()
        process.world.resume_soon(self)

    def wait_baton(self) -> None:
        """Wait for the baton."""
        self._baton.acquire()

    def give_baton(self) -> None:
        """Pass the baton to this thread; the caller must then wait or end."""
        self._baton.release()

    def _run(self) -> None:
        self.wait_baton()
        process = self.process
        try:
            if not process.is_dead:
                self._target()
        except Killed:
            pass
        except BaseException as error:
            process.world.unhandled(self, error)
        for call in self.at_end:
            call()
        self.is_over = True
        process.threads.remove(self)
        for thread in self.ended:
            process.world.wake(thread)
        process.world.leave()


class VirtualWorld:
    """The clock, the turns and the random numbers of one simulation. The thread that creates it runs the simulation."""

    def __init__(self, seed: int, *, trace: Callable[[str], None] | None = None) -> None:
        self.random = Random(seed)
        self.time_s = 0.0
        self.trace = trace
        self.trace_hash = 0
        self.num_turns = self.num_events = 0
        self.processes: list[VirtualProcess] = []
        self.failure: BaseException | None = None
        self._turns: list[tuple[float, float, int, Callable[..., None] | None, tuple[Any, ...]]] = []
        self._number = 0
        harness = VirtualProcess(self, "harness", "harness")
        self.main = self.current = Thread(harness, lambda: None, "harness")
        self.max_turns = _MAX_TURNS

    def next_number(self) -> int:
        """Return a number that is unique in this world."""
        self._number += 1
        return self._number

    def note(self, text: str, *details: object) -> None:
        """Trace an event. `trace_hash` depends on every word of `text`; `details` are only printed."""
        line = f"{self.time_s:10.6f} {text}"
        self.trace_hash = zlib.crc32(line.encode(), self.trace_hash)
        if self.trace is not None:
            self.trace(" ".join([line, *(str(detail) for detail in details if not isinstance(detail, bytes))]))

    # Turns.

    def at(self, time_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call a function at a time. The function must not block."""
        heapq.heappush(self._turns, (time_s, self.random.random(), self.next_number(), call, arguments))

    def after(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call a function after a delay. The function must not block."""
        self.at(self.time_s + delay_s, call, *arguments)

    def resume_at(self, time_s: float, thread: Thread, generation: int | None) -> None:
        """Give a thread its turn at a time. With a `generation`, only if the thread is still in this wait."""
        heapq.heappush(self._turns, (time_s, self.random.random(), self.next_number(), None, (thread, generation)))

    def resume_soon(self, thread: Thread) -> None:
        """Give a thread its turn after a short random delay."""
        self.resume_at(self.time_s + self.random.random() * _JITTER_S, thread, thread.generation)

    def wake(self, thread: Thread) -> None:
        """Wake a thread that waits in :meth:`block`; other threads are not affected."""
        if not thread.is_woken:
            thread.is_woken = True
            self.resume_soon(thread)

    def block(self, timeout_s: float | None = None) -> bool:
        """Wait for :meth:`wake`; return False after the timeout. Raises Killed in a dead process."""
        me = self.current
        if me.process.is_dead:
            raise Killed
        me.is_woken = False
        if timeout_s is not None:
            self.resume_at(self.time_s + max(timeout_s, 0.0), me, me.generation)
        following = self._next(me)
        if following is not me:
            following.give_baton()
            me.wait_baton()
        me.generation += 1
        was_woken, me.is_woken = me.is_woken, True
        if me is self.main and self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        if me.process.is_dead:
            raise Killed
        return was_woken

    def leave(self) -> None:
        """Pass the baton to the next thread, because the current thread ends."""
        self._next(None).give_baton()

    def sleep(self, seconds: float) -> None:
        """Wait for a duration."""
        end_s = self.time_s + seconds
        while self.time_s < end_s:
            self.block(end_s - self.time_s)

    def unhandled(self, thread: Thread, error: BaseException) -> None:
        """Pass a thread's error to the hook of its process, or raise it in the thread that runs the simulation."""
        hook = thread.process.hook
        if hook is None or not isinstance(error, Exception):
            self.fail(error)
            return
        try:
            hook(error)
        except Killed:
            pass

    def fail(self, error: BaseException) -> None:
        """Raise an error in the thread that runs the simulation."""
        if self.failure is None:
            self.failure = error
            self.resume_at(self.time_s, self.main, None)

    def _next(self, me: Thread | None) -> Thread:
        """Run the due calls; return the thread whose turn is next."""
        while True:
            time_s, _, _, call, arguments = heapq.heappop(self._turns)
            self.time_s = max(self.time_s, time_s)
            self.num_events += 1
            if call is not None:
                try:
                    call(*arguments)
                except Exception as error:
                    self.fail(error)
                continue
            thread, generation = arguments
            if thread.is_over or (generation is not None and generation != thread.generation):
                continue
            if thread.process.is_paused:
                thread.process.defer(thread, generation)
                continue
            self.num_turns += 1
            if self.num_turns == self.max_turns:
                self.fail(Deadlock(f"{self.num_turns} turns, and no end"))
            self.current = thread
            return thread  # type: ignore[no-any-return]

    # The end.

    def close(self) -> None:
        """End all processes and wait until their threads are over."""
        harness, *started = self.processes
        for process in started:
            process.kill()
        for _ in range(1000):
            if not any(process.threads for process in started):
                break
            self.block(0.001)
        harness.is_dead = True
