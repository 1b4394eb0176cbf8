"""What a pipeline will do and how long it takes: schedules' orders, splits, measured layers, predicted steps."""
