"""Show the step of a benchmark on standard error: one changing line if this is a terminal, otherwise nothing."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text


class BenchProgress:
    """The progress line. Each update writes it; a thread would disturb the timing."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._live = (
            Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
            if console.is_terminal
            else None
        )
        self._text = Text()

    def show(self, text: str) -> None:
        """Show this text until the next call."""
        self._text = Text(text, no_wrap=True, overflow="crop")
        if self._live is not None:
            self._live.update(self._text, refresh=True)

    def aside(self, write: Callable[[], None]) -> None:
        """Call `write`, whose output appears above the line if both use the same terminal."""
        if self._live is None:
            write()
            return
        self._live.stop()
        write()
        self._live.start()
        self._live.update(self._text, refresh=True)

    def __enter__(self) -> BenchProgress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
