"""Parsed examples as arrays in files: :mod:`.blocks` is the format, of which the cache and converted data make use."""
