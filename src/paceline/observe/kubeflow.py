"""Send the progress of a training to Kubeflow Trainer, which shows it in the status of the TrainJob."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from http.client import HTTPException
from typing import Any, Final
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from typing_extensions import override

from paceline.closing import Closing
from paceline.environment import Environment
from paceline.errors import printable

_EVERY_S: Final = 10.0
_TIMEOUT_S: Final = 5.0
_MOST_SECONDS: Final = 2**31 - 1
_SHOWN_CHARS: Final = 400


class KubeflowStatus(Closing):
    """Sends the newest progress in a thread, every ten seconds and at the end. Thread-safe.

    Nothing is sent outside of a TrainJob. After a failed request the training continues: `warn` receives the first
    failure, and the next request contains the newest progress.
    """

    def __init__(self, settings: Environment, warn: Callable[[str], None]) -> None:
        self._url, self._token, self._ca = settings.status_url, settings.status_token, settings.status_ca
        self._warn = warn
        self._lock = threading.Lock()
        self._first: tuple[float, float] | None = None
        """The time and the finished fraction of the first update."""
        self._last = (0.0, 0.0)
        self._metrics: dict[str, str] = {}
        self._is_new = self._has_failed = False
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def update(self, done: float | None = None, metrics: Mapping[str, Any] | None = None) -> None:
        """Set the finished fraction `done` (from 0 to 1), and numbers or texts by name. Other values do not change.

        Frequent calls are allowed, because a call takes little time.
        """
        if self._url is None:
            return
        with self._lock:
            if done is not None:
                self._last = (time.monotonic(), min(max(done, 0.0), 1.0))
                if self._first is None or self._last[1] < self._first[1]:
                    self._first = self._last
            for name, value in (metrics or {}).items():
                if value is not None:
                    self._metrics[name] = str(value) if isinstance(value, int | str) else f"{float(value):.6g}"
            self._is_new = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="paceline-kubeflow", daemon=True)
                self._thread.start()

    @override
    def close(self) -> None:
        """Send the last progress. Waits at most five seconds for an answer."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(_TIMEOUT_S)

    def _run(self) -> None:
        is_last = False
        while True:
            with self._lock:
                body, self._is_new = self._make_body() if self._is_new else None, False
            if body is not None:
                self._send(body)
            if is_last:
                return
            is_last = self._closed.wait(_EVERY_S)

    def _make_body(self) -> bytes:
        status: dict[str, Any] = {}
        if self._first is not None:
            (first_s, first), (last_s, last) = self._first, self._last
            status["progressPercentage"] = int(100 * last + 1e-9)
            if last > first:
                seconds = round((last_s - first_s) * (1 - last) / (last - first))
                status["estimatedRemainingSeconds"] = min(seconds, _MOST_SECONDS)
        status["metrics"] = [{"name": name, "value": value} for name, value in self._metrics.items()]
        status["lastUpdatedTime"] = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        return json.dumps({"trainerStatus": status}).encode()

    def _send(self, body: bytes) -> None:
        assert self._url is not None
        try:
            headers = {"Content-Type": "application/json"}
            if self._token is not None:  # Kubernetes replaces the token regularly
                headers["Authorization"] = f"Bearer {self._token.read_text().strip()}"
            context = ssl.create_default_context(cafile=self._ca)
            with urlopen(Request(self._url, body, headers), timeout=_TIMEOUT_S, context=context):
                pass
        except (OSError, ValueError, HTTPException) as error:
            if isinstance(error, HTTPError):
                error.close()
            if not self._has_failed:
                self._has_failed = True
                reason = printable(str(error), _SHOWN_CHARS).rstrip(".")
                self._warn(f"Kubeflow does not accept the progress of this training: {reason}. The training continues")
