"""Measure the steps of a script, for ``paceline explain`` and ``paceline compare``."""
