"""Clusters of real processes with a load that knows what is right, under every fault that can be made.

``make torture`` runs it; so does ``PYTHONPATH=tests python -m system.torture --runs 3``. What a run is, is in
:mod:`.scenario`; what is done to it in :mod:`.faults`; what is checked in :mod:`.worker` and :mod:`.audit`.
"""
