"""Play the tasks of a step on a virtual clock. Tasks share resources: processor cores, and the ports of a network.

A task has the duration that it takes alone, and loads: the fractions of resources that it uses during this time. If the
loads of the running tasks on a resource add up to more than 1, these tasks become slower by this factor. Pure.
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
    """A part of a step. It begins when the tasks with the numbers `after` have ended."""

    kind: Kind
    seconds: float
    loads: Mapping[str, float]
    after: tuple[int, ...]


class PlayedTask(NamedTuple):
    """The times of a task on the clock, in seconds, and the number of the task whose end it waited for (or -1)."""

    begin_s: float
    end_s: float
    cause: int


class TaskList:
    """The tasks of a step, in an order in which each task follows the tasks that it waits for."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def add(self, kind: Kind, seconds: float, loads: Mapping[str, float], *after: int) -> int:
        """Append a task and return its number. Negative numbers in `after` are ignored."""
        self.tasks.append(Task(kind, seconds, loads, tuple(number for number in after if number >= 0)))
        return len(self.tasks) - 1


def play(tasks: Sequence[Task]) -> list[PlayedTask]:
    """Return the times of all tasks. A task may only wait for tasks with a smaller number."""
    followers = defaultdict[int, list[int]](list)
    num_missing = [len(task.after) for task in tasks]
    for number, task in enumerate(tasks):
        for before in task.after:
            followers[before].append(number)
    played: list[PlayedTask] = [PlayedTask(0.0, 0.0, -1)] * len(tasks)
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
            played[number] = PlayedTask(begins[number], time_s, causes[number])
            for follower in followers[number]:
                num_missing[follower] -= 1
                if not num_missing[follower]:
                    causes[follower] = number
                    ready.append(follower)
    return played


def _speeds(tasks: Sequence[Task], running: Mapping[int, None]) -> dict[int, float]:
    """Return the speed of each running task, as a fraction of its speed alone."""
    total = defaultdict[str, float](float)
    for number in running:
        for resource, load in tasks[number].loads.items():
            total[resource] += load
    return {number: 1.0 / max((1.0, *(total[resource] for resource in tasks[number].loads))) for number in running}


def critical_path(tasks: Sequence[Task], played: Sequence[PlayedTask], last: int, begin_s: float) -> dict[Kind, float]:
    """Return the seconds by kind on the path of causes that ends with task `last`, from the time `begin_s` on.

    The time by which a computation is slower than alone counts as ``communication CPU``, which uses its processor.
    """
    parts: dict[Kind, float] = {}
    kind: Kind
    number = last
    while number >= 0:
        begin, end, cause = played[number]
        if end <= begin_s:
            break
        duration = end - max(begin, begin_s)
        own = min(duration, tasks[number].seconds) if tasks[number].kind == "compute" else duration
        for kind, seconds in ((tasks[number].kind, own), ("communication CPU", duration - own)):
            if seconds > 0:
                parts[kind] = parts.get(kind, 0.0) + seconds
        number = cause
    return parts
