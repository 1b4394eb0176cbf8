"""Find the settings and the address of this machine, which is one of several machines of a run."""

from __future__ import annotations

import time
from dataclasses import replace

from paceline.environment import environment
from paceline.errors import AddressError
from paceline.launch.engines.engine import report
from paceline.launch.run.options import RunOptions
from paceline.meeting.rendezvous import own_host

_PAUSE_S = 1.0


def wait_host(master_addr: str, patience_s: float) -> str:
    """Return the address of this machine by which node 0 reaches it. Wait until the name of node 0 resolves."""
    end_s, is_noted = time.monotonic() + patience_s, False
    while True:
        try:
            return own_host(master_addr)
        except AddressError as error:
            if time.monotonic() >= end_s:
                raise
            if not is_noted:
                report(f"{error}; trying again for {patience_s:g} s")
            is_noted = True
            time.sleep(_PAUSE_S)


def with_variables(options: RunOptions) -> RunOptions:
    """Add the node's settings from Kubeflow's environment variables to the options, unless --nnodes differs."""
    variables = environment()
    if options.nnodes not in (None, variables.nnodes):
        return options
    names = ["nproc_per_node"]
    if variables.nnodes is not None:  # otherwise MASTER_ADDR is of an outer launcher
        names += ["nnodes", "node_rank", "master_addr", "master_port"]
    missing = {name: getattr(variables, name) for name in names if getattr(options, name) is None}
    return replace(options, **missing)
