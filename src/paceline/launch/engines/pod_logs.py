"""Read the whole log of a pod in a thread. If the connection ends early, reconnect and continue."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import Any, Final

from paceline.transport.backoff import Backoff

from .kubernetes_api import ApiError, ClusterApi
from .manifests import CONTAINER

_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 8.0
MOST_LINES: Final = 10_000
"""Maximum number of lines of all logs that are read but not yet printed. At this number, reading waits."""
_WAIT_S: Final = 0.05
_CLOSE_S: Final = 5.0
"""Time limit for the end of the thread, which may wait for an API server that does not answer."""


class PodLog:
    """Puts each line of a pod's log into `lines`, once and in order."""

    def __init__(self, api: ClusterApi, pod: str, lines: queue.SimpleQueue[bytes]) -> None:
        self.is_over = False
        """Whether the pod has ended. The owner sets this attribute. Reading then ends after the last line."""
        self.problem: str | None = None
        """The reason why the API server refuses to send the log."""
        self._api, self._pod, self._lines = api, pod, lines
        self._last, self._last_key, self._num_last = "", ("", ""), 0
        """The last line's time as text and as a comparable key, and the number of lines read with this time."""
        self._response: Any = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"log of {pod}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_read(self) -> bool:
        """Whether reading has ended."""
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Request the end of reading."""
        self._closed.set()
        with contextlib.suppress(AttributeError, ValueError, OSError):  # not connected, or just disconnected
            self._response.shutdown()

    def close(self) -> None:
        """End reading. Idempotent."""
        self.stop()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        pauses = Backoff(_PAUSE_S, _LONGEST_PAUSE_S)
        while not self._closed.is_set():
            was_over, last = self.is_over, (self._last, self._num_last)
            try:
                self._read(is_last=was_over)
            except ApiError as error:
                if error.status in (401, 403):
                    self.problem = str(error)
                if error.status == 404 or (was_over and not error.is_transient):
                    return  # the pod was deleted, or its container never ran
            else:
                if was_over:
                    return
            if last != (self._last, self._num_last):
                pauses.reset()
            self._closed.wait(pauses.next_s())

    def _write(self, line: bytes) -> None:
        while self._lines.qsize() >= MOST_LINES and not self._closed.wait(_WAIT_S):
            pass
        self._lines.put(line)

    def _read(self, *, is_last: bool) -> None:
        """Read from the last line on. An incomplete line at the end is read again later, except with `is_last`."""
        query = {"container": CONTAINER, "follow": "true", "timestamps": "true"}
        if self._last:
            query["sinceTime"] = self._last
        known, num_known = self._last_key, self._num_last
        with self._api.open_log(self._pod, query) as response:
            self._response = response
            for line in response:
                if self._closed.is_set():
                    return
                time, _, text = line.partition(b" ")
                key = _key_of(time.decode(errors="replace"))
                if key < known or not (is_last or line.endswith(b"\n")):
                    continue
                if key == known and num_known:
                    num_known -= 1
                    continue
                self._num_last = self._num_last + 1 if key == self._last_key else 1
                self._last, self._last_key = time.decode(errors="replace"), key
                self._write(text if text.endswith(b"\n") else text + b"\n")


def _key_of(time: str) -> tuple[str, str]:
    """Return the seconds and the fraction of a time, as a key to compare times with different numbers of digits."""
    seconds, _, fraction = time.rstrip("Z").partition(".")
    return seconds, fraction.ljust(9, "0")
