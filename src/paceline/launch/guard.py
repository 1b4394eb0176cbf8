"""End foreign programs and their children if the parent is killed: a process that waits for that.

Run it as a file, ``python -I -S guard.py``: it imports only the standard library and starts in 15 ms. It reads lines
from standard input: ``+GROUP`` and ``-GROUP`` for process groups that started and ended, and ``end`` when the parent
ends regularly. Without ``end``, the end of the input means that the parent was killed. This works on every system and
for grandchildren, unlike Linux's PR_SET_PDEATHSIG.
"""

import os
import signal
import sys
import time

_GRACE_S = 1.0


def main() -> None:
    """Read standard input to its end, then end the groups unless the parent ended regularly."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        word = line.strip()
        if word == "end":
            return
        groups.add(int(word[1:])) if word[0] == "+" else groups.discard(int(word[1:]))
    deadline = time.monotonic() + _GRACE_S
    groups = {group for group in groups if _send(group, signal.SIGTERM)}
    while groups and time.monotonic() < deadline:
        time.sleep(0.02)
        groups = {group for group in groups if _send(group, 0)}
    for group in groups:
        _send(group, signal.SIGKILL)


def _send(group: int, number: int) -> bool:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    main()
