"""A parameter server: requests in, tables updated, answers out, and its part in chains."""
