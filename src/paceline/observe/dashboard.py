"""The page with the figures of a run: served while it runs (``--dashboard``), or written at its end (``--report``)."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from typing_extensions import override

from paceline.observe.collector import MetricSink
from paceline.observe.history import RunHistory
from paceline.observe.metrics import Samples
from paceline.observe.web import Page, WebRequest, WebServer
from paceline.output_files import check_output, replacing

_PAGE: Final = Path(__file__).with_name("dashboard.html")
_NO_STATE: Final = "const GIVEN = null;"
_NO_TOKEN: Final = b"Open the address that the command has printed: it contains the token of this page.\n"


def add_dashboard(server: WebServer, history: RunHistory) -> str:
    """Serve the page of a run and its figures (``/state``, in JSON). Return the address with the token."""
    content = _PAGE.read_bytes()
    return add_pages(
        server,
        {
            "/": lambda: Page(content, "text/html; charset=utf-8"),
            "/state": lambda: Page(msgspec.json.encode(history.state()), "application/json"),
        },
    )


def add_pages(server: WebServer, pages: Mapping[str, Callable[[], Page]]) -> str:
    """Serve pages by path. Return the address with the token; requests without it get status 403."""
    token = secrets.token_urlsafe(16)

    def show(request: WebRequest, page: Callable[[], Page]) -> Page:
        is_allowed = hmac.compare_digest(request.query.get("token", "").encode(), token.encode())
        return page() if is_allowed else _refusal()

    server.routes |= {path: partial(show, page=page) for path, page in pages.items()}
    return f"{server.address}/?token={token}"


def _refusal() -> Page:
    return Page(_NO_TOKEN, "text/plain; charset=utf-8", 403)


def make_report(state: dict[str, Any]) -> bytes:
    """Return one page that needs no other file, with the figures of :meth:`RunHistory.state`."""
    page = _PAGE.read_text(encoding="utf-8")
    assert page.count(_NO_STATE) == 1
    # In a script, "<" could begin a tag, which the browser would read as the end of the script.
    figures = msgspec.json.encode(state).decode().replace("<", "\\u003c")
    return page.replace(_NO_STATE, f"const GIVEN = {figures};").encode()


class ReportFile(MetricSink):
    """Writes the report at the end of the run."""

    def __init__(self, path: Path, history: RunHistory) -> None:
        """Raises UsageError if the file cannot be written."""
        self._path, self._history = path, history
        self.option = f"--report {path}"
        check_output("--report", path)

    @override
    def write(self, samples: Samples, *, is_last: bool) -> None:
        if is_last:
            with replacing(self._path) as aside:
                aside.write_bytes(make_report(self._history.state()))
