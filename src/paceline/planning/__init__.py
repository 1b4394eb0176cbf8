"""Predict the step of a script under each strategy, explain the prediction, and compare it with measurements.

The modules :mod:`.clock`, :mod:`.links`, :mod:`.steps`, :mod:`.predictions` and :mod:`.waiting` are pure. The other
modules measure the machine and run scripts.
"""
