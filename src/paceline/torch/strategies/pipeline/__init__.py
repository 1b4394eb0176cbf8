"""One model over several processes: its layers are cut into stages, batches go through them in microbatches.

``plan`` decides: measured layers, cuts, schedules, predicted times. ``run`` is the machine: a model's layers, their
cut into stages, the values that travel, the actions of a rank. ``loop`` keeps the user's training loop unchanged: the
model that it calls, outputs, losses, gradients of other processes. ``runner`` connects the three.
"""
