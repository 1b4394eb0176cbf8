"""Processes of tests, forked from three that have imported what they need: an interpreter that does so takes seconds.

pytest's first process starts them (``zygote.py``, one with torch, one for workers), which begin to load when somebody
asks; its workers and what they have forked share them. ``processes.py`` is what tests call, ``programs.py`` what is
forked, ``workers.py`` how pytest's workers are.
"""
