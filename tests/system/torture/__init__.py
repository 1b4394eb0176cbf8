"""Clusters of real processes under a load with known results and under all possible faults.

``make torture`` runs it, and so does ``PYTHONPATH=tests python -m system.torture --runs 3``. :mod:`.scenario` describes
a run, :mod:`.faults` the faults, and :mod:`.worker` and :mod:`.audit` the checks.
"""
