"""The scheduler of a cluster of parameter servers, and the link of other processes to the scheduler."""
