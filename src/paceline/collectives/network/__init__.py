"""The engine that runs schedules over connections."""
