"""The scheduler of a cluster of parameter servers. Names are imported when first used."""

from typing import TYPE_CHECKING

from paceline.on_demand import import_on_demand

if TYPE_CHECKING:
    from paceline.ps.scheduler.link import SchedulerLink
    from paceline.ps.scheduler.runtime import Scheduler

__all__ = ["Scheduler", "SchedulerLink"]

__getattr__ = import_on_demand(__name__, {".link": ("SchedulerLink",), ".runtime": ("Scheduler",)})
