"""Objects that a ``with`` statement closes."""

from __future__ import annotations

from types import TracebackType

from typing_extensions import Self


class Closing:
    """A context manager that is closed at the end of its block."""

    def close(self) -> None:
        """Release all resources. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
