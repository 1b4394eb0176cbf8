"""Split a model over processes: each process runs a range of layers (a stage), on one microbatch after another.

``plan`` chooses cuts and schedule. ``run`` executes the actions of a rank. ``loop`` keeps the user's training loop
unchanged. ``runner`` connects these packages.
"""
