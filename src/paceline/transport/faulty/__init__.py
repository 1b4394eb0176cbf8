"""A transport that fails on purpose, and the plan of its faults."""
