"""Split a model over processes: each process runs a range of layers (a stage), on one microbatch after another.

``plan`` chooses the cuts into stages and the schedule. ``run`` executes the actions of a rank. ``loop`` provides the
objects that the user's training loop uses. ``runner`` connects these packages.
"""
