"""Show where the processes of a job wait: their stacks, and the last operations of each process."""
