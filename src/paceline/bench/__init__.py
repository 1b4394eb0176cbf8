"""What ``paceline bench`` and the programs of ``benchmarks/`` share."""
