"""The forked programs: ``python [-W error] [-X faulthandler] SCRIPT …`` or ``python -m MODULE …``."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import importlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from paceline.cli import load_commands
from paceline.launch import supervisor
from paceline.launch.child import prepare as prepare_roles
from paceline.launch.fork_server import CHILD, ForkServer, module_command
from paceline.launch.run import processes as run_processes
from paceline.launch.warm_parent import reason_not_to_fork, serve, set_title
from paceline.tables.compile import compile_kernels

from .processes import RANKS, WarmProcess

MARK = "PACELINE_TEST_SESSION"
_start_afresh = ForkServer.start
_spawn = supervisor.spawn


@functools.cache
def prepare() -> None:
    """Load all kernels, the imports of every role, and the parameters of every command."""
    prepare_roles()
    compile_kernels()
    _load_parameters(load_commands())
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch's remove its operators, which copies 9,000 pages of memory


def _load_parameters(command: Any) -> None:
    for parameter in command.params:
        parameter.get_runtime_param()
    for subcommand in getattr(command, "commands", {}).values():
        _load_parameters(subcommand)


def main() -> NoReturn:
    """Run the program that the arguments describe."""
    words = sys.argv[1:]
    set_title([sys.executable, *words])
    _show_mark()
    sys.path[:] = [name for name in sys.path if name and Path(name) != Path(__file__).parents[2]]
    sys.path[:0] = [name for name in os.environ.get("PYTHONPATH", "").split(os.pathsep) if name not in ["", *sys.path]]
    ForkServer.start = _fork_fork_server  # type: ignore[method-assign]
    while words[0] in ("--within", "-W", "-X", "-u"):
        match words:
            case ["--within", namespace, *words]:
                _enter(namespace)
            case ["-W", what, *words]:
                warnings.simplefilter(what)  # type: ignore[arg-type]
            case ["-X", "faulthandler", *words]:
                faulthandler.enable()
            case ["-u", *words]:
                for stream in (sys.stdout, sys.stderr):
                    stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    if RANKS in os.environ:
        vars(run_processes)["spawn"] = _fork_rank
        vars(supervisor)["spawn"] = spawn_or_fork  # for programs that import it later
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as error:
        if not isinstance(error.code, int | None):
            raise
        end(error.code or 0)
    end(0)


def end(status: int) -> NoReturn:
    """End like an interpreter, but without the removal of modules, which would copy all modules in half a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    os._exit(status)


def _enter(namespace: str) -> None:
    """Enter another network or mount namespace."""
    folder, libc = os.getcwd(), ctypes.CDLL(None, use_errno=True)
    with open(namespace, "rb") as namespace_file:
        if libc.setns(namespace_file.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.chdir(folder)


def _fork_rank(command: list[str], **options: Any) -> WarmProcess:
    return WarmProcess(command[1:], kind=os.environ[RANKS], **options)


def spawn_or_fork(command: Sequence[str], **options: Any) -> WarmProcess | subprocess.Popen[bytes]:
    """Fork modules, such as the ``paceline run`` of a host, and spawn other programs."""
    runs_module = module_command("")[:-1]
    if [*command[: len(runs_module)]] == runs_module:
        command = [sys.executable, "-m", *command[len(runs_module) :]]
    if [*command[:2]] == [sys.executable, "-m"]:
        streams = {name: value.fileno() for name, value in options.items() if hasattr(value, "fileno")}
        return WarmProcess(command[1:], **{**options, **streams})
    return _spawn(command, **options)


def _show_mark() -> None:
    """Show the mark of this session like a process that was started with the mark."""
    mark = os.environ.get(MARK)
    with contextlib.suppress(OSError), open("/proc/self/stat", "rb") as stat:
        start, end = (int(word) for word in stat.read().rpartition(b")")[2].split()[47:49])
        ctypes.memmove(start, (f"{MARK}={mark}" if mark else "").encode().ljust(end - start, b"\0"), end - start)


class _Fork:
    """A child of this process."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def kill(self) -> None:
        """Kill the child."""
        os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> int:
        """Wait for the end of the child; return its status."""
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def _fork_fork_server(module: str = CHILD) -> ForkServer:
    """Fork a fork server from this process, which has already loaded the modules of a fork server."""
    if reason_not_to_fork() is not None:
        return _start_afresh(module)
    own_end, peer_end = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid != 0:
        peer_end.close()
        return ForkServer(own_end, _Fork(pid))
    status = 1
    try:
        _serve(own_end, peer_end, importlib.import_module(module))
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def _serve(own_end: socket.socket, peer_end: socket.socket, module: Any) -> None:
    """Run a fork server, or a child of a fork server."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    own_end.close()
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    assert threading.active_count() == 1
    serve(peer_end, module)
