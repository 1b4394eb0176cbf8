"""The process that the tests of the fork server fork: it prints its state and executes its arguments."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import threading


def prepare() -> None:
    """Load modules for the children, and start a thread if the test needs one."""
    if os.environ.get("ECHOING_THREAD"):
        threading.Thread(target=threading.Event().wait, daemon=True).start()


def main() -> int:
    """Execute the argument."""
    match sys.argv[1]:
        case "describe":
            found = {
                "pid": os.getpid(),
                "group": os.getpgid(0),
                "session": os.getsid(0),
                "folder": os.getcwd(),
                "given": os.environ.get("GIVEN"),
                "temporary": tempfile.gettempdir(),
                "random": random.random(),
                "child handler": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
                "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1]
                if os.path.isdir("/proc/self/fd")
                else [],
            }
            print(json.dumps(found), flush=True)
            print("to standard error", file=sys.stderr, flush=True)
        case "raise":
            raise ValueError("an error of the child")
        case "wait":
            print("waits", flush=True)
            sys.stdin.buffer.read()
        case "sleep":
            print("sleeps", flush=True)
            signal.pause()
    return 7
