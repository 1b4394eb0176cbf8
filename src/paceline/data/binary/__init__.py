"""Parsed examples as arrays in files: :mod:`.blocks` is the format, used by the cache and by converted data."""
