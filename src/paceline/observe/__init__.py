"""What a person sees while training runs and when it ends: the progress line, rates, tables of results.

The only package that knows rich. It imports nothing of Paceline's machinery: whoever trains makes a
:class:`ProgressSnapshot` now and then and hands it over.
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
