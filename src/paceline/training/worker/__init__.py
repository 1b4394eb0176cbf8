"""The worker's side of a training: jobs, shards and learning rates."""
