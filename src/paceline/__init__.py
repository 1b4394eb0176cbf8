"""Paceline trains models on several processes, devices and machines."""

__version__ = "0.1.0"
