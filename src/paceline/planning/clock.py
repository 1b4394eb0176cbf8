"""Simulate the tasks of a step on a virtual clock. Tasks share processor cores and network ports. Pure.

A task has a duration, which is its time without other tasks, and loads: the fractions of resources that it uses. If the
loads of the running tasks on a resource add up to more than 1, these tasks become slower by this factor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["compute", "communication CPU", "wire", "server CPU", "slow ranks", "bubble"]
"""The reason for which a step takes time.

``communication CPU`` is the processor time of the ranks for communication, ``slow ranks`` the waiting for slower ranks.
"""

_ROUNDING: Final = 1e-12


class Task(NamedTuple):
    """A part of a step. It begins when the tasks with the numbers in `after` have ended."""

    kind: Kind
    seconds: float
    loads: Mapping[str, float]
    after: tuple[int, ...]


class TaskTimes(NamedTuple):
    """The start and the end of a task on the clock, in seconds."""

    begin_s: float
    end_s: float
    cause: int
    """The number of the last task that this task waited for; -1 if it waited for none."""


class TaskList:
    """The tasks of a step. A task has a larger number than the tasks that it waits for."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def add(self, kind: Kind, seconds: float, loads: Mapping[str, float], *after: int) -> int:
        """Append a task and return its number. Negative numbers in `after` are ignored."""
        self.tasks.append(Task(kind, seconds, loads, tuple(number for number in after if number >= 0)))
        return len(self.tasks) - 1


def simulate_tasks(tasks: Sequence[Task]) -> list[TaskTimes]:
    """Return the times of all tasks. A task may only wait for tasks with a smaller number."""
    followers = defaultdict[int, list[int]](list)
    num_missing = [len(task.after) for task in tasks]
    for number, task in enumerate(tasks):
        for before in task.after:
            followers[before].append(number)
    times: list[TaskTimes] = [TaskTimes(0.0, 0.0, -1)] * len(tasks)
    begins, left = [0.0] * len(tasks), [task.seconds for task in tasks]
    causes = [-1] * len(tasks)
    ready, running, time_s = [n for n, count in enumerate(num_missing) if not count], dict[int, None](), 0.0
    while ready or running:
        for number in ready:
            begins[number] = time_s
            running[number] = None
        ready = []
        speeds = _speeds(tasks, running)
        step_s = min(left[number] / speed for number, speed in speeds.items())
        time_s += step_s
        for number, speed in speeds.items():
            left[number] -= step_s * speed
            if left[number] > _ROUNDING:
                continue
            del running[number]
            times[number] = TaskTimes(begins[number], time_s, causes[number])
            for follower in followers[number]:
                num_missing[follower] -= 1
                if not num_missing[follower]:
                    causes[follower] = number
                    ready.append(follower)
    return times


def _speeds(tasks: Sequence[Task], running: Mapping[int, None]) -> dict[int, float]:
    """Return the speed of each running task, as a fraction of its speed alone."""
    total = defaultdict[str, float](float)
    for number in running:
        for resource, load in tasks[number].loads.items():
            total[resource] += load
    return {number: 1.0 / max((1.0, *(total[resource] for resource in tasks[number].loads))) for number in running}


def critical_path(tasks: Sequence[Task], times: Sequence[TaskTimes], last: int, begin_s: float) -> dict[Kind, float]:
    """Return the seconds by kind on the critical path from the time `begin_s` to the end of task `last`.

    The path goes from each task to its cause. If other tasks slow down a computation, the additional time counts as
    ``communication CPU``.
    """
    parts: dict[Kind, float] = {}
    kind: Kind
    number = last
    while number >= 0:
        begin, end, cause = times[number]
        if end <= begin_s:
            break
        duration = end - max(begin, begin_s)
        own = min(duration, tasks[number].seconds) if tasks[number].kind == "compute" else duration
        for kind, seconds in ((tasks[number].kind, own), ("communication CPU", duration - own)):
            if seconds > 0:
                parts[kind] = parts.get(kind, 0.0) + seconds
        number = cause
    return parts
