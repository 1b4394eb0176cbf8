"""Show the progress of a training: progress line, rates.

Only this package uses rich. It imports hardly any other part of Paceline, so callers pass a :class:`ProgressSnapshot`
from time to time.
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
