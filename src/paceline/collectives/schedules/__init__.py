"""Describe collective algorithms as data, check them, and predict their times.

``base`` defines schedules. Each algorithm has a module with its cost and source, and ``registry`` is the table of all
algorithms. Pure: imports only the standard library and ``paceline.errors``, without I/O, clocks or arrays.

>>> schedules = ALGORITHMS["all_reduce"]["ring"].schedules(4)
>>> check("all_reduce", schedules)
>>> round(predict(schedules, block_bytes=1000, link=LinkCost(1e-5, 1e-9)) * 1e6, 3)
66.0
"""

from paceline.collectives.schedules import (
    base,
    binomial_tree,
    bruck,
    central,
    checker,
    dissemination,
    double_binary_tree,
    evaluator,
    halving_doubling,
    hierarchical,
    pairwise,
    recursive_doubling,
    registry,
    ring,
)
from paceline.collectives.schedules.base import (
    Action,
    Copy,
    Receive,
    Round,
    Schedule,
    ScheduleError,
    Send,
    Spans,
    count_blocks,
)
from paceline.collectives.schedules.checker import check
from paceline.collectives.schedules.evaluator import LinkCost, predict
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
    "base",
    "binomial_tree",
    "bruck",
    "central",
    "check",
    "checker",
    "count_blocks",
    "dissemination",
    "double_binary_tree",
    "evaluator",
    "halving_doubling",
    "hierarchical",
    "pairwise",
    "predict",
    "recursive_doubling",
    "registry",
    "ring",
]
