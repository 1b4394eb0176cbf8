"""Run a command of ``horovodrun``."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shlex
import sys
from typing import Final

from paceline.command_options import words_of
from paceline.environment import environment
from paceline.launch.engines.engine import report
from paceline.launch.horovodrun.discovery import HostDiscovery
from paceline.launch.horovodrun.options import HorovodrunOptions
from paceline.launch.horovodrun.translation import LOOPBACK, translate
from paceline.launch.run.on_engine import run_on_engine
from paceline.launch.run.run import run_script
from paceline.version import __version__

_PARTS: Final = {
    "Frameworks": ("TensorFlow", "PyTorch", "MXNet"),
    "Controllers": ("MPI", "Gloo"),
    "Tensor Operations": ("NCCL", "DDL", "CCL", "MPI", "Gloo"),
}


def run_horovod(options: HorovodrunOptions) -> int:
    """Run a program on the ranks; return its status. Raises UsageError, as ``paceline run`` does."""
    if options.version:
        print(__version__)
        return 0
    if options.check_build:
        print(describe_build())
        return 0
    script, most = options.host_discovery_script, options.max_num_proc or sys.maxsize
    with contextlib.ExitStack() as stack:
        discovery = num_slots = None
        if script is not None and options.num_proc is not None:
            timeout_s = options.elastic_timeout or environment().horovod_elastic_timeout_s
            discovery = stack.enter_context(HostDiscovery(script, options.slots, (*LOOPBACK, platform.node())))
            num_slots = min(discovery.wait(options.num_proc, timeout_s), most)
        translation = translate(options, platform.node(), num_slots)
        for note in translation.notes:
            report(note)
        os.environ.update(translation.variables)
        run = translation.run
        if options.verbose:
            report(f"the command is paceline run {shlex.join([*words_of(run), *(options.command or ())])}")
        if run.engine.hosts is not None:
            return run_on_engine(run)
        return run_script(run, None if discovery is None else lambda: min(discovery.num_slots, most))


def describe_build() -> str:
    """Return the text of ``--check-build``: the parts of Horovod with a mark if they are available."""
    available = {"Gloo"} | ({"PyTorch"} if importlib.util.find_spec("torch") else set())
    text = f"Paceline v{__version__}, with Horovod's API:\n"
    for title, names in _PARTS.items():
        lines = [f"    [{'X' if name in available else ' '}] {name}\n" for name in names]
        text += f"\nAvailable {title}:\n{''.join(lines)}"
    return text
