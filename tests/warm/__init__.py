"""Processes of tests, forked from two that have imported what they need: an interpreter that does so takes seconds.

pytest's first process starts both (``zygote.py``, one with torch), which begin to load when somebody asks; its workers
and what they have forked share them. ``processes.py`` is what tests call, ``programs.py`` what is forked.
"""
