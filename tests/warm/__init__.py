"""Processes of tests, forked from three processes that have imported the modules: importing takes seconds.

pytest's first process starts them (``zygote.py``, one with torch, one for workers). They load modules at the first
request. pytest's workers and their children share them. Tests call ``processes.py``. ``programs.py`` has the forked
programs, ``workers.py`` starts pytest's workers, and ``relay.py`` is a program for launchers of other packages.
"""
