"""Record the steps of a timeline: their start and end on this machine, and the phases of each rank."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
from pathlib import Path
from typing import Final, Protocol

from typing_extensions import override

from paceline.closing import Closing
from paceline.errors import UsageError
from paceline.observe.stuck.recorder import PHASE, FlightRecorder, RecordedOperation

_NAME: Final = "window"
_NUM_RANKS, _NUM_STARTED, _NUM_ENDED, _START_NS, _END_NS, _OFFSET_NS = range(6)
_BYTES: Final = 48
_MOST_STEPS: Final = 1000


def parse_steps(text: str) -> range:
    """Return the steps of ``--timeline-steps``, such as ``100:120``. Raises UsageError."""
    first, colon, stop = text.partition(":")
    if not (colon and first.isdecimal() and stop.isdecimal() and int(first) < int(stop) <= int(first) + _MOST_STEPS):
        raise UsageError(
            f"--timeline-steps {text}: expected the first step and the step after the last, as in 100:120, and at most "
            f"{_MOST_STEPS} steps"
        )
    return range(int(first), int(stop))


class StepWindow(Closing):
    """The time in which the ranks of this machine run the steps. The processes share it in a mapped file."""

    def __init__(self, folder: Path) -> None:
        """Open the file in the job's folder, which the launcher has created by :meth:`create`. Raises OSError."""
        self._file = os.open(folder / _NAME, os.O_RDWR)
        self._words = memoryview(mmap.mmap(self._file, _BYTES)).cast("q")

    @classmethod
    def create(cls, folder: Path, num_ranks: int) -> StepWindow:
        """Create the file for the ranks of this machine. Raises OSError."""
        (folder / _NAME).write_bytes(num_ranks.to_bytes(8, "little").ljust(_BYTES, b"\0"))
        return cls(folder)

    @property
    def is_open(self) -> bool:
        """Whether a rank is in the steps."""
        words = self._words
        return bool(words[_NUM_STARTED]) and words[_NUM_ENDED] < words[_NUM_RANKS]

    @property
    def has_ended(self) -> bool:
        """Whether all ranks have finished the steps."""
        return self._words[_NUM_ENDED] >= self._words[_NUM_RANKS]

    @property
    def bounds_ns(self) -> tuple[int, int]:
        """Start and end in nanoseconds since 1970; 0 before that time."""
        return self._words[_START_NS], self._words[_END_NS] if self.has_ended else 0

    @property
    def offset_ns(self) -> int:
        """The clock of this machine minus the clock of rank 0's machine; 0 if it was not measured."""
        return self._words[_OFFSET_NS]

    def set_offset(self, offset_ns: int) -> None:
        """Set :attr:`offset_ns`."""
        self._words[_OFFSET_NS] = offset_ns

    def begin(self) -> None:
        """Record that a rank begins the first step."""
        self._count(_NUM_STARTED)

    def end(self) -> None:
        """Record that a rank has finished the last step."""
        self._count(_NUM_ENDED)

    def _count(self, word: int) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            if word == _NUM_STARTED and not self._words[word]:
                self._words[_START_NS] = time.time_ns()
            self._words[_END_NS] = time.time_ns()
            self._words[word] += 1
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    @override
    def close(self) -> None:
        os.close(self._file)


class StepProfile(Protocol):
    """A profile of the steps in the window."""

    def begin(self) -> None:
        """Begin the profile. The thread of the training loop calls this before the first step."""

    def end(self) -> None:
        """End the profile, after the last step or at the end of the process. It may have ended already."""


class StepSpans:
    """Records the steps of a rank's training loop, and the phases of each step, while they are in the window."""

    def __init__(self, recorder: FlightRecorder, window: StepWindow, steps: range) -> None:
        self._recorder, self.window, self._steps = recorder, window, steps
        self._number, self._thread = -1, 0
        self._step = self._phase = 0
        """The events of the current step and phase; 0: none is recorded."""
        self._is_empty = self._has_begun = self._has_ended = False
        self.profile: StepProfile | None = None

    def begin_step(self) -> None:
        """End the current step, and begin the next one."""
        self._end()
        self._number, self._thread, self._is_empty = self._number + 1, threading.get_ident(), True
        if self._number == self._steps.start and not self._has_begun:
            if self.profile is not None:
                self.profile.begin()
            self.window.begin()
            self._has_begun = True
        if self._number == self._steps.stop and not self._has_ended:
            self.end_profile()
            self.window.end()
            self._has_ended = True
        if self._number in self._steps:
            self._step = self._recorder.begin(_STEP, self._number)
            self._begin_phase("data")

    def enter(self, phase: str) -> None:
        """End the current phase, and begin another one."""
        self._is_empty = False
        if self._phase:
            self._recorder.end(self._phase)
        self._phase = 0
        self._begin_phase(phase)

    def _begin_phase(self, phase: str) -> None:
        if self._step:
            self._phase = self._recorder.begin(_phase(phase), self._number, thread=self._thread)

    def end_loop(self) -> None:
        """End the loop. A step without a batch does not count. The next loop continues with the next step."""
        self._end()
        self._number -= self._is_empty
        self._is_empty = False

    def end_profile(self) -> None:
        """End the profile of the steps, if there is one."""
        if self.profile is not None:
            self.profile.end()

    def _end(self) -> None:
        for event in (self._phase, self._step):
            if event:
                self._recorder.end(event)
        self._step = self._phase = 0


_STEP: Final = RecordedOperation(PHASE, "step").encode()
_phases: Final[dict[str, bytes]] = {}


def _phase(name: str) -> bytes:
    if name not in _phases:
        _phases[name] = RecordedOperation(PHASE, name).encode()
    return _phases[name]
