"""The worker's side of a training: tasks of jobs, shards and learning rates."""
