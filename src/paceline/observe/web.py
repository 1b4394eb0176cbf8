"""Serve the figures of a run by HTTP. The server only answers GET requests, which do not affect the run."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from typing_extensions import override

from paceline.closing import Closing
from paceline.errors import AddressError, UsageError

_LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True)
class WebRequest:
    """A request: the fields of its query, and its header Accept."""

    query: Mapping[str, str]
    accept: str


@dataclass(frozen=True)
class Page:
    """An answer."""

    content: bytes
    content_type: str
    status: int = 200


def parse_listen_address(text: str, option: str) -> tuple[str, int]:
    """Return host and port of ``PORT`` or ``HOST:PORT``; the default host is loopback. Raises UsageError."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise UsageError(f"{option} {text}: expected a port from 0 to 65535 (0: a free port), or HOST:PORT")
    return host.strip("[]") or _LOOPBACK, int(port)


class WebServer(Closing):
    """Serves pages by path, in threads, until it is closed."""

    def __init__(self, text: str, option: str) -> None:
        """Bind the address in `text`, such as ``PORT``. Raises UsageError, and AddressError for a port in use."""
        self.routes: dict[str, Callable[[WebRequest], Page]] = {}
        host, port = parse_listen_address(text, option)
        handler = type("_RoutedHandler", (_PageHandler,), {"pages": self.routes})
        server_class = _ServerOverIPv6 if ":" in host else _QuietServer
        try:
            self._server = server_class((host, port), handler)
        except OSError as error:
            reason = error.strerror or str(error)
            raise AddressError(
                f"{option} {text}: cannot listen on {host}:{port}: {reason}. Choose another port, or 0 for a free one"
            ) from None
        if host in ("0.0.0.0", "::"):  # an address for all interfaces, which a browser does not open everywhere
            host = socket.gethostname()
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="paceline-web", daemon=True
        )

    @classmethod
    def start(cls, text: str, option: str) -> WebServer:
        """Bind the address in `text`, and start the thread. Raises the errors of the constructor."""
        server = cls(text, option)
        server._thread.start()
        return server

    @override
    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _QuietServer(ThreadingHTTPServer):
    request_queue_size = 128  # with the default of 5, many clients at once wait for seconds

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing if the browser has closed the connection."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _ServerOverIPv6(_QuietServer):
    address_family = socket.AF_INET6


class _PageHandler(BaseHTTPRequestHandler):
    pages: Mapping[str, Callable[[WebRequest], Page]]
    timeout = 10.0
    """Seconds until a silent connection is closed."""

    def do_GET(self) -> None:
        try:
            url = urlsplit(self.path)
        except ValueError:  # such as "http://[", an address over IPv6 without an end
            self.send_error(400)
            return
        page = self.pages.get(url.path)
        answer = (
            _NOT_FOUND if page is None else page(WebRequest(dict(parse_qsl(url.query)), self.headers["Accept"] or ""))
        )
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(answer.content)

    @override
    def log_message(self, format: str, *values: Any) -> None:
        """Print nothing."""


_NOT_FOUND: Final = Page(b"no such page\n", "text/plain", 404)
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
