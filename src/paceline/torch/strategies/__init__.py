"""Strategies for distributing one training loop: a file per strategy, over a small base class."""
