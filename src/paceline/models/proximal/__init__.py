"""Delayed block proximal gradient: logistic regression with L1 and L2 penalties, by columns, block by block.

Workers hold their examples by column and push, for the active columns of a block, gradients and bounds of second
derivatives; servers sum them and take a proximal step (:class:`paceline.tables.rules.ProximalNewton`); workers pull the
weights and bring their margins up to date. Source: Li et al., "Scaling Distributed Machine Learning with the Parameter
Server", OSDI'14, algorithm 3 and section 5.1.

:mod:`.rules`, :mod:`.schedule` and :mod:`.convergence` are the algorithm without data or networks; :mod:`.columns` the
examples; :mod:`.exchange` and :mod:`.solver` what a worker does.
"""
