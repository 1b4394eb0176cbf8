"""The virtual clock: order, sharing of resources, and the critical path."""

from __future__ import annotations

import pytest

from paceline.planning.clock import TaskList, critical_path, simulate_tasks


def test_tasks_wait_for_each_other() -> None:
    tasks = TaskList()
    first = tasks.add("compute", 2.0, {})
    second = tasks.add("wire", 3.0, {}, first)
    third = tasks.add("compute", 1.0, {}, first, -1)
    last = tasks.add("compute", 1.0, {}, second, third)
    times = simulate_tasks(tasks.tasks)
    assert [(task.begin_s, task.end_s) for task in times] == [(0, 2), (2, 5), (2, 3), (5, 6)]
    assert critical_path(tasks.tasks, times, last, 0.0) == {"compute": 3.0, "wire": 3.0}
    assert critical_path(tasks.tasks, times, last, 4.0) == {"compute": 1.0, "wire": 1.0}


def test_tasks_on_one_resource_share_it() -> None:
    tasks = TaskList()
    tasks.add("compute", 2.0, {"cpu": 1.0})
    tasks.add("communication CPU", 1.0, {"cpu": 1.0})
    tasks.add("wire", 1.0, {"port": 1.0})
    times = simulate_tasks(tasks.tasks)
    assert [task.end_s for task in times] == pytest.approx([3.0, 2.0, 1.0])
    assert critical_path(tasks.tasks, times, 0, 0.0) == pytest.approx({"compute": 2.0, "communication CPU": 1.0})


def test_tasks_with_small_loads_do_not_slow_each_other() -> None:
    tasks = TaskList()
    tasks.add("compute", 2.0, {"cpu": 0.5})
    tasks.add("communication CPU", 1.0, {"cpu": 0.5})
    assert [task.end_s for task in simulate_tasks(tasks.tasks)] == [2.0, 1.0]


def test_a_task_that_needs_more_than_the_resource_is_slower() -> None:
    tasks = TaskList()
    tasks.add("wire", 1.0, {"cpu": 4.0})
    assert simulate_tasks(tasks.tasks)[0].end_s == pytest.approx(4.0)


def test_tasks_without_duration() -> None:
    tasks = TaskList()
    first = tasks.add("communication CPU", 0.0, {})
    second = tasks.add("communication CPU", 0.0, {}, first)
    last = tasks.add("compute", 1.0, {}, second)
    times = simulate_tasks(tasks.tasks)
    assert times[last].end_s == 1.0
    assert critical_path(tasks.tasks, times, last, 0.0) == {"compute": 1.0}
