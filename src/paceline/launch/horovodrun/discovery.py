"""Run the host discovery script of an elastic training once a second."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Collection
from typing import Final

from typing_extensions import override

from paceline.closing import Closing
from paceline.errors import UsageError, printable
from paceline.launch.engines.engine import report

_POLL_S: Final = 1.0
_SCRIPT_S: Final = 60.0
"""Time limit of the script."""
_SHOWN_CHARS: Final = 300
_MOST_DIGITS: Final = 6
"""The maximum number of digits of a number of slots."""


class HostDiscovery(Closing):
    """The current number of slots on this machine. After :meth:`wait`, a thread updates it until :meth:`close`."""

    def __init__(self, script: str, slots_per_host: int | None, own_names: Collection[str]) -> None:
        """`script` is a shell command. `own_names` are the names of this machine."""
        self._script, self._slots_per_host, self._own_names = script, slots_per_host, own_names
        self._name = f"--host-discovery-script {script}"
        self.num_slots = 0
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="paceline-host-discovery", daemon=True)

    def wait(self, num_slots: int, timeout_s: float) -> int:
        """Wait until the script prints enough slots; return their number.

        Raises UsageError if the script fails, if it prints another host, or after the timeout.
        """
        deadline_s = time.monotonic() + timeout_s
        while (found := self._discover()) < num_slots:
            if time.monotonic() >= deadline_s:
                raise UsageError(
                    f"{self._name} has printed {found} slots for {timeout_s:g} s, and --num-proc is {num_slots}. Pass "
                    "a lower --num-proc or a longer --elastic-timeout"
                )
            time.sleep(_POLL_S)
        self.num_slots = found
        self._thread.start()
        return found

    def _poll(self) -> None:
        problem = ""
        while not self._is_closing.wait(_POLL_S):
            try:
                self.num_slots = self._discover()
            except UsageError as error:
                if str(error) != problem and not self._is_closing.is_set():
                    problem = str(error)
                    report(f"{problem}. The number of ranks stays {self.num_slots}")

    def _discover(self) -> int:
        """Run the script; return the number of slots."""
        num_slots = 0
        for line in filter(None, map(str.strip, self._run_script().splitlines())):
            host, _, slots = line.rpartition(":") if ":" in line else (line, "", str(self._slots_per_host))
            shown = printable(line, _SHOWN_CHARS)
            if not slots.isdecimal() or len(slots) > _MOST_DIGITS:
                raise UsageError(f"{self._name} has printed '{shown}', expected a line such as localhost:4")
            if host not in self._own_names:
                raise UsageError(
                    f"{self._name} has printed '{shown}', but ranks on other hosts cannot be added to a running "
                    "training. Print localhost, or pass --hosts and --min-num-proc instead of the script"
                )
            num_slots += int(slots)
        return num_slots

    def _run_script(self) -> str:
        """Return the output of the script. If it has not ended in time, or at :meth:`close`, kill its processes."""
        pipe, deadline_s = subprocess.PIPE, time.monotonic() + _SCRIPT_S
        with subprocess.Popen(
            self._script, shell=True, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True
        ) as process:
            try:
                while True:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        output, errors = process.communicate(timeout=_POLL_S)
                        break
                    if self._is_closing.is_set() or time.monotonic() >= deadline_s:
                        raise UsageError(f"{self._name} has not ended within {_SCRIPT_S:g} s")
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        if process.returncode:
            text = printable(errors.strip().rpartition("\n")[2], _SHOWN_CHARS) or "it printed no error"
            raise UsageError(f"{self._name} has ended with status {process.returncode}: {text}")
        return output

    @override
    def close(self) -> None:
        self._is_closing.set()
        if self._thread.ident is not None:
            self._thread.join()
