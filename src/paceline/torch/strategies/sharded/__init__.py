"""The strategy ``sharded``: every process keeps a part of each parameter, its gradient and the optimizer's state."""
