"""The strategy ``sharded``: every process has a part of each parameter, its gradient and its optimizer state."""
