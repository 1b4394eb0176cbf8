"""The fork server's process: import the children's common modules, fork on request, report exit statuses.

A :class:`~paceline.launch.fork_server.ForkServer` runs ``python -m paceline.launch.warm_parent LINE MODULE`` and has
the other end of the socket LINE. This process ends when the socket closes. Its children do not end then, because each
child watches a pipe of its own. A child starts like a new interpreter, with its own session, standard streams,
environment, folder, signal handlers, temporary folder and random numbers.
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
    """A process that forks others."""

    def __init__(self, line: socket.socket, module: Any) -> None:
        self._line = line
        self._module = module
        self._statuses: dict[int, int] = {}  # process id → pipe for the exit status
        self._wakeup, self._woken = socket.socketpair()

    def serve(self) -> dict[str, Any] | None:
        """Fork children until the control socket closes. Return the request in each child, None in this process."""
        self._woken.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._woken.fileno())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])  # the parent may have blocked this signal
        while True:
            ready, _, _ = select.select([self._line, self._wakeup], [], [])
            if self._wakeup in ready:
                self._wakeup.recv(4096)
                self._reap()
            if self._line in ready:
                request = self._receive()
                if request is None:
                    return None
                if self._fork(*request):
                    return request[0]

    def _receive(self) -> tuple[dict[str, Any], list[int]] | None:
        try:
            head, descriptors, _, _ = socket.recv_fds(self._line, 4, 4)
        except ConnectionResetError:  # the parent ended while receiving a reply
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

    def _fork(self, request: dict[str, Any], descriptors: list[int]) -> bool:
        """Fork a process; return True in the child."""
        self._module.prepare()
        reason = reason_not_to_fork()
        if reason is not None:
            self._answer({"refused": reason})
        else:
            gc.freeze()  # the garbage collector then writes no pages of loaded objects, so children can share them
            try:
                pid = os.fork()
            except OSError as error:  # no memory, or too many processes
                self._answer({"refused": f"the system does not fork a process: {error}"})
            else:
                if pid == 0:
                    self._become_child(request, descriptors)
                    return True
                self._statuses[pid] = descriptors.pop()
                self._answer({"pid": pid})
        for descriptor in descriptors:
            os.close(descriptor)
        return False

    def _answer(self, answer: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the requesting process has ended
            self._line.sendall(json.dumps(answer).encode())

    def _reap(self) -> None:
        for pid in list(self._statuses):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                statuses = self._statuses.pop(pid)
                with contextlib.suppress(BrokenPipeError):
                    os.write(statuses, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(statuses)

    def _become_child(self, request: dict[str, Any], descriptors: list[int]) -> None:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for connection in (self._line, self._wakeup, self._woken):
            connection.close()
        for number, stream in enumerate(descriptors[:3]):
            os.dup2(stream, number)
        for descriptor in (*descriptors, *self._statuses.values()):
            if descriptor > 2:
                os.close(descriptor)
        os.environ.clear()
        os.environ.update(request["environment"])
        if request["folder"] is not None:
            with contextlib.suppress(OSError):  # the folder was removed, or permission is missing
                os.chdir(request["folder"])
        tempfile.tempdir = None
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # Python itself seeds only its own generator after a fork
        gc.enable()


def reason_not_to_fork() -> str | None:
    """Return why a fork of this process is unsafe; None if a fork is safe."""
    try:
        num_threads = len(os.listdir("/proc/self/task"))
    except OSError:
        if "torch" in sys.modules:
            return "torch is imported, and its threads do not survive a fork"
        num_threads = threading.active_count()
    return None if num_threads == 1 else f"{num_threads} threads run in the fork server"


def set_title(words: list[str]) -> None:
    """On Linux, let tools like ps show `words` as this process's command line, if they fit into its memory."""
    try:
        with open("/proc/self/stat", "rb") as stat:
            start, end = (int(word) for word in stat.read().rpartition(b")")[2].split()[45:47])
    except (OSError, ValueError):
        return
    title = "\0".join(words).encode(errors="surrogateescape")
    if start > 0 and len(title) < end - start:
        ctypes.memmove(start, title.ljust(end - start - 1) + b"\0", end - start)


def serve(line: socket.socket, module: Any) -> NoReturn:
    """Fork processes as requested on `line`. In a child, run `module` and exit with its status."""
    request = WarmParent(line, module).serve()
    if request is None:
        os._exit(0)  # no cleanup is necessary
    sys.argv = [module.__name__, *request["arguments"]]
    set_title([sys.executable, "-m", *sys.argv])
    status = int(module.main())
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a regular exit would take a tenth of a second to unload modules


def main() -> NoReturn:
    gc.disable()  # all loaded objects are needed until the end, so there is nothing to collect
    module = importlib.import_module(sys.argv[2])
    module.prepare()
    serve(socket.socket(fileno=int(sys.argv[1])), module)


if __name__ == "__main__":
    main()
