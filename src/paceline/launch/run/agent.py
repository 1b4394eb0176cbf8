"""Let ``paceline stacks`` and the launcher of node 0 reach the launchers of all nodes of a run."""

from __future__ import annotations

import contextlib
from pathlib import Path

from paceline.errors import AddressError
from paceline.launch.engines.engine import report
from paceline.launch.job_agent import JobAddress, JobAgent
from paceline.launch.run.plan import Layout
from paceline.launch.run.setup import Setup, coordinator_address
from paceline.meeting.network_store import StoreServer
from paceline.observe.collector import Collector
from paceline.strategies import ElasticOptions
from paceline.transport import Address, Hello


def start_agent(
    stack: contextlib.ExitStack,
    setup: Setup,
    layout: Layout,
    folder: Path,
    scheduler: str | None,
    collector: Collector | None,
) -> None:
    """Start the agent of the job in `folder`, which `stack` closes.

    The agents meet at the scheduler or the coordinator. Without both, node 0 serves their store at the port after the
    master port.
    """
    if scheduler is not None:
        address = Address.parse(scheduler)
    elif isinstance(setup.choice.options, ElasticOptions):
        address = coordinator_address(layout)
    else:
        address = coordinator_address(layout, offset=1)
        if 0 in layout.ranks:
            try:
                server = StoreServer(address, setup.token, Hello(role="launcher", name="node 0"), setup.tls)
            except AddressError as error:
                report(f"the stacks and metrics of other nodes are missing: {error}")
                return
            stack.callback(server.close)
    job = JobAddress(address, setup.token, setup.tls)
    stack.enter_context(JobAgent(job, folder, collector=collector, collects_all=0 in layout.ranks))
