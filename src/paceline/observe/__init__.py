"""Show the progress and the results of training: progress line, rates, tables.

Only this package uses rich. Of Paceline it imports only the errors, so callers pass a :class:`ProgressSnapshot` from
time to time.
"""

from paceline.observe.passes_plot import draw_passes
from paceline.observe.progress import ProgressSnapshot, RateMeter, TrainingProgress
from paceline.observe.table import ResultRow, format_bytes, format_rate, results_table, strategies_table

__all__ = [
    "ProgressSnapshot",
    "RateMeter",
    "ResultRow",
    "TrainingProgress",
    "draw_passes",
    "format_bytes",
    "format_rate",
    "results_table",
    "strategies_table",
]
