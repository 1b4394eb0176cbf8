"""Objects that a ``with`` statement closes."""

from __future__ import annotations

from types import TracebackType

from typing_extensions import Self


class Closing:
    """A context manager that is closed at the end of its block."""

    def close(self) -> None:
        """Let go of everything. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
