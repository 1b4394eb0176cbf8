"""The scheduler of a cluster of parameter servers."""

from paceline.ps.scheduler.link import SchedulerLink
from paceline.ps.scheduler.runtime import Scheduler

__all__ = ["Scheduler", "SchedulerLink"]
