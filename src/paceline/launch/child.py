"""What a process that a local cluster starts runs: ``python -m paceline.launch.child '{"role": "server", …}'``.

The token comes by the environment, never on the command line, where everybody could read it.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

from ..environment import environment
from ..errors import PacelineError
from ..protocol import parse_consistency, parse_stale_policy
from ..transport import TLS, Endpoint
from .roles import Joining, run_scheduler, run_server, watch_parent


def main() -> int:
    """Run the role that the first argument describes; return the exit status."""
    options: dict[str, Any] = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    token = environment().token
    assert token is not None
    tls = TLS(**options["tls"]) if options.get("tls") else None
    try:
        if options["role"] == "scheduler":
            run_scheduler(
                token=token,
                address=options["address"],
                tls=tls,
                num_servers=options["num_servers"],
                num_workers=options["num_workers"],
                consistency=parse_consistency(options["consistency"]),
                stale=parse_stale_policy(options["stale"]),
                heartbeat_timeout_s=options["heartbeat_timeout_s"],
                on_ready=_announce,
                with_parent=True,
            )
            return 0
        from ..kernels.compile import compile_kernels

        compile_kernels()  # from the cache, so that no request waits for it
        joining = Joining(scheduler=options["scheduler"], token=token, tls=tls)
        if options["role"] == "server":
            run_server(joining, rank=options["rank"], with_parent=True)
        else:
            from ..models.worker import run_worker

            run_worker(joining.transport(), joining.scheduler, rank=options["rank"], watch=watch_parent)
    except PacelineError as error:
        who = f"{options['role']} {options.get('rank', '')}".strip()
        print(f"paceline {who}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def _announce(endpoint: Endpoint) -> None:
    print(endpoint.best(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
