"""The plan of a pipeline: measured layers, cuts, orders of schedules, predicted steps."""
