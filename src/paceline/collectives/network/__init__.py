"""Run schedules over connections."""
