"""The scheduler's protocol as one pure state machine, :class:`~paceline.protocol.scheduler.core.SchedulerCore`."""
