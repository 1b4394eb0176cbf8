"""An uncaught exception anywhere in a role's process ends the process and prints one line."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
from pathlib import Path

import pytest
from tests.warm.processes import WarmProcess

from paceline.errors import UsageError
from paceline.ps.fail_stop import must_succeed, watch_loop, watch_task

ROLE = """
import asyncio, threading
from functools import partial
from paceline.launch import roles
from paceline.ps.fail_stop import end_process, must_succeed

fail = partial(end_process, "server 3")

def raise_it():
    raise KeyError("a", "b\\nc")

async def task():
    raise_it()

class Machine:
    _fail = staticmethod(fail)
    handle = must_succeed(lambda self: raise_it())

async def serve(stop):
    loop = asyncio.get_running_loop()
    loop.call_later(20, stop.set)
    HOW
    await stop.wait()

roles._run(serve, False, fail)
"""
WAYS = {
    "a callback": "loop.call_soon(raise_it)",
    "a timer": "loop.call_later(0.01, raise_it)",
    "a task": "loop.create_task(task())",
    "a thread": "threading.Thread(target=raise_it).start()",
    "a method": "Machine().handle()",
}


@pytest.mark.parametrize("how", WAYS)
def test_a_role_ends_with_one_line(how: str, tmp_path: Path) -> None:
    script = tmp_path / "role.py"
    script.write_text(ROLE.replace("HOW", WAYS[how]))
    role = WarmProcess([script], env=os.environ, stderr=subprocess.PIPE, text=True)
    _, printed = role.communicate(60)
    assert role.returncode == 1, printed
    (line,) = printed.splitlines()
    assert line.startswith("paceline server 3: KeyError: ('a', 'b\\nc') (")
    assert "this process ends" in line


class Machine:
    def __init__(self) -> None:
        self.failures: list[BaseException] = []

    def _fail(self, error: BaseException) -> None:
        self.failures.append(error)

    @must_succeed
    def handle(self, error: Exception) -> None:
        raise error


@pytest.mark.parametrize("error", [UsageError("no"), MemoryError(), ZeroDivisionError()], ids=repr)
def test_a_fail_stop_method_reports_every_exception(error: Exception) -> None:
    machine = Machine()
    with pytest.raises(type(error)):
        machine.handle(error)
    assert machine.failures == [error]


@pytest.mark.parametrize("by_task", [True, False])
def test_cancelled_tasks_and_broken_connections_are_no_failures(
    by_task: bool, caplog: pytest.LogCaptureFixture
) -> None:
    failures: list[BaseException] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        watch_loop(loop, failures.append)
        if by_task:
            task = loop.create_task(asyncio.sleep(10))
            watch_task(task, failures.append)
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.sleep(0.01)
        else:
            for error in (ConnectionResetError(), MemoryError()):
                loop.call_exception_handler({"message": "closed", "exception": error, "protocol": object()})

    with caplog.at_level(logging.CRITICAL, "asyncio"):
        asyncio.run(main())
    assert failures == []
