"""Engines that start Paceline's processes on several machines, one module per engine."""
