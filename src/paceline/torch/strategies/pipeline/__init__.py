"""One model over several processes: its layers are cut into stages, and batches pass the stages in microbatches.

``plan`` chooses cuts and schedule. ``run`` executes the actions of a rank. ``loop`` keeps the user's training loop
unchanged. ``runner`` connects these packages.
"""
