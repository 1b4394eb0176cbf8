"""Check the behaviour of an engine, which runs small programs on one or two nodes.

:func:`check_engine` runs all checks, each with new engines; ``ENGINE_CHECKS`` contains them by name, for one test each.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.launch.engines.engine import RunEnd, RunEngine, RunRole

_QUIET_S: Final = 1.0
_NUM_LINES: Final = 3000
_HEAD: Final = """
import os, secrets, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])

def live():
    while True:
        with (folder / "alive").open("a") as file:
            file.write(".")
        time.sleep(0.05)
"""
_LIVE: Final = "live()"
_STUBBORN: Final = "signal.signal(signal.SIGTERM, signal.SIG_IGN); (folder / 'ready').touch(); live()"


@dataclass(frozen=True, slots=True)
class EngineSetting:
    """The engine of a check, and the check's folder, which this machine shares with the nodes."""

    make: Callable[[], RunEngine]
    folder: Path
    timeout_s: float

    def role(self, program: str, *, name: str = "ranks", num_nodes: int = 1) -> RunRole:
        """Return a role that runs a program in Python."""
        file = self.folder / f"{name}.py"
        file.write_text(_HEAD + program)
        command = (sys.executable, "-u", str(file), str(self.folder))
        return RunRole(name=name, command=command, num_nodes=num_nodes, num_cpus=1, files=(str(file),))

    def run(self, *roles: RunRole) -> tuple[RunEnd, str]:
        """Run roles until the run ends. Return its end and its output."""
        with _capture_output() as output:
            with self.make() as engine:
                engine.start(roles)
                end = self.wait_end(engine)
            return end, output.getvalue().decode()

    def wait_end(self, engine: RunEngine) -> RunEnd:
        """Poll an engine until its run ends."""
        deadline = time.monotonic() + self.timeout_s
        while (end := engine.poll()) is None:
            assert time.monotonic() < deadline, f"the run did not end within {self.timeout_s:g} s"
        return end

    def wait_alive(self, engine: RunEngine) -> None:
        """Poll an engine until a program is running."""
        deadline = time.monotonic() + self.timeout_s
        while not (self.folder / "alive").exists():
            assert engine.poll() is None, "the run ended too early"
            assert time.monotonic() < deadline, f"the program did not start within {self.timeout_s:g} s"

    def check_dead(self) -> None:
        """Check that no program is running."""
        size = (self.folder / "alive").stat().st_size
        time.sleep(_QUIET_S)
        assert (self.folder / "alive").stat().st_size == size, "a program still runs after the end of the run"


def check_description(setting: EngineSetting) -> None:
    """The description contains the commands of all roles, and starts nothing."""
    roles = [setting.role(_LIVE, name="servers"), setting.role(_LIVE, num_nodes=2)]
    with setting.make() as engine:
        text = engine.describe(roles)
        end, _ = setting.run(setting.role("", name="empty"))  # this run gives a wrongly started program time to appear
        assert end == RunEnd(0, None), end
    for role in roles:
        assert all(word in text for word in role.command), text
    assert not (setting.folder / "alive").exists(), "the description has started a program"


def check_output(setting: EngineSetting) -> None:
    """All lines of all processes are printed before the end, and the lines of a process are in order."""
    program = f"""
name = secrets.token_hex(8)
for number in range({_NUM_LINES}):
    print(f"<{{name}} {{number}}>")
print("end", end="")
"""
    end, output = setting.run(setting.role(program, num_nodes=2))
    assert end == RunEnd(0, None), end
    numbers: dict[str, list[int]] = {}
    for name, number in re.findall(r"<(\w+) (\d+)>$", output, re.MULTILINE):
        numbers.setdefault(name, []).append(int(number))
    assert [*numbers.values()] == [[*range(_NUM_LINES)]] * 2, {name: len(found) for name, found in numbers.items()}
    assert output.count("end") == 2, output[-100:]


def check_status(setting: EngineSetting) -> None:
    """The run has the status of a failed process, or 128 plus the number of the signal that killed it."""
    for program, status in (("sys.exit(3)", 3), ("sys.exit(-1)", 255), ("os.kill(os.getpid(), signal.SIGKILL)", 137)):
        end, _ = setting.run(setting.role(program))
        assert end.status == status, end
    missing = RunRole(name="ranks", command=(str(setting.folder / "missing"),), num_nodes=1, num_cpus=1)
    end, _ = setting.run(missing)
    assert 0 < end.status < 256, end


def check_roles(setting: EngineSetting) -> None:
    """Roles run at the same time, and the run ends with its last role."""
    waiting = "(folder / {!r}).touch()\nwhile not (folder / {!r}).exists():\n    time.sleep(0.05)\n"
    servers = setting.role(waiting.format("servers", "ranks") + _LIVE, name="servers")
    end, _ = setting.run(servers, setting.role(waiting.format("ranks", "alive")))
    assert end == RunEnd(0, None), end
    setting.check_dead()


def check_failed_role(setting: EngineSetting) -> None:
    """A role that fails ends the run."""
    failing = "while not (folder / 'alive').exists():\n    time.sleep(0.05)\nsys.exit({})"
    for servers, ranks, status in ((failing.format(4), _LIVE, 4), (_LIVE, failing.format(5), 5)):
        (setting.folder / "alive").unlink(missing_ok=True)
        end, _ = setting.run(setting.role(servers, name="servers"), setting.role(ranks))
        assert end.status == status, end
        setting.check_dead()


def check_stubborn(setting: EngineSetting) -> None:
    """A program that ignores SIGTERM ends with the run."""
    failing = "while not (folder / 'ready').exists():\n    time.sleep(0.05)\nsys.exit(5)"
    end, _ = setting.run(setting.role(_STUBBORN, name="servers"), setting.role(failing))
    assert end.status == 5, end
    setting.check_dead()


def check_closing(setting: EngineSetting) -> None:
    """Closing an engine cancels its run, and is possible at any time."""
    engine = setting.make()
    engine.close()
    engine = setting.make()
    engine.start([setting.role(_LIVE, num_nodes=2)])
    setting.wait_alive(engine)
    engine.close()
    setting.check_dead()
    engine.close()


ENGINE_CHECKS: Final[Mapping[str, Callable[[EngineSetting], None]]] = {
    check.__name__: check
    for check in (
        check_description,
        check_output,
        check_status,
        check_roles,
        check_failed_role,
        check_stubborn,
        check_closing,
    )
}
"""The checks by name."""


def check_engine(
    make: Callable[[], RunEngine], folder: Path, *, only: str | None = None, timeout_s: float = 120.0
) -> None:
    """Check that an engine behaves as `paceline.launch.engines.engine` documents; raise AssertionError otherwise.

    ``make`` returns a new engine with at least two nodes, which share the empty ``folder`` with this machine. ``only``
    selects one check of ``ENGINE_CHECKS``, and another name is a KeyError. A run may take ``timeout_s``.
    """
    for name in ENGINE_CHECKS if only is None else [only]:
        check = ENGINE_CHECKS[name]
        (folder / name).mkdir()
        check(EngineSetting(make, folder / name, timeout_s))


@contextlib.contextmanager
def _capture_output() -> Iterator[io.BytesIO]:
    output = io.BytesIO()
    with io.TextIOWrapper(output) as text, contextlib.redirect_stdout(text):
        yield output
