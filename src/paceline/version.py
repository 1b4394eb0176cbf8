"""Define the version, without any imports."""

__version__ = "0.1.0"
