"""Observe runs: progress, metrics, timelines, and the processes that wait.

Callers pass the figures; this package is independent of the training. Public names are imported at first use, because a
rank that records metrics needs no display.
"""

from typing import TYPE_CHECKING

from paceline.on_demand import import_on_demand

if TYPE_CHECKING:
    from paceline.observe.passes_plot import draw_passes
    from paceline.observe.progress import ProgressSnapshot, RateMeter, TrainingProgress
    from paceline.observe.table import format_bytes, format_rate

__all__ = [
    "ProgressSnapshot",
    "RateMeter",
    "TrainingProgress",
    "draw_passes",
    "format_bytes",
    "format_rate",
]

__getattr__ = import_on_demand(
    __name__,
    {
        ".passes_plot": ("draw_passes",),
        ".progress": ("ProgressSnapshot", "RateMeter", "TrainingProgress"),
        ".table": ("format_bytes", "format_rate"),
    },
)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
