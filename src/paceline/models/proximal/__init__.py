"""Delayed block proximal gradient: logistic regression with L1 and L2 penalties, solved block of columns by block.

Workers hold their examples by column. For the active columns of a block, workers push gradients and bounds of second
derivatives. Servers sum these numbers and take a proximal step (:class:`paceline.tables.rules.ProximalNewton`). Workers
pull the weights and update their margins. Source: Li et al., "Scaling Distributed Machine Learning with the Parameter
Server", OSDI'14, algorithm 3 and section 5.1.

:mod:`.rules` and :mod:`.schedule` have the algorithm, :mod:`.columns` the examples, :mod:`.exchange` and :mod:`.solver`
the worker's data and communication.
"""
