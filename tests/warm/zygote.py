"""A process that loads modules once, and forks a warm parent for each connection.

``python -m tests.warm.zygote KIND SOCKET``, KIND being one of `MODULES`. It ends with its standard input.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from paceline.launch.warm_parent import serve

_COMMANDS = [
    *("paceline.cli.train", "paceline.training.driver", "paceline.training.predict", "paceline.collectives"),
    *("paceline.launch.run.on_engine", "paceline.launch.run.servers", "paceline.collectives.elastic", "encodings.idna"),
]
COMPILER = ("torch._dynamo.backends.common", "torch._dynamo.testing", "torch._inductor.debug")
"""The modules that PyTorch imports at the first export or compilation, which takes seconds."""
MODULES = {
    "plain": _COMMANDS,
    "torch": [
        *("torch._dynamo", "tests.conformance.conformance", "paceline.models.deep.networks", *_COMMANDS),
        *("paceline.torch.strategies.pipeline.strategy", "paceline.torch.strategies.sharded.strategy"),
        *("paceline.torch.strategies.hybrid", "paceline.torch.strategies.elastic.strategy"),
        *("paceline.torch.strategies.server.parameter_server", "paceline.torch.partitioning.partitioned"),
        *("torch.distributed.pipelining._schedule_visualizer", "sklearn.datasets", *COMPILER),
    ],
    "workers": [],
}
_COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1
_HUGE_PAGE_BYTES = 2 << 20


def main(kind: str, path: str) -> None:
    """Serve connections. The first word on each connection is the name of the module to run."""
    gc.disable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for the status of a warm parent
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:
                os._exit(0)
            line, _ = listener.accept()
            module = importlib.import_module(_read_word(line))
            for name in MODULES[kind]:
                importlib.import_module(name)
            _prepare(module)
            with contextlib.suppress(BrokenPipeError):  # pytest's first process has closed the connection
                line.sendall(b"\n")
            if os.fork() == 0:
                listener.close()
                os.dup2(os.open(os.devnull, os.O_RDWR), 0)
                serve(line, module)
            line.close()


@functools.cache
def _prepare(module: Any) -> None:
    """Load what the module needs. A fork from huge pages is three times as fast, because it copies few page tables."""
    module.prepare()
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, _, *name = line.split()
        if access == "rw-p" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            for page in range(-(-start // _HUGE_PAGE_BYTES), end // _HUGE_PAGE_BYTES):
                libc.madvise(page * _HUGE_PAGE_BYTES, _HUGE_PAGE_BYTES, _COLLAPSE)  # older systems refuse


def _read_word(line: socket.socket) -> str:
    word = b""
    while not word.endswith(b"\n"):
        word += line.recv(1)
    return word.decode().strip()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
