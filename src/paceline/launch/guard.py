"""Ends foreign programs, and what they have started, if their parent is killed: a process that waits for just that.

Run as a file, ``python -I -S guard.py``: it imports nothing of ours and takes 15 ms to start. On standard input it
reads ``+GROUP`` and ``-GROUP``, process groups that began and ended, and ``end`` when the parent needs it no more. An
end without that word is the parent's. Portable, and reaches grandchildren, unlike Linux's PR_SET_PDEATHSIG.
"""

import os
import signal
import sys
import time

_GRACE_S = 1.0


def main() -> None:
    """Follow standard input to its end."""
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
