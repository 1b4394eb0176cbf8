"""Share code between ``paceline bench`` and the programs of ``benchmarks/``."""
