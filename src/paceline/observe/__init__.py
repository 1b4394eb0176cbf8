"""Observe runs: progress, metrics, timelines, and the processes that wait.

Callers pass the figures; this package is independent of the training.
"""
