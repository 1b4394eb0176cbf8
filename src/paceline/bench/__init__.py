"""Code for ``paceline bench`` and for the programs of ``benchmarks/``."""
