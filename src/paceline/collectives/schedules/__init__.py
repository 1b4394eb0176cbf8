"""Describe collective algorithms as data, and predict their times.

``base`` defines schedules. Each algorithm has a module that documents its cost and source, and ``registry`` is the
table of all algorithms. The package is pure: it uses no I/O, clock or array, and imports only the standard library and
``paceline.errors``.

>>> schedules = ALGORITHMS["all_reduce"]["ring"].schedules(4)
>>> round(predict(schedules, block_bytes=1000, link=LinkCost(1e-5, 1e-9)) * 1e6, 3)
66.0
"""

from paceline.collectives.schedules.base import Action, Copy, Receive, Round, Schedule, ScheduleError, Send, Spans
from paceline.collectives.schedules.evaluator import LinkCost, fastest, predict
from paceline.collectives.schedules.registry import ALGORITHMS, Algorithm

__all__ = [
    "ALGORITHMS",
    "Action",
    "Algorithm",
    "Copy",
    "LinkCost",
    "Receive",
    "Round",
    "Schedule",
    "ScheduleError",
    "Send",
    "Spans",
    "fastest",
    "predict",
]
