"""Run a process of a local cluster: a fork, or ``python -m paceline.launch.child '{"role": "server", …}'``.

The token is in the environment, because every user can read a command line.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
from typing import Any

from paceline.environment import environment
from paceline.errors import AddressError, ConnectionLostError, DeadlineError, PacelineError
from paceline.filters.modules import import_filter_modules
from paceline.observe.stuck.processes import watch
from paceline.ps import messages
from paceline.tables.memory.limit import MemoryLimit
from paceline.transport import TLS, Endpoint, Hello

from .kernels import load_kernels, load_kernels_nowait
from .roles import Joining, run_scheduler, run_server
from .supervisor import read_line, watch_parent

_ANSWER_S = 2.0
_WORKER = "paceline.training.worker.worker"
"""Imported by name, because the training package imports this package to start processes."""


def prepare() -> None:
    """Load everything that all roles need, before this process forks them."""
    importlib.import_module(_WORKER)
    load_kernels_nowait()


def main() -> int:
    options: dict[str, Any] = json.loads(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal signals all processes; the parent handles it
        signal.signal(number, signal.SIG_IGN)
    token = environment().token
    assert token is not None
    rank, folder = options.get("rank"), environment().job_dir
    name = options["role"] if rank is None else f"{options['role']} {rank}"
    if folder is not None:
        watch(name, folder)
    tls = TLS(**options["tls"]) if options.get("tls") else None
    try:
        if options["role"] == "scheduler":
            _run_scheduler(options, token, tls)
        else:
            _run_member(options, token, tls)
    except ConnectionLostError:
        return 1  # the parent reports the lost process once for all its children
    except PacelineError as error:
        print(f"paceline {name}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def _run_scheduler(options: dict[str, Any], token: str, tls: TLS | None) -> None:
    was_ready = False

    def announce(endpoint: Endpoint) -> None:
        nonlocal was_ready
        was_ready = True
        try:
            print(endpoint.tcp, flush=True)  # TCP, because a replacement cannot bind a Unix socket's name again
        except BrokenPipeError:  # the parent has ended, so this process will end too
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    try:
        run_scheduler(
            messages.ClusterSettings(**options["settings"]),
            token=token,
            address=options["address"],
            tls=tls,
            on_ready=announce,
            on_note=lambda text: print(f"paceline scheduler: {text}", file=sys.stderr, flush=True),
            with_parent=True,
            replaces=options["replaces"],
        )
    finally:
        # After a failed start the folder stays, because the parent may start another scheduler. The parent removes it.
        if was_ready:
            shutil.rmtree(options["scratch"], ignore_errors=True)


def _run_member(options: dict[str, Any], token: str, tls: TLS | None) -> None:
    load_kernels()  # load before joining, so that no request waits for the kernels
    import_filter_modules(options.get("filter_modules", ()), options.get("path", ()))
    scheduler = read_line()
    if not scheduler:
        return  # the parent has ended
    joining = Joining(scheduler=scheduler, token=token, tls=tls)
    if options["role"] == "server":
        try:
            run_server(
                joining,
                address=options["address"],
                rank=options["rank"],
                extra=options.get("extra", False),
                with_parent=True,
                node=options["node"],
                memory_limit=MemoryLimit(**options["memory_limit"]) if options.get("memory_limit") else None,
            )
        except (AddressError, DeadlineError) as error:
            # This server should replace a dead server, but the cluster may have ended in the meantime.
            if options.get("extra") and not _answers(joining):
                raise ConnectionLostError("the scheduler has ended") from error
            raise
        finally:
            if "scratch" in options:  # if the parent was killed, the last server removes the folder
                _remove_if_empty(options["scratch"])
    else:
        importlib.import_module(_WORKER).run_worker(
            joining.transport(), joining.scheduler, rank=options["rank"], watch=watch_parent
        )


def _answers(joining: Joining) -> bool:
    try:
        joining.transport().connect(
            joining.scheduler, Hello(role="observer", to="scheduler"), timeout_s=_ANSWER_S
        ).close()
    except PacelineError:
        return False
    return True


def _remove_if_empty(folder: str) -> None:
    try:
        os.rmdir(folder)
    except OSError:
        pass  # another server still uses the folder


if __name__ == "__main__":
    sys.exit(main())
