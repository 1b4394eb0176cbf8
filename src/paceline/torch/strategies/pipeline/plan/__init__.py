"""Plan a pipeline: measure the layers, choose cuts and a schedule, predict the time of a step."""
