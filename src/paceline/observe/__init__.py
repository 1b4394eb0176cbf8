"""Show the progress of a training, with its rates.

Only this package uses rich. It is independent of the training: callers regularly pass a :class:`ProgressSnapshot`.
"""

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
