"""Run the HTTP server, one process on one port, until a signal arrives."""

from __future__ import annotations

import gc
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from paceline.errors import AddressError, UsageError

_GRACE_S = 5


def serve(
    directory: Path,
    *,
    host: str,
    port: int,
    poll_s: float = 1.0,
    on_ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve a model until SIGINT, SIGTERM or SIGHUP. Then answer the remaining requests and re-raise the signal.

    Port 0 means any free port. `on_ready` receives the address. Raises ModelError if the directory has no model,
    AddressError if the port is not available, and UsageError if the extra is not installed.
    """
    try:
        import prometheus_client  # noqa: F401  (the metrics need it)
        import uvicorn

        from paceline.serving.app import ModelSource, make_app
    except ImportError as error:
        raise UsageError(
            f"paceline serve needs {error.name}, which is not installed: pip install 'paceline[serve]'"
        ) from None
    with _listen(host, port) as listener:
        source = ModelSource(directory)
        # Exclude the loaded objects from garbage collection, so that its runs are short and do not delay requests.
        gc.collect()
        gc.freeze()
        bound = listener.getsockname()
        name = f"[{bound[0]}]" if listener.family == socket.AF_INET6 else bound[0]
        config = uvicorn.Config(
            make_app(source, poll_s), access_log=False, log_level="warning", timeout_graceful_shutdown=_GRACE_S
        )
        on_ready(f"http://{name}:{bound[1]}")
        server = uvicorn.Server(config)
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        ):
            signal.signal(signal.SIGHUP, server.handle_exit)  # uvicorn handles the other signals
        server.run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port < 1 << 16:
        raise AddressError(f"--port {port}: expected 0 to 65535, where 0 chooses a free port")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (")[0]  # the text after " (" repeats the address
        raise AddressError(f"cannot serve on {host}:{port}: {reason}. Choose another --host or --port") from None
