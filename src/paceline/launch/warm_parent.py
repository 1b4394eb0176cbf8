"""The fork server's process: it loads what children need, forks them when asked, and tells how they end.

``python -m paceline.launch.warm_parent LINE MODULE``: at the other end of the socket LINE is a
:class:`~paceline.launch.fork_server.ForkServer`. When that is gone, so is this process; what it has forked has parents'
ends of its own. A child begins as a new interpreter would: with its own session, standard streams, environment, folder,
signal handlers, temporary folder and random numbers.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
from typing import Any, NoReturn


class WarmParent:
    """One process that forks others."""

    def __init__(self, line: socket.socket, module: Any) -> None:
        self._line = line
        self._module = module
        self._statuses: dict[int, int] = {}  # by process: the pipe that its status is to be written to
        self._wakeup, self._woken = socket.socketpair()

    def serve(self) -> dict[str, Any] | None:
        """Fork processes until whoever asks for them is gone. Returns what was asked for in each of them."""
        self._woken.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._woken.fileno())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])  # whoever has started it may have blocked it
        while True:
            ready, _, _ = select.select([self._line, self._wakeup], [], [])
            if self._wakeup in ready:
                self._wakeup.recv(4096)
                self._reap()
            if self._line in ready:
                asked = self._hear()
                if asked is None:
                    return None
                if self._fork(*asked):
                    return asked[0]

    def _hear(self) -> tuple[dict[str, Any], list[int]] | None:
        try:
            head, descriptors, _, _ = socket.recv_fds(self._line, 4, 4)
        except ConnectionResetError:  # it ended in the middle of an answer
            return None
        if len(head) < 4:
            return None
        (left,) = struct.unpack("<I", head)
        text = b""
        while len(text) < left:
            more = self._line.recv(left - len(text))
            if not more:
                return None
            text += more
        return json.loads(text), descriptors

    def _fork(self, asked: dict[str, Any], descriptors: list[int]) -> bool:
        """Fork a process; return whether this is it."""
        self._module.prepare()
        reason = reason_not_to_fork()
        if reason is not None:
            self._answer({"refused": reason})
        else:
            gc.freeze()  # what is never looked at is never copied
            try:
                pid = os.fork()
            except OSError as error:  # no memory, or too many processes
                self._answer({"refused": f"the system does not fork a process: {error}"})
            else:
                if pid == 0:
                    self._become_child(asked, descriptors)
                    return True
                self._statuses[pid] = descriptors.pop()
                self._answer({"pid": pid})
        for descriptor in descriptors:
            os.close(descriptor)
        return False

    def _answer(self, answer: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # whoever asked is gone
            self._line.sendall(json.dumps(answer).encode())

    def _reap(self) -> None:
        for pid in list(self._statuses):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                statuses = self._statuses.pop(pid)
                with contextlib.suppress(BrokenPipeError):
                    os.write(statuses, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(statuses)

    def _become_child(self, asked: dict[str, Any], descriptors: list[int]) -> None:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for here in (self._line, self._wakeup, self._woken):
            here.close()
        for number, stream in enumerate(descriptors[:3]):
            os.dup2(stream, number)
        for descriptor in (*descriptors, *self._statuses.values()):
            if descriptor > 2:
                os.close(descriptor)
        os.environ.clear()
        os.environ.update(asked["environment"])
        if asked["folder"] is not None:
            with contextlib.suppress(OSError):  # it was removed, or is not to be entered
                os.chdir(asked["folder"])
        tempfile.tempdir = None
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # Python's own do so by themselves
        gc.enable()


def reason_not_to_fork() -> str | None:
    """Return why this process had better not be forked, if there is a reason."""
    try:
        num_threads = len(os.listdir("/proc/self/task"))
    except OSError:
        if "torch" in sys.modules:
            return "torch is imported, whose threads do not live through a fork"
        num_threads = threading.active_count()
    return None if num_threads == 1 else f"{num_threads} threads run in the fork server"


def set_title(words: list[str]) -> None:
    """Have the system show these words as this process's command, where it is Linux and there is room."""
    try:
        with open("/proc/self/stat", "rb") as stat:
            start, end = (int(word) for word in stat.read().rpartition(b")")[2].split()[45:47])
    except (OSError, ValueError):
        return
    title = "\0".join(words).encode(errors="surrogateescape")
    if start > 0 and len(title) < end - start:
        ctypes.memmove(start, title.ljust(end - start - 1) + b"\0", end - start)


def serve(line: socket.socket, module: Any) -> NoReturn:
    """Fork processes that run `module`, as asked for at the other end of `line`; be them, and end with their status."""
    asked = WarmParent(line, module).serve()
    if asked is None:
        os._exit(0)  # at once: there is nothing to be tidied up
    sys.argv = [module.__name__, *asked["arguments"]]
    set_title([sys.executable, "-m", *sys.argv])
    status = int(module.main())
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # to take all modules down would be a tenth of a second for nothing


def main() -> NoReturn:
    """Load what the module's processes need, and serve."""
    gc.disable()  # nothing of what is loaded here is garbage
    module = importlib.import_module(sys.argv[2])
    module.prepare()
    serve(socket.socket(fileno=int(sys.argv[1])), module)


if __name__ == "__main__":
    main()
