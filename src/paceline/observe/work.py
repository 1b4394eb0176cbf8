"""Show the progress of long work of a command: a bar with the rate and the remaining time.

Only commands show progress, and only on a terminal: the command line calls :func:`show_progress`. Library calls in
other programs are silent. The display is imported when it is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.closing import Closing

if TYPE_CHECKING:
    from paceline.observe.progress import WorkProgress

_Item = TypeVar("_Item")
_is_shown = False


def show_progress(is_shown: bool = True) -> None:
    """Show the progress of this process's work from now on, or stop showing it, as with ``--quiet``."""
    global _is_shown
    _is_shown = is_shown and sys.stderr is not None and sys.stderr.isatty()


class SilentWork(Closing):
    """The progress of work that is not shown. The methods are those of :class:`.progress.WorkProgress`."""

    def update(self, done: float, *, fraction: float | None = None, title: str | None = None) -> None:
        """Do nothing."""

    def show(self, title: str) -> None:
        """Do nothing."""

    def write_above(self, write: Callable[[], None]) -> None:
        """Call `write`."""
        write()


def start_work(title: str, total: float | None = None, unit: str = "", **options: Any) -> WorkProgress | SilentWork:
    """Return a progress, which is shown during its ``with`` block. The arguments are those of :class:`WorkProgress`."""
    if not _is_shown:
        return SilentWork()
    from paceline.observe.progress import WorkProgress

    return WorkProgress(title, total, unit, **options)


def track(
    items: Iterable[_Item], title: str, total: float, unit: str = "", size: Callable[[_Item], float] = lambda item: 1
) -> Iterator[_Item]:
    """Yield the items, and show the sum of the sizes of the processed items as a part of `total`."""
    if not _is_shown:
        yield from items
        return
    with start_work(title, total, unit) as progress:
        done = 0.0
        for item in items:
            yield item
            done += size(item)
            progress.update(done)
