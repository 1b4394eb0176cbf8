"""The version, where everybody may read it without importing anything else."""

__version__ = "0.1.0"
